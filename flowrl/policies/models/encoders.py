"""Encoders: observations of any space to features [rows, size]."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from flowrl.data.spaces import MIN_NATURE_SIDE, is_image
from flowrl.errors import ConfigError
from flowrl.policies.config import ModelConfig
from flowrl.policies.models.flatten import flat_size, flatten

# [channels, kernel, stride] of each convolution
NATURE_FILTERS = [[32, 8, 4], [64, 4, 2], [64, 3, 1]]  # Mnih et al. 2015
SMALL_FILTERS = [[16, 3, 1], [32, 3, 2]]
TINY_FILTERS = [[16, 3, 1], [32, 3, 1]]  # strides would lose positions in so small an image

# minimum of the shortest side [pixels]
MIN_SMALL_SIDE = 16  # for SMALL_FILTERS

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
}


def init_orthogonal(layer: nn.Module, gain: float = math.sqrt(2.0)) -> nn.Module:
    """Initialize a layer with an orthogonal weight scaled by `gain` and zero bias; return it."""
    weight: Any = layer.weight
    bias: Any = layer.bias
    nn.init.orthogonal_(weight, gain)
    nn.init.zeros_(bias)
    return layer


def mlp(sizes: list[int], activation: str) -> nn.Sequential:
    """Return linear layers of these sizes, each followed by the activation."""
    modules: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise(sizes):
        modules += [init_orthogonal(nn.Linear(size_in, size_out)), ACTIVATIONS[activation]()]
    return nn.Sequential(*modules)


class FlatEncoder(nn.Module):
    """Flatten values; integers become one-hot.

    Args:
        space: space of one frame, not nested.
        frames: frames per observation, on the axis after the rows.
    """

    def __init__(self, space: spaces.Space, frames: int = 1):
        super().__init__()
        self.space = space
        self.size = flat_size(space) * frames
        self._frames = frames

    def forward(self, values: Any) -> torch.Tensor:
        if self._frames > 1 and isinstance(values, torch.Tensor):
            features = flatten(self.space, values.flatten(0, 1))
            return features.reshape(values.shape[0], -1)
        return flatten(self.space, values)


def has_convolutions(network: Any) -> bool:
    """Return whether a network has convolutions; anything but a torch module has none."""
    kinds = nn.Conv1d, nn.Conv2d, nn.Conv3d
    return isinstance(network, nn.Module) and any(isinstance(m, kinds) for m in network.modules())


class ResidualBlock(nn.Module):
    """x + two convolutions of x."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = init_orthogonal(nn.Conv2d(channels, channels, 3, padding=1))
        self.conv2 = init_orthogonal(nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class ImageEncoder(nn.Module):
    """Convolutions, then linear layers.

    uint8 images are scaled to [0, 1] on the network's device. The channel axis is the shorter of
    the first and the last axis; frames of a stack become channels.

    Args:
        space: space of one frame.
        config: conv_type, conv_filters, conv_activation, post_fcnet_hiddens.
        frames: frames per observation, on the axis after the rows.

    Raises:
        ConfigError: the image is too small for the filters.
    """

    def __init__(self, space: spaces.Box, config: ModelConfig, frames: int = 1):
        super().__init__()
        shape = list(space.shape) if len(space.shape) == 3 else [*space.shape, 1]
        self._add_channel = len(space.shape) == 2
        self._channels_last = shape[2] <= shape[0]
        channels = shape[2] if self._channels_last else shape[0]
        sides = shape[:2] if self._channels_last else shape[1:]
        self._frames = frames
        channels *= frames
        if config.conv_type == "resnet":
            self.convs = self._resnet(channels)
        else:
            filters: Any = config.conv_filters
            if filters is None:
                filters = SMALL_FILTERS if min(sides) >= MIN_SMALL_SIDE else TINY_FILTERS
                if min(sides) >= MIN_NATURE_SIDE:
                    filters = NATURE_FILTERS
            self.convs = self._plain(channels, sides, filters, config.conv_activation)
        with torch.no_grad():
            conv_size = self.convs(torch.zeros(1, channels, *sides)).numel()
        hiddens = config.post_fcnet_hiddens
        self.head = mlp([conv_size, *hiddens], config.conv_activation)
        self.size = hiddens[-1] if hiddens else conv_size

    @staticmethod
    def _plain(channels: int, sides: list[int], filters: Any, activation: str) -> nn.Sequential:
        modules: list[nn.Module] = []
        for out, kernel, stride in filters:
            if kernel > min(sides):
                raise ConfigError(
                    f"conv_filters: {[out, kernel, stride]} does not fit its input of {sides[0]} x "
                    f"{sides[1]} pixels: remove this filter, or use smaller strides before it"
                )
            modules += [
                init_orthogonal(nn.Conv2d(channels, out, kernel, stride)),
                ACTIVATIONS[activation](),
            ]
            channels, sides = out, [(side - kernel) // stride + 1 for side in sides]
        return nn.Sequential(*modules, nn.Flatten())

    @staticmethod
    def _resnet(channels: int) -> nn.Sequential:
        """Return IMPALA's deep network (Espeholt et al. 2018, figure 3) without its LSTM."""
        modules: list[nn.Module] = []
        for out in (16, 32, 32):
            modules += [
                init_orthogonal(nn.Conv2d(channels, out, 3, padding=1)),
                nn.MaxPool2d(3, 2, padding=1),
                ResidualBlock(out),
                ResidualBlock(out),
            ]
            channels = out
        return nn.Sequential(*modules, nn.ReLU(), nn.Flatten())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self._add_channel:
            images = images.unsqueeze(-1)
        # Convolutions are faster with the channels in the last place in memory. Bytes are moved
        # there before they become floats, which are four times as large.
        if self._frames > 1:  # [rows, frames, …]
            axis = -1 if self._channels_last else 1
            images = torch.cat(images.unbind(1), axis)
        if self._channels_last:
            images = images.permute(0, 3, 1, 2)
        else:
            images = images.contiguous(memory_format=torch.channels_last)
        pixels = images.to(torch.float32)
        if images.dtype == torch.uint8:  # normalized images are floats
            pixels = pixels.mul_(1 / 255)
        features: torch.Tensor = self.head(self.convs(pixels))
        return features


class NestedEncoder(nn.Module):
    """An encoder for each leaf of a Dict or Tuple space; features are concatenated."""

    def __init__(self, space: spaces.Space, config: ModelConfig, frames: int = 1):
        super().__init__()
        self._keys: list[Any]
        if isinstance(space, spaces.Dict):
            self._keys = sorted(space)
        else:
            assert isinstance(space, spaces.Tuple)
            self._keys = list(range(len(space.spaces)))
        subspaces: Any = space
        encoders: list[Any] = [make_encoder(subspaces[k], config, frames) for k in self._keys]
        self.encoders = nn.ModuleList(encoders)
        self.size = sum(encoder.size for encoder in encoders)

    def forward(self, values: Any) -> torch.Tensor:
        pairs = zip(self._keys, self.encoders, strict=True)
        return torch.cat([encoder(values[k]) for k, encoder in pairs], 1)


def make_encoder(space: spaces.Space, config: ModelConfig, frames: int = 1) -> nn.Module:
    """Return the encoder for a space; its attribute `size` is the number of features.

    Raises:
        ConfigError: there is no encoder for the space.
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return NestedEncoder(space, config, frames)
    if is_image(space):
        assert isinstance(space, spaces.Box)
        return ImageEncoder(space, config, frames)
    return FlatEncoder(space, frames)
