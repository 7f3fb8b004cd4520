"""Waiter, the one place where a plan waits: for Ray refs, for local signals, until a time.

A plan that waits only for refs uses `ray.wait`. If it also waits for a Signal, every ref gets a
callback that sets the event of the waiter, so that one wait covers all. There is no busy polling: a
wait that includes refs wakes every CHECK_S seconds, to check that Ray is alive; a wait for Signals
ends when one fires, or at the earliest time to wait for.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from flowrl.iter import ray_health
from flowrl.iter.private_api import call_on_put_and_get, call_when_ready
from flowrl.iter.ray_health import CHECK_S


class Signal:
    """An event in this process that occurs repeatedly: `fire()` wakes the subscribed waiters."""

    def __init__(self) -> None:
        self._events: weakref.WeakSet[threading.Event] = weakref.WeakSet()
        # threads fire while plans subscribe; reentrant, because garbage collection may fire inside
        # of `subscribe`
        self._lock = threading.RLock()

    def subscribe(self, event: threading.Event) -> bool:
        """Set `event` whenever the signal fires; return whether it was not subscribed before."""
        with self._lock:
            is_new = event not in self._events
            self._events.add(event)
        return is_new

    def fire(self) -> None:
        with self._lock:
            events = list(self._events)
        for event in events:
            event.set()


_signals: weakref.WeakKeyDictionary[queue.Queue[Any], Signal] = weakref.WeakKeyDictionary()
_signals_lock = threading.Lock()


def queue_signal(watched: queue.Queue[Any]) -> Signal:
    """Return the signal of a queue, which fires on every put and get."""
    with _signals_lock:
        signal = _signals.get(watched)
        if signal is None:
            signal = _signals[watched] = Signal()
            call_on_put_and_get(watched, signal.fire)
    return signal


class Waiter:
    """Waits for one plan.

    Call `clear()` before pulling the plan and `wait()` if it returned NOT_READY: an event that
    occurs in between is not missed.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._watched: set[Any] = set()

    def __reduce__(self) -> Any:
        return (Waiter, ())

    def clear(self) -> None:
        self._event.clear()

    def wait(self, waits: Sequence[Any]) -> None:
        """Block until one of the refs, Signals and `time.monotonic()` times may have occurred."""
        times = [wait for wait in waits if isinstance(wait, float)]
        signals = [wait for wait in waits if isinstance(wait, Signal)]
        # without duplicates, which ray.wait rejects: children of a duplicate share their refs
        refs = list(dict.fromkeys(w for w in waits if not isinstance(w, (float, Signal))))
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        if refs and not signals:
            wait_for_any(refs, timeout)
            return
        # a new signal may have fired before the subscription: do not wait, pull again
        new = [signal for signal in signals if signal.subscribe(self._event)]
        for ref in set(refs) - self._watched:
            self._watched.add(ref)
            self._watch(ref)
        if not new and not refs:
            self._event.wait(timeout)
        elif not new:
            # the next pull notices if Ray has died
            self._event.wait(CHECK_S if timeout is None else min(timeout, CHECK_S))

    def _watch(self, ref: Any) -> None:
        def on_ready(*_: Any) -> None:
            self._watched.discard(ref)
            self._event.set()

        call_when_ready(ref, on_ready)


def wait_for_any(refs: Sequence[Any], timeout: float | None = None) -> list[Any]:
    """Block until one Ray object ref is ready or the timeout [s] passes; return the ready refs.

    Does not fetch the objects.
    """
    return ray_health.wait(refs, 1, timeout)


def ready_refs(refs: Sequence[Any]) -> list[Any]:
    """Return the refs that are ready now, in their order."""
    import ray

    return ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)[0]


def wait_for_all(refs: Sequence[Any], timeout: float | None = None) -> list[Any]:
    """Block until all refs are ready or the timeout [s] passes; return the ready refs."""
    return ray_health.wait(refs, len(refs), timeout)
