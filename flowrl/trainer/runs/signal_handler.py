"""Stop a run cleanly on SIGTERM and Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

# a signal this soon after the first one is a duplicate, as `timeout -s INT` sends
DUPLICATE_SIGNAL_S = 1.0


class SignalHandler:
    """Turn SIGTERM into SystemExit(143) and Ctrl-C into KeyboardInterrupt.

    The first signal raises at once only while `armed`, during training: an exception while
    writing a file or holding a lock would leave either in an inconsistent state. Otherwise,
    `raise_pending` raises it. A signal more than DUPLICATE_SIGNAL_S later raises at once.

    Attributes:
        armed: whether the first signal raises immediately.
    """

    def __init__(self) -> None:
        self.armed = False
        self._received: list[tuple[int, float]] = []  # signal number, time [s]
        self._previous: dict[int, Any] = {}

    def _handle(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if self._received and now - self._received[0][1] < DUPLICATE_SIGNAL_S:
            return
        self._received.append((number, now))
        if self.armed or len(self._received) > 1:
            self.raise_pending()

    def raise_pending(self) -> None:
        """Raise if a signal was received; Python drops what a handler raises in `__del__`."""
        if self._received:
            is_sigterm = self._received[0][0] == signal.SIGTERM
            raise SystemExit(143) if is_sigterm else KeyboardInterrupt

    def __enter__(self) -> SignalHandler:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def is_termination(error: BaseException) -> bool:
    """Return whether an error is due to SIGTERM; Ray's handler exits with the signal's number."""
    return isinstance(error, SystemExit) and error.code in (143, signal.SIGTERM)
