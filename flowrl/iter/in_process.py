"""InProcessActor: an object of this process that is used like a Ray actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.iter import ray_health
from flowrl.iter.recovery import original_error


class InProcessActor:
    """Has the interface of an actor handle: `actor.method.remote(...)`.

    A call runs at once; its result or error is what `fetch` returns or raises.

    Args:
        target: the object.
    """

    def __init__(self, target: Any):
        self._target = target

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._target, name))


class _Method:
    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def remote(self, *args: Any) -> InProcessResult:
        """Call the method."""
        return InProcessResult(self._function, args)


class InProcessResult:
    """The result of a call of an InProcessActor."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]):
        self._error: Exception | None = None
        self._value: Any = None
        try:
            self._value = function(*args)
        except Exception as error:
            self._error = error

    def get(self) -> Any:
        """Return the value, or raise the error of the call."""
        if self._error is not None:
            raise self._error
        return self._value


def fetch(ref: Any) -> Any:
    """Return the value of an InProcessResult or of a Ray object reference, or raise its error with
    its own type."""
    if isinstance(ref, InProcessResult):
        return ref.get()
    import ray

    try:
        return ray_health.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise original_error(error) from None
