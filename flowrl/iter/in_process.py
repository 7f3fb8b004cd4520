"""InProcessActor: an object of this process that is used like a Ray actor."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from flowrl.iter import ray_health
from flowrl.iter.recovery import original_error


class InProcessActor:
    """Has the interface of an actor handle: `actor.method.remote(...)`.

    A call runs at once, and returns a Future; `fetch` returns its result or raises its error.

    Args:
        target: the object.
    """

    def __init__(self, target: Any):
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        def remote(*args: Any) -> Future[Any]:
            future: Future[Any] = Future()
            try:
                future.set_result(method(*args))
            except Exception as error:
                future.set_exception(error)
            return future

        return SimpleNamespace(remote=remote)


def fetch(ref: Any) -> Any:
    """Return the value of a Future of an InProcessActor, or of a Ray object reference, or raise its
    error with its own type."""
    if isinstance(ref, Future):
        return ref.result()
    import ray

    try:
        return ray_health.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise original_error(error) from None
