"""Limits on the time that a step or a reset of an environment may take."""

from __future__ import annotations

import functools
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

log = logging.getLogger("flowrl")
MIN_CLOSE_S = 5.0  # a simulator may need that to end


class CallLimits(NamedTuple):
    """Seconds that each call of an environment may take; None for no limit."""

    step_s: float | None = None
    reset_s: float | None = None

    def apply(self, env: Any) -> Any:
        """Return the environment, whose `step`, `reset` and `close` raise TimeoutError after their
        limits. `close` has the longer limit of the other two, and at least MIN_CLOSE_S."""
        limits = {"step": self.step_s, "reset": self.reset_s}
        for method, seconds in limits.items():
            if seconds is not None:
                shown = f"env_{method}_timeout_s={seconds:g} s"
                setattr(env, method, _limited(env, method, seconds, shown))
        if any(limits.values()) and hasattr(env, "close"):  # a hanging simulator may not close
            longest = max(MIN_CLOSE_S, *filter(None, limits.values()))
            env.close = _limited(env, "close", longest, f"{longest:g} s")
        return env


NO_LIMITS = CallLimits()


def _limited(env: Any, method: str, seconds: float, shown: str) -> Callable[..., Any]:
    function = getattr(env, method)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with limit_seconds(seconds, f"{method}() took more than {shown}"):
            return function(*args, **kwargs)

    return call


@functools.cache
def _warn_of_threads() -> None:
    log.warning(
        "env_step_timeout_s, env_reset_timeout_s: environments run outside of the main thread, "
        "where a call that takes too long is noticed only after it has returned"
    )


LONGEST_TIMER = 1e9  # seconds; timers refuse numbers that are much larger


@contextmanager
def limit_seconds(seconds: float, message: str) -> Iterator[None]:
    """Raise TimeoutError in the block after a time, by the signal SIGALRM.

    A C function that ignores signals, or a block outside of the main thread, is not interrupted:
    the error is raised when the block ends.

    Args:
        seconds: the time.
        message: of the error.

    Raises:
        TimeoutError: the block took longer.
    """
    started = time.monotonic()
    if threading.current_thread() is not threading.main_thread():
        _warn_of_threads()
        yield
    else:
        is_over = False

        def on_alarm(*_: Any) -> None:
            if not is_over:
                raise TimeoutError(message)

        handler = signal.signal(signal.SIGALRM, on_alarm)
        timer = signal.setitimer(signal.ITIMER_REAL, min(seconds, LONGEST_TIMER))
        try:
            try:
                yield
            finally:
                is_over = True
        finally:  # runs even if the alarm interrupts the inner `finally`
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if timer[0]:  # a timer of the caller
                left = max(timer[0] - (time.monotonic() - started), 1e-3)
                signal.setitimer(signal.ITIMER_REAL, left, timer[1])
    if time.monotonic() - started > seconds:
        raise TimeoutError(message)
