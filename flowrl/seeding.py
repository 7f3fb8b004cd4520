"""Independent random streams, each derived from one seed and a purpose."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from flowrl.setting_values import check_int
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
    """Create a random generator for a purpose; None seeds it from the operating system.

    Raises:
        ValueError: the seed is neither None nor an int of at least 0.
    """
    if seed is not None:
        check_int("seed", seed, 0)
    return np.random.default_rng(derive_seed(seed, *purpose))


class RowNoise:
    """Random numbers for some rows of a batch.

    It draws numbers for all rows of the batch and returns those of its rows, so that processes
    which split a batch use the same numbers as a single process.

    Args:
        rng: the generator.
        begin, end: the rows, of which there is at least one.
        num_rows: number of rows of the batch.
    """

    def __init__(self, rng: np.random.Generator, begin: int, end: int, num_rows: int):
        self._rng = rng
        self._begin, self._end, self._num_rows = begin, end, num_rows

    def standard_normal(self, size: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
        """Return standard normal numbers, as `numpy.random.Generator.standard_normal`.

        Args:
            size: (rows, …), or (blocks * rows, …) for several numbers per row.
            dtype: numpy.float32 or numpy.float64.

        Raises:
            ValueError: the first number of `size` is no multiple of the number of rows.
        """
        return self._part(self._rng.standard_normal(self._full_size(size), dtype))

    def uniform(self, low: float, high: float, size: tuple[int, ...]) -> np.ndarray:
        """Return uniform numbers, as `numpy.random.Generator.uniform`; see `standard_normal`."""
        return self._part(self._rng.uniform(low, high, self._full_size(size)))

    def _full_size(self, size: tuple[int, ...]) -> tuple[int, ...]:
        rows = self._end - self._begin
        if not size or size[0] % rows:
            raise ValueError(f"noise of shape {size} for {rows} rows: its first axis must be rows")
        return (size[0] // rows, self._num_rows, *size[1:])

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
