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
