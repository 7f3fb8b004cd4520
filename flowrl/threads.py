"""Limit the threads of numerical libraries in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from threadpoolctl import ThreadpoolController

from flowrl.process_usage import num_cores

Threads = int | Literal["auto"] | None
"""Number of torch's threads; None changes nothing. "auto" is 1, and in the process of an algorithm
whose networks have convolutions `num_free_cores`."""


def limit_threads(count: Threads) -> None:
    """Limit torch to `count` threads ("auto": 1), and numpy's BLAS to one thread.

    Small networks lose more to synchronizing threads than they gain from them, and the workers of
    one machine share its cores. numpy's threads wait in busy loops, as torch's do: together they
    would take each other's cores. The limits stay in force until the next call. torch is limited
    only if it is imported already.
    """
    if count is None:
        return
    count = 1 if count == "auto" else count
    ThreadpoolController().limit(limits=1, user_api="blas")
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != count:
        torch.set_num_threads(count)


@contextmanager
def worker_threads(count: Threads) -> Iterator[None]:
    """Limit the threads in the block as in the process of a worker, if torch is imported."""
    torch: Any = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    wanted = 1 if count == "auto" else count
    if before is None or wanted is None or before == wanted:
        yield
        return
    limit_threads(wanted)
    try:
        yield
    finally:
        limit_threads(before)


def num_free_cores(num_workers: int) -> int:
    """Return the number of cores that no worker uses, at least 1 and at most OMP_NUM_THREADS, which
    Ray sets to the CPUs of a task or an actor."""
    free = max(1, num_cores() - num_workers)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(free, int(limit)) if limit.isdecimal() and int(limit) else free
