"""Delay the exceptions of signals until a block of code that must not be left halfway has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class _DelayedInterrupts:
    """The blocks of the main thread, in which Python calls the handlers of signals."""

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
"""A context in which an interrupted training, as by a second Ctrl-C, continues until its end. A
training loop without SignalHandler is interrupted at once."""
