"""FunctionStage, the base of the stages that apply a function to the items of one parent."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ClassVar

from flowrl.errors import add_note
from flowrl.iter.errors import (
    OnError,
    Retry,
    Skip,
    check_on_error,
    note_origin,
    warn_of_skipped,
    without_stop_iteration,
)
from flowrl.iter.metrics import current_metrics
from flowrl.iter.stage import Stage, describe, function_title
from flowrl.state_schema import Fields, Natural, check_own_state

log = logging.getLogger("flowrl")

SKIPPED = object()  # result of an item that the error policy skips


_RESULTS = {
    "for_each": "one item for each item",
    "combine": "a list of items for each item",
    "filter": "whether to keep an item",
}


def check_method(fn: Any, method: str) -> None:
    """Check that an operator is chained with its own method.

    Raises:
        TypeError: its `chained_with` is another one of for_each, combine and filter, or it is a
            class instead of an operator.
    """
    expected = getattr(fn, "chained_with", None)
    if expected is None or method not in _RESULTS:
        return
    if isinstance(fn, type):
        name = fn.__name__
        raise TypeError(f"{method}({name}) needs an operator, not its class: {method}({name}(…))")
    if method != expected:
        name = type(fn).__name__
        raise TypeError(
            f"{method}({name}): {name} returns {_RESULTS[expected]}, so it must be chained with "
            f"{expected}: .{expected}({function_title(fn)})"
        )


def _check_state_methods(fn: Any) -> None:
    """Raise TypeError for an operator whose state could be saved but not loaded, or vice versa."""
    methods = [name for name in ("state_dict", "load_state_dict") if hasattr(fn, name)]
    if len(methods) == 1 and not isinstance(fn, type):
        raise TypeError(
            f"{type(fn).__name__} has {methods[0]}() only: an operator with a state needs "
            "state_dict() and load_state_dict(state)"
        )


def is_user_defined(operator: Any) -> bool:
    """Return whether an operator is the user's, not one of flowrl's."""
    operator = operator.func if isinstance(operator, functools.partial) else operator
    module = getattr(operator, "__module__", None) or type(operator).__module__
    return not module.startswith("flowrl.")


def _has_state_methods(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def report_lost(item: Any) -> None:
    """Report an item that is lost to an exception to the metrics of the plan."""
    metrics = current_metrics()
    if metrics is not None:
        metrics.report_lost(item)


class FunctionStage(Stage):
    """Base of the stages that apply one function to the items of one parent.

    Args:
        parent: the stage to pull from.
        fn: the operator. Its optional methods are called: `state_dict()` and `load_state_dict()`
            with those of the plan, `stop()` when the plan stops, `extra_stats()` by `stats()`. Its
            optional attribute `chained_with` names the only method that it is for, and
            `shared_state` is that of the stage.
        on_error: policy for exceptions of `fn`.
    """

    state_fields: ClassVar[Fields] = {"skipped": Natural}

    def __init__(self, parent: Stage, fn: Callable[..., Any], on_error: OnError = "raise"):
        if not callable(fn):
            raise TypeError(f"{self.name}() needs a function, got {describe(fn)}")
        check_method(fn, type(self).name)
        _check_state_methods(fn)
        shared = None if isinstance(fn, type) else getattr(fn, "shared_state", None)
        if shared is not None and not _has_state_methods(shared):
            raise TypeError(
                f"{type(fn).__name__}.shared_state needs state_dict() and load_state_dict(state)"
            )
        super().__init__(parent)
        self.name = f"{self.name}({getattr(fn, '__name__', None) or type(fn).__name__})"
        self.fn = fn
        self.on_error = check_on_error(on_error)
        self.skipped = 0
        self._skipped_in_a_row = self._items_at_skip = 0
        self._title: str | None = None

    @property
    def title(self) -> str | None:
        """Display text: the function with its arguments, unless another text was set."""
        return self._title or f"{type(self).name}({function_title(self.fn)})"

    @title.setter
    def title(self, text: str | None) -> None:
        self._title = text

    def _call(self, item: Any) -> Any:
        return self.fn(item)

    def _handle_error(self, error: BaseException, item: Any) -> Any:
        """Apply the error policy: return the result of a retry or SKIPPED, or raise."""
        note_origin(error, self, item)
        if isinstance(self.on_error, Retry) and isinstance(error, Exception):
            for _ in range(self.on_error.times):
                try:
                    return self._call(item)
                except BaseException as next_error:
                    error = next_error
                    note_origin(error, self, item)
                    if not isinstance(error, Exception):  # Ctrl-C
                        break
        self._skip_or_raise(error, item)
        return SKIPPED

    def _skip_or_raise(self, error: BaseException, item: Any) -> None:
        """Report the item as lost, and raise the error unless the error policy skips it."""
        report_lost(item)
        policy = self.on_error
        if isinstance(error, Exception):
            if isinstance(policy, Retry):
                add_note(error, f"tried {policy.times + 1} times")
            elif isinstance(policy, Skip):
                if policy.max is None or self.skipped < policy.max:
                    self.skipped += 1
                    is_next = self.items == self._items_at_skip
                    self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_next else 1
                    self._items_at_skip = self.items
                    warn_of_skipped(self, self.skipped, self._skipped_in_a_row, error)
                    return
                add_note(error, f"Skip(max={policy.max}): {self.skipped} items were skipped before")
        raise without_stop_iteration(error)

    def _method(self, name: str) -> Any:
        """Return an optional method of the operator; None if it has none, or is a class."""
        return None if isinstance(self.fn, type) else getattr(self.fn, name, None)

    def stop(self) -> None:
        stop = self._method("stop")
        if callable(stop):
            stop()

    def extra_stats(self) -> dict[str, Any]:
        extra_stats = self._method("extra_stats")
        stats: dict[str, Any] = {}
        if extra_stats is not None:
            try:
                stats.update(extra_stats())
            except Exception as error:  # it must not end a training that is displayed
                stats["extra_stats"] = f"raised {type(error).__name__}: {error}"
        if self.skipped:
            stats["skipped"] = self.skipped
        return stats

    @property
    def shared_state(self) -> Any:
        return self._method("shared_state")

    def state_dict(self) -> dict[str, Any]:
        state = {"items": self.items, "skipped": self.skipped}
        state_dict = self._method("state_dict")
        if state_dict is not None:
            state["operator"] = state_dict()
        return state

    def check_state(self, state: dict[str, Any]) -> None:
        super().check_state(state)
        if state.get("in_flight") and "in_flight" not in self.state_fields:
            raise ValueError(
                f"{self}, chained at {self.line}: the saved plan ran this operator in Ray tasks, "
                f"which had {len(state['in_flight'])} items in flight: restore the plan with the "
                "same max_concurrency"
            )
        if self._method("state_fields") is not None:
            check_own_state(self.fn, state.get("operator"), f"{self.name}/operator")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items, self.skipped = state["items"], state["skipped"]
        load = self._method("load_state_dict")
        if "operator" not in state and self._method("state_dict") is not None:
            log.warning(
                "%s, chained at %s: the saved plan has no state of this operator: it begins with "
                "its initial state", self, self.line,
            )  # fmt: skip
        if "operator" in state:
            if load is None:
                raise ValueError(
                    f"{self}, chained at {self.line}: the saved plan has a state of this operator, "
                    "but the operator has no load_state_dict(state)"
                )
            try:
                load(state["operator"])
            except Exception as error:
                if not is_user_defined(self.fn):
                    raise  # its message names it
                raise ValueError(
                    f"{self}, chained at {self.line}: load_state_dict() of the operator raised "
                    f"{type(error).__name__}: {error}"
                ) from error
