"""EnvStepIndex: which rows of several policies' replay buffers belong to the same env step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from flowrl.data.columns import expand_runs
from flowrl.data.sample_batch import SampleBatch
from flowrl.state_schema import Fields, Natural, check_own_state


class EnvStepIndex:
    """The rows of each policy in each env step, by step ids that count up.

    A step is removed when a buffer overwrites any of its rows. All rows of a step are in one batch.

    Args:
        capacity: maximum number of steps, and rows of each policy's buffer.
    """

    state_fields: ClassVar[Fields] = {
        "capacity": Natural,
        "num_added": Natural,
        "complete_slots": np.ndarray,
        "policies": dict[str, dict[str, Any]],
    }

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.num_added = 0
        # the first `_num_complete` are the slots of the steps with all their rows, in any order
        self._complete_slots = np.zeros(capacity, np.int64)
        self._positions = np.full(capacity, -1)  # of each slot among them; -1: it is not
        self._num_complete = 0
        self._num_rows = 0  # of the complete steps
        self._policies: dict[str, _PolicyRows] = {}

    def __len__(self) -> int:
        """Return the number of complete steps."""
        return self._num_complete

    def check(self, policy_batches: Mapping[str, SampleBatch]) -> None:
        """Check that the rows identify their env steps.

        Raises:
            ValueError: the rows of a policy have no `eps_id` and `t`, or exceed the capacity.
        """
        for policy_id, rows in policy_batches.items():
            if rows.count > self.capacity:
                raise ValueError(
                    f"{rows.count} rows of policy {policy_id!r} in one batch exceed the capacity "
                    f"of {self.capacity}: no env step would be complete"
                )
            if "eps_id" not in rows or "t" not in rows:
                raise ValueError(
                    f"the rows of policy {policy_id!r} have no eps_id and t, which identify the "
                    "env step"
                )
        if sum(rows.count for rows in policy_batches.values()) > self.capacity:
            num_steps = len(_steps_of(policy_batches)[0])
            if num_steps > self.capacity:
                raise ValueError(
                    f"{num_steps} env steps in one batch exceed the capacity of {self.capacity}"
                )

    def extend(
        self, policy_batches: Mapping[str, SampleBatch], first_rows: Mapping[str, int]
    ) -> None:
        """Add the env steps of a batch.

        Args:
            policy_batches: policy id -> its rows, in the order in which they are stored.
            first_rows: policy id -> row id of its first row.
        """
        unique, row_steps = _steps_of(policy_batches)
        steps = dict.fromkeys(self._policies, np.zeros(0, np.int64)) | row_steps
        start = self.num_added % self.capacity
        slots = np.arange(start, start + len(unique)) % self.capacity
        self._remove(slots)
        for policy_id, row_steps in steps.items():
            if policy_id not in self._policies:
                self._policies[policy_id] = _PolicyRows(self.capacity)
            first_row = first_rows.get(policy_id, 0)
            self._policies[policy_id].extend(start, len(unique), row_steps, first_row)
        self._add(slots)
        self.num_added += len(unique)

    def remove_before(self, oldest: Mapping[str, int]) -> None:
        """Remove the steps with a row whose id is below the policy's `oldest`."""
        for policy_id, row in oldest.items():
            if policy_id in self._policies:  # not if its first rows could not be stored
                self._remove(self._policies[policy_id].overwritten_steps(row))

    def _add(self, slots: np.ndarray) -> None:
        """Add the complete steps in these slots, which have none."""
        end = self._num_complete + len(slots)
        self._complete_slots[self._num_complete : end] = slots
        self._positions[slots] = np.arange(self._num_complete, end)
        self._num_complete = end
        self._num_rows += self._rows_of(slots)

    def _remove(self, slots: np.ndarray) -> None:
        """Remove the steps in these slots, where they are complete."""
        slots = slots[self._positions[slots] >= 0]
        self._num_rows -= self._rows_of(slots)
        for slot in slots.tolist():
            self._num_complete -= 1
            position, last = self._positions[slot], self._complete_slots[self._num_complete]
            self._complete_slots[position], self._positions[last] = last, position
            self._positions[slot] = -1

    def _rows_of(self, slots: np.ndarray) -> int:
        return sum(int(rows.counts[slots].sum()) for rows in self._policies.values())

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Draw `count` env steps uniformly; return policy id -> ids of its rows, step by step."""
        slots = self._complete_slots[rng.integers(0, len(self), count)]
        row_ids = {policy_id: rows.row_ids(slots) for policy_id, rows in self._policies.items()}
        return {policy_id: ids for policy_id, ids in row_ids.items() if len(ids)}

    def rows_per_step(self) -> float:
        """Return the mean number of rows of all policies per env step."""
        return self._num_rows / max(len(self), 1)

    def state_dict(self) -> dict[str, Any]:
        """Return all steps."""
        return {
            "capacity": self.capacity,
            "num_added": self.num_added,
            "complete_slots": self._complete_slots[: self._num_complete].copy(),
            "policies": {
                policy_id: rows.state_dict() for policy_id, rows in self._policies.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict` of an index of the same capacity."""
        check_own_state(self, state)
        self.num_added = int(state["num_added"])
        self._policies = {}
        for policy_id, rows in state["policies"].items():
            self._policies[policy_id] = _PolicyRows(self.capacity)
            self._policies[policy_id].load_state_dict(rows)
        self._num_complete = self._num_rows = 0
        self._positions[:] = -1
        self._add(np.array(state["complete_slots"], np.int64))


class _PolicyRows:
    """The rows of one policy in the env steps.

    Args:
        capacity: maximum number of steps, and of rows.

    Attributes:
        counts: rows [slots] of the step in each slot.
        lowest: lowest row id [slots] of the step in each slot, where it has rows.
    """

    state_fields: ClassVar[Fields] = {
        "counts": np.ndarray,
        "lowest": np.ndarray,
        "starts": np.ndarray,
        "row_ids": np.ndarray,
        "num_row_ids": Natural,
        "batches": np.ndarray,
    }

    def __init__(self, capacity: int):
        self.counts = np.zeros(capacity, np.int64)
        self.lowest = np.zeros(capacity, np.int64)
        # ring of row ids, step by step; twice the capacity, as a batch's steps are not in row order
        self._row_ids = np.zeros(2 * capacity, np.int64)
        self._starts = np.zeros(capacity, np.int64)  # where the row ids of a step begin
        self._num_row_ids = 0  # ever
        # first row id, row id after the last, first slot, steps; oldest first
        self._batches: deque[tuple[int, int, int, int]] = deque()

    def extend(self, start: int, num_steps: int, row_steps: np.ndarray, first_row: int) -> None:
        """Add rows of new steps.

        Args:
            start: slot of the first new step.
            num_steps: number of new steps.
            row_steps: step [rows] of each row, counted from the first new one.
            first_row: row id of the first row.
        """
        counts = np.bincount(row_steps, minlength=num_steps)
        starts = np.cumsum(counts) - counts
        row_ids = first_row + np.argsort(row_steps, kind="stable")
        slots = np.arange(start, start + num_steps) % len(self.counts)
        self.counts[slots], self._starts[slots] = counts, self._num_row_ids + starts
        if len(row_ids):
            has_rows = counts > 0
            self.lowest[slots[has_rows]] = np.minimum.reduceat(row_ids, starts[has_rows])
        end = self._num_row_ids + len(row_ids)
        self._row_ids[np.arange(self._num_row_ids, end) % len(self._row_ids)] = row_ids
        self._num_row_ids = end
        if len(row_ids):
            self._batches.append((first_row, first_row + len(row_ids), start, num_steps))

    def overwritten_steps(self, oldest: int) -> np.ndarray:
        """Return the slots, each once, of the steps with a row whose id is below `oldest`.

        Batches without newer rows are forgotten, so that the next call does not return their steps.
        """
        found = [np.zeros(0, np.int64)]
        while self._batches and self._batches[0][0] < oldest:
            _, end, start, num_steps = self._batches[0]
            slots = np.arange(start, start + num_steps) % len(self.counts)
            found.append(slots[(self.counts[slots] > 0) & (self.lowest[slots] < oldest)])
            if end > oldest:
                break
            self._batches.popleft()
        return np.unique(np.concatenate(found))  # the ring of steps may have come round

    def row_ids(self, slots: np.ndarray) -> np.ndarray:
        """Return the row ids of the steps at `slots`, step by step."""
        positions, _ = expand_runs(self._starts[slots], self.counts[slots])
        row_ids: np.ndarray = self._row_ids[positions % len(self._row_ids)]
        return row_ids

    def state_dict(self) -> dict[str, Any]:
        return {
            "counts": self.counts.copy(),
            "lowest": self.lowest.copy(),
            "starts": self._starts.copy(),
            "row_ids": self._row_ids.copy(),
            "num_row_ids": self._num_row_ids,
            "batches": np.array(self._batches, np.int64).reshape(-1, 4),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_own_state(self, state)
        self.counts, self.lowest = np.array(state["counts"]), np.array(state["lowest"])
        self._starts, self._row_ids = np.array(state["starts"]), np.array(state["row_ids"])
        self._num_row_ids = int(state["num_row_ids"])
        batches = np.asarray(state["batches"], np.int64).reshape(-1, 4)
        self._batches = deque((a, b, c, d) for a, b, c, d in batches.tolist())


def _steps_of(
    policy_batches: Mapping[str, SampleBatch],
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the env steps (eps_id, t) [n, 2] of a batch, and the step of each row by policy."""
    keys = [np.stack([rows["eps_id"], rows["t"]], 1) for rows in policy_batches.values()]
    unique, inverse = np.unique(np.concatenate(keys), axis=0, return_inverse=True)
    cuts = np.cumsum([len(key) for key in keys])[:-1]
    return unique, dict(zip(policy_batches, np.split(inverse.reshape(-1), cuts), strict=True))
