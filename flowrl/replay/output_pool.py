"""OutputPool: reuse of large output arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

MAX_FREE = 4  # blocks kept for reuse


class OutputPool:
    """Arrays of one shape whose memory is reused once no array refers to it.

    Fresh memory costs a page fault per 4 KiB on first write, about as much as the copy itself.
    Each array keeps a lease on its block as its `base`, and so do all views and tensors made from
    it; when the last of them is deleted, the lease returns the block.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an uninitialized array; `dtype` must not contain objects."""
        while self._free:
            block = self._free.pop()
            if block.shape == shape and block.dtype == dtype:
                break
        else:
            block = np.empty(shape, dtype)
        memory = np.asarray(_Lease(block, self._free))
        return np.ndarray(shape, dtype, buffer=memory)


class _Lease:
    """Owner of a block as seen by numpy; returns the block to the pool when it is deleted."""

    def __init__(self, block: np.ndarray, free: list[np.ndarray]):
        self.block = block
        self.free = free
        self.__array_interface__ = block.reshape(-1).view(np.uint8).__array_interface__

    def __del__(self) -> None:
        if len(self.free) < MAX_FREE:
            self.free.append(self.block)
