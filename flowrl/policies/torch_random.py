"""Seed torch's random numbers for a block of code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def torch_seed(seed: int) -> Iterator[None]:
    """Seed torch's generators of the CPU and, if this process uses GPUs, those of all GPUs; restore
    them afterwards.

    Args:
        seed: from 0 to 2**63 - 1.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        # torch.manual_seed is slower: it records the stack for GPUs that are not used yet
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield
