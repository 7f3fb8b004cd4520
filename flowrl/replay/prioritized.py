"""PrioritizedReplayBuffer: draws in proportion to priorities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import numpy as np

from flowrl.data.sample_batch import SampleBatch
from flowrl.replay.buffers import BufferSettings, ReplayBuffer
from flowrl.replay.sum_tree import SumTree
from flowrl.state_schema import Amount, Fields, StateError

ETA = 0.9  # weight of the maximum in a sequence's priority (Kapturowski et al. 2019, section 2.3)

Beta = float | Sequence[Sequence[float]]


class PrioritizedReplayBuffer(ReplayBuffer):
    """Rows drawn in proportion to priority^alpha (Schaul et al. 2016, arXiv 1511.05952).

    New rows have the highest priority so far, at least 1. A drawn batch has the column `weights`
    [B], (N P(i))^-beta divided by the largest weight of the batch (section 3.4). Sequences and
    episodes have one priority each: 0.9 of the maximum of their rows and 0.1 of the mean
    (Kapturowski et al. 2019, section 2.3).

    Args:
        capacity: see ReplayBuffer.
        alpha: prioritization exponent; 0 draws uniformly.
        beta: importance-sampling exponent; 1 corrects fully for the priorities. A number, or points
            [(rows stored, value), …] in ascending order, interpolated linearly.
        eps: added to priorities, so that none is 0.
        settings: n_step, gamma, seed, storage_unit, max_seq_len, burn_in, directory, links; see
            ReplayBuffer.

    Raises:
        ValueError: alpha, beta or eps is negative; see ReplayBuffer.
    """

    state_fields: ClassVar[Fields] = {
        "weights": np.ndarray,
        "max_weight": Amount,
        "alpha": Amount,
    }

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float = 0.6,
        beta: Beta = 0.4,
        eps: float = 1e-6,
        **settings: Unpack[BufferSettings],
    ):
        super().__init__(capacity, **settings)
        try:
            points = np.asarray([(0, beta)] if np.ndim(beta) == 0 else beta, np.float64)
            valid = points.ndim == 2 and len(points) > 0 and points.shape[1] == 2
            valid = valid and (np.diff(points[:, 0]) > 0).all()
            valid = valid and all(0 <= x < np.inf for x in (*points.ravel(), alpha, eps))
        except (TypeError, ValueError):  # not numbers
            valid = False
        if not valid:
            raise ValueError(
                "alpha, beta and eps must be finite numbers of at least 0; beta may be points "
                "[(rows stored, value), …] with ascending numbers of rows. Got "
                f"{alpha!r}, {beta!r} and {eps!r}"
            )
        self._beta = points.T
        self.alpha, self.eps = float(alpha), float(eps)
        self._tree = SumTree(self.capacity)
        self._max_weight = 1.0  # highest priority^alpha so far

    @property
    def beta(self) -> float:
        """The current importance-sampling exponent."""
        return float(np.interp(self.num_added, *self._beta))

    @property
    def weights(self) -> np.ndarray:
        """priority^alpha [slots] of the stored items; read-only by convention."""
        self._flush()
        return self._stored_weights()

    def _stored_weights(self) -> np.ndarray:
        return self._tree.leaves[: min(self.item_ids().stop, self.capacity)]

    def _store(self, batches: list[SampleBatch], counts: list[int]) -> None:
        before = self.item_ids()
        try:
            super()._store(batches, counts)
        finally:  # after an error, some rows are stored
            after = self.item_ids()
            self._set_weight(before.stop, after.stop, self._max_weight)
            if self._sequences is not None:  # items that were removed; their slots are not reused
                oldest_slot = max(before.start, after.stop - self.capacity)
                self._set_weight(oldest_slot, after.start, 0.0)

    def _set_weight(self, first: int, end: int, weight: float) -> None:
        """Set the weight of the items first … end-1."""
        if end - first >= self.capacity:
            self._tree.fill(0, self.capacity, weight)
        elif first < end:
            start, stop = first % self.capacity, (end - 1) % self.capacity + 1
            pieces = [(start, stop)] if start < stop else [(start, self.capacity), (0, stop)]
            for piece in pieces:
                self._tree.fill(*piece, weight)

    def _draw(self, count: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        slots, weights = self._tree.draw(count, self.rng)
        weights /= weights.min()  # N and the total cancel: the largest weight is 1
        return slots, {"weights": weights.astype(np.float32) ** np.float32(-self.beta)}

    def update_priorities(self, batch_indexes: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of drawn rows, such as their absolute TD errors.

        Args:
            batch_indexes: item ids [n] of the rows. Those overwritten since are ignored, and so is
                -1, the id of rows that come from no buffer.
            priorities: priorities [n] of the rows, at least 0.

        Raises:
            ValueError: the lengths differ, a priority is negative, not finite or too large for
                `alpha`, or an id was never stored. Nothing is changed.
        """
        self._flush()
        ids = np.asarray(batch_indexes)
        priorities = np.asarray(priorities, np.float64)
        if ids.shape != priorities.shape or ids.ndim != 1:
            raise ValueError(
                f"priorities {list(priorities.shape)} for batch_indexes {list(ids.shape)}: "
                "expected one priority per row"
            )
        if len(ids) and ids.dtype.kind not in "iu":
            raise ValueError(f"batch_indexes must be integers, got {ids.dtype}")
        if not len(ids):
            return
        low, high = priorities.min(), priorities.max()
        if not (low >= 0 and high < np.inf):  # also rejects NaN
            raise ValueError(f"priorities must be finite and at least 0, got {priorities}")
        stored = self.item_ids()
        oldest = int(ids.min())
        if ids.max() >= stored.stop or oldest < -1:
            raise ValueError(
                f"batch_indexes {ids} are not ids of this buffer, which has stored {stored.stop} "
                f"{self.storage_unit}: remove the column that another buffer added, "
                "batch.without_columns('batch_indexes')"
            )
        if oldest < 0:
            of_buffer = ids >= 0
            self.update_priorities(ids[of_buffer], priorities[of_buffer])
            return
        if self._sequences is not None:
            ids, priorities = _priorities_per_item(ids, priorities)
            high = priorities.max()
        try:
            highest = (float(high) + self.eps) ** self.alpha
        except OverflowError:
            highest = math.inf
        if highest * self.capacity == math.inf:  # the sum if all rows had this weight
            raise ValueError(f"priorities up to {high} are too large for alpha={self.alpha}")
        weights = (priorities + self.eps) ** self.alpha
        if oldest < stored.start:
            present = ids >= stored.start
            ids, weights = ids[present], weights[present]
        self._tree.set(ids % self.capacity, weights)
        self._max_weight = max(self._max_weight, highest)

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "weights": self._stored_weights().copy(),
            "max_weight": self._max_weight,
            "alpha": self.alpha,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        weights = np.asarray(state["weights"], np.float64)
        num_slots = min(self.item_ids().stop, self.capacity)
        if weights.shape != (num_slots,) or not (weights >= 0).all():
            raise StateError(f"weights: they are not {num_slots} numbers of at least 0")
        max_weight, alpha = float(state["max_weight"]), state["alpha"]
        if self.alpha != alpha:
            # priorities are unknown if alpha was 0: all items are then equally likely
            exponent = self.alpha / alpha if alpha else 0.0
            with np.errstate(over="ignore"):
                # a weight of 0 is that of a removed item
                weights = np.where(weights > 0, weights**exponent, 0.0)
                max_weight = float(np.power(max_weight, exponent))
        if not weights.max(initial=max_weight) * self.capacity < np.inf or (
            len(weights) and self.eps and not weights.any()
        ):
            raise StateError(f"weights: they are all 0, or infinite, with alpha={alpha!r}")
        self._max_weight = max_weight
        self._tree = SumTree(self.capacity)
        self._tree.set(np.arange(len(weights)), weights)


def _priorities_per_item(ids: np.ndarray, priorities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reduce the priorities [n] of rows to one per item; return unique ids and priorities."""
    unique, inverse = np.unique(ids, return_inverse=True)
    highest = np.zeros(len(unique))
    np.maximum.at(highest, inverse, priorities)
    mean = np.bincount(inverse, priorities) / np.bincount(inverse)
    return unique, ETA * highest + (1 - ETA) * mean
