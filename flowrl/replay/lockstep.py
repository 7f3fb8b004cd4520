"""Lockstep: which rows of several policies' buffers are of the same env step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl.data.sample_batch import SampleBatch
from flowrl.data.sequences import expand_runs


class Lockstep:
    """Env steps by numbers that count up, and each policy's rows of them.

    A step is gone when one of its rows is. All rows of a step are to come in one batch.

    Args:
        capacity: steps, at most; rows of each policy's buffer.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.stored = 0  # ever
        self._there = np.zeros(0, np.int64)  # the slots of those that are there
        self._whole = np.zeros(capacity, bool)
        self._policies: dict[str, _Rows] = {}

    def __len__(self) -> int:
        return len(self._there)

    def check(self, parts: Mapping[str, SampleBatch]) -> None:
        """Refuse rows that do not say their env step.

        Raises:
            ValueError: a policy's rows have no `eps_id` and `t`.
        """
        for policy_id, rows in parts.items():
            if "eps_id" not in rows or "t" not in rows:
                raise ValueError(
                    f"the rows of policy {policy_id!r} have no eps_id and t, by which those of the "
                    "same env step are found"
                )

    def extend(self, parts: Mapping[str, SampleBatch], begins: Mapping[str, int]) -> None:
        """Note the env steps of a batch.

        Args:
            parts: policy id -> its rows, in the order in which they are stored.
            begins: the number of the first of them.
        """
        keys = {pid: np.stack([own["eps_id"], own["t"]], 1) for pid, own in parts.items()}
        every, step = np.unique(np.concatenate(list(keys.values())), axis=0, return_inverse=True)
        steps = dict.fromkeys(self._policies, np.zeros(0, np.int64))
        cuts = np.cumsum([len(own) for own in keys.values()])[:-1]
        steps |= dict(zip(keys, np.split(step.reshape(-1), cuts), strict=True))
        for policy_id, own in steps.items():
            if policy_id not in self._policies:
                self._policies[policy_id] = _Rows(self.capacity)
            start = self.stored % self.capacity
            self._policies[policy_id].extend(start, own, begins.get(policy_id, 0), len(every))
        self._whole[np.arange(self.stored, self.stored + len(every)) % self.capacity] = True
        self.stored += len(every)

    def forget(self, oldest: Mapping[str, int]) -> None:
        """Of each policy the rows before the number `oldest` are gone."""
        for policy_id, number in oldest.items():
            own = self._policies[policy_id]
            self._whole &= (own.counts == 0) | (own.lowest >= number)
        self._there = self._whole.nonzero()[0]

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """The numbers of each policy's rows in `count` env steps, step by step."""
        slots = self._there[rng.integers(0, len(self._there), count)]
        drawn = {policy_id: own.of(slots) for policy_id, own in self._policies.items()}
        return {policy_id: numbers for policy_id, numbers in drawn.items() if len(numbers)}

    def rows_per_step(self) -> float:
        """Rows of all policies in an env step, on average."""
        rows = sum(int(own.counts[self._there].sum()) for own in self._policies.values())
        return rows / max(len(self), 1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "stored": self.stored,
            "whole": self._whole.copy(),
            "policies": {policy_id: own.state_dict() for policy_id, own in self._policies.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stored = int(state["stored"])
        self._whole = np.array(state["whole"], bool)
        self._there = self._whole.nonzero()[0]
        self._policies = {}
        for policy_id, own in state["policies"].items():
            made = self._policies[policy_id] = _Rows(self.capacity)
            made.load_state_dict(own)


class _Rows:
    """One policy's rows of env steps.

    Args:
        capacity: steps, and rows, at most.
    """

    def __init__(self, capacity: int):
        self.counts = np.zeros(capacity, np.int64)  # rows of the step in a slot
        self.lowest = np.zeros(capacity, np.int64)  # the smallest of their numbers
        self._begins = np.zeros(capacity, np.int64)  # where their numbers are, step by step
        self._numbers = np.zeros(2 * capacity, np.int64)  # a batch's steps lie in another order
        self._end = 0

    def extend(self, start: int, steps: np.ndarray, begin: int, count: int) -> None:
        """Note rows, numbered from `begin` on, of the new steps `steps` [rows] out of `count`, the
        first of which gets the slot `start`."""
        order = np.argsort(steps, kind="stable")
        counts = np.bincount(steps, minlength=count)
        begins = np.cumsum(counts) - counts
        at = np.arange(start, start + count) % len(self.counts)
        self.counts[at], self._begins[at] = counts, self._end + begins
        numbers = begin + order
        if len(numbers):
            there = counts > 0
            self.lowest[at[there]] = np.minimum.reduceat(numbers, begins[there])
        where = np.arange(self._end, self._end + len(numbers)) % len(self._numbers)
        self._numbers[where] = numbers
        self._end += len(numbers)

    def of(self, slots: np.ndarray) -> np.ndarray:
        """The numbers of the rows of the steps in these slots."""
        where, _ = expand_runs(self._begins[slots], self.counts[slots])
        numbers: np.ndarray = self._numbers[where % len(self._numbers)]
        return numbers

    def state_dict(self) -> dict[str, Any]:
        names = ("counts", "lowest", "_begins", "_numbers")
        return {name.strip("_"): getattr(self, name).copy() for name in names} | {"end": self._end}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in ("counts", "lowest", "_begins", "_numbers"):
            setattr(self, name, np.array(state[name.strip("_")], np.int64))
        self._end = int(state["end"])
