"""The one place where a plan waits: for Ray refs, for local signals, until a time.

Where only refs are waited for, `ray.wait` does it. With a Signal among them every ref gets a
callback that sets the waiter's event, so that one wait serves all. Nothing polls.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any


class Signal:
    """Something in this process that may happen: waiters subscribe, `fire()` wakes them."""

    def __init__(self) -> None:
        self._events: weakref.WeakSet[threading.Event] = weakref.WeakSet()
        self._lock = threading.Lock()  # threads fire it while plans subscribe

    def subscribe(self, event: threading.Event) -> bool:
        """True if the event was not subscribed before."""
        with self._lock:
            fresh = event not in self._events
            self._events.add(event)
        return fresh

    def fire(self) -> None:
        with self._lock:
            events = list(self._events)
        for event in events:
            event.set()


_signals: weakref.WeakKeyDictionary[queue.Queue[Any], Signal] = weakref.WeakKeyDictionary()
_signals_lock = threading.Lock()


def queue_signal(watched: queue.Queue[Any]) -> Signal:
    """The signal of a queue: fires when something is put into it or taken out of it."""
    with _signals_lock:
        signal = _signals.get(watched)
        if signal is None:
            signal = _signals[watched] = Signal()
            # the two methods that queue.Queue offers for overriding; called under its lock
            for name in ("_put", "_get"):
                setattr(watched, name, _then_fire(getattr(watched, name), signal))
    return signal


def _then_fire(method: Any, signal: Signal) -> Any:
    def call(*args: Any) -> Any:
        result = method(*args)
        signal.fire()
        return result

    return call


class Waiter:
    """Waits for one plan. `clear()` before the plan is asked, `wait()` when it could not move:
    what happens in between is not missed."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._watched: set[Any] = set()

    def __reduce__(self) -> Any:
        return (Waiter, ())

    def clear(self) -> None:
        self._event.clear()

    def wait(self, waits: Sequence[Any]) -> None:
        """Return when one of them may have happened."""
        times = [wait for wait in waits if isinstance(wait, float)]
        signals = [wait for wait in waits if isinstance(wait, Signal)]
        # children of one duplicate wait for the same refs, which ray.wait refuses
        refs = list(dict.fromkeys(w for w in waits if not isinstance(w, (float, Signal))))
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        if refs and not signals:
            wait_for_any(refs, timeout)
            return
        # the first time a signal is met it may have fired before it was subscribed to: look again
        fresh = [signal for signal in signals if signal.subscribe(self._event)]
        for ref in set(refs) - self._watched:
            self._watched.add(ref)
            self._wake_on(ref)
        if not fresh:
            self._event.wait(timeout)

    def _wake_on(self, ref: Any) -> None:
        def done(*_: Any) -> None:
            self._watched.discard(ref)
            self._event.set()

        if hasattr(ref, "_on_ready"):
            ref._on_ready(done)  # learns that it is ready without fetching it
        else:
            ref.future().add_done_callback(done)


def wait_for_any(refs: Sequence[Any], timeout: float | None = None) -> list[Any]:
    """Block until one of the Ray object refs is ready, fetching nothing; timeout in seconds."""
    import ray

    return ray.wait(list(refs), num_returns=1, timeout=timeout, fetch_local=False)[0]


def ready_refs(refs: Sequence[Any]) -> list[Any]:
    """The refs that are ready now, in the order given."""
    import ray

    return ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)[0]


def wait_for_all(refs: Sequence[Any], timeout: float | None = None) -> list[Any]:
    """Block until all refs are ready or the timeout [s] is over; those that are ready."""
    import ray

    return ray.wait(list(refs), num_returns=len(refs), timeout=timeout, fetch_local=False)[0]
