"""SequenceIndex: the sequences or episodes in a ring buffer."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from flowrl.data.columns import PER_SEQUENCE, expand_runs
from flowrl.data.sample_batch import SampleBatch
from flowrl.data.sequences import burn_in_spans, sequence_lengths
from flowrl.replay.schema import DONE_FLAGS
from flowrl.replay.trajectories import row_order, sort_rows
from flowrl.state_schema import Fields, Natural, StateError, check_own_state

STATE = "state_in_"


class Sequences(NamedTuple):
    """The sequences of a batch; arrays [n], int64."""

    starts: np.ndarray  # first row, burn-in included
    lengths: np.ndarray  # rows, burn-in included
    burn_ins: np.ndarray  # burn-in rows
    states: dict[str, np.ndarray]  # state column -> states [n, …] at the first rows


class SequenceIndex:
    """Rows of the sequences or episodes in a ring buffer, by item ids that count up.

    An item is removed when its first row is overwritten. Sequences share their burn-in rows with
    the previous sequence; recurrent states are stored for the first row of each sequence only.

    Args:
        storage_unit: "sequences" or "episodes".
        capacity: rows of the ring buffer.
        max_seq_len: maximum number of rows to learn from in a sequence.
        burn_in: burn-in rows before them, fewer near the start of a trajectory in its fragment.

    Attributes:
        first: id of the oldest item.
        num_added: items ever added; the id of the next one.
        states: state column -> states [n, …]; that of item i is at i % n. They grow with the number
            of items.
    """

    state_fields: ClassVar[Fields] = {
        "storage_unit": str,
        "max_seq_len": Natural,
        "burn_in": Natural,
        "first": Natural,
        "first_rows": np.ndarray,
        "lengths": np.ndarray,
        "burn_ins": np.ndarray,
        "states": dict[str, np.ndarray],
    }

    def __init__(self, storage_unit: str, capacity: int, max_seq_len: int, burn_in: int):
        self.storage_unit, self.capacity = storage_unit, capacity
        self.max_seq_len, self.burn_in = max_seq_len, burn_in
        self.first = self.num_added = 0
        self.states: dict[str, np.ndarray] = {}
        self._first_rows = np.empty(capacity, np.int64)  # row ids
        self._lengths = np.empty(capacity, np.int64)
        self._burn_ins = np.empty(capacity, np.int64)
        self._loss_rows = 0  # rows of all items without burn-in

    def __len__(self) -> int:
        """Return the number of items."""
        return self.num_added - self.first

    # -- storing -----------------------------------------------------------------------------------

    @staticmethod
    def rows_of(batch: SampleBatch) -> SampleBatch:
        """Return the batch without the columns that have a row per sequence."""
        return batch.without_columns(*(n for n in batch if n.startswith(PER_SEQUENCE)))

    def check(self, batch: SampleBatch) -> None:
        """Check that a batch can be split into sequences or episodes.

        Raises:
            ValueError: the batch has no `eps_id`, is padded, has longer sequences than
                `max_seq_len`, lacks states, has incomplete episodes or repeated steps that would
                split a sequence, or an item exceeds the ring buffer's capacity.
        """
        if batch.zero_padded or "loss_mask" in batch:
            raise ValueError("a batch with padding or burn-in: store it as it was sampled")
        if "eps_id" not in batch:
            raise ValueError(f"{self.storage_unit} need the column eps_id, which is missing")
        if self.storage_unit == "episodes":
            names = ("eps_id", "agent_index", "t", *DONE_FLAGS)
            order = SampleBatch({n: batch[n] for n in names if n in batch})
            order = order if "seq_lens" in batch else sort_rows(order)
            lengths = _trajectory_lengths(order)
            self._check_complete(order, lengths)
        elif "seq_lens" in batch:
            lengths = batch["seq_lens"]
            rows = len(batch["eps_id"])
            if lengths.min() < 1 or lengths.sum() != rows:
                raise ValueError(
                    f"seq_lens must be at least 1 and add up to {rows} rows, got {lengths}"
                )
            if self.burn_in or lengths.max() > self.max_seq_len:
                raise ValueError(
                    f"sequences of up to {lengths.max()} rows without burn-in, where the buffer has"
                    f" max_seq_len={self.max_seq_len} and burn_in={self.burn_in}: give the buffer "
                    "the max_seq_len and burn_in of the policy's model"
                )
        else:
            lengths = np.full(1, self.max_seq_len + self.burn_in)
        if lengths.max() > self.capacity:
            raise ValueError(
                f"{self.storage_unit} of {lengths.max()} rows do not fit a capacity of "
                f"{self.capacity}"
            )
        self._check_states(batch)
        if self.storage_unit == "sequences":
            self._check_order(batch)

    def _check_order(self, batch: SampleBatch) -> None:
        """Raise ValueError if the order in which the rows are stored would split a sequence."""
        order = row_order(self.rows_of(batch))
        if order is None:
            return
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        starts, lengths, _ = self._spans(batch)
        if np.any(position[starts + lengths - 1] - position[starts] != lengths - 1):
            raise ValueError(
                "the batch has several rows of the same step of an episode, and sorting them would "
                "split a sequence: give copies of steps a new eps_id"
            )

    @staticmethod
    def _check_complete(batch: SampleBatch, lengths: np.ndarray) -> None:
        done = np.zeros(batch.count, bool)
        for flag in DONE_FLAGS:
            if flag in batch:
                done |= np.asarray(batch[flag]).astype(bool)
        last = np.cumsum(lengths) - 1
        single_agent = not ("agent_index" in batch and np.any(batch["agent_index"]))
        is_whole = True
        if "t" in batch and single_agent:
            first, final = batch["t"][last - lengths + 1], batch["t"][last]
            is_whole = bool(np.all(first == 0) and np.all(final == lengths - 1))
        # a lost life sets a done flag, although the episode continues
        has_several = "t" not in batch and done.sum() > len(last)
        if not is_whole or not done[last].all() or has_several:
            raise ValueError(
                "a batch with part of an episode for a buffer of whole episodes: sample with "
                'batch_mode="complete_episodes"'
            )

    def _check_states(self, batch: SampleBatch) -> None:
        states = {name: np.asarray(batch[name]) for name in batch if name.startswith(STATE)}
        if self.num_added and set(states) != set(self.states):
            raise ValueError(
                f"a batch with states {sorted(states)}, earlier batches had {[*self.states]}"
            )
        count = len(batch["seq_lens"]) if "seq_lens" in batch else batch.count
        for name, column in states.items():
            stored = self.states.get(name, column)
            shape, dtype = stored.shape[1:], stored.dtype
            fits = np.can_cast(column.dtype, dtype, "same_kind")
            if len(column) != count or column.shape[1:] != shape or not fits:
                raise ValueError(
                    f"{name}: expected {dtype} {[count, *shape]}, one state for each "
                    f"{'sequence' if 'seq_lens' in batch else 'row'}, got {column.dtype} "
                    f"{list(column.shape)}"
                )

    def split(self, batch: SampleBatch) -> tuple[SampleBatch, Sequences]:
        """Return the rows of a checked batch, in the order to store them, and their sequences."""
        if self.storage_unit == "episodes":
            batch = _sorted(batch)
        rows = self.rows_of(batch)
        starts, lengths, burn_ins = self._spans(batch)
        states = {n: np.asarray(batch[n]) for n in batch if n.startswith(STATE)}
        if "seq_lens" not in batch:
            states = {name: column[starts] for name, column in states.items()}
        order = row_order(rows)
        if order is not None:  # sequences stay contiguous, see `_check_order`
            rows = rows.take_rows(order)
            position = np.empty(len(order), np.int64)
            position[order] = np.arange(len(order))
            by_start = np.argsort(position[starts], kind="stable")
            starts, lengths = position[starts][by_start], lengths[by_start]
            burn_ins = burn_ins[by_start]
            states = {name: column[by_start] for name, column in states.items()}
        return rows, Sequences(starts, lengths, burn_ins, states)

    def _spans(self, batch: SampleBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return first rows, lengths, and numbers of burn-in rows; [n] each."""
        if self.storage_unit == "sequences" and "seq_lens" not in batch:
            return burn_in_spans(batch, self.max_seq_len, self.burn_in)
        episodes = self.storage_unit == "episodes"
        lengths = (
            _trajectory_lengths(batch) if episodes else np.asarray(batch["seq_lens"], np.int64)
        )
        return np.cumsum(lengths) - lengths, lengths, np.zeros_like(lengths)

    def extend(self, sequences: Sequences, first_row: int) -> None:
        """Add the sequences of rows that the ring buffer stored from row id `first_row` on."""
        starts, lengths, burn_ins, states = sequences
        items = np.arange(self.num_added, self.num_added + len(starts))
        slots = items % self.capacity
        self._first_rows[slots], self._lengths[slots] = first_row + starts, lengths
        self._burn_ins[slots] = burn_ins
        self._reserve_states(self.num_added + len(starts) - self.first, states)
        for name, column in states.items():
            self.states[name][items % len(self.states[name])] = column
        self.num_added += len(starts)
        self._loss_rows += int((lengths - burn_ins).sum())

    def _reserve_states(self, num_items: int, like: dict[str, np.ndarray]) -> None:
        """Make room for the states of this many items; double the room if there is too little.

        Args:
            num_items: number of items.
            like: state column -> array with the shape and dtype of its states.
        """
        items = np.arange(self.first, self.num_added)
        for name, column in like.items():
            old = self.states.get(name)
            if old is not None and len(old) >= min(self.capacity, num_items):
                continue
            # items beyond the capacity replace those whose rows are overwritten
            size = min(self.capacity, num_items if old is None else max(num_items, 2 * len(old)))
            new = self.states[name] = np.empty((size, *column.shape[1:]), column.dtype)
            if old is not None:
                new[items % size] = old[items % len(old)]

    def remove_before(self, oldest: int) -> None:
        """Remove the items whose first row has an id below `oldest`."""
        first = max(self.first, self.num_added - self.capacity)
        slots = np.arange(first, self.num_added) % self.capacity
        count = len(slots) - int(np.searchsorted(self._first_rows[slots], oldest))
        if count < len(self):
            self.first = self.num_added - count
            slots = slots[len(slots) - count :]
            self._loss_rows = int((self._lengths[slots] - self._burn_ins[slots]).sum())

    # -- reading -----------------------------------------------------------------------------------

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """Look up the items at slots [n].

        Returns:
            the ids of their rows, item by item; the length [n] of each item; the columns
            `seq_lens`, states and, with burn-in, `loss_mask`.
        """
        lengths = self._lengths[slots]
        row_ids, offsets = expand_runs(self._first_rows[slots], lengths)
        newest = self.num_added - 1
        items = newest - (newest - slots) % self.capacity
        columns: dict[str, Any] = {
            name: column[items % len(column)] for name, column in self.states.items()
        }
        columns["seq_lens"] = lengths.astype(np.int32)
        if self.burn_in:
            columns["loss_mask"] = offsets >= np.repeat(self._burn_ins[slots], lengths)
        return row_ids, lengths, columns

    def mean_rows(self) -> float:
        """Return the mean number of rows to learn from per item."""
        return self._loss_rows / max(len(self), 1)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all items and the settings."""
        items = np.arange(self.first, self.num_added)
        slots = items % self.capacity
        return {
            "storage_unit": self.storage_unit,
            "max_seq_len": self.max_seq_len,
            "burn_in": self.burn_in,
            "first": self.first,
            "first_rows": self._first_rows[slots],
            "lengths": self._lengths[slots],
            "burn_ins": self._burn_ins[slots],
            "states": {name: column[items % len(column)] for name, column in self.states.items()},
        }

    def load_state_dict(self, state: dict[str, Any], num_rows: int) -> None:
        """Restore the result of `state_dict` of an index with the same settings.

        Args:
            state: the state.
            num_rows: rows ever stored in the ring buffer.

        Raises:
            ValueError: the fields do not fit each other, or `num_rows`.
        """
        check_own_state(self, state)
        first_rows, lengths, burn_ins = arrays = [
            np.asarray(state[name]) for name in ("first_rows", "lengths", "burn_ins")
        ]
        count = len(first_rows)
        columns = [*arrays, *state["states"].values()]
        fits = all(len(column) == count for column in columns) and all(
            array.ndim == 1 and array.dtype.kind in "iu" for array in arrays
        )
        oldest = max(0, num_rows - self.capacity)
        fits = fits and bool(
            np.all((first_rows >= oldest) & (first_rows + lengths <= num_rows))
            and np.all((burn_ins >= 0) & (burn_ins < lengths))
        )
        if not fits:
            raise StateError(f"the sequences are not {count} sequences of {num_rows} rows")
        self.first = int(state["first"])
        self.num_added = self.first + len(state["first_rows"])
        items = np.arange(self.first, self.num_added)
        slots = items % self.capacity
        self._first_rows[slots], self._lengths[slots] = state["first_rows"], state["lengths"]
        self._burn_ins[slots] = state["burn_ins"]
        self.states = {}
        self._reserve_states(max(1, len(items)), state["states"])
        for name, column in state["states"].items():
            self.states[name][items % len(self.states[name])] = column
        self._loss_rows = int((self._lengths[slots] - self._burn_ins[slots]).sum())


def _sorted(batch: SampleBatch) -> SampleBatch:
    """Return the rows with those of each episode one after the other."""
    return batch if "seq_lens" in batch else sort_rows(batch)


def _trajectory_lengths(batch: SampleBatch) -> np.ndarray:
    """Return the lengths [n] of the consecutive rows with equal episode and agent, in the order of
    their steps."""
    lengths = sequence_lengths(
        batch.count, batch["eps_id"], None, batch.get("agent_index"), batch.get("t")
    )
    return lengths.astype(np.int64)
