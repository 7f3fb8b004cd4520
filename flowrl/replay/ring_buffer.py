"""RingBuffer: rows of experience in preallocated columns; new rows overwrite the oldest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import optree

from flowrl.data.columns import FLAT_KINDS
from flowrl.data.indexed_columns import NOTHING
from flowrl.data.memmap import MemmapArrays
from flowrl.data.sample_batch import SampleBatch
from flowrl.replay.frame_table import FrameTable, Stacks, is_stacked, stacks_of
from flowrl.replay.output_pool import OutputPool
from flowrl.replay.schema import (
    DONE_FLAGS,
    NEXT_OBS,
    OBS,
    ColumnSchema,
    check_first_batch,
    stored_names,
    treespec_from_json,
    treespec_of,
    treespec_to_json,
)
from flowrl.replay.trajectories import (
    LinkRule,
    SuccessorTable,
    sort_rows,
    split_final_observations,
)
from flowrl.state_schema import Fields, Natural, check_own_state

_ANY_KIND = "biufScO"
POOLED_BYTES = 1 << 20  # outputs of at least this size reuse memory


class RingBuffer:
    """The last `capacity` rows, by row ids that count up from the first row ever stored.

    Each observation is stored once: `new_obs` of a row is the observation of the trajectory's next
    row or, while that is not stored, one in a separate slot (see `SuccessorTable`). Of observations
    that are stacks of frames, each frame is stored once (see `FrameTable`). Trajectories are found
    by the columns `eps_id`, `agent_index` and `t`; without `eps_id` and `t`, rows are not linked.

    Args:
        capacity: maximum number of rows.
        directory: keep the columns in files of this folder; None: in memory.
        links: see ReplayBuffer.

    Attributes:
        num_added: rows ever stored; after `replace`, the number of slots in use.
        columns: name -> leaves [slots, …]; `obs` has 2 * capacity slots, and is missing if a
            FrameTable has the observations.
        row_bytes: bytes of a row.
    """

    state_fields: ClassVar[Fields] = {
        "capacity": Natural,
        "num_added": Natural,
        "columns": dict[str, list[np.ndarray]],
        "treespecs": dict[str, Any],
        "successors": dict[str, Any],
        "final_observations": list[np.ndarray],
    }

    def __init__(
        self, capacity: int, directory: Path | str | None = None, links: LinkRule = "equal"
    ):
        self.capacity = capacity
        self.num_added = 0
        self.columns: dict[str, list[np.ndarray]] = {}
        self.row_bytes = 0
        self._files = None if directory is None else MemmapArrays(directory)
        self._schema: ColumnSchema | None = None
        self._link_rule = links
        self._successors = SuccessorTable(capacity)
        self._frames: FrameTable | None = None
        self._reserved_final = 0  # final slots with reserved disk space
        self._outputs: dict[tuple[str, int], OutputPool] = {}

    def __len__(self) -> int:
        """Return the number of stored rows."""
        return min(self.num_added, self.capacity)

    @property
    def directory(self) -> Path | None:
        """Folder of the files; None: in memory."""
        return self._files.directory if self._files is not None else None

    # -- storing -----------------------------------------------------------------------------------

    def check(self, batch: SampleBatch) -> None:
        """Check that a batch can be stored; columns that the first batch lacked are ignored.

        Raises:
            ValueError: a column is missing or has another shape or dtype, or the rows are
                sequences.
        """
        if self._schema is None:
            check_first_batch(batch, in_files=self._files is not None)
        else:
            self._schema.check(batch)

    def extend(self, batches: Sequence[SampleBatch], counts: Sequence[int]) -> None:
        """Store the rows of checked batches.

        Args:
            batches: the batches.
            counts: rows of each batch.
        """
        room = self.capacity - self.num_added % self.capacity  # slots before the wrap-around
        pending: list[SampleBatch] = []
        sizes: list[int] = []
        for batch, count in zip(batches, counts, strict=True):
            if count <= room:
                pending.append(batch)
                sizes.append(count)
                room -= count
                continue
            self._write(pending, sizes)
            pending, sizes, batch = [], [], sort_rows(batch)
            while count > room:
                if room:
                    self._write([batch[:room]], [room])
                    batch, count = batch[room:], count - room
                room = self.capacity
            self._write([batch], [count])  # separately: a slice of a batch has no NextRows
            room -= count
        self._write(pending, sizes)

    def replace(self, batch: SampleBatch, slots: np.ndarray) -> None:
        """Store rows in these slots [rows], each with its own next observation."""
        if self._schema is None:
            self._allocate(batch)
        # of rows for the same slot, the last one stays
        kept, at = np.unique(slots[::-1], return_index=True)
        # before any row changes, because it may raise
        rows = [] if self._frames is None else [batch.take_rows(len(slots) - 1 - at)]
        stacks = self._prepare_stacks(rows)
        for name, leaves in self.columns.items():
            new_leaves: Any = optree.tree_leaves(batch[name])
            for leaf, new_leaf in zip(leaves, new_leaves, strict=True):
                leaf[slots] = new_leaf
        final_slots = self._successors.isolate(slots)
        if self._frames is not None:
            self._frames.write(kept, stacks[0])
        else:
            next_leaves: Any = optree.tree_leaves(batch[NEXT_OBS])
            for leaf, next_leaf in zip(self.columns[OBS], next_leaves, strict=True):
                leaf[final_slots] = next_leaf
        self.num_added = max(self.num_added, int(slots.max()) + 1)

    def _write(self, batches: list[SampleBatch], counts: list[int]) -> None:
        """Store rows that fit between the next slot and the last one."""
        count = sum(counts)
        if not count:
            return
        if self._schema is None:
            self._allocate(batches[0])
        stacked = self._frames is not None
        batches, ends, final_leaves = split_final_observations(batches, counts, stacked)
        stacks = self._prepare_stacks(batches)
        first, start = self.num_added, self.num_added % self.capacity
        if self._files is not None:
            self._reserve(start, count, self.capacity - self._successors.num_free + len(ends))
        assert self._schema is not None
        for name, leaves in self.columns.items():
            parts: Any = [list(map(dict.__getitem__, batches, itertools.repeat(name)))]
            if self._schema.treespecs[name] is not None:
                parts = zip(*(optree.tree_leaves(batch[name]) for batch in batches), strict=True)
            for leaf, part in zip(leaves, parts, strict=True):
                np.concatenate(part, out=leaf[start : start + count])
        self.num_added += count
        final_slots = self._successors.append(first, count, ends)
        if self._frames is not None:
            at = start
            for batch_stacks in stacks:
                rows = np.arange(at, at + len(batch_stacks.inverse))
                self._frames.write(rows, batch_stacks)
                at += len(rows)
        else:
            for leaf, observations in zip(self.columns[OBS], final_leaves, strict=True):
                leaf[final_slots] = observations
        if self._link_rule != "never" and "eps_id" in self.columns and "t" in self.columns:
            links = self._successors.link(
                self.columns,
                first,
                ends,
                oldest=self.num_added - self.capacity,
                continues=self._continues,
                across_changes=self._link_rule == "consecutive",
            )
            if self._frames is not None:
                for last, following in links:
                    path = self.path(np.array([following]), self._frames.stack[0])
                    self._frames.share(last, path[:, 0])

    def _prepare_stacks(self, batches: list[SampleBatch]) -> list[Stacks]:
        """Return the stacks of batches, with room for their frames; none without a FrameTable."""
        if self._frames is None:
            return []
        stacks = [
            stacks_of(dict.__getitem__(batch, OBS), dict.__getitem__(batch, NEXT_OBS))
            for batch in batches
        ]
        self._frames.reserve(sum(len(one.used) for one in stacks))
        return stacks

    def _continues(self, last: Any, slots: Any) -> Any:
        """Return whether the next observation of a row equals the observation of another.

        Args:
            last: slot of the row, or slots [n].
            slots: slot of the other row, or slots [n].
        """
        if self._frames is not None:
            pairs = zip(np.atleast_1d(last), np.atleast_1d(slots), strict=True)
            equal = np.array([self._frames.continues(*pair) for pair in pairs], bool)
            return equal if np.ndim(slots) else equal.item()
        final_slots, is_equal = self._successors.next_slots[last], np.ones(np.shape(slots), bool)
        for leaf in self.columns[OBS]:
            equal = leaf[final_slots] == leaf[slots]
            is_equal = is_equal & equal.all(tuple(range(np.ndim(slots), equal.ndim)))
        return is_equal

    # -- memory ------------------------------------------------------------------------------------

    def _allocate(self, batch: SampleBatch) -> None:
        """Allocate columns like those of a batch; pages are touched when rows are written."""
        columns, treespecs = {}, {}
        frames: FrameTable | None = None
        names = stored_names(batch) - {NEXT_OBS}
        if is_stacked(dict.__getitem__(batch, OBS), dict.__getitem__(batch, NEXT_OBS)):
            obs = batch[OBS]
            frames = FrameTable(self.capacity, obs.shape[1:], obs.dtype, self._files)
            names -= {OBS}
        for name in sorted(names):
            treespecs[name] = treespec_of(batch[name])
            leaves: Any = optree.tree_leaves(batch[name])
            columns[name] = self._empty_leaves(name, leaves)
        self._frames = frames
        self._set_columns(columns, treespecs)

    def _empty_leaves(self, name: str, like: Sequence[np.ndarray]) -> list[np.ndarray]:
        empty = np.empty if self._files is None else self._files.empty
        slots = 2 * self.capacity if name == OBS else self.capacity
        try:
            return [empty((slots, *leaf.shape[1:]), leaf.dtype) for leaf in like]
        except MemoryError as error:
            raise MemoryError(
                f"a replay buffer of {self.capacity} rows: {error}. Reduce its capacity "
                "(replay_buffer_capacity) or keep it in files (replay_buffer_dir)"
            ) from error

    def _set_columns(self, columns: dict[str, list[np.ndarray]], treespecs: dict[str, Any]) -> None:
        self.columns = columns
        self.row_bytes = sum(leaf.strides[0] for leaves in columns.values() for leaf in leaves)
        if self._frames is not None:
            self.row_bytes += self._frames.row_bytes
            example = np.empty((0, *self._frames.stack), self._frames.frames.dtype)
            columns, treespecs = {**columns, OBS: [example]}, {**treespecs, OBS: None}
        self._schema = ColumnSchema(columns, treespecs)

    def _reserve(self, start: int, count: int, num_final: int) -> None:
        """Reserve disk space for `count` slots from `start` on and `num_final` final slots."""
        assert self._files is not None
        first_final = self._reserved_final
        for name, leaves in self.columns.items():
            for leaf in leaves:
                if self.num_added < self.capacity:
                    self._files.reserve(leaf, start, count)
                if name == OBS and num_final > first_final:
                    first = self.capacity + first_final
                    self._files.reserve(leaf, first, num_final - first_final)
        self._reserved_final = max(first_final, num_final)

    # -- reading -----------------------------------------------------------------------------------

    def path(self, slots: np.ndarray, steps: int) -> np.ndarray:
        """Return the slots [steps, n] of rows and their successors; see `SuccessorTable.path`."""
        return self._successors.path(slots, steps)

    def read(
        self, slots: np.ndarray, ends: np.ndarray | None = None, **columns: np.ndarray
    ) -> SampleBatch:
        """Return copies of the rows at slots [n].

        Args:
            slots: slots [n].
            ends: slots [n] of the rows to take `new_obs`, `terminateds` and `truncateds` from; None
                for `slots`.
            columns: columns [n] to add, or to return instead of the stored ones.
        """
        batch: dict[str, Any] = {}
        ends = slots if ends is None else ends
        for name in self.columns:
            if name not in columns:
                batch[name] = self._take(name, ends if name in (*DONE_FLAGS, "dones") else slots)
        if self._frames is not None:
            batch[OBS] = self._take_stacks(OBS, self._frames.positions_of(slots))
            batch[NEXT_OBS] = self._take_stacks(NEXT_OBS, self._frames.positions_of(ends, True))
        else:
            next_slots = self._successors.next_slots.take(ends, mode="clip")
            batch[NEXT_OBS] = self._take(OBS, next_slots, NEXT_OBS)
        batch.update(columns)
        return SampleBatch.unchecked(batch)

    def _take(self, name: str, slots: np.ndarray, output: str = "") -> Any:
        """Return a column at slots [n]; `output` is its name in the result."""
        assert self._schema is not None
        leaves, treespec = self.columns[name], self._schema.treespecs[name]
        if treespec is None:
            return self._take_leaf(output or name, 0, leaves[0], slots)
        taken = [self._take_leaf(output or name, i, leaf, slots) for i, leaf in enumerate(leaves)]
        return optree.tree_unflatten(treespec, taken)

    def _take_stacks(self, output: str, positions: np.ndarray) -> np.ndarray:
        """Return stacks [n, k, …] of the frames at positions [n, k]."""
        assert self._frames is not None
        stacks = self._take_leaf(output, 0, self._frames.frames, positions.reshape(-1))
        stacks = stacks.reshape(*positions.shape, *stacks.shape[1:])
        nothing = positions == NOTHING
        if nothing.any():
            stacks[nothing] = 0
        return stacks

    def _take_leaf(self, output: str, i: int, leaf: np.ndarray, slots: np.ndarray) -> np.ndarray:
        if leaf.strides[0] * len(slots) < POOLED_BYTES or leaf.dtype.hasobject:
            return leaf.take(slots, 0, mode="clip")
        pool = self._outputs.get((output, i))
        if pool is None:
            pool = self._outputs[output, i] = OutputPool()
        out = pool.empty((len(slots), *leaf.shape[1:]), leaf.dtype)
        return leaf.take(slots, 0, out=out, mode="clip")

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all stored rows, each observation once.

        Columns in files are views, valid until more rows are stored.
        """
        rows, in_files = len(self), self._files is not None
        final_slots = self._successors.final_slots(rows)
        treespecs = self._schema.treespecs if self._schema is not None else {}
        frames = {} if self._frames is None else {"frames": self._frames.state_dict(rows)}
        return {
            "capacity": self.capacity,
            "num_added": self.num_added,
            "columns": {
                name: [leaf[:rows] if in_files else leaf[:rows].copy() for leaf in leaves]
                for name, leaves in self.columns.items()
            },
            "treespecs": {name: treespec_to_json(spec) for name, spec in treespecs.items()},
            "successors": self._successors.state_dict(rows),
            "final_observations": [leaf[final_slots] for leaf in self.columns.get(OBS, [])],
            **frames,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict` of a ring buffer of the same capacity.

        Raises:
            ValueError: the state has another capacity, or columns of other lengths or types;
                nothing is changed.
        """
        check_own_state(self, state)
        if int(state["capacity"]) != self.capacity:
            raise ValueError(
                f"the state is of a buffer of capacity {state['capacity']}, this buffer has "
                f"capacity {self.capacity}: create it with the capacity of the state (the setting "
                f"replay_buffer_capacity={state['capacity']} of an algorithm)"
            )
        names = {*state["columns"], *([OBS] if "frames" in state else ())}
        if names != set(state["treespecs"]):
            raise ValueError(
                f"the state has the columns {sorted(names)}, but the structures of "
                f"{sorted(state['treespecs'])}"
            )
        for name, leaves in state["columns"].items():
            for leaf in leaves:
                has_one_axis = name not in FLAT_KINDS or leaf.ndim == 1
                kinds, _ = FLAT_KINDS.get(name, (_ANY_KIND, ""))
                if not has_one_axis or leaf.dtype.kind not in kinds:
                    raise ValueError(f"the column {name!r} is {leaf.dtype} of shape {leaf.shape}")
        rows = min(int(state["num_added"]), self.capacity)
        for name, leaves in state["columns"].items():
            if any(len(leaf) != rows for leaf in leaves):
                raise ValueError(f"the column {name!r} does not have {rows} rows")
        ring = RingBuffer(self.capacity, self.directory, self._link_rule)
        ring._successors.load_state_dict(state["successors"], state["num_added"])
        final_slots = ring._successors.final_slots(rows)
        columns = {name: ring._empty_leaves(name, like) for name, like in state["columns"].items()}
        if "frames" in state:
            ring._frames = FrameTable.from_state(self.capacity, state["frames"], ring._files)
        if names:
            treespecs = {
                name: treespec_from_json(json)
                for name, json in state["treespecs"].items()
                if name in columns
            }
            ring._set_columns(columns, treespecs)
        if ring._files is not None:
            num_final = int(final_slots.max(initial=self.capacity - 1)) + 1 - self.capacity
            ring._reserve(0, rows, num_final)
        ring.num_added = int(state["num_added"])
        for name, leaves in state["columns"].items():
            for leaf, saved in zip(columns[name], leaves, strict=True):
                leaf[:rows] = saved
        for leaf, saved in zip(columns.get(OBS, []), state["final_observations"], strict=True):
            leaf[final_slots] = saved
        vars(self).update(vars(ring))

    def __getstate__(self) -> dict[str, Any]:
        attributes = dict(vars(self), _outputs={})
        if self._files is not None:  # a copy has its own files
            attributes |= {"_files": self._files.directory, "columns": {}}
            attributes |= {"_schema": None, "_frames": None}
            attributes["state"] = self.state_dict()
        return attributes

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        state = attributes.pop("state", None)
        vars(self).update(attributes)
        if state is not None:
            self._files = MemmapArrays(attributes["_files"])
            self.load_state_dict(state)
