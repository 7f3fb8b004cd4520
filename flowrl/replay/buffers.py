"""ReplayBuffer: stores rows of experience and draws from them uniformly."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict, get_args

import numpy as np

from flowrl.data.sample_batch import SampleBatch
from flowrl.interrupts import delayed_interrupts
from flowrl.replay.replay_ratio import EMPTY, NOTHING_TO_DRAW
from flowrl.replay.ring_buffer import RingBuffer
from flowrl.replay.schema import DONE_FLAGS
from flowrl.replay.sequence_index import STATE, SequenceIndex
from flowrl.replay.trajectories import LinkRule, sort_rows
from flowrl.seeding import random_stream, restore_stream, stream_state
from flowrl.setting_values import check_int, check_number
from flowrl.state_schema import Fields, Natural, check_own_state, check_state

MAX_PENDING_BATCHES = 128
MAX_PENDING_BYTES = 1 << 22

StorageUnit = Literal["timesteps", "sequences", "episodes"]
STORAGE_UNITS = get_args(StorageUnit)


log = logging.getLogger("flowrl")


class BufferSettings(TypedDict, total=False):
    """Arguments of a ReplayBuffer that its subclasses have, too; see ReplayBuffer."""

    n_step: int
    gamma: float
    seed: int | None
    storage_unit: StorageUnit
    max_seq_len: int
    burn_in: int
    directory: Path | str | None
    links: LinkRule


class ReplayBuffer:
    """The last `capacity` rows of experience, drawn uniformly with replacement.

    Each observation is stored once. A drawn row has the stored columns and `batch_indexes`, the id
    of the drawn item. `unroll_id`, `env_id`, `infos` and columns that are computed or fetched on
    access in the first batch are not stored.

    With `n_step` above 1, each drawn row spans up to n steps of its trajectory: `rewards` is
    sum_k gamma^k r_{t+k}; `new_obs`, `terminateds` and `truncateds` are those of the last step; and
    `n_steps` [B] is the number of steps (Sutton & Barto 2018, chapter 7.1). This is computed at
    draw time, so rows at the end of a fragment gain steps when the next fragment is stored.

    Recurrent policies need sequences: with `storage_unit="sequences"` a draw returns whole
    sequences as they were sampled, with `seq_lens`, the states at their starts (`state_in_…`) and,
    with `burn_in`, the column `loss_mask`, False for burn-in rows (Kapturowski et al. 2019, section
    3). `storage_unit="episodes"` draws whole episodes.

    Args:
        capacity: maximum number of rows; new rows overwrite the oldest.
        n_step: maximum number of steps that a drawn row spans.
        gamma: discount factor of the rewards within those steps.
        seed: seed of the draws; None for a random one.
        storage_unit: the items to draw: "timesteps" (rows), "sequences" or "episodes".
        max_seq_len: maximum number of rows to learn from in a sequence; the model's `max_seq_len`.
        burn_in: rows before each sequence that only warm up the recurrent state; the model's
            `burn_in`. A sequence near the start of a fragment has fewer.
        directory: keep the rows in memory-mapped files of this folder, for buffers larger than
            memory. The files have no names and disappear with the process. None: in memory.
        links: which rows of different batches are linked as steps of one trajectory. "equal": if
            the next observation of one row equals the observation of the other. "consecutive":
            also steps t and t + 1 whose observations differ, because running normalization has
            changed in between. "never": none, for batches that are distributed to several buffers.

    Raises:
        OSError: `directory` cannot be written.
        TypeError: `directory` is not a path.
        ValueError: capacity, n_step or max_seq_len is below 1, gamma is outside [0, 1], the
            storage_unit or links is unknown, `directory` is empty, or burn_in is set without
            sequences.
    """

    state_fields: ClassVar[Fields] = {
        "kind": str,
        "ring": dict[str, Any],
        "rng": dict[str, Any],
        "num_sampled": Natural,
    }

    def __init__(
        self,
        capacity: int,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        seed: int | None = None,
        storage_unit: StorageUnit = "timesteps",
        max_seq_len: int = 20,
        burn_in: int = 0,
        directory: Path | str | None = None,
        links: LinkRule = "equal",
    ):
        integers = (("capacity", capacity), ("n_step", n_step), ("max_seq_len", max_seq_len))
        for name, value in integers:
            check_int(name, value)
        check_number("gamma", gamma, 0, 1)
        if storage_unit not in STORAGE_UNITS:
            raise ValueError(
                f"storage_unit must be one of {', '.join(STORAGE_UNITS)}, got {storage_unit!r}"
            )
        if links not in get_args(LinkRule):
            raise ValueError(f"links must be one of {', '.join(get_args(LinkRule))}, got {links!r}")
        check_int("burn_in", burn_in, 0)
        if burn_in and storage_unit != "sequences":
            raise ValueError(
                f'burn_in above 0 needs storage_unit="sequences", got burn_in={burn_in!r} and '
                f"storage_unit={storage_unit!r}"
            )
        self.capacity, self.n_step, self.gamma = int(capacity), int(n_step), float(gamma)
        self.rng = random_stream(seed, "replay")
        self.num_sampled = 0
        self._ring = RingBuffer(self.capacity, directory, links)
        self._sequences: SequenceIndex | None = None
        if storage_unit != "timesteps":
            index = SequenceIndex(storage_unit, self.capacity, int(max_seq_len), int(burn_in))
            self._sequences = index
        # batches to store: storing several at once is faster
        self._pending: list[SampleBatch] = []
        self._pending_rows = 0
        self._max_pending_rows = 0  # set after the first batch, which defines the size of a row
        self._discounts = (self.gamma ** np.arange(self.n_step))[:, None].astype(np.float32)

    @property
    def storage_unit(self) -> str:
        """The items to draw: "timesteps", "sequences" or "episodes"."""
        return "timesteps" if self._sequences is None else self._sequences.storage_unit

    @property
    def directory(self) -> Path | None:
        """Folder of the files with the rows; None: in memory."""
        return self._ring.directory

    # -- storing -----------------------------------------------------------------------------------

    def check(self, batch: SampleBatch) -> None:
        """Check that `add` accepts a batch.

        Raises:
            ValueError: the batch lacks obs or new_obs, its columns differ from those of earlier
                batches, it has sequences but the buffer stores timesteps, or it cannot be split
                into the sequences or episodes that the buffer stores.
        """
        if self._sequences is None:
            self._ring.check(batch)
        elif batch.count:
            self._sequences.check(batch)
            self._ring.check(self._sequences.rows_of(batch))
        if self.n_step > 1 and "rewards" not in batch:
            raise ValueError(f"the batch has no column rewards, which n_step={self.n_step} needs")
        if self.n_step > 1 and "n_steps" in batch and np.any(batch["n_steps"] != 1):
            raise ValueError(
                f"the rows span several steps already (column n_steps) and are stored with n_step="
                f"{self.n_step}: draw them from a buffer with n_step=1"
            )
        if self.n_step > 1 and "dones" in batch and not set(DONE_FLAGS) <= set(batch):
            raise ValueError(
                f"n_step={self.n_step} needs the columns terminateds and truncateds; the batch has "
                "dones instead"
            )
        if self.n_step > 1 and not {"eps_id", "t"} <= set(batch):
            raise ValueError(
                f"n_step={self.n_step} needs the columns eps_id and t, which link the rows of an "
                f"episode; the batch has {sorted(batch)}"
            )

    def add(self, batch: SampleBatch) -> None:
        """Store the rows of a batch, which must not be changed afterwards.

        Raises:
            TypeError: the batch is not a SampleBatch.
            ValueError: see `check`.
        """
        if not isinstance(batch, SampleBatch):
            raise TypeError(f"a ReplayBuffer stores a SampleBatch, got {type(batch).__name__}")
        if not batch.count:
            return
        self.check(batch)
        self._keep(batch)

    def _keep(self, batch: SampleBatch) -> None:
        """Store the rows of a batch that was checked."""
        self._pending.append(batch)
        self._pending_rows += batch.count
        if len(self._pending) >= MAX_PENDING_BATCHES or self._pending_rows > self._max_pending_rows:
            try:
                self._flush()
            except BaseException:
                # a failed add adds nothing to draw
                if self._pending and self._pending[-1] is batch:
                    self._pending.pop()
                    self._pending_rows -= batch.count
                raise
            states = sum(array.nbytes for name, array in batch.stored() if name.startswith(STATE))
            row_bytes = self._ring.row_bytes + states // batch.count
            self._max_pending_rows = min(self.capacity, MAX_PENDING_BYTES // max(row_bytes, 1))

    def _flush(self) -> None:
        if self._pending:
            with delayed_interrupts:  # a buffer with half a batch would be wrong
                batches, before = self._pending, self._ring.num_added
                try:
                    self._store(batches, [batch.count for batch in batches])
                finally:  # after an error, such as a full disk, the other rows stay pending
                    num_stored = self._ring.num_added - before
                    can_cut = self._sequences is None
                    self._pending = _without_first(batches, num_stored, can_cut)
                    self._pending_rows = sum(batch.count for batch in self._pending)

    def _store(self, batches: list[SampleBatch], counts: list[int]) -> None:
        if self._sequences is None:
            self._ring.extend(batches, counts)
            return
        parts = [self._sequences.split(batch) for batch in batches]
        first_rows = list(itertools.accumulate(counts, initial=self._ring.num_added))
        try:
            self._ring.extend([rows for rows, _ in parts], counts)
        finally:  # also if only some batches were stored, which have overwritten older rows
            for (_, sequences), (first, end) in zip(
                parts, itertools.pairwise(first_rows), strict=True
            ):
                if end <= self._ring.num_added:
                    self._sequences.extend(sequences, first)
            self._sequences.remove_before(self._ring.num_added - len(self._ring))

    def item_ids(self) -> range:
        """Return the ids of the items that can be drawn, without batches not yet flushed."""
        if self._sequences is not None:
            return range(self._sequences.first, self._sequences.num_added)
        return range(self._ring.num_added - len(self._ring), self._ring.num_added)

    # -- drawing -----------------------------------------------------------------------------------

    def sample(self, num_items: int) -> SampleBatch:
        """Draw `num_items` rows [B, …], or as many sequences or episodes, one after the other.

        The columns are copies.

        Raises:
            ValueError: the buffer is empty or has no whole item, or num_items is below 1.
        """
        if num_items < 1:
            raise ValueError(f"num_items must be at least 1, got {num_items}")
        if not len(self):
            raise ValueError(EMPTY)
        self._flush()
        if not self.item_ids():
            raise ValueError(NOTHING_TO_DRAW)
        slots, columns = self._draw(num_items)
        newest = self.item_ids().stop - 1
        # id of the item in a slot: the highest one that is at most `newest`
        columns["batch_indexes"] = newest - (newest - slots) % self.capacity
        if self._sequences is None:
            self.num_sampled += num_items
            return self._read(slots, columns)
        row_ids, lengths, sequence_columns = self._sequences.read(slots)
        self.num_sampled += len(row_ids)
        columns = {name: np.repeat(column, lengths) for name, column in columns.items()}
        rows = self._read(row_ids % self.capacity, columns)
        return SampleBatch.unchecked(dict(rows.stored()) | sequence_columns)

    def rows_by_id(self, row_ids: np.ndarray) -> SampleBatch:
        """Return the rows with these ids [B], which count from the first row ever stored.

        Raises:
            KeyError: a row was never stored, or has been overwritten.
        """
        self._flush()
        first, end = self._ring.num_added - len(self._ring), self._ring.num_added
        row_ids = np.asarray(row_ids, np.int64)
        if len(row_ids) and not first <= row_ids.min() <= row_ids.max() < end:
            stored = f"the rows {first} to {end - 1} are stored" if end else "the buffer is empty"
            raise KeyError(f"row ids {row_ids}: {stored}")
        self.num_sampled += len(row_ids)
        return self._read(row_ids % self.capacity, {"batch_indexes": row_ids})

    def _read(self, slots: np.ndarray, columns: dict[str, np.ndarray]) -> SampleBatch:
        """Return the rows at slots [B], of up to `n_step` steps each, with additional columns."""
        ring = self._ring
        if self.n_step == 1:
            return ring.read(slots, None, **columns)
        path = ring.path(slots, self.n_step)
        is_new_step = np.ones(path.shape, bool)
        np.not_equal(path[1:], path[:-1], out=is_new_step[1:])
        rewards = ring.columns["rewards"][0].take(path, mode="clip")
        rewards = (rewards * is_new_step * self._discounts).sum(0)
        steps = is_new_step.sum(0)
        return ring.read(slots, path[-1], rewards=rewards, n_steps=steps, **columns)

    def _draw(self, count: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Draw items; return their slots [count] and columns [count] to add to the batch."""
        if self._sequences is None:
            return self.rng.integers(0, len(self._ring), count), {}
        ids = self.item_ids()
        return self.rng.integers(ids.start, ids.stop, count) % self.capacity, {}

    def rows_per_item(self) -> float:
        """Return the mean number of rows to learn from per item."""
        if self._sequences is None:
            return 1.0
        self._flush()
        return self._sequences.mean_rows()

    def update_priorities(self, batch_indexes: np.ndarray, priorities: np.ndarray) -> None:
        """Do nothing: this buffer has no priorities. Plans call it for every buffer."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return min(self.num_added, self.capacity)

    @property
    def num_added(self) -> int:
        """Rows ever stored."""
        return self._ring.num_added + self._pending_rows

    def stats(self) -> dict[str, float]:
        """Return the numbers of rows: stored, ever stored, overwritten and drawn."""
        return {
            "num_rows": len(self),
            "num_rows_added": self.num_added,
            "num_rows_evicted": self.num_added - len(self),
            "num_rows_sampled": self.num_sampled,
        }

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all rows and the state of the draws.

        Rows that cannot be written because the disk is full are left out, with a warning.
        """
        try:
            self._flush()
        except OSError as error:
            log.warning("%d rows are not saved: %s", self._pending_rows, error)
        state = {
            "kind": type(self).__name__,
            "ring": self._ring.state_dict(),
            "rng": stream_state(self.rng),
            "num_sampled": self.num_sampled,
        }
        if self._sequences is not None:
            state["sequences"] = self._sequences.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict` of a buffer with the same settings.

        Raises:
            ValueError: the state is of another kind of buffer, or of one with other settings; do
                not use the buffer afterwards.
        """
        kind = type(self).__name__
        if state.get("kind", kind) == kind:  # another kind has other fields
            check_own_state(self, state)
        settings: dict[str, Any] = {"kind": kind, "storage_unit": self.storage_unit}
        saved: dict[str, Any] = {"kind": state["kind"], "storage_unit": "timesteps"}
        if self._sequences is not None:
            settings["max_seq_len"] = self._sequences.max_seq_len
            settings["burn_in"] = self._sequences.burn_in
        if "sequences" in state:
            check_state(state["sequences"], SequenceIndex.state_fields, "SequenceIndex")
            names = ("storage_unit", "max_seq_len", "burn_in")
            saved |= {name: state["sequences"][name] for name in names}
        for name, value in settings.items():
            if saved.get(name, value) != value:
                hint = " (the setting prioritized_replay of an algorithm)" if name == "kind" else ""
                raise ValueError(
                    f"the state is of a buffer with {name}={saved[name]!r}, this buffer has "
                    f"{name}={value!r}: create it with the settings of the state{hint}"
                )
        self._ring.load_state_dict(state["ring"])
        if self._sequences is not None:
            self._sequences.load_state_dict(state["sequences"], self._ring.num_added)
        self._pending, self._pending_rows = [], 0
        restore_stream(self.rng, state["rng"])
        self.num_sampled = int(state["num_sampled"])

    def __repr__(self) -> str:
        settings = f", n_step={self.n_step}" if self.n_step > 1 else ""
        if self._sequences is not None:
            settings += f", storage_unit={self.storage_unit!r}"
        return f"{type(self).__name__}(capacity={self.capacity}{settings})"


def _without_first(batches: list[SampleBatch], count: int, can_cut: bool) -> list[SampleBatch]:
    """Return the rows of batches without the first ones, which a RingBuffer has stored.

    Args:
        batches: the batches.
        count: number of stored rows.
        can_cut: leave out the stored rows of a batch of which only a part was stored; otherwise
            keep it whole.
    """
    left = []
    for batch in batches:
        if count < batch.count:  # a batch that is stored in parts is sorted
            left.append(sort_rows(batch)[count:] if count and can_cut else batch)
        count = max(0, count - batch.count)
    return left
