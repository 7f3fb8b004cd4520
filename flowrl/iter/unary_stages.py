"""Stages with one parent: what `for_each`, `filter`, `combine` and the like chain on."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flowrl.iter.errors import OnError, Retry, Skip, note_origin, check_policy, operator_error
from flowrl.iter.metrics import current_metrics
from flowrl.iter.stage import (
    NOT_READY,
    Source,
    Stage,
    describe,
    function_name,
    sources_to_list,
    sources_from_list,
)
from flowrl.iter.waiting import Waiter

SOURCES_KEPT = 10_000

_DROPPED = object()  # what a policy gives instead of the result of an item that it skips


class Mapped(Stage):
    """Base of the stages that apply one function to the items of one parent.

    Args:
        parent: gives the items.
        fn: the operator. Its `state_dict()`, if it has one, is saved with the plan; its `stop()`,
            if it has one, is called when the plan stops.
        on_error: what to do when it raises.
    """

    def __init__(self, parent: Stage, fn: Callable[..., Any], on_error: OnError = "raise"):
        if not callable(fn):
            raise TypeError(f"{self.kind}() needs a function, got {describe(fn)}")
        super().__init__(parent)
        self.fn = fn
        self.on_error = check_policy(on_error)
        self.skipped = 0

    def _call(self, item: Any) -> Any:
        return self.fn(item)

    def _failed(self, error: BaseException, item: Any) -> Any:
        """The result after all, _DROPPED, or the error raised, as the policy says."""
        note_origin(error, self, item)
        if isinstance(self.on_error, Retry) and isinstance(error, Exception):
            for _ in range(self.on_error.times):
                try:
                    return self._call(item)
                except Exception as again:
                    error = again
                    note_origin(error, self, item)
        return self._give_up(error, item)

    def _give_up(self, error: BaseException, item: Any) -> Any:
        """_DROPPED, or the error raised: the item is lost."""
        metrics = current_metrics()
        if metrics is not None:
            for told in metrics.on_lost:
                told(item)
        policy = self.on_error
        if isinstance(error, Exception):
            if isinstance(policy, Retry):
                error.add_note(f"tried {policy.times + 1} times")
            elif isinstance(policy, Skip):
                if policy.max is None or self.skipped < policy.max:
                    self.skipped += 1
                    return _DROPPED
                error.add_note(f"{self.skipped} items were skipped before: no more may be")
        raise operator_error(error)

    def stop(self) -> None:
        stop = getattr(self.fn, "stop", None)
        if callable(stop):
            stop()

    def label(self) -> str:
        return f"{self.kind}({function_name(self.fn)})"

    def short(self) -> str:
        return super().short() if self.title else self.state_name() or self.label()

    def extra_stats(self) -> dict[str, Any]:
        own = self.fn.extra_stats() if hasattr(self.fn, "extra_stats") else {}
        return {**own, **({"skipped": self.skipped} if self.skipped else {})}

    def state_name(self) -> str:
        fn = self.fn
        return f"{self.kind}({getattr(fn, '__name__', None) or type(fn).__name__})"

    def state_dict(self) -> dict[str, Any]:
        state = {"items": self.items, "skipped": self.skipped}
        if hasattr(self.fn, "state_dict"):
            state["operator"] = self.fn.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items, self.skipped = state["items"], state["skipped"]
        if "operator" in state:
            self.fn.load_state_dict(state["operator"])  # type: ignore[attr-defined]


class ForEach(Mapped):
    """fn(item) for every item."""

    kind = "for_each"

    def pull(self, block: bool) -> Any:
        while True:
            item = self._pull_up(block)
            if item is NOT_READY:
                return item
            try:
                result = self.fn(item)
            except BaseException as error:
                result = self._failed(error, item)
                if result is _DROPPED:
                    continue
            self.items += 1
            return result


class ForEachHooked(ForEach):
    """for_each with an operator that has a say in when it is fed.

    `fn.ready()`, if there is one, is asked before anything is pulled; while it is false the stage
    is not ready and waits for what `fn.waits()` gives. `fn._on_fetch_start()`, if there is one,
    is called before each item is fetched, once per item.
    """

    def __init__(self, parent: Stage, fn: Any, on_error: OnError = "raise"):
        super().__init__(parent, fn, on_error)
        self._ready = getattr(fn, "ready", None)
        self.depends_on_sibling = self._ready is not None
        self._on_fetch_start = getattr(fn, "_on_fetch_start", None)
        self._fetching = False
        self._full = False
        self.backpressure_s = 0.0  # for which there was no room
        self._full_since = 0.0
        self._held: Any = NOT_READY  # an item that came while the operator got full
        self._item_sources: tuple[Source, ...] = ()

    @classmethod
    def wanted(cls, fn: Any) -> bool:
        return any(callable(getattr(fn, name, None)) for name in ("ready", "_on_fetch_start"))

    def _ask(self, hook: Callable[[], Any]) -> Any:
        try:
            return hook()
        except BaseException as error:
            note_origin(error, self, None)
            raise operator_error(error) from error.__cause__

    def _has_room(self) -> bool:
        if self._ready is None:
            return True
        room = bool(self._ask(self._ready))
        if room == self._full:  # that has changed
            now = time.perf_counter()
            if room:
                self.backpressure_s += now - self._full_since
            self._full_since, self._full = now, not room
        return room

    def pull(self, block: bool) -> Any:
        while True:
            if not self._has_room():
                return NOT_READY
            if self._on_fetch_start is not None and not self._fetching:
                self._ask(self._on_fetch_start)
                self._fetching = True
            if self._held is NOT_READY:
                item = self._pull_up(block)
                if item is NOT_READY:
                    return item
                self._item_sources = super().sources
                if not self._has_room():
                    self._held = item
                    return NOT_READY
            else:
                item, self._held = self._held, NOT_READY
            self._fetching = False
            try:
                result = self.fn(item)
            except BaseException as error:
                result = self._failed(error, item)
                if result is _DROPPED:
                    continue
            self.items += 1
            return result

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._item_sources

    def waits(self) -> list[Any]:
        if self._full:
            return list(self.fn.waits()) if hasattr(self.fn, "waits") else []
        return super().waits()

    def can_wait(self) -> bool:
        return self._ready is not None or super().can_wait()

    def extra_stats(self) -> dict[str, Any]:
        if self._ready is None:
            return super().extra_stats()
        now = time.perf_counter() - self._full_since if self._full else 0.0
        return {**super().extra_stats(), "backpressure_s": self.backpressure_s + now}

    def state_dict(self) -> dict[str, Any]:
        held = (
            [] if self._held is NOT_READY else [[self._held, sources_to_list(self._item_sources)]]
        )
        return {**super().state_dict(), "held": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for item, sources in state["held"]:
            self._held, self._item_sources = item, sources_from_list(sources)


class Tap(Mapped):
    """Every item as it is, after fn(item) has seen it."""

    kind = "tap"

    def __init__(self, parent: Stage, name: str, fn: Callable[[Any], Any]):
        super().__init__(parent, fn)
        self.name = name

    def pull(self, block: bool) -> Any:
        item = self._pull_up(block)
        if item is not NOT_READY:
            try:
                self.fn(item)
            except BaseException as error:
                note_origin(error, self, item)
                raise operator_error(error) from None
            self.items += 1
        return item

    def label(self) -> str:
        return f"tap({self.name})"

    def state_name(self) -> None:  # type: ignore[override]
        return None


class Filter(Mapped):
    """The items for which fn(item) is true."""

    kind = "filter"

    def pull(self, block: bool) -> Any:
        while True:
            item = self._pull_up(block)
            if item is NOT_READY:
                return item
            try:
                keep = self.fn(item)
            except BaseException as error:
                keep = self._failed(error, item)
                if keep is _DROPPED:
                    continue
            if keep:
                self.items += 1
                return item


class Combine(Mapped):
    """fn(item) gives a list for every item; the lists' elements, one by one."""

    kind = "combine"

    def __init__(
        self,
        parent: Stage,
        fn: Callable[[Any], Iterable[Any]],
        on_error: OnError = "raise",
    ):
        super().__init__(parent, fn, on_error)
        self._pending: deque[Any] = deque()
        # of an item that is made of very many, the last ones
        self._sources: deque[Source] = deque(maxlen=SOURCES_KEPT)
        self._emitted: tuple[Source, ...] = ()

    def _call(self, item: Any) -> Any:
        return deque(self.fn(item))  # all of it here: a generator raises when it is read

    def pull(self, block: bool) -> Any:
        while not self._pending:
            item = self._pull_up(block)
            if item is NOT_READY:
                return item
            try:
                made = self._call(item)
            except BaseException as error:
                made = self._failed(error, item)
                if made is _DROPPED:
                    continue
            self._sources.extend(self.parents[0].sources)
            if made:
                self._pending = made
                self._emitted = tuple(self._sources)
                self._sources.clear()
        self.items += 1
        return self._pending.popleft()

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._emitted

    def extra_stats(self) -> dict[str, Any]:
        return {**super().extra_stats(), "queued": len(self._pending)}

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "pending": list(self._pending),
            "emitted": sources_to_list(self._emitted),
            "sources": sources_to_list(self._sources),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._pending = deque(state["pending"])
        self._emitted = sources_from_list(state["emitted"])
        self._sources.extend(sources_from_list(state["sources"]))


class Flatten(Combine):
    """Every item is a list; its elements, one by one."""

    kind = "flatten"

    def __init__(self, parent: Stage):
        super().__init__(parent, iter)
        self._each: tuple[Source, ...] = ()  # one per element, where that is known

    def pull(self, block: bool) -> Any:
        fresh = not self._pending
        element = super().pull(block)
        if fresh and element is not NOT_READY:
            told = self.parents[0].yields_lists and len(self._emitted) == len(self._pending) + 1
            self._each = self._emitted if told else ()
        return element

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self._each[-len(self._pending) - 1],) if self._each else self._emitted

    def label(self) -> str:
        return self.kind

    def state_name(self) -> str:
        return self.kind

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "each": sources_to_list(self._each)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._each = sources_from_list(state["each"])


class Transform(Stage):
    """fn(iterator) -> iterator, over the whole stream.

    The iterator given to fn cannot say "not now", so this stage waits for its own items. Its
    function's frame cannot be saved: in a saved plan it starts again.
    """

    kind = "transform"
    resumable = False

    def __init__(self, parent: Stage, fn: Callable[[Iterator[Any]], Iterable[Any]]):
        if not callable(fn):
            raise TypeError(f"transform() needs a function, got {describe(fn)}")
        super().__init__(parent)
        self.fn = fn
        self._iterator: Iterator[Any] | None = None
        self._waiter = Waiter()

    def next_item(self) -> Any:
        """The next item of the stage before, waited for."""
        while True:
            self._waiter.clear()
            item = self._pull_up(True)
            if item is not NOT_READY:
                return item
            waits = self.parents[0].waits()
            if not waits:
                raise RuntimeError(f"{self.shown()} cannot move: nothing upstream can")
            started = time.perf_counter()
            self._waiter.wait(waits)
            self.waited_s += time.perf_counter() - started

    def pull(self, block: bool) -> Any:
        try:
            if self._iterator is None:
                self._iterator = iter(self.fn(_Upstream(self)))
            item = next(self._iterator)
        except StopIteration:
            raise
        except BaseException as error:
            note_origin(error, self, None)
            if inspect.isgenerator(self._iterator):
                self._iterator = None  # a generator that raised is over: the next pull calls fn
            raise
        self.items += 1
        return item

    def waits(self) -> list[Any]:
        return []

    def can_wait(self) -> bool:
        return False

    def label(self) -> str:
        return f"{self.kind}({function_name(self.fn)})"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class _Upstream:
    """What the function of a transform reads. An error in it does not end it."""

    def __init__(self, stage: Transform):
        self._stage = stage

    def __iter__(self) -> _Upstream:
        return self

    def __next__(self) -> Any:
        return self._stage.next_item()


class ZipWithSource(Stage):
    """(sources, item) for every item: the tuple of `Source`s that it came from."""

    kind = "zip_with_source"

    def pull(self, block: bool) -> Any:
        item = self._pull_up(block)
        if item is NOT_READY:
            return item
        self.items += 1
        return self.parents[0].sources, item
