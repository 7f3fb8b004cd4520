"""Stage, the node of a plan. A subclass implements one method, `pull(block)`.

`pull` returns the next item, returns NOT_READY if there is none yet (another branch may run), or
raises StopIteration at the end of the stream. State lives in attributes, never in the frame of a
generator, so a plan stays usable after an exception. NOT_READY stays inside the engine: a stage
passes it on without calling its function.

Provenance: `stage.sources` holds the sources of the item that the stage returned last.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from flowrl.source import Source
from flowrl.state_schema import Fields, Natural, check_own_state

if TYPE_CHECKING:
    from flowrl.iter.journal import Journal


class _NotReady:
    __slots__ = ()

    def __repr__(self) -> str:
        return "NOT_READY"

    def __reduce__(self) -> str:
        return "NOT_READY"


NOT_READY: Final = _NotReady()

MAX_TITLE = 200  # characters of an operator in titles

Pull = Callable[[bool], Any]


class Stage:
    """One node of a plan. Subclasses implement `pull`; parents are the stages it pulls from.

    A subclass pulls its parents through `_pull_up` (the first one) or `_pulls` (each one), so that
    the profiler can separate their time from its own. It increments `items` for each item it
    returns, waits in the context `waiting()`, and lists in `waits()` what it waits for.

    Attributes:
        name: unique in a plan (a started plan numbers repeated names: `batch`, `batch#2`); the key
            of the stage in saved state. Subclasses set a default on the class.
        title: display text with arguments for `explain()` and `stats()`; None displays the name.
        line: `file:line` where the stage was chained.
    """

    name: str = "stage"
    title: str | None = None
    depends_on_sibling = False  # another branch of the plan may have to run before it can continue
    yields_lists = False  # items are lists with one element per entry of `sources`
    state_fields: ClassVar[Fields] = {"items": Natural}
    has_state = True  # False: not in saved state, a restored plan may add or lack the stage
    resumable = True  # False: its position is not saved, a restored plan starts it again
    is_asynchronous = False  # True: a recorded run needs a journal of the order of its items
    journal: Journal | None = None  # of the plan; set before `start`
    _item_sources: tuple[Source, ...] | None = None  # see `sources`; None: those of the parent

    def __init__(self, *parents: Stage):
        self.parents = parents
        self.items = 0
        self.waited_s = 0.0
        self.waiting_since: float | None = None  # time of perf_counter, while it waits
        self.line = chained_at()
        self.started = False
        self.consumer: object | None = None  # the LocalIterator or Duplicate that consumes it
        self.wire([parent.pull for parent in parents])

    def wire(self, pulls: Sequence[Pull]) -> None:
        """Set the functions that pull the parents, one per parent."""
        self._pulls = pulls
        if pulls:
            self._pull_up = pulls[0]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in this context as waiting, also while it lasts."""
        self.waiting_since = started = time.perf_counter()
        try:
            yield
        finally:
            self.waiting_since = None
            self.waited_s += time.perf_counter() - started

    def pull(self, block: bool) -> Any:
        """Return the next item or NOT_READY, or raise StopIteration.

        With `block=True` a stage that waits for a single event may block. Unions pull their
        branches with `block=False`; the end of the plan then waits for all of them at once.
        """
        raise NotImplementedError

    def waits(self) -> list[Any]:
        """Return the events that may end NOT_READY: Ray refs, Signals, `time.monotonic()` times."""
        return [wait for parent in self.parents for wait in parent.waits()]

    def holds_items(self) -> bool:
        """Return whether the stage holds items of its input that it has not returned yet, because
        they wait for something."""
        return False

    def blocked_by(self) -> str:
        """Return what must happen before the stage can continue, for an error message; or ""."""
        return ""

    def can_return_not_ready(self) -> bool:
        """Return whether `pull` may return NOT_READY."""
        return any(parent.can_return_not_ready() for parent in self.parents)

    def start(self, seed: str | None) -> None:
        """Prepare the stage. Called once, before the first pull, unless `has_state` is False.

        Args:
            seed: seed of this stage, derived from the seed of the plan; None without one.
        """

    def stop(self) -> None:
        """Release the resources that this stage owns."""

    # -- inspection ----------------------------------------------------------------------------

    @property
    def sources(self) -> tuple[Source, ...]:
        """Sources of the item returned last: by default, those of the parent's item."""
        if self._item_sources is not None:
            return self._item_sources
        return self.parents[0].sources if self.parents else ()

    def source_actor(self, source: Source) -> Any:
        """Return the actor of a source if this stage gathered the item from it, else None."""
        return None

    def extra_stats(self) -> dict[str, Any]:
        """Return additional values for `stats()`, such as queue sizes."""
        return {}

    def shard_stats(self) -> dict[int, list[dict[str, Any]]]:
        """Return the latest `stats()` of the steps on each shard, if this stage reads shards."""
        return {}

    def __str__(self) -> str:
        return self.title or self.name

    # -- state ---------------------------------------------------------------------------------

    @property
    def shared_state(self) -> Any:
        """An object, such as a replay buffer, whose state the plan saves once, even if several
        stages use it; None if there is none. Ignored if `has_state` is False."""
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"items": self.items}

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that `load_state_dict` accepts a state of a stage with this name.

        Raises:
            ValueError: the state does not fit this stage.
        """
        check_own_state(self, state, self.name)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = state["items"]


def walk(stage: Stage) -> Iterator[Stage]:
    """Yield every stage of the plan that ends in `stage` once, starting at the end."""
    seen: set[int] = set()
    stack = [stage]
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            stack.extend(reversed(node.parents))


def stages_by_name(end: Stage) -> dict[str, Stage]:
    """Return the stages of a plan that have a state by their unique names, end first."""
    by_name: dict[str, Stage] = {}
    count: Counter[str] = Counter()
    for node in walk(end):
        if node.has_state:
            name = node.name.partition("#")[0]  # a started plan has numbered it already
            count[name] += 1
            by_name[name if count[name] == 1 else f"{name}#{count[name]}"] = node
    return by_name


def operator_of(stage: Stage) -> Any:
    """Return the operator of a stage: a learner thread, a function, or the stage itself."""
    return getattr(stage, "learner_thread", None) or getattr(stage, "fn", stage)


def topological_order(end: Stage) -> list[Stage]:
    """Return the stages of the plan that ends in `end` in topological order: input stages first,
    branches by index."""
    ordered: dict[Stage, None] = {}

    def add(stage: Stage) -> None:
        if stage not in ordered:
            for parent in stage.parents:
                add(parent)
            ordered[stage] = None

    add(end)
    return list(ordered)


_ITER_DIR = os.path.dirname(__file__)
_INTERNAL_DIRS = tuple(
    os.path.join(os.path.dirname(_ITER_DIR), package) + os.sep for package in ("iter", "ops")
)


def chained_at() -> str:
    """Return `file:line` of the nearest caller outside `flowrl.iter` and `flowrl.ops`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INTERNAL_DIRS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_SHOWN_FIRST = ("obs", "actions", "rewards")  # columns in the summary of a batch


def _has_rows(item: Any) -> bool:
    """Return whether an item is a batch or an array."""
    is_batch = hasattr(item, "stored") or hasattr(item, "policy_batches")
    return is_batch or bool(getattr(item, "shape", ()))


def describe(item: Any) -> str:
    """Return a short summary of an item for error notes: type, size, shapes.

    Lazy columns of a batch are not computed or fetched.
    """
    by_policy = getattr(item, "policy_batches", None)
    if by_policy is not None and not isinstance(item, dict):
        parts = ", ".join(f"{pid}: {describe(rows)}" for pid, rows in by_policy.items())
        return f"{type(item).__name__} ({parts})"
    if isinstance(item, dict):
        stored: Any = getattr(item, "stored", None)  # of a batch
        pairs: Any = item.items() if stored is None else stored()
        if stored is not None:
            pairs = sorted(pairs, key=lambda pair: pair[0] not in _SHOWN_FIRST)
        noun = "keys" if stored is None else "rows"
        columns = ", ".join(
            f"{key}: {getattr(value, 'shape', type(value).__name__)}"
            for key, value in itertools.islice(pairs, 6)
        )
        return f"{type(item).__name__} of {len(item)} {noun} ({columns})"
    shape = getattr(item, "shape", None)
    if shape is not None:
        return f"{type(item).__name__} of shape {shape}"
    if isinstance(item, (list, tuple)) and len(item) > 4:
        return f"{type(item).__name__} of {len(item)}, the first a {describe(item[0])}"
    if isinstance(item, (list, tuple)) and any(map(_has_rows, item)):  # their repr() takes long
        return f"{type(item).__name__} ({', '.join(map(describe, item))})"
    try:
        text = repr(item)
    except Exception as error:
        text = f"whose repr() raises {type(error).__name__}"
    text = text if len(text) < 80 else text[:77] + "..."
    name = type(item).__name__
    return text if isinstance(item, Exception) and text.startswith(name) else f"{name} {text}"


def close_generator(iterator: Any) -> None:
    """Close an iterator that a stage created, if it is a generator, so that its `finally` blocks
    run."""
    if inspect.isgenerator(iterator) and not iterator.gi_running:
        iterator.close()


def function_title(fn: Any) -> str:
    """Return the display text of an operator: its `__name__`, else its repr."""
    name = getattr(fn, "__name__", None)
    if name is not None:
        return name
    try:
        text = repr(fn)
    except Exception:
        return type(fn).__name__
    if text.startswith("<"):
        return type(fn).__name__
    half = MAX_TITLE // 2
    return text if len(text) <= MAX_TITLE else f"{text[:half]}…{text[-half:]}"
