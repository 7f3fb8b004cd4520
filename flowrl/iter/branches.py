"""Stages with several branches: union joins streams, duplicate splits one.

They pull their branches with `block=False` only: it is the end of the plan that waits, once for
all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, get_args

from flowrl.iter.isolate import isolated
from flowrl.iter.linear import Transform
from flowrl.iter.stage import NOT_READY, Source, Stage, walk
from flowrl.iter.waiting import Signal

STAR_PULLS = 100  # items that a "*" branch may give in one turn before the others get theirs

ONE = 1 - 1e-9  # ten times 0.1 falls short of 1 by rounding

WhenFull = Literal["block", "drop_oldest", "drop_newest"]


class Union(Stage):
    """Items of several branches.

    Ordered: branch i gives `weights[i]` items a turn, exactly. Fractions accumulate. A branch
    that waits for a worker keeps its turn; one that its siblings may have to move (they share a
    `duplicate`, or a thread between two queues) lends its turn and is owed it. "*" gives all that
    is ready.
    Not ordered: a turn takes one item of whatever branch has one ready.

    Args:
        branches: the stages joined.
        weights: items of each branch per turn; implies `ordered`.
        ordered: see above.
        outputs: branches whose items are handed on; the others' are dropped. None: all.

    Raises:
        ValueError: wrong weights, or a `transform` in a branch that must be able to pause.
    """

    kind = "union"

    def __init__(
        self,
        branches: Sequence[Stage],
        weights: Sequence[float | str] | None = None,
        ordered: bool = False,
        outputs: Sequence[int] | None = None,
    ):
        if not branches:
            raise ValueError("union needs at least one branch")
        if weights is not None:
            _check_weights(weights, len(branches))
        super().__init__(*branches)
        self._weights = list(weights) if weights is not None else [1.0] * len(branches)
        self._ordered = ordered or weights is not None
        self._emits = [outputs is None or i in outputs for i in range(len(branches))]
        for index, branch in enumerate(branches):
            if not self._ordered or self._weights[index] == "*":
                _refuse_transform(branch, index)
        self._credit = [0.0] * len(branches)
        self._done = [False] * len(branches)
        self._turn = -1
        self._expecting: int | None = None  # the branch that keeps its turn
        self._last: Stage | None = None

    def _next_turn(self) -> None:
        self._turn = (self._turn + 1) % len(self.parents)
        weight = self._weights[self._turn]
        if weight == "*":
            self._credit[self._turn] = STAR_PULLS
        else:
            self._credit[self._turn] += float(weight)

    def pull(self, block: bool) -> Any:
        idle = 0  # branches in a row that could not move
        left = self._done.count(False)
        self._expecting = None
        while left:
            turn = self._turn
            if turn < 0 or self._done[turn] or self._credit[turn] < ONE:
                self._next_turn()
                continue
            try:
                item = self._pulls[turn](False)
            except StopIteration:
                self._done[turn] = True
                left -= 1
                idle = 0
                continue
            if item is not NOT_READY:
                self._credit[turn] -= 1
                if not self._emits[turn]:
                    idle = 0
                    continue
                self._last = self.parents[turn]
                self.items += 1
                return item
            if self._ordered and self._weights[turn] != "*" and self._keeps_turn(turn):
                self._expecting = turn
                return NOT_READY
            idle += 1
            if not self._ordered or self._weights[turn] == "*":
                self._credit[turn] = 0
            self._next_turn()
            if idle >= left:
                return NOT_READY
        raise StopIteration

    def _keeps_turn(self, turn: int) -> bool:
        """Whether a branch that is not ready waits for nothing that its siblings could bring."""
        waits = self.parents[turn].waits()
        return bool(waits) and not any(isinstance(wait, Signal) for wait in waits)

    def waits(self) -> list[Any]:
        if self._expecting is not None:
            return self.parents[self._expecting].waits()
        return [
            wait
            for parent, done in zip(self.parents, self._done, strict=True)
            if not done
            for wait in parent.waits()
        ]

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._last.sources if self._last is not None else ()

    def label(self) -> str:
        if not self._ordered:
            return self.kind
        return f"{self.kind}(round_robin_weights={self._weights})"

    def state_dict(self) -> dict[str, Any]:
        return {
            "items": self.items,
            "credit": list(self._credit),
            "turn": self._turn,
            "done": list(self._done),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items, self._turn = state["items"], state["turn"]
        self._credit, self._done = list(state["credit"]), list(state["done"])


def _check_weights(weights: Sequence[float | str], branches: int) -> None:
    if len(weights) != branches:
        raise ValueError(f"round_robin_weights has {len(weights)} entries for {branches} branches")
    for weight in weights:
        number = isinstance(weight, (int, float)) and 0 < weight < float("inf")
        if weight != "*" and not number:
            raise ValueError(f"a round-robin weight is a number > 0 or '*', got {weight!r}")
    if all(weight == "*" for weight in weights):
        raise ValueError("round_robin_weights: at least one weight must be a number")


def _refuse_transform(branch: Stage, index: int) -> None:
    """A transform's function cannot be paused: it would hold up the other branches."""
    for stage in walk(branch):
        if isinstance(stage, Transform) and stage.parents[0].can_wait():
            raise ValueError(
                f"branch {index} of an asynchronous union has {stage.label()} (chained at "
                f"{stage.line}), whose function cannot pause while it waits for its next item "
                "and would hold up the other branches: write it with for_each or combine, "
                "apply it on the shards before the gather, or after the union"
            )


class Tee(Stage):
    """The shared end of `duplicate(n)`: gives every item to n bounded buffers.

    Args:
        n: children.
        max_buffered: items that a child may lie ahead of the slowest.
        when_full: per child, what happens to an item for which its buffer has no room: "block"
            holds up the others, "drop_oldest" and "drop_newest" lose one, counted.
    """

    kind = "duplicate"

    def __init__(self, parent: Stage, n: int, max_buffered: int, when_full: Sequence[WhenFull]):
        if max_buffered < 1:
            raise ValueError(f"duplicate: max_buffered must be at least 1, got {max_buffered}")
        if len(when_full) != n:
            raise ValueError(f"duplicate: when_full has {len(when_full)} entries for {n} children")
        for policy in when_full:
            if policy not in get_args(WhenFull):
                raise ValueError(f"duplicate: when_full is one of {get_args(WhenFull)}: {policy!r}")
        super().__init__(parent)
        self.max_buffered = max_buffered
        self.when_full = list(when_full)
        self.buffers: list[deque[tuple[Any, tuple[Source, ...]]]] = [deque() for _ in range(n)]
        self.children: list[TeeChild] = []
        self.dropped = [0] * n

    def blocking(self) -> list[int]:
        """Children whose full buffers hold up the stream."""
        return [
            index
            for index, buffer in enumerate(self.buffers)
            if len(buffer) >= self.max_buffered and self.when_full[index] == "block"
        ]

    def pull(self, block: bool) -> Any:
        """Move one item from the parent into every buffer."""
        if self.blocking():
            return NOT_READY
        item = self._pull_up(block)
        if item is NOT_READY:
            return item
        self.items += 1
        sources = self.parents[0].sources
        for index, buffer in enumerate(self.buffers):
            if len(buffer) >= self.max_buffered:
                self.dropped[index] += 1
                if self.when_full[index] == "drop_newest":
                    continue
                buffer.popleft()
            buffer.append((isolated(item), sources))
        return item

    def label(self) -> str:
        return f"{self.kind}({len(self.buffers)})"

    def numbers(self) -> dict[str, Any]:
        queued = [len(buffer) for buffer in self.buffers]
        return {"queued": queued, **({"dropped": self.dropped} if any(self.dropped) else {})}

    def state_dict(self) -> dict[str, Any]:
        return {
            "items": self.items,
            "dropped": list(self.dropped),
            "buffers": [[item for item, _ in buffer] for buffer in self.buffers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items, self.dropped = state["items"], list(state["dropped"])
        self.buffers = [deque((item, ()) for item in items) for items in state["buffers"]]


class TeeChild(Stage):
    """One of the n streams of `duplicate(n)`."""

    kind = "duplicate_child"

    def __init__(self, tee: Tee, index: int):
        super().__init__(tee)
        self._tee = tee
        self._index = index
        self._sources: tuple[Source, ...] = ()
        tee.children.append(self)

    def pull(self, block: bool) -> Any:
        tee = self._tee
        if not tee.buffers[self._index] and self._pull_up(block) is NOT_READY:
            abandoned = [i for i in tee.blocking() if tee.children[i].owner is None]
            if abandoned:
                raise RuntimeError(
                    f"child {self._index} of duplicate({len(tee.buffers)}), chained at "
                    f"{tee.line}, cannot move: child {abandoned[0]} holds {tee.max_buffered} items "
                    "and nobody takes them. Consume all the children, for example with "
                    'Concurrently([...]), use fewer, or set when_full="drop_oldest"'
                )
            return NOT_READY
        item, self._sources = tee.buffers[self._index].popleft()
        self.items += 1
        return item

    def waits(self) -> list[Any]:
        return [] if self._tee.blocking() else self._tee.waits()

    def can_wait(self) -> bool:
        return True

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._sources

    def label(self) -> str:
        return f"{self.kind}[{self._index}]"
