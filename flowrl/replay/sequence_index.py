"""SequenceIndex: runs of rows that are drawn from a replay buffer as one, sequences or episodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.data.sample_batch import SampleBatch
from flowrl.data.sequences import burn_in_spans, expand_runs, sequence_lengths
from flowrl.replay.ring_buffer import ENDS, order_of

STATE = "state_in_"


class SequenceIndex:
    """The runs of rows in a ring that can be drawn, by numbers that count up.

    A unit is gone when the first of its rows is. Sequences share the rows of their burn-in with the
    one before; states are kept for the first row of each alone.

    Args:
        kind: "sequences" or "episodes".
        capacity: rows of the ring.
        max_seq_len: rows to learn from in a sequence, at most.
        burn_in: rows before those, as many of them as there are in the same fragment.
    """

    def __init__(self, kind: str, capacity: int, max_seq_len: int, burn_in: int):
        self.kind, self.capacity = kind, capacity
        self.max_seq_len, self.burn_in = max_seq_len, burn_in
        self.first = self.stored = 0  # the oldest that is there; ever
        self._begins = np.empty(capacity, np.int64)  # the number of a unit's first row
        self._lengths = np.empty(capacity, np.int64)
        self._heads = np.empty(capacity, np.int64)  # rows that are burn-in
        self.states: dict[str, np.ndarray] = {}
        self._to_learn = 0  # rows of all units that are there, without burn-in

    def __len__(self) -> int:
        return self.stored - self.first

    # -- storing -----------------------------------------------------------------------------------

    def rows_of(self, batch: SampleBatch) -> SampleBatch:
        """The batch without what is of sequences, not of rows."""
        return batch.without_columns(*(n for n in batch if n == "seq_lens" or n.startswith(STATE)))

    def check(self, batch: SampleBatch) -> None:
        """Refuse a batch without such units.

        Raises:
            ValueError: it has no `eps_id`; it is padded; its sequences are longer than
                `max_seq_len`, or without the states that are needed; episodes are not whole; a unit
                is larger than the ring.
        """
        if batch.zero_padded or "loss_mask" in batch:
            raise ValueError("a batch with padding or burn-in: store it as it was sampled")
        if "eps_id" not in batch:
            raise ValueError(f"{self.kind} are found by the column eps_id, which is missing")
        if self.kind == "episodes":
            lengths = self._trajectories(batch)
            ended = np.zeros(batch.count, bool)
            for flag in ENDS:
                if flag in batch:
                    ended |= np.asarray(batch[flag]).astype(bool)
            last = np.cumsum(lengths) - 1
            single = not ("agent_index" in batch and np.any(batch["agent_index"]))
            begun = "t" in batch and single and np.any(batch["t"][last - lengths + 1])
            if begun or not ended[last].all() or ended.sum() > len(last):
                raise ValueError(
                    "a batch with a part of an episode, where whole ones are stored: sample with "
                    'batch_mode="complete_episodes"'
                )
        elif "seq_lens" in batch:
            lengths = batch["seq_lens"]
            if self.burn_in or lengths.max() > self.max_seq_len:
                raise ValueError(
                    f"sequences of up to {lengths.max()} rows without burn-in, where the buffer has"
                    f" max_seq_len={self.max_seq_len} and burn_in={self.burn_in}: give the buffer "
                    "and the policy's model the same"
                )
        else:
            lengths = np.full(1, self.max_seq_len + self.burn_in)
        if lengths.max() > self.capacity:
            raise ValueError(
                f"{self.kind} of {lengths.max()} rows do not fit a capacity of {self.capacity}"
            )
        self._check_states(batch)

    def _check_states(self, batch: SampleBatch) -> None:
        states = {name: np.asarray(batch[name]) for name in batch if name.startswith(STATE)}
        if self.stored and set(states) != set(self.states):
            raise ValueError(f"a batch with {sorted(states)}, those before had {[*self.states]}")
        count = len(batch["seq_lens"]) if "seq_lens" in batch else batch.count
        for name, column in states.items():
            have = self.states.get(name, column)
            shape, dtype = have.shape[1:], have.dtype
            fits = np.can_cast(column.dtype, dtype, "same_kind")
            if len(column) != count or column.shape[1:] != shape or not fits:
                raise ValueError(
                    f"{name}: {dtype} {[count, *shape]} are needed, a state for each "
                    f"{'sequence' if 'seq_lens' in batch else 'row'}, got {column.dtype} "
                    f"{list(column.shape)}"
                )

    def extend(self, batch: SampleBatch, first: int) -> SampleBatch:
        """Note the units of a batch whose rows get the numbers from `first` on; the rows, in the
        order in which they are to be stored."""
        rows = self.rows_of(batch)
        starts, lengths, heads = self._spans(batch)
        per_sequence = "seq_lens" in batch
        states = {n: np.asarray(batch[n]) for n in batch if n.startswith(STATE)}
        if not per_sequence:
            states = {name: column[starts] for name, column in states.items()}
        order = order_of(rows)
        if order is not None:  # runs stay runs: they are of one trajectory, in order of time
            rows = rows.take_rows(order)
            where = np.empty(len(order), np.int64)
            where[order] = np.arange(len(order))
            by = np.argsort(where[starts], kind="stable")
            starts, lengths, heads = where[starts][by], lengths[by], heads[by]
            states = {name: column[by] for name, column in states.items()}
        if not self.states:
            self.states = {
                n: np.empty((self.capacity, *c.shape[1:]), c.dtype) for n, c in states.items()
            }
        at = np.arange(self.stored, self.stored + len(starts)) % self.capacity
        self._begins[at], self._lengths[at], self._heads[at] = first + starts, lengths, heads
        for name, column in states.items():
            self.states[name][at] = column
        self.stored += len(starts)
        self._to_learn += int((lengths - heads).sum())
        return rows

    def _spans(self, batch: SampleBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """First rows [units], lengths, and how many of those rows are burn-in."""
        if self.kind == "sequences" and "seq_lens" not in batch:
            return burn_in_spans(batch, self.max_seq_len, self.burn_in)
        whole = self.kind == "episodes"
        lengths = self._trajectories(batch) if whole else np.asarray(batch["seq_lens"], np.int64)
        return np.cumsum(lengths) - lengths, lengths, np.zeros_like(lengths)

    @staticmethod
    def _trajectories(batch: SampleBatch) -> np.ndarray:
        lengths = sequence_lengths(batch.count, batch["eps_id"], None, batch.get("agent_index"))
        return lengths.astype(np.int64)

    def mark(self) -> tuple[int, int]:
        """What there is, for `forget_since`."""
        return self.stored, self._to_learn

    def forget_since(self, there: tuple[int, int]) -> None:
        """Those noted since then are not there: their rows could not be stored."""
        self.stored, self._to_learn = there

    def forget(self, oldest: int) -> None:
        """The rows before the number `oldest` are gone."""
        there = np.arange(max(self.first, self.stored - self.capacity), self.stored) % self.capacity
        count = len(there) - int(np.searchsorted(self._begins[there], oldest))
        if count < len(self):
            self.first = self.stored - count
            there = there[len(there) - count :]
            self._to_learn = int((self._lengths[there] - self._heads[there]).sum())

    # -- reading -----------------------------------------------------------------------------------

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """Of the units at slots [n]: the numbers of their rows, one unit after another; how long
        each is; and the columns of sequences."""
        lengths = self._lengths[slots]
        numbers, within = expand_runs(self._begins[slots], lengths)
        columns: dict[str, Any] = {name: column[slots] for name, column in self.states.items()}
        columns["seq_lens"] = lengths.astype(np.int32)
        if self.burn_in:
            columns["loss_mask"] = within >= np.repeat(self._heads[slots], lengths)
        return numbers, lengths, columns

    def mean_rows(self) -> float:
        """Rows to learn from in a unit, on average."""
        return self._to_learn / max(len(self), 1)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        at = np.arange(self.first, self.stored) % self.capacity
        return {
            "storage_unit": self.kind,
            "max_seq_len": self.max_seq_len,
            "burn_in": self.burn_in,
            "first": self.first,
            "begins": self._begins[at],
            "lengths": self._lengths[at],
            "heads": self._heads[at],
            "states": {name: column[at] for name, column in self.states.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = int(state["first"])
        self.stored = self.first + len(state["begins"])
        at = np.arange(self.first, self.stored) % self.capacity
        self._begins[at], self._lengths[at] = state["begins"], state["lengths"]
        self._heads[at] = state["heads"]
        self.states = {}
        for name, column in state["states"].items():
            self.states[name] = np.empty((self.capacity, *column.shape[1:]), column.dtype)
            self.states[name][at] = column
        self._to_learn = int((self._lengths[at] - self._heads[at]).sum())
