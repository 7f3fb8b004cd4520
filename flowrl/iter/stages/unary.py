"""Stages with one parent: for_each, tap, filter, combine, flatten, transform, zip_with_source."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from flowrl.iter.errors import MANY_DROPPED, OnError, call_in_stage, note_origin
from flowrl.iter.metrics import current_metrics
from flowrl.iter.stage import (
    NOT_READY,
    Stage,
    close_generator,
    describe,
    function_title,
    walk,
)
from flowrl.iter.stages.function_stage import (
    SKIPPED,
    FunctionStage,
    is_user_defined,
    report_lost,
)
from flowrl.iter.waiting import Waiter
from flowrl.source import Source, sources_from_list, sources_to_list
from flowrl.state_schema import Fields

log = logging.getLogger("flowrl")

MAX_SOURCES = 10_000  # of one item of `combine`


class ForEach(FunctionStage):
    """Return fn(item) for every item."""

    name = "for_each"

    def pull(self, block: bool) -> Any:
        while True:
            item = self._pull_up(block)
            if item is NOT_READY:
                return item
            try:
                result = self.fn(item)
            except BaseException as error:
                result = self._handle_error(error, item)
                if result is SKIPPED:
                    continue
            self.items += 1
            return result


class ForEachWithHooks(ForEach):
    """for_each with an operator that has the hook `ready()` or `_on_fetch_start()`.

    While `fn.ready()` is false, nothing is pulled and the stage waits for `fn.waits()`. If that is
    empty and no other branch can run, the error contains `fn.blocked_by()`, if defined.
    `fn._on_fetch_start()` is called once per item, before the item is pulled.
    """

    state_fields: ClassVar[Fields] = {"held": list[list[Any]]}

    def __init__(self, parent: Stage, fn: Any, on_error: OnError = "raise"):
        super().__init__(parent, fn, on_error)
        self._ready = getattr(fn, "ready", None)
        self.depends_on_sibling = self._ready is not None
        self._on_fetch_start = getattr(fn, "_on_fetch_start", None)
        self._fetching = False
        self._full = False
        self._full_since = 0.0
        self._backpressure_s = 0.0  # total time in which the operator was not ready
        self._held: Any = NOT_READY  # an item that arrived after the operator became full
        self._item_sources: tuple[Source, ...] = ()

    @classmethod
    def has_hooks(cls, fn: Any) -> bool:
        """Return whether the operator has one of the hooks."""
        if isinstance(fn, type):  # its hooks belong to its instances, which are the items
            return False
        return any(callable(getattr(fn, name, None)) for name in ("ready", "_on_fetch_start"))

    def _has_room(self) -> bool:
        if self._ready is None:
            return True
        room = bool(call_in_stage(self, self._ready))
        if room == self._full:  # the operator became full or not full
            now = time.perf_counter()
            if room:
                self._backpressure_s += now - self._full_since
            self._full_since, self._full = now, not room
        return room

    def pull(self, block: bool) -> Any:
        while True:
            if not self._has_room():
                return NOT_READY
            if self._on_fetch_start is not None and not self._fetching:
                call_in_stage(self, self._on_fetch_start)
                self._fetching = True
            if self._held is NOT_READY:
                item = self._pull_up(block)
                if item is NOT_READY:
                    return item
                self._item_sources = self.parents[0].sources
                if not self._has_room():
                    self._held = item
                    return NOT_READY
            else:
                item, self._held = self._held, NOT_READY
            self._fetching = False
            try:
                result = self.fn(item)
            except BaseException as error:
                result = self._handle_error(error, item)
                if result is SKIPPED:
                    continue
            self.items += 1
            return result

    def holds_items(self) -> bool:
        return self._held is not NOT_READY

    def waits(self) -> list[Any]:
        if self._full:
            return list(self.fn.waits()) if hasattr(self.fn, "waits") else []
        return super().waits()

    def blocked_by(self) -> str:
        return str(self.fn.blocked_by()) if hasattr(self.fn, "blocked_by") else ""

    def can_return_not_ready(self) -> bool:
        return self._ready is not None or super().can_return_not_ready()

    def extra_stats(self) -> dict[str, Any]:
        if self._ready is None:
            return super().extra_stats()
        full_s = time.perf_counter() - self._full_since if self._full else 0.0
        return {**super().extra_stats(), "backpressure_s": self._backpressure_s + full_s}

    def state_dict(self) -> dict[str, Any]:
        empty = self._held is NOT_READY
        held = [] if empty else [[self._held, sources_to_list(self._item_sources)]]
        return {**super().state_dict(), "held": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for item, sources in state["held"]:
            self._held, self._item_sources = item, sources_from_list(sources)


class Tap(FunctionStage):
    """Return every item unchanged after calling fn(item)."""

    name = "tap"
    has_state = False

    def __init__(self, parent: Stage, label: str, fn: Callable[[Any], Any]):
        super().__init__(parent, fn)
        self.name = self.title = f"tap({label})"
        for name in ("state_dict", "shared_state"):
            if self._method(name) is not None:
                raise TypeError(
                    f"{self.name}: it does not save the state of its function, which has {name}: "
                    "use for_each"
                )

    def pull(self, block: bool) -> Any:
        item = self._pull_up(block)
        if item is not NOT_READY:
            try:
                self.fn(item)
            except BaseException as error:
                self._handle_error(error, item)
            self.items += 1
        return item


class Filter(FunctionStage):
    """Return the items for which fn(item) is true."""

    name = "filter"
    _num_dropped = 0  # since the last item that was kept
    _has_warned = False

    def _call(self, item: Any) -> Any:
        keep = self.fn(item)
        if keep is None:
            raise TypeError("the function returned None: return True to keep the item, or False")
        return bool(keep)

    def pull(self, block: bool) -> Any:
        while True:
            item = self._pull_up(block)
            if item is NOT_READY:
                return item
            try:
                keep = self._call(item)
            except BaseException as error:
                keep = self._handle_error(error, item)
                if keep is SKIPPED:
                    continue
            if keep:
                self.items += 1
                self._num_dropped = 0
                return item
            self._num_dropped += 1
            if self._num_dropped == MANY_DROPPED and not self._has_warned:
                self._has_warned = True
                _warn_of_dropped(self)


def _warn_of_dropped(stage: FunctionStage) -> None:
    """Warn that a stage has returned nothing for MANY_DROPPED items.

    flowrl's own operators, such as ReportDue and ConcatBatches, may drop or collect many items.
    """
    if is_user_defined(stage.fn):
        log.warning(
            "%s, chained at %s, has returned nothing for %d items in a row; a plan without items "
            "has no result and does not end", stage, stage.line, MANY_DROPPED,
        )  # fmt: skip


class Combine(FunctionStage):
    """Return the elements of the lists fn(item), one at a time."""

    state_fields: ClassVar[Fields] = {
        "pending": list[Any],
        "emitted": list[list[Any]],
        "sources": list[list[Any]],
    }

    name = "combine"
    _num_empty = 0  # empty lists before the first item

    def __init__(
        self,
        parent: Stage,
        fn: Callable[[Any], Iterable[Any]],
        on_error: OnError = "raise",
    ):
        super().__init__(parent, fn, on_error)
        self._pending: deque[Any] = deque()
        # sources of the items since the last non-empty list
        self._sources: deque[Source] = deque(maxlen=MAX_SOURCES)
        self._item_sources: tuple[Source, ...] = ()

    def _call(self, item: Any) -> Any:
        elements = self.fn(item)
        if elements is None:
            raise TypeError(
                "the function must return a list of items, it returned None: return [] if there is "
                "no item yet"
            )
        if _is_one_item(elements):
            raise TypeError(
                f"the function must return a list of items, it returned a "
                f"{type(elements).__name__}: put it in a list, or use for_each"
            )
        return deque(elements)  # consumed here: a generator raises only when it is read

    def pull(self, block: bool) -> Any:
        while not self._pending:
            item = self._pull_up(block)
            if item is NOT_READY:
                return item
            try:
                elements = self._call(item)
            except BaseException as error:
                elements = self._handle_error(error, item)
                if elements is SKIPPED:
                    continue
            self._sources.extend(self.parents[0].sources)
            if elements:
                self._pending = elements
                self._item_sources = tuple(self._sources)
                self._sources.clear()
            elif not self.items:  # later, it may collect many items for each of its own
                self._num_empty += 1
                if self._num_empty == MANY_DROPPED:
                    _warn_of_dropped(self)
        self.items += 1
        return self._pending.popleft()

    def extra_stats(self) -> dict[str, Any]:
        return {**super().extra_stats(), "queued": len(self._pending)}

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "pending": list(self._pending),
            "emitted": sources_to_list(self._item_sources),
            "sources": sources_to_list(self._sources),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._pending = deque(state["pending"])
        self._item_sources = sources_from_list(state["emitted"])
        self._sources.extend(sources_from_list(state["sources"]))


class Flatten(Combine):
    """Return the elements of items that are lists, one at a time."""

    state_fields: ClassVar[Fields] = {"element_sources": list[list[Any]]}

    name = "flatten"

    def __init__(self, parent: Stage):
        super().__init__(parent, _elements)
        self.name = self.title = "flatten"
        self._element_sources: tuple[Source, ...] = ()  # one per element, if known

    def pull(self, block: bool) -> Any:
        is_first = not self._pending
        element = super().pull(block)
        if is_first and element is not NOT_READY:
            one_each = len(self._item_sources) == len(self._pending) + 1
            known = self.parents[0].yields_lists and one_each
            self._element_sources = self._item_sources if known else ()
        return element

    @property
    def sources(self) -> tuple[Source, ...]:
        if self._element_sources:
            return (self._element_sources[-len(self._pending) - 1],)
        return self._item_sources

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "element_sources": sources_to_list(self._element_sources)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._element_sources = sources_from_list(state["element_sources"])


def _elements(item: Any) -> Iterable[Any]:
    """Return an item of `flatten`, which must be a list or another iterable of items."""
    if _is_one_item(item):
        raise TypeError(f"flatten() takes lists, got {describe(item)}")
    elements: Iterable[Any] = item
    return elements


def _is_one_item(value: Any) -> bool:
    """Return whether a value is not a list of items: Python cannot iterate over it, or it is text,
    a mapping or a batch."""
    is_batch_or_mapping = hasattr(value, "keys") or hasattr(value, "policy_batches")
    is_iterable = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    return isinstance(value, (str, bytes)) or is_batch_or_mapping or not is_iterable


class Transform(Stage):
    """Return the items of fn(iterator), where the iterator yields the items of the parent.

    `fn` cannot receive NOT_READY, so this stage blocks until its parent has an item. The state of
    `fn` cannot be saved: a restored plan calls it again.
    """

    name = "transform"
    resumable = False

    def __init__(self, parent: Stage, fn: Callable[[Iterator[Any]], Iterable[Any]]):
        if not callable(fn):
            raise TypeError(f"transform() needs a function, got {describe(fn)}")
        super().__init__(parent)
        self.fn = fn
        self.title = f"transform({function_title(fn)})"
        self._iterator: Iterator[Any] | None = None
        self._has_raised = False  # in the last pull
        # items since the one returned last, if a StalenessLimit counts lost items
        self._read: list[Any] = []
        self._input_ended = False
        self._waiter = Waiter()

    def next_item(self) -> Any:
        """Return the next item of the parent; block until one is ready."""
        total_items = -1
        while True:
            self._waiter.clear()
            try:
                item = self._pull_up(True)
            except StopIteration:
                self._input_ended = True
                raise
            if item is not NOT_READY:
                metrics = current_metrics()
                if metrics is not None and metrics.on_lost:
                    self._read.append(item)
                return item
            journal: Any = self.journal
            replays = journal is not None and journal.replays
            # in a replay, the journal determines how often the plan is pulled
            waits = [] if replays else self.parents[0].waits()
            if waits:
                with self.waiting():
                    self._waiter.wait(waits)
                continue
            before, total_items = total_items, sum(s.items for s in walk(self.parents[0]))
            if replays:
                total_items += journal.plan_log.num_observed
            if total_items == before:
                reasons = [
                    f"{one}: {why}" for one in walk(self.parents[0]) if (why := one.blocked_by())
                ]
                why = "; ".join(reasons) or "its input stages wait for another branch of the plan"
                raise RuntimeError(f"{self} is blocked: {why}")

    def pull(self, block: bool) -> Any:
        try:
            if self._iterator is None:
                self._iterator = self._new_iterator()
            item = next(self._iterator)
        except StopIteration:
            if not self._has_raised or self._input_ended:
                raise
            # a generator in the iterator may be exhausted because it raised: call fn again
            self._has_raised, self._iterator = False, None
            return self.pull(block)
        except BaseException as error:
            note_origin(error, self, None)
            self._has_raised = True
            for item in self._read:
                report_lost(item)
            self._read.clear()
            raise
        self._read.clear()
        self._has_raised = False
        self.items += 1
        return item

    def stop(self) -> None:
        close_generator(self._iterator)

    def _new_iterator(self) -> Iterator[Any]:
        try:
            returned = self.fn(_Upstream(self))
            if not hasattr(returned, "__iter__"):
                raise TypeError(
                    f"the function must return an iterable, it returned {describe(returned)}"
                )
            return iter(returned)
        except StopIteration as error:
            raise RuntimeError(
                "the function raised StopIteration: let it return an iterator"
            ) from error

    def waits(self) -> list[Any]:
        return []

    def can_return_not_ready(self) -> bool:
        return False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class _Upstream:
    """The iterator passed to the function of a transform; it continues after an error."""

    def __init__(self, stage: Transform):
        self._stage = stage

    def __iter__(self) -> _Upstream:
        return self

    def __next__(self) -> Any:
        return self._stage.next_item()


class ZipWithSource(Stage):
    """Return (sources, item) for every item; `sources` is a tuple of `Source`."""

    name = "zip_with_source"

    def pull(self, block: bool) -> Any:
        item = self._pull_up(block)
        if item is NOT_READY:
            return item
        self.items += 1
        return self.parents[0].sources, item
