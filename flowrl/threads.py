"""Threads of this process: those of numerical libraries, and one for calls in the background."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any, Generic, Literal, TypeVar

from threadpoolctl import ThreadpoolController

from flowrl.process_usage import num_cores

T = TypeVar("T")

Threads = int | Literal["auto"] | None
"""Number of torch's threads; None changes nothing. "auto" is 1, or `num_free_cores` in the process
of an algorithm whose networks have convolutions."""


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
    limit_torch(count)


_torch_limit = 0  # number of threads that `limit_torch` has set last; 0: none


def limit_torch(count: int) -> None:
    """Limit torch to `count` threads, if it is imported."""
    global _torch_limit
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        _torch_limit = count
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)


def limit_torch_again(count: int | None) -> None:
    """Limit torch to `count` threads, if there is a limit and another algorithm has changed it. A
    number that the user has set since then stays."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and count and torch.get_num_threads() == _torch_limit != count:
        limit_torch(count)


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


_background_calls_are_allowed = False


def allow_background_calls(allowed: bool) -> None:
    """Set whether a second thread of this process may make BackgroundCalls; otherwise their callers
    make them."""
    global _background_calls_are_allowed
    _background_calls_are_allowed = allowed


class BackgroundCall(Generic[T]):
    """A call that a second thread makes while its caller does other work in a `with` block.

    The caller makes the call itself if the second thread has not begun it when the result is
    needed, so it never waits for another BackgroundCall. The thread waits without using its core.
    When the block ends, the call has ended or is never made.

    Args:
        call: a function without arguments. It must not use autograd, whose modes belong to threads.
        in_background: False leaves the call to the caller, as `allow_background_calls(False)` does.
    """

    def __init__(self, call: Callable[[], T], in_background: bool = True):
        self._call = call
        self._future: Future[T] | None = None
        if in_background and _background_calls_are_allowed:
            with suppress(RuntimeError):  # the interpreter exits, or no thread can be started
                self._future = _second_thread(os.getpid()).submit(call)

    def result(self) -> T:
        """Return the result, or raise the error, of the call."""
        if self._future is None or self._future.cancel():
            return self._call()
        return self._future.result()

    def __enter__(self) -> BackgroundCall[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._future is not None and not self._future.cancel():
            wait([self._future])


@functools.cache
def _second_thread(pid: int) -> ThreadPoolExecutor:
    """Return the executor of the process with this id: threads do not survive a fork."""
    return ThreadPoolExecutor(1, "flowrl-background-calls", limit_this_thread)


def limit_this_thread() -> None:
    """Apply the limit of torch to this thread: that of MKL belongs to each thread, and a new thread
    would multiply matrices with the default number of threads."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.get_num_threads()
