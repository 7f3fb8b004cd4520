"""One seed, many random streams: each is derived from (seed, what it is for)."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np


def derive_seed(seed: int | None, *purpose: str | int) -> int | None:
    """A 32-bit seed for this purpose; None (not seeded) stays None.

    >>> derive_seed(1, "env", 0, 3) == derive_seed(1, "env", 0, 3) != derive_seed(1, "env", 1, 3)
    True
    """
    if seed is None:
        return None
    words = [zlib.crc32(str(word).encode()) for word in purpose]
    return int(np.random.SeedSequence([seed, *words]).generate_state(1)[0])


def random_stream(seed: int | None, *purpose: str | int) -> np.random.Generator:
    """A random generator for this purpose; from the machine's entropy if the seed is None."""
    return np.random.default_rng(derive_seed(seed, *purpose))


def stream_state(rng: np.random.Generator) -> dict[str, Any]:
    """The generator's state as JSON values."""
    return dict(rng.bit_generator.state)


def restore_stream(rng: np.random.Generator, state: dict[str, Any]) -> None:
    """Continue where `stream_state` was taken."""
    rng.bit_generator.state = state
