"""Replay buffers: rows of experience are stored once and given out again, at random."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.data.sample_batch import SampleBatch
from flowrl.replay.ring_buffer import Ring
from flowrl.replay.sequence_index import SequenceIndex
from flowrl.replay.sum_tree import SumTree
from flowrl.seeding import random_stream, restore_stream, stream_state

PENDING_BATCHES = 128
PENDING_BYTES = 1 << 22

UNITS = "timesteps", "sequences", "episodes"
ETA = (
    0.9  # of a sequence's priority, the share of the largest (Kapturowski et al. 2019, section 2.3)
)

Beta = float | Sequence[Sequence[float]]


class ReplayBuffer:
    """The last `capacity` rows of experience, drawn uniformly with replacement.

    Observations are stored once. A drawn row has the columns that were stored (but for ids of
    fragments and `infos`), and `batch_indexes`, the number of what was drawn.

    With `n_step` above 1 a drawn row looks so many steps ahead in its trajectory, or as many as
    there are: `rewards` is sum_k gamma^k r_{t+k}, `new_obs`, `terminateds` and `truncateds` are of
    the last of those steps, and `n_steps` [B] says how many they are (Sutton & Barto 2018,
    chapter 7.1). That is looked up when a row is drawn, so rows at the edge of a fragment gain
    steps when the next one is stored.

    Policies that remember need rows in sequences: with `storage_unit="sequences"` a draw gives
    whole ones, as they were sampled, with `seq_lens` and the states at the start of each
    (`state_in_…`), and with a `burn_in` the column `loss_mask`, False for the rows before those to
    learn from (Kapturowski et al. 2019, section 3). `storage_unit="episodes"` gives whole episodes.

    Args:
        capacity: rows; the oldest are overwritten.
        n_step: steps that a drawn row spans, at most.
        gamma: discount of the rewards within those.
        seed: of the draws; None takes the machine's entropy.
        storage_unit: what one item of a draw is: "timesteps" (rows), "sequences" or "episodes".
        max_seq_len: rows to learn from in a sequence, at most: the model's.
        burn_in: rows before those, fewer where a fragment's part of a trajectory begins: the
            model's.
        directory: keep the rows in files of this folder, for buffers that are larger than memory:
            what was used last is in memory as far as there is room. The files have no names and are
            gone with the process. None: in memory.

    Raises:
        OSError: nothing can be written in `directory`.
        ValueError: a capacity, n_step or max_seq_len below 1, a gamma outside [0, 1], another
            storage_unit, a burn_in of what is not in sequences.
    """

    def __init__(
        self,
        capacity: int,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        seed: int | None = None,
        storage_unit: str = "timesteps",
        max_seq_len: int = 20,
        burn_in: int = 0,
        directory: Path | str | None = None,
    ):
        whole = (("capacity", capacity), ("n_step", n_step), ("max_seq_len", max_seq_len))
        for name, value in whole:
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: a whole number of at least 1 is needed, got {value!r}")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma: a number from 0 to 1 is needed, got {gamma!r}")
        if storage_unit not in UNITS:
            raise ValueError(f"storage_unit is one of {', '.join(UNITS)}, got {storage_unit!r}")
        if burn_in < 0 or (burn_in and storage_unit != "sequences"):
            raise ValueError(f"burn_in is at least 0, and of sequences only, got {burn_in!r}")
        self.capacity, self.n_step, self.gamma = int(capacity), int(n_step), float(gamma)
        self.rng = random_stream(seed, "replay")
        self.num_sampled = 0
        self._ring = Ring(self.capacity, directory)
        self._units: SequenceIndex | None = None
        if storage_unit != "timesteps":
            self._units = SequenceIndex(storage_unit, self.capacity, int(max_seq_len), int(burn_in))
        self._pending: list[SampleBatch] = []  # storing many batches at once costs less
        self._counts: list[int] = []
        self._pending_rows = 0
        self._most_pending = 0  # before the first batch is there: it says how large rows are
        self._discounts = (self.gamma ** np.arange(self.n_step))[:, None].astype(np.float32)

    @property
    def storage_unit(self) -> str:
        """What one item of a draw is."""
        return "timesteps" if self._units is None else self._units.kind

    # -- storing -----------------------------------------------------------------------------------

    def check(self, batch: SampleBatch) -> None:
        """Refuse a batch that `add` would refuse.

        Raises:
            ValueError: it lacks obs or new_obs, its columns are not like those stored before, its
                rows are sequences where timesteps are stored, or it has no such units.
        """
        if self._units is None:
            self._ring.check(batch)
        elif batch.count:
            self._units.check(batch)
            self._ring.check(self._units.rows_of(batch))
        if self.n_step > 1 and "rewards" not in batch:
            raise ValueError(f"a batch without rewards, of which n_step={self.n_step} adds up some")

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
        self.check(batch)
        self._pending.append(batch)
        self._counts.append(rows)
        self._pending_rows += rows
        if len(self._pending) >= PENDING_BATCHES or self._pending_rows > self._most_pending:
            self._flush()
            self._most_pending = min(self.capacity, PENDING_BYTES // self._ring.row_bytes)

    def _flush(self) -> None:
        if self._pending:
            batches, counts = self._pending, self._counts
            self._pending, self._counts, self._pending_rows = [], [], 0
            self._store(batches, counts)

    def _store(self, batches: list[SampleBatch], counts: list[int]) -> None:
        if self._units is None:
            self._ring.extend(batches, counts)
            return
        starts = itertools.accumulate(counts, initial=self._ring.stored)
        pairs = zip(batches, starts, strict=False)
        there = self._units.mark()
        try:
            self._ring.extend([self._units.extend(batch, start) for batch, start in pairs], counts)
        except OSError:  # no room in its files
            self._units.forget_since(there)
            raise
        self._units.forget(self._ring.stored - self._ring.rows)

    def _items(self) -> tuple[int, int]:
        """The number of the oldest item that can be drawn, and that of the next one to come."""
        if self._units is not None:
            return self._units.first, self._units.stored
        return self._ring.stored - self._ring.rows, self._ring.stored

    # -- drawing -----------------------------------------------------------------------------------

    def sample(self, num_items: int) -> SampleBatch:
        """`num_items` rows [B, …], copied; or as many sequences or episodes, one after another.

        Raises:
            ValueError: the buffer is empty, or num_items is below 1.
        """
        if num_items < 1:
            raise ValueError(f"num_items: at least 1 is needed, got {num_items}")
        if not len(self):
            raise ValueError("the buffer is empty: store something before drawing from it")
        self._flush()
        slots, more = self._draw(num_items)
        newest = self._items()[1] - 1
        # the number of the item in a slot: at most the newest one's
        more["batch_indexes"] = newest - (newest - slots) % self.capacity
        if self._units is None:
            self.num_sampled += num_items
            return self._read(slots, more)
        numbers, lengths, columns = self._units.read(slots)
        self.num_sampled += len(numbers)
        more = {name: np.repeat(column, lengths) for name, column in more.items()}
        rows = self._read(numbers % self.capacity, more)
        return SampleBatch.unchecked(dict(rows.stored()) | columns)

    def rows(self, numbers: np.ndarray) -> SampleBatch:
        """The rows with these numbers [B], which were counted from the first that was stored.

        Raises:
            KeyError: one is not there, or not any more.
        """
        self._flush()
        stored = self._ring.stored
        if len(numbers) and not stored - self._ring.rows <= numbers.min() <= numbers.max() < stored:
            raise KeyError(f"rows {numbers}: there are {stored - self._ring.rows} … {stored - 1}")
        return self._read(numbers % self.capacity, {"batch_indexes": numbers})

    def _read(self, slots: np.ndarray, more: dict[str, np.ndarray]) -> SampleBatch:
        """The rows at slots [n], n steps each, and more columns."""
        ring = self._ring
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
        """Slots [count] of items, and columns of what was drawn."""
        if self._units is None:
            return self.rng.integers(0, self._ring.rows, count), {}
        return self.rng.integers(*self._items(), count) % self.capacity, {}

    def rows_per_item(self) -> float:
        """Rows to learn from in an item of a draw, on average."""
        if self._units is None:
            return 1.0
        self._flush()
        return self._units.mean_rows()

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
        state = {
            "kind": type(self).__name__,
            "ring": self._ring.state_dict(),
            "rng": stream_state(self.rng),
            "num_sampled": self.num_sampled,
        }
        if self._units is not None:
            state["units"] = self._units.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, of a buffer with the same settings.

        Raises:
            ValueError: it is of another kind of buffer, capacity or storage unit; nothing is
                changed.
        """
        own: dict[str, Any] = {"kind": type(self).__name__, "storage_unit": self.storage_unit}
        given: dict[str, Any] = {"kind": state["kind"], "storage_unit": "timesteps"}
        if self._units is not None:
            own |= {"max_seq_len": self._units.max_seq_len, "burn_in": self._units.burn_in}
        if "units" in state:
            units = state["units"]
            given |= {name: units[name] for name in ("storage_unit", "max_seq_len", "burn_in")}
        for name, value in own.items():
            if given.get(name, value) != value:
                raise ValueError(
                    f"a state of a buffer with {name}={given[name]!r} for one with {value!r}: give "
                    "the buffer the settings that it had"
                )
        self._ring.load_state_dict(state["ring"])
        if self._units is not None:
            self._units.load_state_dict(state["units"])
        self._pending, self._counts, self._pending_rows = [], [], 0
        restore_stream(self.rng, state["rng"])
        self.num_sampled = int(state["num_sampled"])

    def __repr__(self) -> str:
        more = f", n_step={self.n_step}" if self.n_step > 1 else ""
        more += f", storage_unit={self.storage_unit!r}" if self._units is not None else ""
        return f"{type(self).__name__}(capacity={self.capacity}{more})"


class PrioritizedReplayBuffer(ReplayBuffer):
    """Rows are drawn in proportion to priority^alpha (Schaul et al. 2016, arXiv 1511.05952).

    New rows have the highest priority so far. A drawn batch has the column `weights` [B],
    (N P(i))^-beta divided by the batch's largest (section 3.4). Sequences and episodes have one
    priority each: 0.9 of their rows' largest and 0.1 of the mean (Kapturowski et al. 2019,
    section 2.3).

    Args:
        capacity, n_step, gamma, seed, storage_unit, max_seq_len, burn_in, directory: see
            ReplayBuffer.
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
        **more: Any,
    ):
        super().__init__(capacity, **more)
        points = [(0, beta)] if np.ndim(beta) == 0 else beta
        self._beta = np.asarray(points, np.float64).reshape(-1, 2).T
        rising = (np.diff(self._beta[0]) > 0).all()
        numbers = np.concatenate([self._beta.ravel(), [alpha, eps]])
        fits = np.isfinite(numbers).all() and (numbers >= 0).all()
        if not fits or not self._beta.size or not rising:
            raise ValueError(
                f"alpha, beta and eps are finite and at least 0, got {alpha!r}, {beta!r} and "
                f"{eps!r} (points of beta in rising order)"
            )
        self.alpha, self.eps = float(alpha), float(eps)
        self._tree = SumTree(self.capacity)
        self._highest = 1.0  # priority^alpha

    @property
    def beta(self) -> float:
        """The exponent of the weights, now."""
        return float(np.interp(self.num_added, *self._beta))

    def _store(self, batches: list[SampleBatch], counts: list[int]) -> None:
        before, after = self._items()
        super()._store(batches, counts)
        first, stored = self._items()
        self._weigh(after, stored, self._highest)
        if self._units is not None:  # some have gone whose slots nobody has taken
            self._weigh(max(before, stored - self.capacity), first, 0.0)

    def _weigh(self, start: int, stop: int, weight: float) -> None:
        """Give the items from number `start` to `stop` a weight."""
        if stop - start >= self.capacity:
            self._tree.fill(0, self.capacity, weight)
        elif start < stop:
            begin, end = start % self.capacity, (stop - 1) % self.capacity + 1
            pieces = [(begin, end)] if begin < end else [(begin, self.capacity), (0, end)]
            for piece in pieces:
                self._tree.fill(*piece, weight)

    def _draw(self, count: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        slots, weights = self._tree.draw(count, self.rng)
        weights /= weights.min()  # N and the total go out, as the largest weight is to be 1
        return slots, {"weights": weights.astype(np.float32) ** np.float32(-self.beta)}

    def update_priorities(self, batch_indexes: np.ndarray, priorities: np.ndarray) -> None:
        """Give rows new priorities, such as the absolute TD errors of drawn ones.

        Args:
            batch_indexes: numbers [n] of what rows were drawn as; those overwritten since are left
                alone.
            priorities: of rows [n], at least 0.

        Raises:
            ValueError: other lengths; a priority that is negative or not finite; a number that was
                never stored. Nothing is changed.
        """
        self._flush()
        indexes = np.asarray(batch_indexes)
        priorities = np.asarray(priorities, np.float64)
        if indexes.shape != priorities.shape or indexes.ndim != 1:
            raise ValueError(
                f"priorities {list(priorities.shape)} for rows {list(indexes.shape)}: one for each"
            )
        if len(indexes) and indexes.dtype.kind not in "iu":
            raise ValueError(f"batch_indexes are whole numbers, got {indexes.dtype}")
        if not len(indexes):
            return
        low, high = priorities.min(), priorities.max()
        if not (low >= 0 and high < np.inf):  # NaN is neither
            raise ValueError(f"priorities are finite and at least 0, got {priorities}")
        first, stored = self._items()
        oldest = int(indexes.min())
        if indexes.max() >= stored or oldest < 0:
            raise ValueError(f"{self.storage_unit} {indexes} of {stored} that were ever stored")
        if self._units is not None:
            indexes, priorities = _of_units(indexes, priorities)
            high = priorities.max()
        weights = priorities + self.eps
        weights **= self.alpha
        if oldest < first:
            there = indexes >= first
            indexes, weights = indexes[there], weights[there]
        self._tree.set(indexes % self.capacity, weights)
        self._highest = max(self._highest, float((high + self.eps) ** self.alpha))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {
            **state,
            "weights": self._tree.leaves[: min(self._items()[1], self.capacity)].copy(),
            "highest": self._highest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        weights = np.asarray(state["weights"], np.float64)
        self._tree = SumTree(self.capacity)
        self._tree.set(np.arange(len(weights)), weights)
        self._highest = float(state["highest"])


def _of_units(indexes: np.ndarray, priorities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The units of rows, each once, and their priorities."""
    units, where = np.unique(indexes, return_inverse=True)
    most = np.zeros(len(units))
    np.maximum.at(most, where, priorities)
    mean = np.bincount(where, priorities) / np.bincount(where)
    return units, ETA * most + (1 - ETA) * mean
