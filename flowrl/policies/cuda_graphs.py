"""CUDA graphs, and the memory on a GPU from which they read columns of a batch."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import optree
import torch

from flowrl.policies.models.base import ModelV2
from flowrl.policies.models.noisy import NoisyLinear

log = logging.getLogger("flowrl")

T = TypeVar("T")
_ALIGNMENT = 256  # bytes, as of the CUDA allocator


def make_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream of a GPU; None if there is none."""
    is_there = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.Stream(device) if is_there else None


@contextlib.contextmanager
def running_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run operations on a stream, after earlier and before later ones of the current stream."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


class CudaGraph:
    """The operations of a function, captured once and launched together.

    Args:
        stream: the stream on which they are captured.
        warm_up: called before the capture, on the stream.
        function: without arguments; it is called once, and its operations are not executed.

    Attributes:
        outputs: what the function returned; each replay writes them.

    Raises:
        RuntimeError: an operation cannot be captured.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream | None,
        warm_up: Callable[[], Any],
        function: Callable[[], Any],
    ):
        with running_on(stream):
            warm_up()
        self._graph = torch.cuda.CUDAGraph()
        # other threads may use the GPU during the capture; one that fails leaves its stream current
        with (
            running_on(stream),
            torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"),
        ):
            self.outputs = function()

    def replay(self) -> None:
        """Execute the operations."""
        self._graph.replay()


def try_to_capture(name: str, capture: Callable[[], T]) -> T | None:
    """Return capture(); None, with a warning, if an operation cannot be captured.

    Args:
        name: name of the operations in the warning, such as "the network TorsoNetwork".
        capture: makes a CudaGraph.
    """
    try:
        return capture()
    except RuntimeError as error:
        log.warning(
            "%s cannot be captured as a CUDA graph, its operations are launched one by one: %s",
            name, error,
        )  # fmt: skip
        return None


def can_repeat_forward(model: ModelV2) -> bool:
    """Return whether a graph can repeat a network's forward pass: all parts are of flowrl and torch
    (others may read and change anything), and none has noise or buffers that the CPU changes."""
    is_noisy = any(isinstance(module, NoisyLinear) for module in model.modules())
    return model.has_only_known_modules and not is_noisy and not list(model.buffers())


class ColumnBuffer:
    """Columns of a batch in one block of memory on a device, copied there in one transfer.

    Args:
        batch: arrays [rows, …] by name, or nests of them.
        names: the columns to copy.
        device: the device.

    Attributes:
        columns: name -> tensors [rows, …] on the device, nested as in the batch.
    """

    def __init__(self, batch: Mapping[str, Any], names: Collection[str], device: torch.device):
        nests = {name: batch[name] for name in sorted(names)}
        by_name: dict[str, Any] = {name: optree.tree_leaves(nest) for name, nest in nests.items()}
        leaves = [leaf for column in by_name.values() for leaf in column]
        ends = np.cumsum(
            [0] + [math.ceil(leaf.nbytes / _ALIGNMENT) * _ALIGNMENT for leaf in leaves]
        )
        # page-locked memory, which the GPU reads without the CPU
        is_locked = device.type == "cuda" and torch.cuda.is_available()
        self._host = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=is_locked)
        self._device = torch.empty(int(ends[-1]), dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if is_locked else None
        self._arrays: list[np.ndarray] = []
        places = iter([self._place(leaf, int(at)) for leaf, at in zip(leaves, ends, strict=False)])
        self.columns: dict[str, Any] = {
            name: optree.tree_map(lambda _: next(places), nest) for name, nest in nests.items()
        }

    def _place(self, leaf: np.ndarray, start: int) -> torch.Tensor:
        block = slice(start, start + leaf.nbytes)
        self._arrays.append(self._host[block].numpy().view(leaf.dtype).reshape(leaf.shape))
        dtype = torch.from_numpy(np.empty(0, leaf.dtype)).dtype
        return self._device[block].view(dtype).view(leaf.shape)

    def load(self, batch: Mapping[str, Any]) -> bool:
        """Copy the columns of a batch; columns of fewer rows fill the first ones.

        Returns:
            False, and nothing is copied, if the columns have other shapes or dtypes, or more rows.
        """
        leaves: Any = [leaf for name in self.columns for leaf in optree.tree_leaves(batch[name])]
        if len(leaves) != len(self._arrays) or not all(map(_fits, leaves, self._arrays)):
            return False
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still read the memory
        for array, leaf in zip(self._arrays, leaves, strict=True):
            array[: len(leaf)] = leaf
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))
        return True


def _fits(leaf: Any, array: np.ndarray) -> bool:
    return (
        isinstance(leaf, np.ndarray)
        and leaf.dtype == array.dtype
        and leaf.shape[1:] == array.shape[1:]
        and len(leaf) <= len(array)
    )
