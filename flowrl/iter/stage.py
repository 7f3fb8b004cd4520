"""What a stage is: a node of a plan with one method, `pull(block)`.

`pull` returns the next item, or NOT_READY ("nothing now; let another branch move"), or raises
StopIteration at the end of the stream. State is attributes, never a generator's frame, so an
exception leaves the plan resumable. NOT_READY stays inside the engine: a stage passes it on
before its function sees it.

Provenance: `stage.sources` says where the item that the stage returned last came from.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final


class _NotReady:
    __slots__ = ()

    def __repr__(self) -> str:
        return "NOT_READY"

    def __reduce__(self) -> str:
        return "NOT_READY"


NOT_READY: Final = _NotReady()

Pull = Callable[[bool], Any]


@dataclass(slots=True, unsafe_hash=True)  # frozen ones take five times as long to make
class Source:
    """Where an item came from: worker index, incarnation (restarts so far), sequence number.

    `tags` is what the worker said about the item (sampling: weights version, step counts, …);
    `origin` is the name of the gather, which tells those of a plan apart.
    """

    worker: int
    incarnation: int = 0
    seq: int = 0
    tags: dict[str, Any] = field(default_factory=dict, compare=False)
    origin: str = field(default="", compare=False, repr=False)


def sources_to_list(sources: Sequence[Source]) -> list[list[Any]]:
    """Sources as a saved plan holds them."""
    return [[s.worker, s.incarnation, s.seq, s.tags, s.origin] for s in sources]


def sources_from_list(saved: Sequence[Sequence[Any]]) -> tuple[Source, ...]:
    """What `sources_to_list` gave, as sources again."""
    return tuple(Source(*fields) for fields in saved)


class Stage:
    """One node of a plan. Subclasses write `pull`; parents are the stages it pulls from.

    A subclass pulls its parents through `_pull_up` (the first) or `_pulls` (each), so that the
    time spent in them can be told from its own. It adds to `items` what it gives out, to
    `waited_s` the seconds in which it did nothing but wait, and says in `waits()` what for.
    """

    kind = "stage"
    depends_on_sibling = (
        False  # True where what it waits for may be for another branch of the plan to bring
    )
    yields_lists = False  # True where items are lists with an element for each of `sources`
    resumable = True  # False where a saved plan cannot say where this stage was: it starts again

    def __init__(self, *parents: Stage):
        self.parents = parents
        self.items = 0
        self.waited_s = 0.0
        self.line = chained_at()
        self.name = ""  # what the stage is called in its plan, once that has started
        self.owner: object | None = None
        self.title: str | None = None  # set by an operator that is made of several stages
        self.wire([parent.pull for parent in parents])

    def wire(self, pulls: Sequence[Pull]) -> None:
        """Pull the parents through these functions, one for each."""
        self._pulls = pulls
        if pulls:
            self._pull_up = pulls[0]

    def pull(self, block: bool) -> Any:
        """The next item, NOT_READY, or StopIteration.

        With `block=True` a stage that waits for one thing only may wait for it; branches are
        pulled with `block=False`, and it is the end of the plan that waits, for all of them.
        """
        raise NotImplementedError

    def waits(self) -> list[Any]:
        """What could make this stage move after NOT_READY: Ray refs, Signals, and times of
        `time.monotonic()`."""
        return [wait for parent in self.parents for wait in parent.waits()]

    def can_wait(self) -> bool:
        """Whether `pull` may ever return NOT_READY."""
        return any(parent.can_wait() for parent in self.parents)

    def start(self, seed: str | None) -> None:
        """Called once, before the first pull. `seed` is this stage's own, from the plan's."""

    def stop(self) -> None:
        """Release what this stage owns."""

    # -- what the stage says of itself -----------------------------------------------------------

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

    def short(self) -> str:
        """The same without arguments, for error notes."""
        return (self.title or self.state_name() or self.label()).split("(", 1)[0]

    def state_name(self) -> str | None:
        """What the stage is called in a saved plan (numbered where two are called the same);
        None for a stage that keeps nothing and may come and go."""
        return self.kind

    def extra_stats(self) -> dict[str, Any]:
        """Figures of its own for `stats()`, such as the depth of its queue."""
        return {}

    def shard_stats(self) -> dict[int, list[dict[str, Any]]]:
        """What the steps on each shard said of themselves last, if this stage reads shards."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"items": self.items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = state["items"]


def walk(stage: Stage) -> Iterator[Stage]:
    """Every stage of the plan that ends in `stage`, each once, end first."""
    seen: set[int] = set()
    stack = [stage]
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            stack.extend(reversed(node.parents))


def state_names(stage: Stage) -> dict[str, Stage]:
    """The stages of a plan by their names in its saved state, end first."""
    named: dict[str, Stage] = {}
    count: dict[str, int] = {}
    for node in walk(stage):
        name = node.state_name()
        if name is not None:
            count[name] = count.get(name, 0) + 1
            named[name if count[name] == 1 else f"{name}#{count[name]}"] = node
    return named


_ROOM = os.path.dirname(__file__)
_INNER = tuple(os.path.join(os.path.dirname(_ROOM), room) + os.sep for room in ("iter", "ops"))


def chained_at() -> str:
    """`file:line` of the nearest caller outside the engine and the operators, for error notes."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
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
    if isinstance(item, (list, tuple)) and len(item) > 4:
        return f"{type(item).__name__} of {len(item)}, the first a {describe(item[0])}"
    try:
        text = repr(item)
    except Exception as error:
        text = f"whose repr() raises {type(error).__name__}"
    return f"{type(item).__name__} {text if len(text) < 80 else text[:77] + '...'}"


def function_name(fn: Any) -> str:
    """How an operator is called in `explain()`: its name, or the repr of an operator object."""
    name = getattr(fn, "__name__", None)
    if name is not None:
        return name
    text = repr(fn)
    return type(fn).__name__ if text.startswith("<") else text
