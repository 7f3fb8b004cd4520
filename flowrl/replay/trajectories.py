"""Trajectories in a ring buffer: the order of a batch's rows, and which row follows which.

A *row id* counts up from the first row ever stored; a row's *slot* is its id modulo the capacity.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import optree

from flowrl.data.indexed_columns import NextRows
from flowrl.data.sample_batch import SampleBatch
from flowrl.replay.frame_table import is_stacked
from flowrl.replay.schema import DONE_FLAGS, NEXT_OBS, OBS
from flowrl.state_schema import Fields, Integer, Natural, check_own_state, check_state

TrajectoryKey = tuple[int, int]  # episode, agent
LinkRule = Literal["equal", "consecutive", "never"]  # see ReplayBuffer


_UNFINISHED: Fields = {"eps_id": Integer, "agent_index": Integer, "t": Integer, "row": Natural}


class SuccessorTable:
    """The slot of the observation that follows each row, for the last `capacity` rows.

    That is the slot of the trajectory's next row or, while that row is not stored, a *final slot*:
    a place for one observation, numbered from `capacity` to 2 * capacity - 1.

    Args:
        capacity: maximum number of rows.
    """

    state_fields: ClassVar[Fields] = {"next_slots": np.ndarray, "unfinished": list[list[Any]]}

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.next_slots = np.empty(capacity, np.int64)
        self.num_free = capacity
        self._free = np.arange(2 * capacity - 1, capacity - 1, -1)  # stack of final slots
        # trajectory -> last step, its row id; for trajectories that may continue
        self._unfinished: dict[TrajectoryKey, tuple[int, int]] = {}

    def append(self, first: int, count: int, ends: np.ndarray) -> np.ndarray:
        """Add consecutive rows, each followed by the next one except at `ends`.

        Args:
            first: row id of the first; the rows end at the last slot or before it.
            count: number of rows.
            ends: offsets [k] of the rows that get final slots.

        Returns:
            the final slots [k].
        """
        start = first % self.capacity
        if first >= self.capacity:
            if start == 0:  # once per round
                oldest = first - self.capacity
                self._unfinished = {
                    k: end for k, end in self._unfinished.items() if end[1] >= oldest
                }
            overwritten = self.next_slots[start : start + count]
            self._release(overwritten[overwritten >= self.capacity])
        self.next_slots[start : start + count] = np.arange(start + 1, start + count + 1)
        self.num_free -= len(ends)
        final_slots = self._free[self.num_free : self.num_free + len(ends)].copy()
        self.next_slots[start + ends] = final_slots
        return final_slots

    def isolate(self, slots: np.ndarray) -> np.ndarray:
        """Give each of these slots [n] its own final slot, without links; return the new slots."""
        self.next_slots[slots] = self.capacity + slots
        return self.capacity + slots

    def _release(self, final_slots: np.ndarray) -> None:
        self._free[self.num_free : self.num_free + len(final_slots)] = final_slots
        self.num_free += len(final_slots)

    def path(self, slots: np.ndarray, steps: int) -> np.ndarray:
        """Return the slots [steps, n] of rows [n] and of the rows that follow them.

        At the end of a trajectory the last row is repeated.
        """
        path = np.empty((steps, len(slots)), np.int64)
        path[0] = slots
        for t in range(1, steps):
            following = self.next_slots.take(path[t - 1], mode="clip")
            path[t] = np.where(following < self.capacity, following, path[t - 1])
        return path

    # -- linking the parts of trajectories ---------------------------------------------------------

    def link(
        self,
        columns: dict[str, list[np.ndarray]],
        first: int,
        ends: np.ndarray,
        oldest: int,
        continues: Callable[[Any, Any], Any],
        across_changes: bool,
    ) -> list[tuple[int, int]]:
        """Link new parts of trajectories with each other and with earlier parts.

        Args:
            columns: name -> leaves [slots, …] of the ring buffer, new rows included.
            first: row id of the first new row.
            ends: offsets [k] of the last rows of the parts.
            oldest: row id of the oldest stored row.
            continues: returns whether the next observation of the row in one slot equals the
                observation of the row in another; for integers, or arrays [n].
            across_changes: link rows of consecutive steps although their observations differ.

        Returns:
            the slots (row, successor) of the new links.
        """
        if len(ends) == 1:  # a short fragment of one environment
            earlier = self._take_earlier(columns, first, oldest)
            end = first + int(ends[0])
            slot = end % self.capacity
            if not any(columns[flag][0][slot] for flag in DONE_FLAGS if flag in columns):
                self._mark_unfinished(columns, end, oldest)
            return self._link_earlier(earlier, continues, across_changes)
        starts = np.empty_like(ends)
        starts[0] = 0
        starts[1:] = ends[:-1] + 1
        links, continued, unfinished = self._link_adjacent(
            columns, first, starts, ends, continues, across_changes
        )
        earlier = []
        for i in (unfinished | continued).nonzero()[0].tolist():
            if continued[i]:
                earlier += self._take_earlier(columns, first + int(starts[i]), oldest)
            if unfinished[i]:
                self._mark_unfinished(columns, first + int(ends[i]), oldest)
        return links + self._link_earlier(earlier, continues, across_changes)

    def _link_adjacent(
        self,
        columns: dict[str, list[np.ndarray]],
        first: int,
        starts: np.ndarray,
        ends: np.ndarray,
        continues: Callable[[Any, Any], Any],
        across_changes: bool,
    ) -> tuple[list[tuple[int, int]], np.ndarray, np.ndarray]:
        """Link new parts of a trajectory with each other.

        Args:
            columns, first, ends, continues, across_changes: see `link`.
            starts: offsets [k] of the first rows of the parts.

        Returns:
            the slots (row, successor) of the links; which parts may continue a part that was
            stored before, bool [k]; which parts still need a successor, bool [k].
        """
        start_slots, end_slots = starts + first % self.capacity, ends + first % self.capacity
        steps = columns["t"][0]
        first_steps, last_steps = steps.take(start_slots), steps.take(end_slots)
        keys = [
            columns[name][0].take(end_slots)
            for name in ("agent_index", "eps_id")
            if name in columns
        ]
        unfinished = np.ones(len(ends), bool)
        for flag in DONE_FLAGS:
            if flag in columns:
                unfinished &= ~columns[flag][0].take(end_slots)
        order = np.lexsort((first_steps, *keys))
        part, next_part = order[:-1], order[1:]
        same = np.ones(len(part), bool)
        for key in keys:
            same &= key[part] == key[next_part]
        adjacent = same & unfinished[part] & (first_steps[next_part] == last_steps[part] + 1)
        adjacent &= next_part > part  # a row must not outlive its successor
        overlaps = same & (first_steps[next_part] <= last_steps[part])
        if overlaps.any():  # trajectories with copied steps are linked by _take_earlier
            trajectory = np.cumsum(~same)  # number of the trajectory of next_part
            adjacent &= ~np.isin(trajectory, trajectory[overlaps])
        if not across_changes and adjacent.any():
            is_next = continues(end_slots[part[adjacent]], start_slots[next_part[adjacent]])
            adjacent[np.flatnonzero(adjacent)] = is_next
        part, next_part = part[adjacent], next_part[adjacent]
        self._release(self.next_slots[end_slots[part]])
        self.next_slots[end_slots[part]] = start_slots[next_part]
        links = list(zip(end_slots[part].tolist(), start_slots[next_part].tolist(), strict=True))
        unfinished[part] = False
        continued = first_steps > 0
        continued[next_part] = False
        return links, continued, unfinished

    def _take_earlier(
        self, columns: dict[str, list[np.ndarray]], row: int, oldest: int
    ) -> list[tuple[int, int, bool]]:
        """Return the slot of the last row of the trajectory's earlier part, if it is stored, the
        slot of the new row, and whether their steps follow each other."""
        slot = row % self.capacity
        key, step = _key(columns, slot), columns["t"][0][slot]
        last_step, last_row = self._unfinished.get(key, (step, 0))
        if last_step >= step or last_row < oldest:
            return []
        del self._unfinished[key]
        return [(last_row % self.capacity, slot, last_step + 1 == step)]

    def _link_earlier(
        self,
        earlier: list[tuple[int, int, bool]],
        continues: Callable[[Any, Any], Any],
        across_changes: bool,
    ) -> list[tuple[int, int]]:
        """Link rows with the last rows of earlier parts; return the new links.

        Steps between them may be missing, if other agents acted; then the observations must be
        equal.
        """
        if not earlier:
            return []
        if len(earlier) == 1:
            last, slot, is_next_step = earlier[0]
            is_linked = [(across_changes and is_next_step) or continues(last, slot)]
        else:
            lasts, slots, are_next_steps = map(np.array, zip(*earlier, strict=True))
            is_linked = continues(lasts, slots)
            if across_changes:
                is_linked |= are_next_steps
        links = [
            (last, slot) for (last, slot, _), yes in zip(earlier, is_linked, strict=True) if yes
        ]
        for last, slot in links:
            self._free[self.num_free] = self.next_slots[last]
            self.num_free += 1
            self.next_slots[last] = slot
        return links

    def _mark_unfinished(self, columns: dict[str, list[np.ndarray]], row: int, oldest: int) -> None:
        """Note that a later row may follow this one, unless it is a copy of a stored step."""
        slot = row % self.capacity
        key, step = _key(columns, slot), int(columns["t"][0][slot])
        last_step, last_row = self._unfinished.get(key, (-1, -1))
        if last_step < step or last_row < oldest:
            self._unfinished[key] = step, row

    # -- state -------------------------------------------------------------------------------------

    def final_slots(self, rows: int) -> np.ndarray:
        """Return the final slots that the first `rows` slots use."""
        following = self.next_slots[:rows]
        return following[following >= self.capacity]

    def state_dict(self, rows: int) -> dict[str, Any]:
        """Return the state of the first `rows` slots."""
        return {
            "next_slots": self.next_slots[:rows].copy(),
            "unfinished": [[*key, *end] for key, end in self._unfinished.items()],
        }

    def load_state_dict(self, state: dict[str, Any], num_added: int) -> None:
        """Restore the result of `state_dict`.

        Args:
            state: the state.
            num_added: rows ever stored.

        Raises:
            ValueError: an entry is not of these rows.
        """
        check_own_state(self, state)
        next_slots = np.asarray(state["next_slots"], np.int64)
        rows = min(num_added, self.capacity)
        is_row = (next_slots >= 0) & (next_slots < rows)
        is_final = (next_slots >= self.capacity) & (next_slots < 2 * self.capacity)
        if next_slots.shape != (rows,) or not (is_row | is_final).all():
            raise ValueError(f"next_slots: must be slots of {rows} rows and their successors")
        self.next_slots[: len(next_slots)] = next_slots
        used = self.final_slots(len(next_slots))
        free = np.setdiff1d(np.arange(self.capacity, 2 * self.capacity), used)
        self._free[: len(free)] = free[::-1]
        self.num_free = len(free)
        for row in state["unfinished"]:
            entry = dict(zip(_UNFINISHED, row, strict=True))
            check_state(entry, _UNFINISHED, "unfinished")
            last = entry["row"]
            if last >= num_added or (
                last >= num_added - self.capacity
                and next_slots[last % self.capacity] < self.capacity
            ):
                raise ValueError(f"unfinished: row {last} is not the last one of a trajectory")
        self._unfinished = {(e, a): (step, row) for e, a, step, row in state["unfinished"]}


def _key(columns: dict[str, list[np.ndarray]], slot: int) -> TrajectoryKey:
    agents = columns.get("agent_index")
    return int(columns["eps_id"][0][slot]), int(agents[0][slot]) if agents else 0


# -- rows of batches -------------------------------------------------------------------------------


def split_final_observations(
    batches: list[SampleBatch], counts: list[int], stacked: bool
) -> tuple[list[SampleBatch], np.ndarray, list[np.ndarray]]:
    """Order rows so that each is followed by its successor, and return the final observation of
    each sequence of successors.

    Args:
        batches: batches with obs and new_obs.
        counts: rows of each batch.
        stacked: whether the buffer stores observations as stacks of frames.

    Returns:
        the ordered batches; offsets [k], in all batches together, of the rows without a successor
        among them; the observations that follow those rows, one array [k, …] per leaf; none if
        the buffer stores stacks of frames.
    """
    next_obs = list(map(dict.__getitem__, batches, itertools.repeat(NEXT_OBS)))
    obs = list(map(dict.__getitem__, batches, itertools.repeat(OBS)))
    kinds = set(map(type, next_obs)), set(map(type, obs))
    if not stacked and kinds == ({NextRows}, {np.ndarray}):
        bases = [rows.base for rows in next_obs]
        cuts = [rows.cuts for rows in next_obs]
        is_plain = all(column.base is base for column, base in zip(obs, bases, strict=True))
        if is_plain and not any(map(_has_done_between_cuts, batches, cuts)):
            # fragments of the columnar samplers, in which no life was lost
            finals = [base[count:] for base, count in zip(bases, counts, strict=True)]
            if len(batches) == 1:
                return batches, cuts[0], finals
            ends = np.concatenate(cuts)
            ends += np.repeat(np.cumsum(counts) - counts, [len(cut) for cut in cuts])
            return batches, ends, [np.concatenate(finals)]
    parts = [_split_batch(batch, stacked) for batch in batches]
    offsets = itertools.accumulate(counts, initial=0)
    ends = np.concatenate([end + at for (_, end, _), at in zip(parts, offsets, strict=False)])
    leaves = zip(*(leaves for _, _, leaves in parts), strict=True)
    return [batch for batch, _, _ in parts], ends, [np.concatenate(leaf) for leaf in leaves]


def _has_done_between_cuts(batch: SampleBatch, cuts: np.ndarray) -> bool:
    """Return whether a row is done although the next row has its next observation."""
    for name in DONE_FLAGS:
        flag = dict.get(batch, name)
        if flag is not None:
            num_done = np.count_nonzero(flag)
            if num_done and num_done > np.count_nonzero(flag[cuts]):
                return True
    return False


def _split_batch(
    batch: SampleBatch, stacked: bool
) -> tuple[SampleBatch, np.ndarray, list[np.ndarray]]:
    """Split one batch; see `split_final_observations`."""
    batch = sort_rows(batch)
    followed = np.zeros(batch.count, bool)  # row i + 1 is the successor of row i
    if "eps_id" in batch and "t" in batch:
        steps = batch["t"]
        followed[:-1] = _same_trajectory(batch["eps_id"], _agents(batch))
        followed[:-1] &= steps[1:] > steps[:-1]
        for flag in DONE_FLAGS:
            if flag in batch:
                followed[:-1] &= ~batch[flag][:-1]
    stored_obs, stored_next = dict.__getitem__(batch, OBS), dict.__getitem__(batch, NEXT_OBS)
    if is_stacked(stored_obs, stored_next) and stored_obs.shares_base(stored_next):
        followed[:-1] &= (stored_obs.index[1:] == stored_next.index[:-1]).all(1)
        ends = np.flatnonzero(~followed)
        return batch, ends, [] if stacked else [stored_next[ends]]
    obs: Any = optree.tree_leaves(batch[OBS])
    next_obs: Any = optree.tree_leaves(batch[NEXT_OBS])
    for leaf, next_leaf in zip(obs, next_obs, strict=True):
        rows = np.flatnonzero(followed)
        equal = leaf[rows + 1] == next_leaf[rows]
        followed[rows[~equal.all(tuple(range(1, equal.ndim)))]] = False
    ends = np.flatnonzero(~followed)
    return batch, ends, [] if stacked else [leaf[ends] for leaf in next_obs]


def row_order(batch: SampleBatch) -> np.ndarray | None:
    """Return the order [rows] that makes trajectories contiguous and sorted by time. If a step
    occurs several times, its n-th row belongs to the n-th copy of the trajectory.

    None if the rows have that order already, or lack `eps_id` or `t`.
    """
    if "eps_id" not in batch or "t" not in batch:
        return None
    episodes, agents, steps = batch["eps_id"], _agents(batch), batch["t"]
    same = _same_trajectory(episodes, agents)
    backwards = (same & (steps[1:] <= steps[:-1])).any()
    if not backwards and (episodes[1:] >= episodes[:-1]).all() and not agents.any():
        return None
    order: np.ndarray = np.lexsort((steps, agents, episodes))
    same_if_sorted = _same_trajectory(episodes[order], agents[order])
    scattered = same.sum() < same_if_sorted.sum()
    if not (scattered or backwards):
        return None
    in_order = steps[order]
    repeated = same_if_sorted & (in_order[1:] == in_order[:-1])
    if repeated.any():  # copies of steps, such as those with other goals, follow the originals
        first = np.concatenate([[0], np.where(repeated, 0, np.arange(1, len(order)))])
        copies = np.empty(len(order), np.int64)  # number of earlier rows of the same step
        copies[order] = np.arange(len(order)) - np.maximum.accumulate(first)
        order = np.lexsort((steps, copies, agents, episodes))
    return order


def sort_rows(batch: SampleBatch) -> SampleBatch:
    """Return the rows in the order of `row_order`."""
    order = row_order(batch)
    return batch if order is None else batch.take_rows(order)


def _agents(batch: SampleBatch) -> np.ndarray:
    agents: np.ndarray = (
        batch["agent_index"] if "agent_index" in batch else np.zeros(batch.count, np.int64)
    )
    return agents


def _same_trajectory(episodes: np.ndarray, agents: np.ndarray) -> np.ndarray:
    """Return whether each row and the next one have the same trajectory, [rows - 1]."""
    same: np.ndarray = (np.diff(episodes) == 0) & (np.diff(agents) == 0)
    return same
