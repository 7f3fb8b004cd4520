"""Independent random streams, each derived from one seed and a purpose."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from flowrl.state_schema import Fields, Natural, check_state


def derive_seed(seed: int | None, *purpose: str | int) -> int | None:
    """Derive a 32-bit seed from a seed and a purpose, such as ("env", worker, slot).

    >>> derive_seed(1, "env", 0, 3) == derive_seed(1, "env", 0, 3) != derive_seed(1, "env", 1, 3)
    True

    Returns:
        the derived seed; None (not seeded) if `seed` is None.
    """
    if seed is None:
        return None
    words = [zlib.crc32(str(word).encode()) for word in purpose]
    return int(np.random.SeedSequence([seed, *words]).generate_state(1)[0])


def random_stream(seed: int | None, *purpose: str | int) -> np.random.Generator:
    """Create a random generator for a purpose; None seeds it from the operating system."""
    return np.random.default_rng(derive_seed(seed, *purpose))


class RowNoise(np.random.Generator):
    """The numbers of a random generator that belong to some rows of a batch.

    It draws arrays for all rows of the batch, or for several blocks of them, and returns the part
    of its rows: processes that share out a batch use the numbers that one process would use.

    Args:
        rng: the generator; it advances as if it had drawn for all rows.
        begin, end: the rows.
        num_rows: number of rows of the batch.
    """

    def __init__(self, rng: np.random.Generator, begin: int, end: int, num_rows: int):
        super().__init__(rng.bit_generator)
        self._begin, self._end, self._num_rows = begin, end, num_rows

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        """Return standard normal numbers of shape `size`, (rows, …) or (blocks * rows, …)."""
        return self._part(super().standard_normal(self._full_size(size), dtype))

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        """Return uniform numbers of shape `size`, (rows, …) or (blocks * rows, …)."""
        return self._part(super().uniform(low, high, self._full_size(size)))

    def _full_size(self, size: tuple[int, ...]) -> tuple[int, ...]:
        return (size[0] // (self._end - self._begin), self._num_rows, *size[1:])

    def _part(self, numbers: np.ndarray) -> np.ndarray:
        return numbers[:, self._begin : self._end].reshape(-1, *numbers.shape[2:])


_STREAM: Fields = {
    "bit_generator": str, "state": dict[str, int], "has_uint32": Natural, "uinteger": Natural,
}  # fmt: skip


def stream_state(rng: np.random.Generator) -> dict[str, Any]:
    """Return the state of a random generator as JSON values."""
    return dict(rng.bit_generator.state)


def restore_stream(rng: np.random.Generator, state: dict[str, Any]) -> None:
    """Set a random generator to the result of `stream_state`.

    Raises:
        StateError, ValueError: it is not such a result.
    """
    check_state(state, _STREAM, "random stream")
    rng.bit_generator.state = state
