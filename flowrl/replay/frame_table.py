"""FrameTable: observations that are stacks of frames, with each frame stored once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flowrl.data.indexed_columns import NOTHING, IndexedColumn
from flowrl.data.memmap import MemmapArrays

Column = np.ndarray | IndexedColumn  # stacks [rows, k, …]


def is_stacked(obs: Any, next_obs: Any) -> bool:
    """Return whether two columns are stacks of frames, each frame stored once."""
    return all(isinstance(c, IndexedColumn) and c.index.ndim == 2 for c in (obs, next_obs))


class FrameTable:
    """The observations and next observations of the rows of a ring buffer, as stacks of frames.

    A row has the positions of its frames. A frame is released when no row has its position.

    Args:
        capacity: number of rows.
        stack: shape [k, …] of an observation: k frames.
        dtype: of the frames.
        files: where to keep the frames; None: in memory.

    Attributes:
        frames: the frames [slots, …].
        positions: slots of frames [rows, 2, k] of observations and next observations; NOTHING for
            zeros.
    """

    def __init__(
        self,
        capacity: int,
        stack: tuple[int, ...],
        dtype: np.dtype[Any],
        files: MemmapArrays | None = None,
    ):
        self._files = files
        self.stack = stack
        # The pages of a frame are touched when it is written.
        self.frames = self._empty((2 * capacity, *stack[1:]), dtype)
        self.positions = np.full((capacity, 2, stack[0]), NOTHING, np.int32)
        self._uses = np.zeros(2 * capacity, np.int32)  # positions that name the frame
        self._released = np.empty(2 * capacity, np.int32)  # a stack of slots
        self._num_released = 0
        self._end = 0  # slots from here on were never used

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with a frame of its own."""
        return self.frames.strides[0] + self.positions.strides[0]

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        return np.empty(shape, dtype) if self._files is None else self._files.empty(shape, dtype)

    # -- storing -----------------------------------------------------------------------------------

    def reserve(self, count: int) -> None:
        """Make room for more frames. An error, such as a full disk, changes no row."""
        end = self._end + max(0, count - self._num_released)
        if end > len(self.frames):
            self._grow(end)
        if self._files is not None:
            self._files.reserve(self.frames, self._end, end - self._end)

    def write(self, rows: np.ndarray, stacks: Stacks) -> None:
        """Replace rows; call `reserve` with the number of their frames before.

        Args:
            rows: slots of the rows, [n].
            stacks: their observations and next observations.
        """
        nothing = np.full(stacks.inverse.shape, NOTHING, np.int32)
        self._set(rows, nothing)  # releases frames
        slots = self._allocate(len(stacks.used))
        self.frames[slots] = stacks.base.take(stacks.used, 0)
        # the last entry is for NOTHING, which has the inverse -1
        table = np.append(slots, np.int32(NOTHING))
        self._set(rows, table[stacks.inverse])

    def _allocate(self, count: int) -> np.ndarray:
        """Return free slots [count]; there is room for them."""
        reused = min(count, self._num_released)
        self._num_released -= reused
        slots = np.empty(count, np.int32)
        slots[:reused] = self._released[self._num_released : self._num_released + reused]
        end = self._end + count - reused
        slots[reused:] = np.arange(self._end, end)
        self._end = end
        return slots

    def _grow(self, end: int) -> None:
        """Allocate at least `end` slots, twice as many as before if possible."""
        slots = max(end, 2 * len(self.frames))
        frames = self._empty((slots, *self.stack[1:]), self.frames.dtype)
        if self._files is not None:
            self._files.reserve(frames, 0, self._end)
        frames[: self._end] = self.frames[: self._end]
        self.frames = frames
        more = slots - len(self._uses)
        self._uses = np.append(self._uses, np.zeros(more, np.int32))
        self._released = np.append(self._released, np.empty(more, np.int32))

    def _set(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Set the positions [n, 2, k] of rows [n]; release frames that no row has any more."""
        old = self.positions[rows]
        self.positions[rows] = positions
        np.add.at(self._uses, positions[positions != NOTHING], 1)
        old = old[old != NOTHING]
        np.subtract.at(self._uses, old, 1)
        free = np.unique(old[self._uses[old] == 0])
        self._released[self._num_released : self._num_released + len(free)] = free
        self._num_released += len(free)

    # -- linking the parts of trajectories ---------------------------------------------------------

    def continues(self, last: int, row: int) -> bool:
        """Return whether the next observation of the row `last` equals the one of `row`."""
        before, own = self.positions[last, 1], self.positions[row, 0]
        return all(map(self._equal, before.tolist(), own.tolist()))

    def _equal(self, one: int, other: int) -> bool:
        if NOTHING in (one, other):
            return one == other
        return one == other or np.array_equal(self.frames[one], self.frames[other])

    def share(self, last: int, following: np.ndarray) -> None:
        """Let a row and its successors, which were stored later, have the same frames.

        Args:
            last: slot of the row.
            following: slots [at least k] of its successors; the last one may be repeated.
        """
        before, own = self.positions[last, 1], self.positions[following[0], 0]
        pairs = zip(own.tolist(), before.tolist(), strict=True)
        same = {new: old for new, old in pairs if new != old and self._equal(new, old)}
        if not same:
            return
        rows = np.unique(np.append(following, last))
        old = self.positions[rows]
        positions = old.copy()
        for new_slot, old_slot in same.items():
            positions[old == new_slot] = old_slot
        self._set(rows, positions)

    # -- reading -----------------------------------------------------------------------------------

    def positions_of(self, rows: np.ndarray, next_obs: bool = False) -> np.ndarray:
        """Return the slots [n, k] of the frames of rows [n]."""
        return self.positions[:, int(next_obs)].take(rows, 0, mode="clip")

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self, rows: int) -> dict[str, Any]:
        """Return the frames of the first `rows` rows; those in files are views."""
        frames = self.frames[: self._end]
        return {
            "stack": list(self.stack),
            "frames": frames if self._files is not None else frames.copy(),
            "positions": self.positions[:rows].copy(),
        }

    @classmethod
    def from_state(
        cls, capacity: int, state: dict[str, Any], files: MemmapArrays | None = None
    ) -> FrameTable:
        """Return the table that `state` was saved from."""
        frames, positions = state["frames"], np.asarray(state["positions"], np.int32)
        table = cls(capacity, tuple(state["stack"]), frames.dtype, files)
        table.reserve(len(frames))
        table._allocate(len(frames))
        table.frames[: len(frames)] = frames
        rows = np.arange(len(positions))
        table.positions[rows] = positions
        np.add.at(table._uses, positions[positions != NOTHING], 1)
        free = np.flatnonzero(table._uses[: table._end] == 0)
        table._released[: len(free)] = free
        table._num_released = len(free)
        return table


class Stacks(NamedTuple):
    """Observations and next observations [n, 2, k] as stacks of frames.

    base: frames [m, …].
    used: positions in `base` of the frames that the stacks have, [f].
    inverse: positions in `used`, [n, 2, k]; -1 for NOTHING.
    """

    base: np.ndarray
    used: np.ndarray
    inverse: np.ndarray


def stacks_of(obs: Column, next_obs: Column) -> Stacks:
    """Return two columns of stacks [n, k, …]; frames are shared where both have the same base."""
    base, at = _frames_of(obs, next_obs)
    used, inverse = np.unique(at, return_inverse=True)
    has_nothing = int(len(used) > 0 and used[0] == NOTHING)
    return Stacks(base, used[has_nothing:], inverse.reshape(at.shape) - has_nothing)


def _frames_of(obs: Column, next_obs: Column) -> tuple[np.ndarray, np.ndarray]:
    """Return frames [m, …], and the positions [rows, 2, k] in them of two columns of stacks."""
    if (
        isinstance(obs, IndexedColumn)
        and isinstance(next_obs, IndexedColumn)
        and obs.shares_base(next_obs)
    ):
        return obs.base, np.stack([obs.index, next_obs.index], 1)
    obs, next_obs = np.asarray(obs), np.asarray(next_obs)
    frames = np.concatenate([one.reshape(-1, *one.shape[2:]) for one in (obs, next_obs)])
    at = np.arange(len(frames)).reshape(2, *obs.shape[:2]).swapaxes(0, 1)
    if np.array_equal(obs[:, 1:], next_obs[:, :-1]):
        at = at.copy()
        at[:, 1, :-1] = at[:, 0, 1:]
    return frames, at
