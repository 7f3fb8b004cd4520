"""Stages with several branches: union joins streams, duplicate splits one.

They pull their branches with `block=False` only: it is the end of the plan that waits, once for
all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, get_args

from flowrl.iter.readonly import isolated
from flowrl.iter.stage import NOT_READY, Source, Stage, sources_to_list, sources_from_list, walk
from flowrl.iter.unary_stages import Transform
from flowrl.iter.waiting import Signal

STAR_PULLS = 100  # items that a "*" branch may give in one turn before the others get theirs
DROPPED_AT_ONCE = 100  # items of branches that are not handed on, before others get their chance

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
        self._ordered = ordered or weights is not None
        self._shown = list(weights) if weights is not None else [1.0] * len(branches)
        self._stars = [weight == "*" for weight in self._shown]
        self._weights = [0.0 if weight == "*" else float(weight) for weight in self._shown]
        self._emits = [outputs is None or i in outputs for i in range(len(branches))]
        for index, branch in enumerate(branches):
            _refuse_transform(branch, index, self._ordered and not self._stars[index])
        self._children = [
            [stage for stage in walk(branch) if isinstance(stage, DuplicateChild)]
            for branch in branches
        ]
        self._taken = [0] * len(branches)
        self._credit = [0.0] * len(branches)  # items that a branch may give; negative: that it owes
        self._done = [False] * len(branches)
        self._turn = -1
        self._expecting: int | None = None  # the branch that keeps its turn
        self._made_way = False  # though it could go on
        self._last: Stage | None = None

    def pull(self, block: bool) -> Any:
        idle: set[int] = set()  # branches that could not move since another one has
        dropped = 0
        self._expecting, self._made_way = None, False
        while not all(self._done):
            turn = self._next_turn(idle) if self._ordered else None
            index = turn if turn is not None and turn not in idle else self._lent(idle)
            if index is None:
                return NOT_READY
            try:
                item = self._pulls[index](False)
            except StopIteration:
                self._end(index)
                idle.clear()
                continue
            if item is NOT_READY:
                if index == turn and self._keeps_turn(turn):
                    self._expecting = turn
                    return NOT_READY
                if self._has_moved(index):
                    idle.clear()  # it took items that others waited for it to take
                idle.add(index)
                continue
            if self._ordered:
                self._credit[index] -= 1
            else:
                self._turn = index
            if self._emits[index]:
                self._last = self.parents[index]
                self.items += 1
                return item
            idle.clear()
            dropped += 1
            if dropped >= DROPPED_AT_ONCE and not block:
                self._made_way = True  # siblings of this union have waited long enough
                return NOT_READY
        raise StopIteration

    def _next_turn(self, idle: set[int]) -> int:
        """The branch whose turn it is; a "*" that had nothing has had its turn."""
        while True:
            for _ in range(len(self.parents) + 1):
                turn = self._turn
                starved = self._stars[turn] and turn in idle
                if self._credit[turn] >= ONE and not self._done[turn] and not starved:
                    return turn
                if self._stars[turn]:
                    self._credit[turn] = 0
                turn = self._turn = (turn + 1) % len(self.parents)
                self._credit[turn] += STAR_PULLS if self._stars[turn] else self._weights[turn]
            # nobody has enough for an item yet: so many rounds until somebody has
            live = [i for i, done in enumerate(self._done) if not done and not self._stars[i]]
            if not live:
                return self._done.index(False)
            rounds = min((ONE - self._credit[i]) // self._weights[i] for i in live)
            for i in live:
                self._credit[i] += max(rounds, 0) * self._weights[i]

    def _lent(self, idle: set[int]) -> int | None:
        """The branch that goes first where the one whose turn it is cannot move."""
        count = len(self.parents)
        others = [(self._turn + 1 + i) % count for i in range(count)]
        others = [i for i in others if i not in idle and not self._done[i]]
        if not self._ordered:
            return others[0] if others else None
        return max(others, key=self._credit.__getitem__, default=None)

    def _has_moved(self, index: int) -> bool:
        """Whether a branch has taken items from a stream that it shares with others, since this
        was asked last."""
        taken, self._taken[index] = self._taken[index], sum(c.items for c in self._children[index])
        return taken != self._taken[index]

    def _keeps_turn(self, turn: int) -> bool:
        """Whether a branch that is not ready waits for nothing that its siblings could bring."""
        if self._stars[turn]:
            return False
        waits = self.parents[turn].waits()
        return bool(waits) and not any(isinstance(wait, Signal) for wait in waits)

    def _end(self, index: int) -> None:
        self._done[index] = True
        for child in self._children[index]:
            child.leave()

    def waits(self) -> list[Any]:
        if self._made_way:
            return [0.0]  # a time that has come
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
        return f"{self.kind}(round_robin_weights={self._shown})"

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


def _refuse_transform(branch: Stage, index: int, ordered: bool) -> None:
    """A transform's function cannot be paused: it would hold up the other branches, which in an
    ordered union matters where it waits for what they bring."""
    for stage in walk(branch):
        if not isinstance(stage, Transform):
            continue
        upstream = stage.parents[0]
        if _leans_on_others(upstream) if ordered else upstream.can_wait():
            kind = "a round-robin" if ordered else "an asynchronous"
            raise ValueError(
                f"branch {index} of {kind} union has {stage.label()} (chained at "
                f"{stage.line}), whose function cannot pause while it waits for its next item "
                "and would hold up the other branches: write it with for_each or combine, "
                "apply it on the shards before the gather, or after the union"
            )


def _leans_on_others(stage: Stage) -> bool:
    """Whether what a stage waits for may be for a stage outside of its own stream to bring."""
    own = set(walk(stage))
    return any(
        not own.issuperset(one.siblings)
        if isinstance(one, DuplicateChild)
        else one.depends_on_sibling
        for one in own
    )


class Duplicate(Stage):
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
        self.children: list[DuplicateChild] = []
        self.dropped = [0] * n
        self._left = [False] * n

    def blocking(self) -> list[int]:
        """Children whose full buffers hold up the stream."""
        return [
            index
            for index, buffer in enumerate(self.buffers)
            if len(buffer) >= self.max_buffered and self.when_full[index] == "block"
        ]

    def leave(self, index: int) -> None:
        """A child's reader has ended: nothing is kept for it any more."""
        self._left[index] = True
        self.buffers[index].clear()

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
            if self._left[index]:
                continue
            if len(buffer) >= self.max_buffered:
                self.dropped[index] += 1
                if self.when_full[index] == "drop_newest":
                    continue
                buffer.popleft()
            buffer.append((isolated(item), sources))
        return item

    def label(self) -> str:
        return f"{self.kind}({len(self.buffers)})"

    def extra_stats(self) -> dict[str, Any]:
        queued = [len(buffer) for buffer in self.buffers]
        return {"queued": queued, **({"dropped": self.dropped} if any(self.dropped) else {})}

    def state_dict(self) -> dict[str, Any]:
        return {
            "items": self.items,
            "dropped": list(self.dropped),
            "buffers": [
                [[item, sources_to_list(s)] for item, s in buffer] for buffer in self.buffers
            ],
            "left": list(self._left),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items, self.dropped = state["items"], list(state["dropped"])
        self.buffers = [
            deque((item, sources_from_list(sources)) for item, sources in buffer)
            for buffer in state["buffers"]
        ]
        self._left = list(state["left"])


class DuplicateChild(Stage):
    """One of the n streams of `duplicate(n)`."""

    kind = "duplicate_child"

    def __init__(self, tee: Duplicate, index: int):
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

    @property
    def siblings(self) -> list[DuplicateChild]:
        """All the children of the duplicate."""
        return self._tee.children

    def leave(self) -> None:
        """Say that nobody will pull this child again."""
        self._tee.leave(self._index)

    def can_wait(self) -> bool:
        return True

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._sources

    def label(self) -> str:
        return f"{self.kind}[{self._index}]"
