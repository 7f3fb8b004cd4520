"""Stages: the nodes of a plan, each with one method, `pull(block)`.

`pull` returns the next item, or NOT_READY ("nothing now; let another branch move"), or raises
StopIteration at the end of the stream. State is attributes, never a generator's frame, so an
exception leaves the plan resumable. NOT_READY stays inside the engine: a stage passes it on
before its function sees it.

Provenance: `stage.sources` says where the item that the stage returned last came from.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final


class _NotReady:
    __slots__ = ()

    def __repr__(self) -> str:
        return "NOT_READY"

    def __reduce__(self) -> str:
        return "NOT_READY"


NOT_READY: Final = _NotReady()


@dataclass(frozen=True, slots=True)
class Source:
    """Where an item came from: worker index, incarnation (restarts so far), sequence number.

    `tags` is what the worker said about the item (sampling: weights version, step counts, …).
    """

    worker: int
    incarnation: int = 0
    seq: int = 0
    tags: dict[str, Any] = field(default_factory=dict, compare=False)


def chained_at() -> str:
    """`file:line` of the nearest caller outside the engine, for error notes."""
    frame = sys._getframe(1)
    while frame.f_back is not None and "/flowrl/iter/" in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def describe(item: Any) -> str:
    """A short summary of an item for error notes: type, count, shapes."""
    if isinstance(item, dict):
        columns = ", ".join(
            f"{key}: {getattr(value, 'shape', type(value).__name__)}"
            for key, value in list(item.items())[:6]
        )
        return f"{type(item).__name__} of {len(item)} rows/keys ({columns})"
    shape = getattr(item, "shape", None)
    if shape is not None:
        return f"{type(item).__name__} of shape {shape}"
    text = repr(item)
    return f"{type(item).__name__} {text if len(text) < 80 else text[:77] + '...'}"


def function_name(fn: Any) -> str:
    """How an operator is called in `explain()`: its name, or the repr of an operator object."""
    name = getattr(fn, "__name__", None)
    if name is not None:
        return name
    text = repr(fn)
    return type(fn).__name__ if text.startswith("<") else text


class Stage:
    """One node of a plan. Subclasses write `pull`; parents are the stages it pulls from."""

    kind = "stage"

    def __init__(self, *parents: Stage):
        self.parents = parents
        self.items = 0
        self.line = chained_at()
        self.owner: object | None = None
        self.title: str | None = None  # set by an operator that is made of several stages

    def pull(self, block: bool) -> Any:
        """The next item, NOT_READY, or StopIteration.

        With `block=True` only a stage without branches may be waiting: unions and children of
        `duplicate` pull their branches with `block=False` and wait once for all of them.
        """
        raise NotImplementedError

    def waits(self) -> list[Any]:
        """Object refs any of which, when ready, could make this stage move."""
        return [wait for parent in self.parents for wait in parent.waits()]

    @property
    def sources(self) -> tuple[Source, ...]:
        """Provenance of the item returned last."""
        return self.parents[0].sources if self.parents else ()

    def label(self) -> str:
        """What `explain()` prints for this stage."""
        return self.kind

    def shown(self) -> str:
        """The title if it has one, else the label."""
        return self.title or self.label()

    def operator(self) -> Any:
        """The operator whose state is this stage's, if it has one."""
        return None

    def state_dict(self) -> dict[str, Any]:
        operator = self.operator()
        inner = operator.state_dict() if hasattr(operator, "state_dict") else None
        return {"items": self.items, **({"operator": inner} if inner is not None else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = state["items"]
        if "operator" in state:
            self.operator().load_state_dict(state["operator"])

    def stop(self) -> None:
        """Release what this stage owns."""


class FromIterable(Stage):
    """Source stage over a Python iterable, or a callable that returns one at the first pull."""

    kind = "from_iterable"

    def __init__(self, make: Iterable[Any] | Callable[[], Iterable[Any]], name: str = ""):
        super().__init__()
        self._make = make
        self._name = name or self.kind
        self._iterator: Iterator[Any] | None = None

    def pull(self, block: bool) -> Any:
        if self._iterator is None:
            made = self._make() if callable(self._make) else self._make
            self._iterator = iter(made)
        item = next(self._iterator)
        self.items += 1
        return item

    def label(self) -> str:
        return self._name


class _Mapped(Stage):
    """Base of the stages that apply one function to the items of one parent."""

    def __init__(self, parent: Stage, fn: Callable[..., Any]):
        if not callable(fn):
            raise TypeError(f"{self.kind}() needs a function, got {describe(fn)}")
        super().__init__(parent)
        self.fn = fn
        self._pull_up = parent.pull

    def label(self) -> str:
        return f"{self.kind}({function_name(self.fn)})"

    def operator(self) -> Any:
        return self.fn

    def blame(self, error: BaseException, item: Any) -> None:
        """Note on the error where it happened, once: the stage and the item."""
        if not hasattr(error, "_flowrl_stage"):
            error._flowrl_stage = self  # type: ignore[attr-defined]
            error._flowrl_item = describe(item)  # type: ignore[attr-defined]


class ForEach(_Mapped):
    """fn(item) for every item."""

    kind = "for_each"

    def pull(self, block: bool) -> Any:
        item = self._pull_up(block)
        if item is NOT_READY:
            return item
        try:
            result = self.fn(item)
        except BaseException as error:
            self.blame(error, item)
            raise_operator_error(error)
        self.items += 1
        return result


class Filter(_Mapped):
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
                self.blame(error, item)
                raise_operator_error(error)
            if keep:
                self.items += 1
                return item


class Combine(_Mapped):
    """fn(item) gives a list for every item; the lists' elements, one by one."""

    kind = "combine"

    def __init__(self, parent: Stage, fn: Callable[[Any], Iterable[Any]]):
        super().__init__(parent, fn)
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
                self._pending.extend(self.fn(item))
            except BaseException as error:
                self.blame(error, item)
                raise_operator_error(error)
            if self._pending:
                self._emitted, self._sources = tuple(self._sources), []
        self.items += 1
        return self._pending.popleft()

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._emitted


class Flatten(Combine):
    """Every item is a list; its elements, one by one."""

    kind = "flatten"

    def __init__(self, parent: Stage):
        super().__init__(parent, iter)

    def label(self) -> str:
        return self.kind

    def operator(self) -> Any:
        return None


class Batch(Stage):
    """Lists of `size` items; the last one may be shorter."""

    kind = "batch"

    def __init__(self, parent: Stage, size: int):
        if size < 1:
            raise ValueError(f"batch(n): n must be at least 1, got {size}")
        super().__init__(parent)
        self.size = size
        self._pending: list[Any] = []
        self._sources: list[Source] = []
        self._emitted: tuple[Source, ...] = ()

    def pull(self, block: bool) -> Any:
        parent = self.parents[0]
        while len(self._pending) < self.size:
            try:
                item = parent.pull(block)
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


class Transform(Stage):
    """fn(iterator) -> iterator, over the whole stream.

    The iterator given to fn cannot say "not now", so the stage waits for its own items.
    """

    kind = "transform"

    def __init__(self, parent: Stage, fn: Callable[[Iterator[Any]], Iterable[Any]]):
        super().__init__(parent)
        self.fn = fn
        self._iterator: Iterator[Any] | None = None

    def _upstream(self) -> Iterator[Any]:
        while True:
            try:
                item = self.parents[0].pull(True)
            except StopIteration:
                return
            yield item

    def pull(self, block: bool) -> Any:
        if self._iterator is None:
            self._iterator = iter(self.fn(self._upstream()))
        item = next(self._iterator)
        self.items += 1
        return item

    def label(self) -> str:
        return f"{self.kind}({function_name(self.fn)})"


class ZipWithSource(Stage):
    """(sources, item) for every item: the tuple of `Source`s that it came from."""

    kind = "zip_with_source"

    def pull(self, block: bool) -> Any:
        item = self.parents[0].pull(block)
        if item is NOT_READY:
            return item
        self.items += 1
        return self.parents[0].sources, item


def raise_operator_error(error: BaseException) -> None:
    """Re-raise an operator's error; a StopIteration from it must not end the stream."""
    if isinstance(error, StopIteration):
        raised = RuntimeError("the operator raised StopIteration, which would end the stream")
        raised.__dict__.update(error.__dict__)
        raise raised from error
    raise error
