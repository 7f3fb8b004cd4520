"""Buffers of a network: list, copy and restore them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn


class Buffer(NamedTuple):
    """A buffer of a network."""

    module: nn.Module
    name: str
    tensor: torch.Tensor


class BufferCopy(NamedTuple):
    """A buffer of a network, and a copy of its values."""

    buffer: Buffer
    values: torch.Tensor

    @property
    def has_changed(self) -> bool:
        """Whether the buffer has other values now, also because another tensor has replaced it."""
        now = self.buffer.module._buffers.get(self.buffer.name)
        return now is None or not torch.equal(now, self.values)


def buffers_of(model: nn.Module) -> list[Buffer]:
    """Return the buffers of a network."""
    return [
        Buffer(module, name, tensor)
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]


def copy_buffers(buffers: Sequence[Buffer]) -> list[BufferCopy]:
    """Return copies for `restore_buffers`."""
    return [BufferCopy(buffer, buffer.tensor.clone()) for buffer in buffers]


def restore_buffers(copies: Sequence[BufferCopy]) -> None:
    """Restore the values of buffers, and the tensors of those that were replaced since the copy."""
    for (module, name, tensor), values in copies:
        tensor.copy_(values)
        module._buffers[name] = tensor
