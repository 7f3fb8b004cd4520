"""Delay signals until a block of code that must not be left halfway has ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Call the handlers of SIGINT and SIGTERM at the end of the block, not within it.

    Signals without a Python handler, such as an ignored one, are left alone. Other threads than the
    main one receive no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append((number, frame))

    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in arrived:
            handlers[number](number, frame)
