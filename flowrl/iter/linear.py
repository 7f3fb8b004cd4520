"""Stages with one parent: what `for_each`, `filter`, `combine` and the like chain on."""

from __future__ import annotations

import inspect
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from flowrl.iter.errors import OnError, Retry, Skip, blame, check_policy, operator_error
from flowrl.iter.stage import NOT_READY, Source, Stage, describe, function_name
from flowrl.iter.waiting import Waiter

_DROPPED = object()  # what a policy gives instead of the result of an item that it skips


class FromIterable(Stage):
    """Source stage over a Python iterable, or a callable that returns one at the first pull.

    A generator that raised is over for Python; it is made again from the callable and the items
    that it gave before are skipped. Over a sequence the position is saved with a plan.
    """

    kind = "from_iterable"

    def __init__(self, make: Iterable[Any] | Callable[[], Iterable[Any]], name: str = ""):
        super().__init__()
        self._make = make
        self._name = name or self.kind
        self._iterator: Iterator[Any] | None = None
        self._skip = 0
        self.saved = isinstance(make, Sequence)

    def _open(self) -> Iterator[Any]:
        try:
            made = self._make() if callable(self._make) else self._make
            if isinstance(made, Sequence):
                return iter(made[self._skip :] if self._skip else made)
            return itertools.islice(made, self._skip, None) if self._skip else iter(made)
        except BaseException as error:
            blame(error, self, None)
            raise operator_error(error) from error.__cause__

    def pull(self, block: bool) -> Any:
        if self._iterator is None:
            self._iterator = self._open()
        try:
            item = next(self._iterator)
        except StopIteration:
            raise
        except BaseException as error:
            self._after(error)
            raise
        self.items += 1
        return item

    def _after(self, error: BaseException) -> None:
        blame(error, self, None)
        iterator = self._iterator
        if inspect.isgenerator(iterator) and iterator.gi_frame is None:
            if callable(self._make):
                self._iterator, self._skip = None, self.items
            else:
                error.add_note("this generator cannot go on: give a callable that makes it")
                self._iterator = _Over(error)

    def can_wait(self) -> bool:
        return False

    def label(self) -> str:
        return self._name

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.saved:
            super().load_state_dict(state)
            self._iterator, self._skip = None, self.items


class _Over:
    """Raises what ended a generator, again and again: an error is not the end of a stream."""

    def __init__(self, error: BaseException):
        self._error = error

    def __iter__(self) -> _Over:
        return self

    def __next__(self) -> Any:
        raise self._error


class Mapped(Stage):
    """Base of the stages that apply one function to the items of one parent.

    Args:
        parent: gives the items.
        fn: the operator. Its `state_dict()`, if it has one, is saved with the plan.
        on_error: what to do when it raises.
    """

    def __init__(self, parent: Stage, fn: Callable[..., Any], on_error: OnError = "raise"):
        if not callable(fn):
            raise TypeError(f"{self.kind}() needs a function, got {describe(fn)}")
        super().__init__(parent)
        self.fn = fn
        self.on_error = check_policy(on_error)
        self.skipped = 0

    def _failed(self, error: BaseException, item: Any) -> Any:
        """The result after all, _DROPPED, or the error raised, as the policy says."""
        blame(error, self, item)
        policy = self.on_error
        if isinstance(error, Exception):
            if isinstance(policy, Retry):
                for _ in range(policy.times):
                    try:
                        return self.fn(item)
                    except Exception as again:
                        error = again
                        blame(error, self, item)
                error.add_note(f"tried {policy.times + 1} times")
            elif isinstance(policy, Skip):
                if policy.max is None or self.skipped < policy.max:
                    self.skipped += 1
                    return _DROPPED
                error.add_note(f"{self.skipped} items were skipped before: no more may be")
        raise operator_error(error)

    def label(self) -> str:
        return f"{self.kind}({function_name(self.fn)})"

    def short(self) -> str:
        return super().short() if self.title else self.state_name() or self.label()

    def numbers(self) -> dict[str, Any]:
        own = self.fn.numbers() if hasattr(self.fn, "numbers") else {}
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
        self._on_fetch_start = getattr(fn, "_on_fetch_start", None)
        self._fetching = False
        self._full = False
        self._held: Any = NOT_READY  # an item that came while the operator got full
        self._held_sources: tuple[Source, ...] = ()

    @classmethod
    def wanted(cls, fn: Any) -> bool:
        return any(callable(getattr(fn, name, None)) for name in ("ready", "_on_fetch_start"))

    def pull(self, block: bool) -> Any:
        while True:
            self._full = self._ready is not None and not self._ready()
            if self._full:
                return NOT_READY
            if self._on_fetch_start is not None and not self._fetching:
                self._fetching = True
                self._on_fetch_start()
            if self._held is NOT_READY:
                item = self._pull_up(block)
                if item is NOT_READY:
                    return item
                if self._ready is not None and not self._ready():
                    self._held, self._held_sources, self._full = item, super().sources, True
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
        return self._held_sources or super().sources

    def waits(self) -> list[Any]:
        if self._full:
            return list(self.fn.waits()) if hasattr(self.fn, "waits") else []
        return super().waits()

    def can_wait(self) -> bool:
        return self._ready is not None or super().can_wait()

    def state_dict(self) -> dict[str, Any]:
        held = [] if self._held is NOT_READY else [self._held]
        return {**super().state_dict(), "held": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._held = state["held"][0] if state["held"] else NOT_READY


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
                blame(error, self, item)
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
        self._sources: list[Source] = []
        self._emitted: tuple[Source, ...] = ()

    def pull(self, block: bool) -> Any:
        while not self._pending:
            item = self._pull_up(block)
            if item is NOT_READY:
                return item
            self._sources.extend(self.parents[0].sources)
            try:
                made = deque(self.fn(item))
            except BaseException as error:
                made = self._failed(error, item)
                if made is _DROPPED:
                    continue
                made = deque(made)
            if made:
                self._pending = made
                self._emitted, self._sources = tuple(self._sources), []
        self.items += 1
        return self._pending.popleft()

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._emitted

    def numbers(self) -> dict[str, Any]:
        return {**super().numbers(), "queued": len(self._pending)}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pending": list(self._pending)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._pending = deque(state["pending"])


class Flatten(Combine):
    """Every item is a list; its elements, one by one."""

    kind = "flatten"

    def __init__(self, parent: Stage):
        super().__init__(parent, iter)

    def label(self) -> str:
        return self.kind

    def state_name(self) -> str:
        return self.kind


class Batch(Stage):
    """Lists of `size` items; the last one may be shorter."""

    kind = "batch"

    def __init__(self, parent: Stage, size: int):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"batch(n): n must be an int of at least 1, got {size!r}")
        super().__init__(parent)
        self.size = size
        self._pending: list[Any] = []
        self._sources: list[Source] = []
        self._emitted: tuple[Source, ...] = ()

    def pull(self, block: bool) -> Any:
        parent = self.parents[0]
        while len(self._pending) < self.size:
            try:
                item = self._pull_up(block)
            except StopIteration:
                if not self._pending:
                    raise
                break
            if item is NOT_READY:
                return item
            self._pending.append(item)
            self._sources.extend(parent.sources)
        batch, self._pending = self._pending, []
        self._emitted, self._sources = tuple(self._sources), []
        self.items += 1
        return batch

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._emitted

    def label(self) -> str:
        return f"batch({self.size})"

    def numbers(self) -> dict[str, Any]:
        return {"queued": len(self._pending)}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pending": list(self._pending)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._pending = list(state["pending"])


class Shuffle(Stage):
    """The items in random order within a sliding window of `size` items.

    Args:
        seed: of the order; None derives it from the plan's seed.
    """

    kind = "shuffle"

    def __init__(self, parent: Stage, size: int, seed: int | None):
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"shuffle(shuffle_buffer_size): an int of at least 1 is needed, got {size!r}"
            )
        super().__init__(parent)
        self.size = size
        self.seed = seed
        self._random = random.Random(os.urandom(16) if seed is None else seed)
        self._window: list[tuple[Any, tuple[Source, ...]]] = []
        self._loaded = False
        self._ended = False
        self._emitted: tuple[Source, ...] = ()

    def start(self, seed: str | None) -> None:
        if self.seed is None and seed is not None and not self._loaded:
            self._random.seed(seed)

    def pull(self, block: bool) -> Any:
        window = self._window
        while not self._ended and len(window) < self.size:
            try:
                item = self._pull_up(block)
            except StopIteration:
                self._ended = True
                break
            if item is NOT_READY:
                return item
            window.append((item, self.parents[0].sources))
        if not window:
            raise StopIteration
        item, self._emitted = window.pop(self._random.randint(0, len(window) - 1))
        self.items += 1
        return item

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._emitted

    def label(self) -> str:
        return f"shuffle({self.size}, seed={self.seed})"

    def numbers(self) -> dict[str, Any]:
        return {"queued": len(self._window)}

    def state_dict(self) -> dict[str, Any]:
        version, numbers, gauss = self._random.getstate()
        return {
            **super().state_dict(),
            "window": [item for item, _ in self._window],
            "random": [version, list(numbers), gauss],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._window = [(item, ()) for item in state["window"]]
        version, numbers, gauss = state["random"]
        self._random.setstate((version, tuple(numbers), gauss))
        self._loaded = True


class Transform(Stage):
    """fn(iterator) -> iterator, over the whole stream.

    The iterator given to fn cannot say "not now", so this stage waits for its own items. Its
    function's frame cannot be saved: in a saved plan it starts again.
    """

    kind = "transform"
    saved = False

    def __init__(self, parent: Stage, fn: Callable[[Iterator[Any]], Iterable[Any]]):
        if not callable(fn):
            raise TypeError(f"transform() needs a function, got {describe(fn)}")
        super().__init__(parent)
        self.fn = fn
        self._iterator: Iterator[Any] | None = None
        self._waiter = Waiter()

    def _upstream(self) -> Iterator[Any]:
        while True:
            self._waiter.clear()
            try:
                item = self._pull_up(True)
            except StopIteration:
                return
            if item is not NOT_READY:
                yield item
                continue
            waits = self.parents[0].waits()
            if not waits:
                raise RuntimeError(f"{self.shown()} cannot move: nothing upstream can")
            started = time.perf_counter()
            self._waiter.wait(waits)
            self.waited_s += time.perf_counter() - started

    def pull(self, block: bool) -> Any:
        try:
            if self._iterator is None:
                self._iterator = iter(self.fn(self._upstream()))
            item = next(self._iterator)
        except StopIteration:
            raise
        except BaseException as error:
            blame(error, self, None)
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


class ZipWithSource(Stage):
    """(sources, item) for every item: the tuple of `Source`s that it came from."""

    kind = "zip_with_source"

    def pull(self, block: bool) -> Any:
        item = self._pull_up(block)
        if item is NOT_READY:
            return item
        self.items += 1
        return self.parents[0].sources, item
