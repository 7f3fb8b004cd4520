"""Stop a run cleanly on SIGTERM, SIGHUP and Ctrl-C, or when its output is closed."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from flowrl.interrupts import delayed_interrupts

# exit codes; after a signal, 128 + its number
TERMINAL_CLOSED = 128 + signal.SIGHUP
INTERRUPTED = 128 + signal.SIGINT
OUTPUT_CLOSED = 128 + signal.SIGPIPE
TERMINATED = 128 + signal.SIGTERM
ENDED_BY_SIGNAL = {TERMINAL_CLOSED, INTERRUPTED, TERMINATED}

# a signal this soon after the first one is a duplicate, as `timeout -s INT` sends
DUPLICATE_SIGNAL_S = 1.0
GRACE_S = 10.0  # time for the current iteration to end after the first signal


class StoppedBySignal(SystemExit):
    """A run was stopped from outside before its last checkpoint was written.

    Attributes:
        exit_code: the exit code of the run.
    """

    def __init__(self, exit_code: int):
        super().__init__(exit_code)
        self.exit_code = exit_code


class SignalHandler:
    """Turn SIGTERM and SIGHUP into SystemExit and Ctrl-C into KeyboardInterrupt.

    SIGHUP, which a closed terminal sends, stays ignored under `nohup`.

    The first signal lets the current iteration end, because an interrupted one would lose the
    batch that it trains on; `raise_pending` then raises. An iteration that takes longer than
    GRACE_S is interrupted, but only while `armed`, during training: an exception while writing a
    file or holding a lock would leave either in an inconsistent state. A signal more than
    DUPLICATE_SIGNAL_S after the first one raises at once, or at the end of a block of
    `delayed_interrupts`.

    Attributes:
        armed: whether an iteration may be interrupted.
    """

    def __init__(self) -> None:
        self.armed = False
        self._received: list[tuple[int, float]] = []  # signal number, time [s]
        self._previous: dict[int, Any] = {}
        self._grace: threading.Timer | None = None
        self._expects_timer = False  # the next signal is that of the timer
        self.is_repeated = False  # the user has pressed Ctrl-C again to stop at once

    def _handle(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if self._expects_timer:
            self._expects_timer = False
            if self.armed:  # else the iteration has ended meanwhile
                delayed_interrupts.call(self.raise_pending)
            return
        if self._received and now - self._received[0][1] < DUPLICATE_SIGNAL_S:
            return
        self._received.append((number, now))
        if len(self._received) > 1:
            self.is_repeated = number == signal.SIGINT
            delayed_interrupts.call(self.raise_pending)
            return
        if number == signal.SIGINT:
            # not print(), which this handler may have interrupted
            with suppress(OSError):  # such as a closed pipe
                os.write(2, b"stopping after this iteration; Ctrl-C again stops at once\n")
        self._grace = threading.Timer(GRACE_S, self._end_grace)
        self._grace.daemon = True
        self._grace.start()

    def _end_grace(self) -> None:
        """Interrupt the iteration, in a thread of its own."""
        main = threading.main_thread().ident
        if self.armed and main is not None:
            self._expects_timer = True
            signal.pthread_kill(main, self._received[0][0])

    def raise_pending(self) -> None:
        """Raise if a signal was received; Python drops what a handler raises in `__del__`."""
        if self._received:
            is_ctrl_c = self._received[0][0] == signal.SIGINT
            raise KeyboardInterrupt if is_ctrl_c else SystemExit(self.exit_code)

    @property
    def exit_code(self) -> int:
        """128 + the number of the first signal; 0 if none was received."""
        return 128 + self._received[0][0] if self._received else 0

    def is_termination(self, error: BaseException) -> bool:
        """Return whether an error is due to SIGTERM or SIGHUP.

        The exit code does not tell: Ray replaces a SystemExit that is raised while it waits.
        """
        numbers = [number for number, _ in self._received if number != signal.SIGINT]
        return isinstance(error, SystemExit) and bool(numbers)

    @property
    def terminal_closed(self) -> bool:
        """Whether SIGHUP was received."""
        return any(number == signal.SIGHUP for number, _ in self._received)

    def __enter__(self) -> SignalHandler:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._grace is not None:
            self._grace.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def discard_lost_output() -> None:
    """Discard what is printed from now on to a terminal that was closed."""
    for name in ("stdout", "stderr"):
        try:
            print(file=getattr(sys, name), flush=True)
        except OSError:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def is_output_closed() -> bool:
    """Return whether the reader of standard output, such as `head`, has closed it."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # not a file
        return False
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def discard_closed_output() -> None:
    """Redirect standard output to the null device."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
