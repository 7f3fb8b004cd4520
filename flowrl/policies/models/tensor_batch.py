"""TensorBatch: the columns of a batch as tensors, and the input dict of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import optree
import torch

from flowrl.data import SampleBatch
from flowrl.data.indexed_columns import IndexedColumn
from flowrl.data.sequences import without_masked_rows, without_padding


class InputDict(dict[str, Any]):
    """Columns as tensors [rows, …]. `obs_flat` [rows, features] is computed on first access."""

    def __missing__(self, key: str) -> Any:
        if key != "obs_flat":
            raise KeyError(f"no column {key!r} in the model's input, only {sorted(self)}")
        leaves: Any = optree.tree_leaves(self["obs"])
        flat = [leaf.reshape(leaf.shape[0], -1).to(torch.float32) for leaf in leaves]
        self[key] = obs_flat = flat[0] if len(flat) == 1 else torch.cat(flat, 1)
        return obs_flat


class TensorBatch(InputDict):
    """Columns of a SampleBatch as tensors that share its memory, created on first access.

    Padding, and rows with `loss_mask` False (the burn-in of sequences), are removed from every
    column, and sequences are shortened accordingly.

    Args:
        batch: the rows.
        device: device of the tensors.

    Attributes:
        burn_in: the burn-in rows of the sequences as a separate batch, or None.
    """

    def __init__(self, batch: SampleBatch, device: torch.device | str = "cpu"):
        super().__init__()
        self.burn_in: TensorBatch | None = None
        self.device = torch.device(device)
        self._on_cpu = self.device.type == "cpu"
        if dict.__contains__(batch, "loss_mask"):
            batch, burn_in = without_masked_rows(batch)
            if burn_in is not None:
                self.burn_in = TensorBatch(burn_in, device)
        self._batch = without_padding(batch)

    @property
    def count(self) -> int:
        """Number of rows to learn from."""
        return self._batch.count

    def __missing__(self, key: str) -> Any:
        if key == "obs_flat":
            return super().__missing__(key)
        column: Any = self._batch[key]
        tensors: Any
        if isinstance(column, np.ndarray):
            if column.dtype == object:
                raise TypeError(f"column {key!r} holds objects, which cannot become a tensor")
            tensors = self._to_device(column)
        else:
            tensors = optree.tree_map(self._to_device, column)
        self[key] = tensors
        return tensors

    def array(self, key: str) -> Any:
        """Return a column as numpy arrays."""
        return self._batch[key]

    def array_rows(self, key: str, index: np.ndarray) -> Any:
        """Return some rows of a column as numpy arrays; an indexed column gathers only these.

        Args:
            key: name of the column.
            index: row numbers, int [n].
        """
        if key not in self._batch:
            raise KeyError(key)
        column = dict.get(self._batch, key)
        if column is None or (isinstance(column, IndexedColumn) and column.is_lazy):
            column = self._batch[key]
        return optree.tree_map(lambda leaf: np.asarray(leaf[index]), column)

    def _to_device(self, leaf: Any) -> torch.Tensor:
        tensor = as_tensor(leaf)
        return tensor if self._on_cpu else tensor.to(self.device)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._batch

    def keys(self) -> Any:
        """Return the names of all columns, accessed or not."""
        return dict.fromkeys([*self._batch, *super().keys()]).keys()

    def values(self) -> Any:
        """Return the columns of `copy`."""
        return self.copy().values()

    def items(self) -> Any:
        """Return the names and columns of `copy`."""
        return self.copy().items()

    def copy(self) -> dict[str, Any]:
        """Return a dict of all columns as tensors, without columns of objects, such as `infos`."""
        columns = {}
        for key in self:
            with contextlib.suppress(TypeError):
                columns[key] = self[key]
        return columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __bool__(self) -> bool:
        return True

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default


def as_state(value: Any) -> np.ndarray:
    """Return a copy of a recurrent state, an array or a tensor, as an array.

    float64 becomes float32, the dtype of networks.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    state = np.array(value)
    return state.astype(np.float32) if state.dtype == np.float64 else state


def as_tensor(array: Any) -> torch.Tensor:
    """Return a tensor that shares the array's memory, or a copy if the array is read-only or has
    negative strides."""
    array = np.asarray(array)
    # torch supports neither; Ray's arrays are read-only
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)
