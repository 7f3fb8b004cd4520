"""Ring: rows of experience in preallocated columns, the oldest overwritten first."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optree

from flowrl.data.indexed_columns import NextRows
from flowrl.data.memmap import MemmapArrays
from flowrl.data.sample_batch import SampleBatch

OBS, NEXT = SampleBatch.OBS, SampleBatch.NEXT_OBS
ENDS = ("terminateds", "truncateds")
LEFT_OUT = ("unroll_id", "env_id", "infos")  # of no use away from the fragment
REUSED_BYTES = 1 << 20  # outputs above: fresh memory costs a page fault per 4 KiB
OUTPUTS_KEPT = 4

Key = tuple[int, int]  # of a trajectory: episode and agent


class Ring:
    """The last `capacity` rows, by numbers that count up from the first row ever stored.

    An observation is stored once: that of each row, and what the last row of a trajectory led to,
    as long as the trajectory's next row is not there. Rows of a trajectory are found by the columns
    `eps_id`, `agent_index` and `t`; without them every batch stands alone.

    Args:
        capacity: rows.
        directory: keep the columns in files there; None: in memory.
    """

    def __init__(self, capacity: int, directory: Path | str | None = None):
        self.capacity = capacity
        self._mapped = None if directory is None else MemmapArrays(directory)
        self.stored = 0  # rows ever; number % capacity is a row's slot
        self.columns: dict[str, list[np.ndarray]] = {}  # name -> leaves
        self.row_bytes = 0
        self._nests: dict[str, Any] = {}
        self._kinds: list[tuple[str, Any, Any]] = []  # name; a row's shape, None of nests; dtype
        # where the observation is that a row led to: another slot, or a spare place beyond them
        self._following = np.empty(capacity, np.int64)
        self._spare = np.arange(2 * capacity - 1, capacity - 1, -1)
        self._num_spare = capacity
        self._most_spare = 0  # places that were ever taken
        self._open: dict[Key, tuple[int, int]] = {}  # trajectory -> last step, its row
        self._outputs: dict[tuple[str, int], list[np.ndarray]] = {}

    @property
    def rows(self) -> int:
        """Rows that are there."""
        return min(self.stored, self.capacity)

    # -- storing -----------------------------------------------------------------------------------

    @staticmethod
    def names_of(batch: SampleBatch) -> set[str]:
        """The columns of a batch that are stored."""
        return {name for name in batch if name not in LEFT_OUT and not batch.is_lazy(name)}

    def check(self, batch: SampleBatch) -> None:
        """Refuse rows that cannot be stored with those that are there; columns that the first ones
        did not have are left out.

        Raises:
            ValueError: a column is missing, or of another shape or kind; the rows are sequences.
        """
        if not self.columns:
            names = self.names_of(batch)
            if OBS not in names or NEXT not in names:
                raise ValueError(f"a batch without obs and new_obs: it has {sorted(names)}")
            recurrent = sorted(n for n in names if n == "seq_lens" or n.startswith("state_in_"))
            if recurrent:
                raise ValueError(
                    f"a batch of sequences, with {', '.join(recurrent)}: rows are drawn one by one "
                    'here; for policies that remember give the buffer storage_unit="sequences"'
                )
            self._check_first(batch, names)
            for name in names if self._mapped is not None else ():
                leaves: Any = optree.tree_leaves(batch[name])
                if any(leaf.dtype.hasobject for leaf in leaves):
                    raise ValueError(
                        f"column {name!r} holds objects, which files cannot: leave it out"
                    )
            return
        for name, shape, dtype in self._kinds:
            column = dict.get(batch, name)
            if column is None:
                raise ValueError(
                    f"a batch without {name!r}, which those stored before had: it has "
                    f"{sorted(self.names_of(batch))}"
                )
            if shape is None:
                self._check_nest(name, column)
                continue
            if type(column) is NextRows and name == NEXT:
                continue  # rows like those of obs, to which it belongs
            given = column.dtype
            alike = column.shape[1:] == shape if shape else column.ndim == 1
            if not alike or (given is not dtype and not np.can_cast(given, dtype, "same_kind")):
                raise ValueError(
                    f"column {name!r} has rows of {given} {list(column.shape[1:])}, those stored "
                    f"before {dtype} {list(shape)}"
                )

    @staticmethod
    def _check_first(batch: SampleBatch, names: set[str]) -> None:
        """Refuse a first batch that says by itself that it cannot be stored."""
        for name in names & {*ENDS, "eps_id", "t", "agent_index", "rewards"}:
            column = np.asarray(batch[name])
            kinds = "b" if name in ENDS else "fiu" if name == "rewards" else "iu"
            if column.ndim != 1 or column.dtype.kind not in kinds:
                told = {"b": "booleans", "iu": "whole numbers", "fiu": "numbers"}[kinds]
                raise ValueError(
                    f"column {name!r}: {told} [rows] are needed, got {column.dtype} "
                    f"{list(column.shape)}"
                )
        nests = [optree.tree_structure(batch[name]) for name in (OBS, NEXT)]
        leaves: list[Any] = [optree.tree_leaves(batch[name]) for name in (OBS, NEXT)]
        if nests[0] != nests[1] or any(
            one.shape[1:] != other.shape[1:] or not np.can_cast(other.dtype, one.dtype, "same_kind")
            for one, other in zip(*leaves, strict=True)
        ):
            raise ValueError("new_obs are of another shape or kind than obs")
        for name in names - {NEXT}:
            if _structure(_skeleton(_nest_of(batch[name]))) != _nest_of(batch[name]):
                raise ValueError(
                    f"column {name!r}: nested columns are plain dicts and tuples of arrays"
                )

    def _check_nest(self, name: str, column: Any) -> None:
        own = OBS if name == NEXT else name
        same = optree.tree_structure(column) == self._nests[own]
        leaves: Any = optree.tree_leaves(column) if same else ()
        pairs = zip(leaves, self.columns[own], strict=False)
        if not same or any(
            leaf.shape[1:] != have.shape[1:] or not np.can_cast(leaf.dtype, have.dtype, "same_kind")
            for leaf, have in pairs
        ):
            raise ValueError(f"column {name!r} is nested otherwise than in those stored before")

    def extend(self, batches: Sequence[SampleBatch], counts: Sequence[int]) -> None:
        """Store the rows of batches that `check` lets pass; `counts` says how many each has."""
        room = self.capacity - self.stored % self.capacity
        piece: list[SampleBatch] = []
        sizes: list[int] = []
        for batch, count in zip(batches, counts, strict=True):
            if count <= room:
                piece.append(batch)
                sizes.append(count)
                room -= count
                continue
            self._write(piece, sizes)
            piece, sizes, batch = [], [], in_order(batch)
            while count > room:  # up to the last slot, and on in the first one
                if room:
                    self._write([batch[:room]], [room])
                    batch, count = batch[room:], count - room
                room = self.capacity
            self._write([batch], [count])  # alone: a part is not linked as whole ones are
            room -= count
        self._write(piece, sizes)

    def replace(self, batch: SampleBatch, slots: np.ndarray) -> None:
        """Put rows into these slots [rows]; each has what it led to beside it, none is linked."""
        if not self.columns:
            self._allocate(batch)
        for at in slots if self._mapped is not None else ():
            self._reserve(int(at), 1, int(at) + 1)
        for name, leaves in self.columns.items():
            given: Any = optree.tree_leaves(batch[name])
            for leaf, column in zip(leaves, given, strict=True):
                leaf[slots] = column
        following: Any = optree.tree_leaves(batch[NEXT])
        for leaf, column in zip(self.columns[OBS], following, strict=True):
            leaf[self.capacity + slots] = column
        self._following[slots] = self.capacity + slots
        self.stored = max(self.stored, int(slots.max()) + 1)

    def _write(self, batches: list[SampleBatch], counts: list[int]) -> None:
        """Store rows that fit between the next slot and the last one."""
        count = sum(counts)
        if not count:
            return
        if not self.columns:
            self._allocate(batches[0])
        batches, ends, last = linked(batches, counts)
        first, start = self.stored, self.stored % self.capacity
        if self._mapped is not None:
            self._reserve(start, count, self.capacity - self._num_spare + len(ends))
        for name, leaves in self.columns.items():
            parts: Any = [list(map(dict.__getitem__, batches, itertools.repeat(name)))]
            if self._nests[name] is not None:
                given = (optree.tree_leaves(batch[name]) for batch in batches)
                parts = zip(*given, strict=True)
            for leaf, part in zip(leaves, parts, strict=True):
                np.concatenate(part, out=leaf[start : start + count])
        self._release(start, start + count)
        self.stored += count
        self._following[start : start + count] = np.arange(start + 1, start + count + 1)
        self._num_spare -= len(ends)
        places = self._spare[self._num_spare : self._num_spare + len(ends)].copy()
        self._following[start + ends] = places
        for leaf, observations in zip(self.columns[OBS], last, strict=True):
            leaf[places] = observations
        if "eps_id" in self.columns and "t" in self.columns:
            self._go_on(first, ends)

    def _allocate(self, batch: SampleBatch) -> None:
        """Memory for columns like a batch's; a page of it is taken when it is first written."""
        columns, nests = {}, {}
        for name in sorted(self.names_of(batch) - {NEXT}):
            column = batch[name]
            nests[name] = _nest_of(column)
            rows = 2 * self.capacity if name == OBS else self.capacity
            leaves: Any = optree.tree_leaves(column)
            columns[name] = [self._memory(rows, leaf) for leaf in leaves]
        self.columns, self._nests = columns, nests
        self._describe()

    def _memory(self, rows: int, like: np.ndarray) -> np.ndarray:
        """Room for so many rows like those of an array."""
        empty = np.empty if self._mapped is None else self._mapped.empty
        try:
            return empty((rows, *like.shape[1:]), like.dtype)
        except MemoryError as error:
            raise MemoryError(
                f"a replay buffer of {self.capacity} rows: {error}. Make its capacity "
                "(replay_buffer_capacity) smaller, or keep it in files (replay_buffer_dir)"
            ) from error

    def _reserve(self, start: int, count: int, spare: int) -> None:
        """Take room on the disk for rows at these slots, and for so many spare places."""
        assert self._mapped is not None
        more = range(self._most_spare, spare)
        for name, leaves in self.columns.items():
            for leaf in leaves:
                if self.stored < self.capacity:
                    self._mapped.reserve(leaf, start, count)
                if name == OBS:
                    self._mapped.reserve(leaf, self.capacity + more.start, len(more))
        self._most_spare = max(self._most_spare, spare)

    def _describe(self) -> None:
        """Note what `check` and others want to know of the columns."""
        every = [leaf for leaves in self.columns.values() for leaf in leaves]
        self.row_bytes = sum(leaf.strides[0] for leaf in every)
        self._kinds = [
            (name, leaves[0].shape[1:] if self._nests[own] is None else None, leaves[0].dtype)
            for own, leaves in self.columns.items()
            for name in ((OBS, NEXT) if own == OBS else (own,))
        ]

    def _release(self, start: int, stop: int) -> None:
        """Rows at these slots are to be overwritten: the places of what they led to are free."""
        if self.stored < self.capacity:
            return
        if start == 0:  # once in a while
            oldest = self.stored - self.capacity
            self._open = {key: end for key, end in self._open.items() if end[1] >= oldest}
        places = self._following[start:stop]
        self._give_back(places[places >= self.capacity])

    def _give_back(self, places: np.ndarray) -> None:
        """These spare places [n] are free again."""
        self._spare[self._num_spare : self._num_spare + len(places)] = places
        self._num_spare += len(places)

    def _go_on(self, first: int, ends: np.ndarray) -> None:
        """Join the parts of trajectories that end at `ends` of the rows from `first` on with each
        other, and with what was there of them before."""
        if len(ends) == 1:  # as in short fragments of one environment
            end = first + int(ends[0])
            self._join_earlier(first)
            if not any(self.columns[f][0][end % self.capacity] for f in ENDS if f in self.columns):
                self._leave_open(end)
            return
        begins = np.empty_like(ends)
        begins[0] = 0
        begins[1:] = ends[:-1] + 1
        at_begin, at_end = begins + first % self.capacity, ends + first % self.capacity
        steps = self.columns["t"][0]
        since, until = steps.take(at_begin), steps.take(at_end)
        names = [name for name in ("agent_index", "eps_id") if name in self.columns]
        whose = [self.columns[name][0].take(at_end) for name in names]
        goes_on = np.ones(len(ends), bool)
        for flag in ENDS:
            if flag in self.columns:
                goes_on &= ~self.columns[flag][0].take(at_end)
        order = np.lexsort((since, *whose))
        one, next_one = order[:-1], order[1:]
        joined = goes_on[one] & (since[next_one] == until[one] + 1)
        for key in whose:
            joined &= key[one] == key[next_one]
        joined &= next_one > one  # what is overwritten first cannot be led to
        one, next_one = one[joined], next_one[joined]
        rows = at_end[one]
        self._give_back(self._following[rows])
        self._following[rows] = at_begin[next_one]
        goes_on[one] = False
        begun = since > 0
        begun[next_one] = False
        for i in (goes_on | begun).nonzero()[0].tolist():
            if begun[i]:
                self._join_earlier(first + int(begins[i]))
            if goes_on[i]:
                self._leave_open(first + int(ends[i]))

    def _join_earlier(self, begin: int) -> None:
        """Join a row that begins a part of a trajectory with the part before it."""
        at = begin % self.capacity
        step = self.columns["t"][0][at]
        before = self._open.pop(self._key(at), None)
        if before is not None and before[0] < step:
            self._join(before[1], begin, sure=before[0] + 1 == step)

    def _leave_open(self, end: int) -> None:
        """Note a row that ends a part of a trajectory of which more may come."""
        at = end % self.capacity
        self._open[self._key(at)] = int(self.columns["t"][0][at]), end

    def _key(self, slot: int) -> Key:
        agents = self.columns.get("agent_index")
        return int(self.columns["eps_id"][0][slot]), int(agents[0][slot]) if agents else 0

    def _join(self, row: int, successor: int, sure: bool) -> None:
        """`successor` is what `row` led to, if that is still there. Where steps lie between (others
        acted, or rows were lost) their observations must agree; a running normalisation may have
        moved on, so elsewhere they need not."""
        if row < self.stored - self.capacity:
            return
        slot, at = row % self.capacity, successor % self.capacity
        place = int(self._following[slot])
        if sure or all(np.array_equal(leaf[place], leaf[at]) for leaf in self.columns[OBS]):
            self._following[slot] = at
            self._spare[self._num_spare] = place
            self._num_spare += 1

    # -- reading -----------------------------------------------------------------------------------

    def path(self, slots: np.ndarray, steps: int) -> np.ndarray:
        """Slots [steps, n] of the rows at slots [n] and those after them in their trajectories;
        where there is none, the last one is repeated."""
        path = np.empty((steps, len(slots)), np.int64)
        path[0] = slots
        for t in range(1, steps):
            following = self._following.take(path[t - 1], mode="clip")
            path[t] = np.where(following < self.capacity, following, path[t - 1])
        return path

    def read(
        self, slots: np.ndarray, ends: np.ndarray | None = None, **more: np.ndarray
    ) -> SampleBatch:
        """The rows at slots [n], copied.

        Args:
            ends: slots [n] of the rows whose `new_obs`, `terminateds` and `truncateds` are meant,
                if not those themselves.
            more: columns [n] to be added, or instead.
        """
        made: dict[str, Any] = {}
        ends = slots if ends is None else ends
        for name in self.columns:
            if name not in more:
                made[name] = self._taken(name, ends if name in ENDS else slots)
        made[NEXT] = self._taken(OBS, self._following.take(ends, mode="clip"), NEXT)
        made.update(more)
        return SampleBatch.unchecked(made)

    def _taken(self, name: str, at: np.ndarray, called: str = "") -> Any:
        leaves, nest = self.columns[name], self._nests[name]
        if nest is None:
            return self._out(called or name, 0, leaves[0], at)
        taken = [self._out(called or name, i, leaf, at) for i, leaf in enumerate(leaves)]
        return optree.tree_unflatten(nest, taken)

    def _out(self, name: str, number: int, leaf: np.ndarray, at: np.ndarray) -> np.ndarray:
        """leaf[at]; large ones in memory that an earlier reader has given up."""
        if leaf.strides[0] * len(at) < REUSED_BYTES:
            return leaf.take(at, 0, mode="clip")
        shape = (len(at), *leaf.shape[1:])
        kept = self._outputs.setdefault((name, number), [])
        if kept and kept[0].shape != shape:
            kept.clear()
        for out in kept:
            if sys.getrefcount(out) == 3:  # held by `kept`, `out` and the call alone
                return leaf.take(at, 0, out=out, mode="clip")
        del kept[: max(0, len(kept) - OUTPUTS_KEPT + 1)]
        kept.append(leaf.take(at, 0, mode="clip"))
        return kept[-1]

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that is there, each observation once; of columns in files views, to be written before
        more rows are stored."""
        rows, following = self.rows, self._following[: self.rows]
        places = following[following >= self.capacity]
        return {
            "capacity": self.capacity,
            "stored": self.stored,
            "columns": {
                name: [leaf[:rows] if self._mapped else leaf[:rows].copy() for leaf in leaves]
                for name, leaves in self.columns.items()
            },
            "nests": {name: _skeleton(nest) for name, nest in self._nests.items()},
            "following": following.copy(),
            "ends": [leaf[places] for leaf in self.columns.get(OBS, [])],
            "open": [[*key, *end] for key, end in self._open.items()],
        }

    def __getstate__(self) -> dict[str, Any]:
        own = dict(vars(self), _outputs={})
        if self._mapped is not None:  # a copy has files of its own
            own |= {"_mapped": self._mapped.directory, "columns": {}, "copied": self.state_dict()}
        return own

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = state.pop("copied", None)
        vars(self).update(state)
        if copied is not None:
            self._mapped = MemmapArrays(state["_mapped"])
            self.load_state_dict(copied)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, of a ring of the same capacity.

        Raises:
            ValueError: it is of one of another capacity; nothing is changed.
        """
        if int(state["capacity"]) != self.capacity:
            raise ValueError(
                f"a state of a buffer of capacity {state['capacity']} for one of {self.capacity}: "
                "give the buffer the capacity that it had"
            )
        made = Ring(self.capacity, self._mapped.directory if self._mapped else None)
        stored, following = int(state["stored"]), np.asarray(state["following"], np.int64)
        rows, places = len(following), following[following >= self.capacity]
        for name, leaves in state["columns"].items():
            size = 2 * self.capacity if name == OBS else self.capacity
            made.columns[name] = [made._memory(size, leaf) for leaf in leaves]
        if made._mapped is not None:
            made._reserve(0, rows, int(places.max(initial=self.capacity - 1)) + 1 - self.capacity)
        made.stored = stored
        for name, leaves in state["columns"].items():
            for own, leaf in zip(made.columns[name], leaves, strict=True):
                own[:rows] = leaf
        made._nests = {name: _structure(nest) for name, nest in state["nests"].items()}
        if made.columns:
            made._describe()
        made._following[:rows] = following
        for leaf, observations in zip(made.columns.get(OBS, []), state["ends"], strict=True):
            leaf[places] = observations
        free = np.setdiff1d(np.arange(self.capacity, 2 * self.capacity), places)
        made._spare[: len(free)] = free[::-1]
        made._num_spare = len(free)
        made._open = {(e, a): (step, row) for e, a, step, row in state["open"]}
        vars(self).update(vars(made))


def linked(
    batches: list[SampleBatch], counts: list[int]
) -> tuple[list[SampleBatch], np.ndarray, list[np.ndarray]]:
    """Rows in an order in which each leads to the next one, but for the ends of trajectories.

    Returns:
        the batches; the numbers [k] of the rows, of all batches together, whose successor is not
        among them; what those led to, one array [k, …] for each leaf of the observations.
    """
    following = list(map(dict.__getitem__, batches, itertools.repeat(NEXT)))
    observed = list(map(dict.__getitem__, batches, itertools.repeat(OBS)))
    if set(map(type, following)) == {NextRows} and set(map(type, observed)) == {np.ndarray}:
        bases = [rows.base for rows in following]
        if all(obs.base is base for obs, base in zip(observed, bases, strict=True)):
            # as samplers make them
            cuts = [rows.cuts for rows in following]
            finals = [base[count:] for base, count in zip(bases, counts, strict=True)]
            if len(batches) == 1:
                return batches, cuts[0], finals
            ends = np.concatenate(cuts)
            ends += np.repeat(np.cumsum(counts) - counts, [len(own) for own in cuts])
            return batches, ends, [np.concatenate(finals)]
    made = [_linked(batch) for batch in batches]
    starts = itertools.accumulate(counts, initial=0)
    every = np.concatenate([end + start for (_, end, _), start in zip(made, starts, strict=False)])
    last = [np.concatenate(parts) for parts in zip(*(own for _, _, own in made), strict=True)]
    return [batch for batch, _, _ in made], every, last


def order_of(batch: SampleBatch) -> np.ndarray | None:
    """The order [rows] that puts the rows of a trajectory one after another, in order of time, as
    far as it is known; None if they lie so."""
    if "eps_id" not in batch or "t" not in batch:
        return None
    agents = _agents(batch)
    order: np.ndarray = np.lexsort((batch["t"], agents, batch["eps_id"]))
    same = _same(batch["eps_id"], agents)
    in_pieces = same.sum() < _same(batch["eps_id"][order], agents[order]).sum()
    backwards = (np.diff(batch["t"])[same] <= 0).any()
    return order if in_pieces or backwards else None


def in_order(batch: SampleBatch) -> SampleBatch:
    """The rows with those of a trajectory one after another, in order of time, if it is known."""
    order = order_of(batch)
    return batch if order is None else batch.take_rows(order)


def _agents(batch: SampleBatch) -> np.ndarray:
    agents: np.ndarray = (
        batch["agent_index"] if "agent_index" in batch else np.zeros(batch.count, np.int64)
    )
    return agents


def _linked(batch: SampleBatch) -> tuple[SampleBatch, np.ndarray, list[np.ndarray]]:
    """`linked` for any one batch."""
    batch = in_order(batch)
    follows = np.zeros(batch.count, bool)  # row i + 1 is what row i led to
    if "eps_id" in batch and "t" in batch:
        follows[:-1] = _same(batch["eps_id"], _agents(batch)) & (np.diff(batch["t"]) > 0)
        for flag in ENDS:
            if flag in batch:
                follows[:-1] &= ~batch[flag][:-1]
    observations: Any = optree.tree_leaves(batch[OBS])
    following: Any = optree.tree_leaves(batch[NEXT])
    for now, then in zip(observations, following, strict=True):
        rows = np.flatnonzero(follows)
        equal = now[rows + 1] == then[rows]
        follows[rows[~equal.all(tuple(range(1, equal.ndim)))]] = False
    ends = np.flatnonzero(~follows)
    return batch, ends, [leaf[ends] for leaf in following]


def _same(episodes: np.ndarray, agents: np.ndarray) -> np.ndarray:
    """Whether a row and the next one are of the same trajectory, [rows - 1]."""
    same: np.ndarray = (np.diff(episodes) == 0) & (np.diff(agents) == 0)
    return same


def _nest_of(column: Any) -> Any:
    """The structure of a column; None for a plain array."""
    return None if isinstance(column, np.ndarray) else optree.tree_structure(column)


def _skeleton(nest: Any) -> Any:
    """A structure of dicts and tuples as JSON; None for a plain array's."""
    if nest is None:
        return None
    return _parts(optree.tree_unflatten(nest, [None] * nest.num_leaves))


def _parts(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {"dict": {key: _parts(part) for key, part in tree.items()}}
    return {"tuple": [_parts(part) for part in tree]} if isinstance(tree, tuple) else "leaf"


def _structure(skeleton: Any) -> Any:
    return None if skeleton is None else optree.tree_structure(_tree(skeleton))


def _tree(skeleton: Any) -> Any:
    if skeleton == "leaf":
        return 0
    if "dict" in skeleton:
        return {key: _tree(part) for key, part in skeleton["dict"].items()}
    return tuple(_tree(part) for part in skeleton["tuple"])
