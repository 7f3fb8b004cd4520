"""Encoders: observations of any space to features [rows, size]."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from flowrl.policies.config import ModelConfig
from flowrl.settings import ConfigError

NATURE_FILTERS = [[32, 8, 4], [64, 4, 2], [64, 3, 1]]  # Mnih et al. 2015
SMALL_FILTERS = [[16, 3, 1], [32, 3, 2]]
TINY_FILTERS = [[16, 3, 1], [32, 3, 1]]  # a stride would lose where things are
NATURE_SIDE = 36  # pixels that the Nature CNN needs
SMALL_SIDE = 16
IMAGE_SIDE = 7  # pixels that make an array of three axes an image

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
}


def initialised(layer: nn.Module, gain: float = math.sqrt(2.0)) -> nn.Module:
    """The layer with an orthogonal weight scaled by `gain` and zero bias."""
    weight: Any = layer.weight
    bias: Any = layer.bias
    nn.init.orthogonal_(weight, gain)
    nn.init.zeros_(bias)
    return layer


def layers(sizes: list[int], activation: str) -> nn.Sequential:
    """Linear layers of these sizes, each followed by the activation."""
    parts: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise(sizes):
        parts += [initialised(nn.Linear(size_in, size_out)), ACTIVATIONS[activation]()]
    return nn.Sequential(*parts)


def is_image(space: spaces.Space) -> bool:
    """Whether an encoder takes a space for an image: a Box of height, width and channels (or
    channels first), of at least 7 pixels a side; or of 36 pixels a side without channels."""
    if not isinstance(space, spaces.Box):
        return False
    sides = sorted(space.shape)[-2:]
    if len(space.shape) == 3:
        return sides[0] >= IMAGE_SIDE
    return len(space.shape) == 2 and space.dtype == np.uint8 and sides[0] >= NATURE_SIDE


def flat_size(space: spaces.Space) -> int:
    """Features of one value of a space that is not nested, flattened or one-hot.

    Raises:
        ConfigError: there is no way to.
    """
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return int(np.prod(space.shape))
    raise ConfigError(
        f"no model for the space {space}: Box, Discrete, MultiDiscrete and MultiBinary, and Dict "
        "and Tuple of those are supported (write a custom_model for others)"
    )


def flat(space: spaces.Space, values: Any, counted_from_0: bool = False) -> torch.Tensor:
    """Features [rows, size] of values [rows, …], float32.

    Args:
        counted_from_0: numbers of Discrete spaces are a policy's, which begin at 0.
    """
    if isinstance(space, spaces.Dict):
        return torch.cat([flat(space[k], values[k], counted_from_0) for k in sorted(space)], 1)
    if isinstance(space, spaces.Tuple):
        pairs = zip(space, values, strict=True)
        return torch.cat([flat(part, v, counted_from_0) for part, v in pairs], 1)
    if isinstance(space, spaces.Discrete):
        start = 0 if counted_from_0 else int(space.start)
        return F.one_hot(values.reshape(-1).long() - start, int(space.n)).to(torch.float32)
    if isinstance(space, spaces.MultiDiscrete):
        numbers = values.reshape(values.shape[0], -1).long()
        if not counted_from_0:
            numbers = numbers - torch.as_tensor(space.start.reshape(-1), device=numbers.device)
        parts = zip(numbers.unbind(1), space.nvec.reshape(-1).tolist(), strict=True)
        return torch.cat([F.one_hot(v, n) for v, n in parts], 1).to(torch.float32)
    return values.reshape(values.shape[0], -1).to(torch.float32)


def nested_size(space: spaces.Space) -> int:
    """`flat_size`, of nested spaces, too."""
    if isinstance(space, spaces.Dict):
        return sum(nested_size(space[key]) for key in space)
    if isinstance(space, spaces.Tuple):
        return sum(map(nested_size, space))
    return flat_size(space)


class FlatEncoder(nn.Module):
    """Flattened or one-hot values, as they are."""

    def __init__(self, space: spaces.Space, frames: int = 1):
        super().__init__()
        self.space = space
        self.size = flat_size(space) * frames
        self._frames = frames

    def forward(self, values: Any) -> torch.Tensor:
        if self._frames > 1 and isinstance(values, torch.Tensor):
            every = flat(self.space, values.flatten(0, 1))
            return every.reshape(values.shape[0], -1)
        return flat(self.space, values)


class _Residual(nn.Module):
    """x + two convolutions of x."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = initialised(nn.Conv2d(channels, channels, 3, padding=1))
        self.second = initialised(nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(F.relu(self.first(F.relu(x))))


class ImageEncoder(nn.Module):
    """Convolutions and a linear layer.

    uint8 images are scaled to [0, 1] where the network is. Channels are the shorter of the first
    and the last axis, or the frames of a stack.

    Args:
        space: of one frame.
        config: conv_type, conv_filters, conv_activation, post_fcnet_hiddens.
        frames: of one observation, on the axis after the rows.

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
                filters = SMALL_FILTERS if min(sides) >= SMALL_SIDE else TINY_FILTERS
                if min(sides) >= NATURE_SIDE:
                    filters = NATURE_FILTERS
            self.convs = self._plain(channels, sides, filters, config.conv_activation)
        with torch.no_grad():
            found = self.convs(torch.zeros(1, channels, *sides)).numel()
        hiddens = config.post_fcnet_hiddens
        self.head = layers([found, *hiddens], config.conv_activation)
        self.size = hiddens[-1] if hiddens else found

    @staticmethod
    def _plain(channels: int, sides: list[int], filters: Any, activation: str) -> nn.Sequential:
        parts: list[nn.Module] = []
        for out, kernel, stride in filters:
            if kernel > min(sides):
                raise ConfigError(
                    f"conv_filters: {[out, kernel, stride]} does not fit what is {sides[0]} x "
                    f"{sides[1]} pixels by then: leave it out, or take smaller strides"
                )
            parts += [
                initialised(nn.Conv2d(channels, out, kernel, stride)),
                ACTIVATIONS[activation](),
            ]
            channels, sides = out, [(side - kernel) // stride + 1 for side in sides]
        return nn.Sequential(*parts, nn.Flatten())

    @staticmethod
    def _resnet(channels: int) -> nn.Sequential:
        """The deep network of IMPALA (Espeholt et al. 2018, figure 3), without its LSTM."""
        parts: list[nn.Module] = []
        for out in (16, 32, 32):
            parts += [
                initialised(nn.Conv2d(channels, out, 3, padding=1)),
                nn.MaxPool2d(3, 2, padding=1),
                _Residual(out),
                _Residual(out),
            ]
            channels = out
        return nn.Sequential(*parts, nn.ReLU(), nn.Flatten())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self._add_channel:
            images = images.unsqueeze(-1)
        if self._channels_last:
            images = images.movedim(-1, -3)  # [rows, (frames,) channels, height, width]
        if self._frames > 1:
            images = images.flatten(1, 2)
        scale = 1 / 255 if images.dtype == torch.uint8 else 1.0  # normalised ones are floats
        made: torch.Tensor = self.head(self.convs(images.to(torch.float32) * scale))
        return made


class NestedEncoder(nn.Module):
    """An encoder for each leaf of a Dict or Tuple space; their features one after another."""

    def __init__(self, space: spaces.Space, config: ModelConfig, frames: int = 1):
        super().__init__()
        self._keys: list[Any]
        if isinstance(space, spaces.Dict):
            if "action_mask" in space.spaces:
                raise ConfigError(
                    "action_mask: it is taken from the top of a Dict observation, not from within"
                )
            self._keys = sorted(space)
        else:
            assert isinstance(space, spaces.Tuple)
            self._keys = list(range(len(space.spaces)))
        parts: Any = space
        made: list[Any] = [encoder_for(parts[k], config, frames) for k in self._keys]
        self.encoders = nn.ModuleList(made)
        self.size = sum(encoder.size for encoder in made)

    def forward(self, values: Any) -> torch.Tensor:
        made = [encoder(values[k]) for k, encoder in zip(self._keys, self.encoders, strict=True)]
        return torch.cat(made, 1)


def encoder_for(space: spaces.Space, config: ModelConfig, frames: int = 1) -> nn.Module:
    """The encoder for a space: its attribute `size` says how many features it gives.

    Raises:
        ConfigError: there is nothing to see in it, or no encoder for it.
    """
    if nested_size(space) == 0:
        raise ConfigError(f"no model for the space {space}: there is nothing in it")
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return NestedEncoder(space, config, frames)
    if is_image(space):
        assert isinstance(space, spaces.Box)
        return ImageEncoder(space, config, frames)
    return FlatEncoder(space, frames)


def has_image(space: spaces.Space) -> bool:
    """Whether a space is an image, or has one among its leaves."""
    if isinstance(space, spaces.Dict):
        return any(has_image(space[key]) for key in space)
    if isinstance(space, spaces.Tuple):
        return any(map(has_image, space))
    return is_image(space)
