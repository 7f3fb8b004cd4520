"""Stages with several branches: union joins streams, duplicate splits one.

Both pull their branches with `block=False` only, and wait, when they may, once for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from flowrl.iter.stage import NOT_READY, Source, Stage
from flowrl.iter.waiting import wait_for_any

STAR_PULLS = 100  # items that a "*" branch may give in one turn before the others get theirs


class Union(Stage):
    """Items of several branches.

    Round-robin with weights gives branch i `weights[i]` items a turn: fractions accumulate, and
    what a branch could not give because it was not ready stays owed to it. "*" gives all that is
    ready. Without weights a turn takes whatever the branches have ready, one item each.

    Args:
        ordered: a branch whose turn it is and that may block is waited for, so that the output
            order is deterministic.
    """

    kind = "union"

    def __init__(
        self,
        branches: Sequence[Stage],
        weights: Sequence[float | str] | None = None,
        ordered: bool = False,
    ):
        if len(branches) < 2:
            raise ValueError(f"union needs at least 2 branches, got {len(branches)}")
        if weights is not None:
            if len(weights) != len(branches):
                raise ValueError(
                    f"round_robin_weights has {len(weights)} entries for {len(branches)} branches"
                )
            for weight in weights:
                if weight != "*" and (isinstance(weight, str) or not weight > 0):
                    raise ValueError(f"a round-robin weight is a number > 0 or '*', got {weight!r}")
            if all(weight == "*" for weight in weights):
                raise ValueError("round_robin_weights: at least one weight must be a number")
        super().__init__(*branches)
        self._weights = list(weights) if weights is not None else [1.0] * len(branches)
        self._ordered = ordered or weights is not None
        self._credit = [0.0] * len(branches)
        self._done = [False] * len(branches)
        self._turn = -1
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
        while not all(self._done):
            turn = self._turn
            if turn < 0 or self._done[turn] or self._credit[turn] < 1:
                self._next_turn()
                continue
            try:
                item = self.parents[turn].pull(False)
            except StopIteration:
                self._done[turn] = True
                continue
            if item is not NOT_READY:
                self._credit[turn] -= 1
                self._last = self.parents[turn]
                self.items += 1
                return item
            idle += 1
            expected = self._expected()
            if expected or idle >= self._done.count(False):
                waits = expected or self.waits()
                if not block or not waits:
                    return NOT_READY
                wait_for_any(waits)
                idle = 0
            if not expected:
                if not self._ordered or self._weights[turn] == "*":
                    self._credit[turn] = 0
                self._next_turn()
        raise StopIteration

    def _expected(self) -> list[Any]:
        """What the branch whose turn it is waits for, where its turn is not given away.

        A branch that waits for nothing (its sibling in `duplicate` must move first) lends its
        turn to the next one and is owed it.
        """
        if not self._ordered or self._weights[self._turn] == "*" or self._done[self._turn]:
            return []
        return self.parents[self._turn].waits()

    def waits(self) -> list[Any]:
        expected = self._expected() if self._turn >= 0 else []
        if expected:
            return expected
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
        return {"items": self.items, "credit": list(self._credit), "turn": self._turn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items, self._credit, self._turn = state["items"], state["credit"], state["turn"]


class Tee(Stage):
    """The shared end of `duplicate(n)`: gives every item to n bounded buffers."""

    kind = "duplicate"

    def __init__(self, parent: Stage, n: int, max_buffered: int):
        super().__init__(parent)
        self.max_buffered = max_buffered
        self.buffers: list[deque[tuple[Any, tuple[Source, ...]]]] = [deque() for _ in range(n)]

    def pull(self, block: bool) -> Any:
        """Move one item from the parent into every buffer."""
        if any(len(buffer) >= self.max_buffered for buffer in self.buffers):
            return NOT_READY
        item = self.parents[0].pull(block)
        if item is not NOT_READY:
            self.items += 1
            for buffer in self.buffers:
                buffer.append((item, self.parents[0].sources))
        return item

    def label(self) -> str:
        return f"{self.kind}({len(self.buffers)})"


class TeeChild(Stage):
    """One of the n streams of `duplicate(n)`."""

    kind = "duplicate_child"

    def __init__(self, tee: Tee, index: int):
        super().__init__(tee)
        self._tee = tee
        self._index = index
        self._sources: tuple[Source, ...] = ()

    def pull(self, block: bool) -> Any:
        buffer = self._tee.buffers[self._index]
        if not buffer and self._tee.pull(block) is NOT_READY:
            if block and not self.waits():
                full = [i for i, other in enumerate(self._tee.buffers) if other]
                raise RuntimeError(
                    f"child {self._index} of duplicate({len(self._tee.buffers)}) cannot move: "
                    f"child {full} holds {self._tee.max_buffered} items that nobody takes. "
                    "Consume all the children, for example with Concurrently([...]), or use fewer."
                )
            return NOT_READY
        item, self._sources = buffer.popleft()
        self.items += 1
        return item

    def waits(self) -> list[Any]:
        tee = self._tee
        full = any(len(buffer) >= tee.max_buffered for buffer in tee.buffers)
        return [] if full else tee.waits()

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._sources

    def label(self) -> str:
        return f"{self.kind}[{self._index}]"
