"""Defer exceptions of signal handlers until the end of a critical section."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class _DelayedInterrupts:
    """Counts the running blocks of the main thread, and keeps an exception until the last ends.

    Python calls the handlers of signals in the main thread only.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._delayed: Callable[[], None] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if not self._depth and self._delayed is not None:
            interrupt, self._delayed = self._delayed, None
            interrupt()

    def call(self, interrupt: Callable[[], None]) -> None:
        """Call a function that raises the exception of a signal, at the end of a running block.

        Args:
            interrupt: the function.
        """
        if self._depth:
            self._delayed = interrupt
        else:
            interrupt()


delayed_interrupts = _DelayedInterrupts()
"""Context manager: an exception that SignalHandler would raise in the block is raised at the end of
the block. A training loop without SignalHandler is interrupted at once."""
