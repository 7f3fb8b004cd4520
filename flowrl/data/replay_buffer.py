"""Replay buffers: rows of experience are stored once and given out again, at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.data.ring import Ring
from flowrl.data.sample_batch import SampleBatch
from flowrl.data.sum_tree import SumTree
from flowrl.seeding import random_stream, restore_stream, stream_state

PENDING_BATCHES = 128
PENDING_BYTES = 1 << 22

Beta = float | Sequence[Sequence[float]]


class ReplayBuffer:
    """The last `capacity` rows of experience, drawn uniformly with replacement.

    Observations are stored once. A drawn row has the columns that were stored (but for ids of
    fragments and `infos`), and `batch_indexes`, the row's number.

    With `n_step` above 1 a drawn row looks so many steps ahead in its trajectory, or as many as
    there are: `rewards` is sum_k gamma^k r_{t+k}, `new_obs`, `terminateds` and `truncateds` are of
    the last of those steps, and `n_steps` [B] says how many they are (Sutton & Barto 2018,
    chapter 7.1). That is looked up when a row is drawn, so rows at the edge of a fragment gain
    steps when the next one is stored.

    Args:
        capacity: rows; the oldest are overwritten.
        n_step: steps that a drawn row spans, at most.
        gamma: discount of the rewards within those.
        seed: of the draws; None takes the machine's entropy.

    Raises:
        ValueError: a capacity or n_step below 1, a gamma outside [0, 1].
    """

    def __init__(
        self, capacity: int, *, n_step: int = 1, gamma: float = 0.99, seed: int | None = None
    ):
        for name, value in (("capacity", capacity), ("n_step", n_step)):
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: a whole number of at least 1 is needed, got {value!r}")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma: a number from 0 to 1 is needed, got {gamma!r}")
        self.capacity, self.n_step, self.gamma = int(capacity), int(n_step), float(gamma)
        self.rng = random_stream(seed, "replay")
        self.num_sampled = 0
        self._ring = Ring(self.capacity)
        self._pending: list[SampleBatch] = []  # storing many batches at once costs less
        self._counts: list[int] = []
        self._pending_rows = 0
        self._most_pending = 0  # before the first batch is there: it says how large rows are
        self._discounts = (self.gamma ** np.arange(self.n_step))[:, None].astype(np.float32)

    # -- storing -----------------------------------------------------------------------------------

    def check(self, batch: SampleBatch) -> None:
        """Refuse a batch that `add` would refuse.

        Raises:
            ValueError: it lacks obs or new_obs, its columns are not like those stored before, or
                its rows are sequences.
        """
        self._ring.check(batch)

    def add(self, batch: SampleBatch) -> None:
        """Store the rows of a batch; it must not be changed afterwards.

        Raises:
            ValueError: see `check`.
        """
        if not isinstance(batch, SampleBatch):
            raise TypeError(f"a ReplayBuffer stores a SampleBatch, got {type(batch).__name__}")
        rows = batch.count
        if not rows:
            return
        self._ring.check(batch)
        self._pending.append(batch)
        self._counts.append(rows)
        self._pending_rows += rows
        if len(self._pending) >= PENDING_BATCHES or self._pending_rows > self._most_pending:
            self._flush()
            self._most_pending = min(self.capacity, PENDING_BYTES // self._ring.row_bytes)

    def _flush(self) -> None:
        if self._pending:
            self._store(self._pending, self._counts)
        self._pending, self._counts, self._pending_rows = [], [], 0

    def _store(self, batches: list[SampleBatch], counts: list[int]) -> None:
        self._ring.extend(batches, counts)

    # -- drawing -----------------------------------------------------------------------------------

    def sample(self, num_items: int) -> SampleBatch:
        """`num_items` rows [B, …], copied.

        Raises:
            ValueError: the buffer is empty, or num_items is below 1.
        """
        if num_items < 1:
            raise ValueError(f"num_items: at least 1 is needed, got {num_items}")
        if not len(self):
            raise ValueError("the buffer is empty: store something before drawing from it")
        self._flush()
        slots, more = self._draw(num_items)
        self.num_sampled += num_items
        ring = self._ring
        newest = ring.stored - 1
        # the number of the row in a slot: at most the newest one's
        more["batch_indexes"] = newest - (newest - slots) % self.capacity
        if self.n_step == 1:
            return ring.read(slots, None, **more)
        path = ring.path(slots, self.n_step)
        counts = np.ones(path.shape, bool)
        np.not_equal(path[1:], path[:-1], out=counts[1:])
        rewards = ring.columns["rewards"][0].take(path, mode="clip")
        rewards = (rewards * counts * self._discounts).sum(0)
        steps = counts.sum(0)
        return ring.read(slots, path[-1], rewards=rewards, n_steps=steps, **more)

    def _draw(self, count: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Slots [count], and columns of what was drawn."""
        return self.rng.integers(0, self._ring.rows, count), {}

    def update_priorities(self, batch_indexes: np.ndarray, priorities: np.ndarray) -> None:
        """Nothing: rows have no priorities here. It is there so that plans work with both."""

    def __len__(self) -> int:
        """Rows that are there."""
        return min(self.num_added, self.capacity)

    @property
    def num_added(self) -> int:
        """Rows that were ever stored."""
        return self._ring.stored + self._pending_rows

    def stats(self) -> dict[str, float]:
        """Figures for reports: rows there, stored, overwritten and drawn."""
        return {
            "num_rows": len(self),
            "num_rows_added": self.num_added,
            "num_rows_evicted": self.num_added - len(self),
            "num_rows_sampled": self.num_sampled,
        }

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All rows, and where the draws are."""
        self._flush()
        return {
            "ring": self._ring.state_dict(),
            "rng": stream_state(self.rng),
            "num_sampled": self.num_sampled,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, of a buffer with the same settings.

        Raises:
            ValueError: it is of another capacity.
        """
        self._ring.load_state_dict(state["ring"])
        self._pending, self._counts, self._pending_rows = [], [], 0
        restore_stream(self.rng, state["rng"])
        self.num_sampled = int(state["num_sampled"])

    def __repr__(self) -> str:
        more = f", n_step={self.n_step}" if self.n_step > 1 else ""
        return f"{type(self).__name__}(capacity={self.capacity}{more})"


class PrioritizedReplayBuffer(ReplayBuffer):
    """Rows are drawn in proportion to priority^alpha (Schaul et al. 2016, arXiv 1511.05952).

    New rows have the highest priority so far. A drawn batch has the column `weights` [B],
    (N P(i))^-beta divided by the batch's largest (section 3.4).

    Args:
        capacity, n_step, gamma, seed: see ReplayBuffer.
        alpha: 0 draws uniformly.
        beta: how far the weights make up for the priorities, 1 wholly: a number, or points
            [(rows stored, value), …] in rising order, linear in between.
        eps: added to priorities, so that none is 0.

    Raises:
        ValueError: a negative alpha, beta or eps.
    """

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float = 0.6,
        beta: Beta = 0.4,
        eps: float = 1e-6,
        n_step: int = 1,
        gamma: float = 0.99,
        seed: int | None = None,
    ):
        super().__init__(capacity, n_step=n_step, gamma=gamma, seed=seed)
        points = [(0, beta)] if isinstance(beta, (int, float)) else beta
        self._beta = np.asarray(points, np.float64).reshape(-1, 2).T
        rising = (np.diff(self._beta[0]) > 0).all()
        if alpha < 0 or eps < 0 or not self._beta.size or not rising or (self._beta[1] < 0).any():
            raise ValueError(
                f"alpha, beta and eps are at least 0, got {alpha!r}, {beta!r} and {eps!r} (points "
                "of beta in rising order)"
            )
        self.alpha, self.eps = float(alpha), float(eps)
        self._tree = SumTree(self.capacity)
        self._highest = 1.0  # priority^alpha

    @property
    def beta(self) -> float:
        """The exponent of the weights, now."""
        return float(np.interp(self.num_added, *self._beta))

    def _store(self, batches: list[SampleBatch], counts: list[int]) -> None:
        before = self._ring.stored
        super()._store(batches, counts)
        count = self._ring.stored - before
        if count >= self.capacity:
            self._tree.fill(0, self.capacity, self._highest)
            return
        start, stop = before % self.capacity, (before + count - 1) % self.capacity + 1
        if start < stop:
            self._tree.fill(start, stop, self._highest)
        else:
            self._tree.fill(start, self.capacity, self._highest)
            self._tree.fill(0, stop, self._highest)

    def _draw(self, count: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        slots, weights = self._tree.draw(count, self.rng)
        weights /= weights.min()  # N and the total go out, as the largest weight is to be 1
        return slots, {"weights": weights.astype(np.float32) ** np.float32(-self.beta)}

    def update_priorities(self, batch_indexes: np.ndarray, priorities: np.ndarray) -> None:
        """Give rows new priorities, such as the absolute TD errors of drawn ones.

        Args:
            batch_indexes: numbers of rows [n], as drawn; those overwritten since are left alone.
            priorities: [n], at least 0.

        Raises:
            ValueError: other lengths; a priority that is negative or not finite; a row that was
                never stored. Nothing is changed.
        """
        self._flush()
        indexes = np.asarray(batch_indexes)
        priorities = np.asarray(priorities, np.float64)
        if indexes.shape != priorities.shape or indexes.ndim != 1:
            raise ValueError(
                f"priorities {list(priorities.shape)} for rows {list(indexes.shape)}: one for each"
            )
        if not len(indexes):
            return
        low, high = priorities.min(), priorities.max()
        if not (low >= 0 and high < np.inf):  # NaN is neither
            raise ValueError(f"priorities are finite and at least 0, got {priorities}")
        stored = self._ring.stored
        oldest = int(indexes.min())
        if indexes.max() >= stored or oldest < 0:
            raise ValueError(f"rows {indexes} of {stored} that were ever stored")
        weights = priorities + self.eps
        weights **= self.alpha
        if oldest < stored - self.capacity:
            there = indexes >= stored - self.capacity
            indexes, weights = indexes[there], weights[there]
        self._tree.set(indexes % self.capacity, weights)
        self._highest = max(self._highest, float((high + self.eps) ** self.alpha))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {
            **state,
            "weights": self._tree.leaves[: self._ring.rows].copy(),
            "highest": self._highest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        weights = np.asarray(state["weights"], np.float64)
        self._tree = SumTree(self.capacity)
        self._tree.set(np.arange(len(weights)), weights)
        self._highest = float(state["highest"])
