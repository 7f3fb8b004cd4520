"""Noisy layers, whose noise explores (Fortunato et al. 2018, arXiv 1706.10295)."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class NoisyLinear(nn.Linear):
    """A linear layer with weight w + s * (f(e) f(e')^T) and bias b + s' * f(e), where e and e' are
    Gaussian, f(x) = sgn(x) sqrt|x| and the scales s are learned (equations 9 to 11).

    Without noise, as it is at first, it is the layer with the mean weights.

    Args:
        layer: whose weights it begins with.
        sigma0: scales begin as sigma0 / sqrt(inputs) (section 3.2).
    """

    def __init__(self, layer: nn.Linear, sigma0: float):
        nn.Module.__init__(self)  # Linear's own would draw weights from torch's global stream
        self.in_features, self.out_features = layer.in_features, layer.out_features
        bias = layer.bias
        if bias is None:
            bias = nn.Parameter(layer.weight.new_zeros(layer.out_features))
        self.weight, self.bias = layer.weight, bias
        first = sigma0 / math.sqrt(layer.in_features)
        self.weight_sigma = nn.Parameter(torch.full_like(layer.weight, first))
        self.bias_sigma = nn.Parameter(torch.full_like(bias, first))
        self._noise: tuple[torch.Tensor, torch.Tensor] | None = None

    def draw(self, rng: np.random.Generator | None) -> None:
        """Take other noise; None: none."""
        if rng is None:
            self._noise = None
            return
        drawn = rng.standard_normal(self.in_features + self.out_features, dtype=np.float32)
        scaled = np.sign(drawn) * np.sqrt(np.abs(drawn))
        noise = torch.from_numpy(scaled).to(self.weight.device)
        self._noise = noise[: self.in_features], noise[self.in_features :]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        noise = self._noise
        if noise is None:
            return F.linear(input, self.weight, self.bias)
        inwards, outwards = noise
        weight = self.weight + self.weight_sigma * torch.outer(outwards, inwards)
        return F.linear(input, weight, self.bias + self.bias_sigma * outwards)


def make_noisy(model: nn.Module, sigma0: float) -> int:
    """Put a NoisyLinear in the place of every linear layer of a model; how many there were."""
    count = 0
    for name, part in list(model.named_children()):
        if type(part) is nn.Linear:
            setattr(model, name, NoisyLinear(part, sigma0))
            count += 1
        else:
            count += make_noisy(part, sigma0)
    return count


def draw_noise(model: nn.Module, rng: np.random.Generator | None) -> None:
    """Other noise in every noisy layer; None: none."""
    for part in model.modules():
        if isinstance(part, NoisyLinear):
            part.draw(rng)
