"""EnvStepIndex: which rows of several policies' replay buffers belong to the same env step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from flowrl.data.sample_batch import SampleBatch
from flowrl.data.sequences import expand_runs
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
        "complete": np.ndarray,
        "policies": dict[str, dict[str, Any]],
    }

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.num_added = 0
        self._complete = np.zeros(capacity, bool)  # whether the step in a slot has all its rows
        self._complete_slots = np.zeros(0, np.int64)
        self._rows_per_step = 0.0
        self._policies: dict[str, _PolicyRows] = {}

    def __len__(self) -> int:
        """Return the number of complete steps."""
        return len(self._complete_slots)

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

    def extend(
        self, policy_batches: Mapping[str, SampleBatch], first_rows: Mapping[str, int]
    ) -> None:
        """Add the env steps of a batch.

        Args:
            policy_batches: policy id -> its rows, in the order in which they are stored.
            first_rows: policy id -> row id of its first row.
        """
        keys = [np.stack([rows["eps_id"], rows["t"]], 1) for rows in policy_batches.values()]
        unique, inverse = np.unique(np.concatenate(keys), axis=0, return_inverse=True)
        cuts = np.cumsum([len(key) for key in keys])[:-1]
        steps = dict.fromkeys(self._policies, np.zeros(0, np.int64))
        steps |= dict(zip(policy_batches, np.split(inverse.reshape(-1), cuts), strict=True))
        start = self.num_added % self.capacity
        for policy_id, row_steps in steps.items():
            if policy_id not in self._policies:
                self._policies[policy_id] = _PolicyRows(self.capacity)
            first_row = first_rows.get(policy_id, 0)
            self._policies[policy_id].extend(start, len(unique), row_steps, first_row)
        slots = np.arange(self.num_added, self.num_added + len(unique)) % self.capacity
        self._complete[slots] = True
        self.num_added += len(unique)

    def remove_before(self, oldest: Mapping[str, int]) -> None:
        """Remove the steps with a row whose id is below the policy's `oldest`."""
        for policy_id, row in oldest.items():
            rows = self._policies[policy_id]
            self._complete &= (rows.counts == 0) | (rows.lowest >= row)
        self._update_complete()

    def _update_complete(self) -> None:
        """Update the slots of the complete steps and their mean number of rows."""
        self._complete_slots = self._complete.nonzero()[0]
        rows = sum(int(r.counts[self._complete_slots].sum()) for r in self._policies.values())
        self._rows_per_step = rows / max(len(self), 1)

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Draw `count` env steps uniformly; return policy id -> ids of its rows, step by step."""
        slots = self._complete_slots[rng.integers(0, len(self), count)]
        row_ids = {policy_id: rows.row_ids(slots) for policy_id, rows in self._policies.items()}
        return {policy_id: ids for policy_id, ids in row_ids.items() if len(ids)}

    def rows_per_step(self) -> float:
        """Return the mean number of rows of all policies per env step."""
        return self._rows_per_step

    def state_dict(self) -> dict[str, Any]:
        """Return all steps."""
        return {
            "capacity": self.capacity,
            "num_added": self.num_added,
            "complete": self._complete.copy(),
            "policies": {
                policy_id: rows.state_dict() for policy_id, rows in self._policies.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict` of an index of the same capacity."""
        check_own_state(self, state)
        self.num_added = int(state["num_added"])
        self._complete = np.array(state["complete"], bool)
        self._policies = {}
        for policy_id, rows in state["policies"].items():
            self._policies[policy_id] = _PolicyRows(self.capacity)
            self._policies[policy_id].load_state_dict(rows)
        self._update_complete()


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
    }

    def __init__(self, capacity: int):
        self.counts = np.zeros(capacity, np.int64)
        self.lowest = np.zeros(capacity, np.int64)
        # ring of row ids, step by step; twice the capacity, as a batch's steps are not in row order
        self._row_ids = np.zeros(2 * capacity, np.int64)
        self._starts = np.zeros(capacity, np.int64)  # where the row ids of a step begin
        self._num_row_ids = 0  # ever

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
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_own_state(self, state)
        self.counts, self.lowest = np.array(state["counts"]), np.array(state["lowest"])
        self._starts, self._row_ids = np.array(state["starts"]), np.array(state["row_ids"])
        self._num_row_ids = int(state["num_row_ids"])
