"""Stages with several branches: union joins streams, duplicate splits one.

They pull their branches with `block=False`; the end of the plan waits for all of them at once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from numbers import Real
from typing import Any, ClassVar, Literal, get_args

from flowrl.iter.errors import call_in_stage
from flowrl.iter.readonly import read_only_copy
from flowrl.iter.stage import NOT_READY, Stage, walk
from flowrl.iter.stages.function_stage import report_lost
from flowrl.iter.stages.tasks import ForEachConcurrent
from flowrl.iter.stages.unary import Transform
from flowrl.iter.waiting import Signal
from flowrl.setting_values import check_int
from flowrl.source import Source, sources_from_list, sources_to_list
from flowrl.state_schema import Fields, Integer, Natural

log = logging.getLogger("flowrl")

MAX_STAR_ITEMS = 100  # items of a "*" branch per turn
MAX_FOREIGN_ITEMS = 100  # items of other sources in a row, after which a branch is ended
DRAIN_TIMEOUT_S = 10.0  # without progress, after which items of dropped branches are given up
MAX_DROPPED = 100  # items dropped in one pull, before the siblings of the union may run

FULL_CREDIT = 1 - 1e-9  # a full credit: ten times 0.1 is less than 1 by rounding
AT_ONCE = 0.0  # a time in the past: pull again at once

WhenFull = Literal["block", "drop_oldest", "drop_newest"]


class Union(Stage):
    """Return the items of several branches.

    Ordered: branch i returns exactly `weights[i]` items per turn; fractions accumulate. A branch
    that waits for a worker keeps its turn. A branch that may depend on a sibling (they share a
    `duplicate`, or a thread between two queues) gives up its turn while it is not ready, and gets
    an additional turn later.
    "*" returns all items that are ready, up to MAX_STAR_ITEMS.
    Not ordered: a turn returns one item of any branch that is ready.
    The stream ends when all branches whose items are returned have ended. If the stream that a
    `duplicate` copies has ended, the other branches first process the items buffered for them.

    Args:
        branches: the stages to join.
        weights: items of each branch per turn; implies `ordered`.
        ordered: see above.
        outputs: indexes of the branches whose items are returned; the items of the others are
            dropped. None: all.

    Raises:
        ValueError: invalid weights, or a `transform` in a branch that must be able to pause.
    """

    state_fields: ClassVar[Fields] = {
        "credit": list[float],
        "turn": Integer,
        "done": list[bool],
    }

    name = "union"

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
        self.has_own_weights = weights is not None
        self._ordered = ordered or self.has_own_weights
        all_weights = list(weights) if weights is not None else [1.0] * len(branches)
        if self._ordered:
            self.title = f"{self.name}(round_robin_weights={all_weights})"
        self._stars = [weight == "*" for weight in all_weights]
        self._weights = [0.0 if weight == "*" else float(weight) for weight in all_weights]
        self._is_output = [outputs is None or i in outputs for i in range(len(branches))]
        for index, branch in enumerate(branches):
            union = "a round-robin union" if self._ordered else "an asynchronous union"
            star = " ('*')" if self._stars[index] else ""
            waits_its_turn = self._ordered and not star
            _reject_transform(branch, f"branch {index}{star} of {union}", waits_its_turn)
        self._children = [
            [stage for stage in walk(branch) if isinstance(stage, DuplicateChild)]
            for branch in branches
        ]
        self._items_taken = [0] * len(branches)  # from `_children`, at the last call
        # items that each branch may still return in its turn; negative if it was pulled instead of
        # a branch that was not ready
        self._credit = [0.0] * len(branches)
        self._done = [False] * len(branches)
        self._has_ended = self._outputs_have_ended()  # kept, because each pull reads it
        self._turn = -1
        self._kept_turn: int | None = None  # the branch to wait for
        self._yielded = False  # returned NOT_READY though a branch was ready
        # of a branch that is drained: items in a row that no child of a duplicate provided
        self._num_foreign = [0] * len(branches)
        self._drain_until: float | None = None  # time.monotonic() until which a branch may wait
        self._last: Stage | None = None

    def _outputs_have_ended(self) -> bool:
        """Return whether all branches whose items are returned have ended."""
        return all(done for done, output in zip(self._done, self._is_output, strict=True) if output)

    def is_output(self, index: int) -> bool:
        """Return whether the items of a branch are returned, not dropped."""
        return self._is_output[index]

    def pull(self, block: bool) -> Any:
        idle: set[int] = set()  # branches that were not ready since any branch last progressed
        dropped = 0
        self._kept_turn, self._yielded = None, False
        while not self._has_ended:
            turn = self._next_turn(idle) if self._ordered else None
            index = turn if turn is not None and turn not in idle else self._substitute(idle)
            if index is None:
                return NOT_READY
            try:
                item = self._pulls[index](False)
            except StopIteration:
                self._end_branch(index)
                idle.clear()
                continue
            except Exception:
                self._count_item(index)  # the next pull continues with the other branches
                raise
            if item is NOT_READY:
                if index == turn and self._keeps_turn(turn):
                    self._kept_turn = turn
                    return NOT_READY
                if self._has_progressed(index):
                    idle.clear()  # it took items, which makes room for its siblings
                idle.add(index)
                continue
            self._count_item(index)
            if self._is_output[index]:
                self._last = self.parents[index]
                self.items += 1
                return item
            idle.clear()
            dropped += 1
            if dropped >= MAX_DROPPED and not block:
                self._yielded = True  # let the siblings of this union run
                return NOT_READY
        if self._drain_others():
            return NOT_READY
        raise StopIteration

    def _count_item(self, index: int) -> None:
        """Subtract an item of a branch, or its error, from the branch's credit; without weights,
        end its turn."""
        if self._ordered:
            self._credit[index] -= 1
        else:
            self._turn = index

    def _drain_others(self) -> bool:
        """Let each branch whose items are dropped process the items that `duplicate` has buffered
        for it, then end the branch; return whether a branch must wait before it can continue."""
        live = [index for index, done in enumerate(self._done) if not done]
        waiting = [index for index in live if self._drain(index)]
        for index in live:
            if index in waiting or self._done[index]:
                continue
            if not waiting:
                self._end_branch(index)
                continue
            try:  # it may make room in the queue for which another branch waits
                self._pulls[index](False)
            except StopIteration:
                self._end_branch(index)
        return bool(waiting)

    def _drain(self, index: int) -> bool:
        """Pull a branch until it has no item of a duplicated stream that has ended; return whether
        it waits for something with such an item, at most DRAIN_TIMEOUT_S."""
        children = self._children[index]
        if not children or not all(child.stream_has_ended for child in children):
            return False
        now = time.monotonic()
        while self._num_foreign[index] < MAX_FOREIGN_ITEMS:
            try:
                if self._pulls[index](False) is NOT_READY:
                    return self._waits_with_items(index, now)
            except StopIteration:
                self._end_branch(index)
                return False
            self._drain_until = None
            is_foreign = not self._has_progressed(index)
            self._num_foreign[index] = self._num_foreign[index] + 1 if is_foreign else 0
        return False

    def _waits_with_items(self, index: int, now: float) -> bool:
        """Return whether a branch that is drained holds items and waits for an event; warn, and
        return False, when no branch has progressed for DRAIN_TIMEOUT_S."""
        holding = [stage for stage in walk(self.parents[index]) if stage.holds_items()]
        if not holding or not self.parents[index].waits():
            return False
        if any(isinstance(stage, ForEachConcurrent) for stage in holding):
            return True  # its Ray tasks end by themselves
        if self._drain_until is None:
            self._drain_until = now + DRAIN_TIMEOUT_S
        if now < self._drain_until:
            return True
        log.warning(
            "%s: items in %s are dropped at the end of the stream, because the stage has waited "
            "for %.0f s without progress: does something read its queue?",
            self, ", ".join(map(str, holding)), DRAIN_TIMEOUT_S,
        )  # fmt: skip
        return False

    def _next_turn(self, idle: set[int]) -> int:
        """Return the branch whose turn it is; the turn of an idle "*" branch ends."""
        while True:
            for _ in range(len(self.parents) + 1):
                turn = self._turn
                idle_star = self._stars[turn] and turn in idle
                if self._credit[turn] >= FULL_CREDIT and not self._done[turn] and not idle_star:
                    return turn
                if self._stars[turn]:
                    self._credit[turn] = 0
                turn = self._turn = (turn + 1) % len(self.parents)
                self._credit[turn] += MAX_STAR_ITEMS if self._stars[turn] else self._weights[turn]
            # no branch has a full credit: skip the rounds until one has
            live = [i for i, done in enumerate(self._done) if not done and not self._stars[i]]
            if not live:
                return self._done.index(False)
            rounds = min((FULL_CREDIT - self._credit[i]) // self._weights[i] for i in live)
            for i in live:
                self._credit[i] += max(rounds, 0) * self._weights[i]

    def _substitute(self, idle: set[int]) -> int | None:
        """Return the branch to pull instead of the one whose turn it is; None if all are idle."""
        count = len(self.parents)
        others = [(self._turn + 1 + i) % count for i in range(count)]
        others = [i for i in others if i not in idle and not self._done[i]]
        if not self._ordered:
            return others[0] if others else None
        return max(others, key=self._credit.__getitem__, default=None)

    def _has_progressed(self, index: int) -> bool:
        """Return whether a branch took items from a duplicated stream since the last call."""
        before = self._items_taken[index]
        self._items_taken[index] = sum(child.items for child in self._children[index])
        return before != self._items_taken[index]

    def _keeps_turn(self, turn: int) -> bool:
        """Return whether a branch that is not ready waits for workers only, not for siblings."""
        if self._stars[turn]:
            return False
        waits = self.parents[turn].waits()
        return bool(waits) and not any(isinstance(w, Signal) or w is AT_ONCE for w in waits)

    def _end_branch(self, index: int) -> None:
        """End a branch; the children of `duplicate` that only it reads are not read any more."""
        self._done[index] = True
        self._has_ended = self._outputs_have_ended()
        still_read = {
            child
            for children, done in zip(self._children, self._done, strict=True)
            if not done
            for child in children
        }
        close_children(self.parents[index], still_read)

    def waits(self) -> list[Any]:
        if self._yielded:
            return [AT_ONCE]
        if self._kept_turn is not None:
            return self.parents[self._kept_turn].waits()
        deadline = [] if self._drain_until is None else [self._drain_until]
        return deadline + [
            wait
            for parent, done in zip(self.parents, self._done, strict=True)
            if not done
            for wait in parent.waits()
        ]

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._last.sources if self._last is not None else ()

    def state_dict(self) -> dict[str, Any]:
        return {
            "items": self.items,
            "credit": list(self._credit),
            "turn": self._turn,
            "done": list(self._done),
        }

    def check_state(self, state: dict[str, Any]) -> None:
        super().check_state(state)
        num_branches = len(self.parents)
        lengths = len(state["credit"]), len(state["done"])
        if lengths != (num_branches, num_branches) or not -1 <= state["turn"] < num_branches:
            raise ValueError(f"{self}: the saved state is of another number of branches")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items, self._turn = state["items"], state["turn"]
        self._credit, self._done = list(state["credit"]), list(state["done"])
        self._has_ended = self._outputs_have_ended()


def _check_weights(weights: Sequence[float | str], branches: int) -> None:
    if isinstance(weights, str) or not hasattr(weights, "__len__"):
        raise TypeError(
            f"round_robin_weights must be a list with one weight per branch, got {weights!r}"
        )
    if len(weights) != branches:
        raise ValueError(f"round_robin_weights has {len(weights)} entries for {branches} branches")
    for weight in weights:
        valid = isinstance(weight, Real) and 0 < weight < float("inf")
        if weight != "*" and not valid:
            raise ValueError(
                f"round_robin_weights: each weight must be a number > 0 or '*', got {weight!r}"
            )
    if all(weight == "*" for weight in weights):
        raise ValueError("round_robin_weights: at least one weight must be a number")


def _reject_transform(branch: Stage, name: str, waits_its_turn: bool) -> None:
    """Raise an error for a transform that would block the other branches: its function cannot
    pause. A branch that is pulled in its turn may have a transform, unless the input of the
    transform depends on a sibling branch."""
    for stage in walk(branch):
        if not isinstance(stage, Transform):
            continue
        upstream = stage.parents[0]
        if _depends_on_siblings(upstream) if waits_its_turn else upstream.can_return_not_ready():
            raise ValueError(
                f"{name} has {stage} (chained at {stage.line}), whose function cannot pause while "
                "it waits for its next item and would block the other branches: use for_each or "
                "combine instead, or apply the transform on the shards before the gather, or after "
                "the union"
            )


def _depends_on_siblings(stage: Stage) -> bool:
    """Return whether a stream may wait for a stage outside of it."""
    stream = set(walk(stage))
    for node in stream:
        if isinstance(node, DuplicateChild):
            if not stream.issuperset(node.siblings):
                return True
        elif node.depends_on_sibling:
            return True
    return False


class Duplicate(Stage):
    """The shared part of `duplicate(n)`: puts every item into n bounded buffers.

    Args:
        n: number of children.
        max_buffered: capacity of the buffer of each child, in items.
        when_full: per child, what happens to an item if its buffer is full: "block" stops the
            other children, "drop_oldest" and "drop_newest" drop an item, counted as `dropped`.
    """

    state_fields: ClassVar[Fields] = {
        "dropped": list[Natural],
        "buffers": list[list[list[Any]]],
        "closed": list[bool],
    }

    name = "duplicate"

    def __init__(self, parent: Stage, n: int, max_buffered: int, when_full: Sequence[WhenFull]):
        check_int("duplicate: max_buffered", max_buffered)
        if len(when_full) != n:
            raise ValueError(f"duplicate: when_full has {len(when_full)} entries for {n} children")
        for policy in when_full:
            if policy not in get_args(WhenFull):
                raise ValueError(
                    f"duplicate: when_full must be one of {get_args(WhenFull)}, got {policy!r}"
                )
        super().__init__(parent)
        self.title = f"duplicate({n})"
        self.max_buffered = max_buffered
        self.when_full = list(when_full)
        self.buffers: list[deque[tuple[Any, tuple[Source, ...]]]] = [deque() for _ in range(n)]
        self.children: list[DuplicateChild] = []
        self.dropped = [0] * n
        self._closed = [False] * n
        self._stopped = False
        self.has_ended = False

    def blocking(self) -> list[int]:
        """Return the children whose full buffers stop the stream."""
        return [
            index
            for index, buffer in enumerate(self.buffers)
            if len(buffer) >= self.max_buffered and self.when_full[index] == "block"
        ]

    def _takes_item(self) -> list[bool]:
        """Return for each child whether it takes the next item."""
        return [
            not closed and (policy != "drop_newest" or len(buffer) < self.max_buffered)
            for closed, policy, buffer in zip(
                self._closed, self.when_full, self.buffers, strict=True
            )
        ]

    def is_closed(self, index: int) -> bool:
        """Return whether `close` was called for a child."""
        return self._closed[index]

    def close(self, index: int) -> None:
        """Stop buffering items for a child whose consumer has ended."""
        self._closed[index] = True
        self.buffers[index].clear()

    def pull(self, block: bool) -> Any:
        """Move one item from the parent into every buffer."""
        if self._stopped:
            raise RuntimeError(
                f"{self.title}, chained at {self.line}, was stopped with one of its children, "
                "before a plan read the others: pull all children before you stop one"
            )
        if self.blocking():
            return NOT_READY
        try:
            item = self._pull_up(block)
        except StopIteration:
            self.has_ended = True
            raise
        if item is NOT_READY:
            return item
        takes = self._takes_item()
        try:
            copies = call_in_stage(
                self, lambda: [read_only_copy(item) if t else None for t in takes]
            )
        except BaseException:
            report_lost(item)
            raise
        self.items += 1
        sources = self.parents[0].sources
        for index, buffer in enumerate(self.buffers):
            if self._closed[index]:
                continue
            if len(buffer) >= self.max_buffered:
                self.dropped[index] += 1
                if not takes[index]:
                    continue
                buffer.popleft()
            buffer.append((copies[index], sources))
        return item

    def stop(self) -> None:
        self._stopped = True

    def extra_stats(self) -> dict[str, Any]:
        queued = [len(buffer) for buffer in self.buffers]
        return {"queued": queued, **({"dropped": self.dropped} if any(self.dropped) else {})}

    def state_dict(self) -> dict[str, Any]:
        return {
            "items": self.items,
            "dropped": list(self.dropped),
            "buffers": [
                [[item, sources_to_list(sources)] for item, sources in buffer]
                for buffer in self.buffers
            ],
            "closed": list(self._closed),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items, self.dropped = state["items"], list(state["dropped"])
        self.buffers = [
            deque((read_only_copy(item), sources_from_list(sources)) for item, sources in buffer)
            for buffer in state["buffers"]
        ]
        self._closed = list(state["closed"])


class DuplicateChild(Stage):
    """One of the n streams of `duplicate(n)`."""

    name = "duplicate_child"

    def __init__(self, duplicate: Duplicate, index: int):
        super().__init__(duplicate)
        self.name = f"duplicate_child[{index}]"
        self._duplicate = duplicate
        self._index = index
        self._item_sources: tuple[Source, ...] = ()
        duplicate.children.append(self)

    def pull(self, block: bool) -> Any:
        duplicate = self._duplicate
        if duplicate.is_closed(self._index):
            raise StopIteration
        if not duplicate.buffers[self._index] and self._pull_up(block) is NOT_READY:
            unread = [i for i in duplicate.blocking() if duplicate.children[i].consumer is None]
            if unread:
                raise RuntimeError(
                    f"child {self._index} of {duplicate.title}, chained at {duplicate.line}, is "
                    f"blocked: child {unread[0]} holds {duplicate.max_buffered} items and no plan "
                    "consumes it. Consume all children, for example with Concurrently([...]), "
                    'use fewer, or set when_full="drop_oldest"'
                )
            return NOT_READY
        item, self._item_sources = duplicate.buffers[self._index].popleft()
        self.items += 1
        return item

    def waits(self) -> list[Any]:
        return [] if self._duplicate.blocking() else self._duplicate.waits()

    def holds_items(self) -> bool:
        return bool(self._duplicate.buffers[self._index])

    @property
    def siblings(self) -> list[DuplicateChild]:
        """All children of the duplicate, this one included."""
        return self._duplicate.children

    @property
    def stream_has_ended(self) -> bool:
        """Whether the stream that is duplicated has ended."""
        return self._duplicate.has_ended

    @property
    def has_reading_siblings(self) -> bool:
        """Whether a plan still reads a child of the duplicate."""
        return any(
            child.consumer is not None and not self._duplicate.is_closed(child._index)
            for child in self.siblings
        )

    def close(self) -> None:
        """Declare that this child is not pulled any more."""
        self._duplicate.close(self._index)

    def can_return_not_ready(self) -> bool:
        return True


def close_children(end: Stage, still_read: Collection[Stage] = ()) -> list[Stage]:
    """Close the children of `duplicate` that a stream reads.

    Args:
        end: the last stage of the stream, which is not pulled any more.
        still_read: children that stay open because another stream of the plan reads them.

    Returns:
        the stages that nothing else reads, `end` first.
    """
    found: dict[Stage, None] = {}
    remaining = [end]
    while remaining:
        stage = remaining.pop()
        if stage in found or stage in still_read:
            continue
        found[stage] = None
        if isinstance(stage, DuplicateChild):
            stage.close()
            if stage.has_reading_siblings:
                continue
        remaining += reversed(stage.parents)
    return list(found)
