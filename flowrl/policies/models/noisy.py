"""Noisy linear layers for exploration (Fortunato et al. 2018, arXiv 1706.10295)."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class NoisyLinear(nn.Linear):
    """A linear layer with factorized Gaussian noise on its parameters (equations 9 to 11).

    The weight is w + s * (f(e) f(e')^T) and the bias b + s' * f(e), where e and e' are standard
    normal, f(x) = sgn(x) sqrt|x|, and the scales s and s' are learned. Before the first
    `resample` the layer has no noise.

    Args:
        layer: the linear layer whose parameters it takes over.
        sigma0: initial scales are sigma0 / sqrt(inputs) (section 3.2).
    """

    def __init__(self, layer: nn.Linear, sigma0: float):
        nn.Module.__init__(self)  # nn.Linear.__init__ would draw from torch's global generator
        self.in_features, self.out_features = layer.in_features, layer.out_features
        bias = layer.bias
        if bias is None:
            bias = nn.Parameter(layer.weight.new_zeros(layer.out_features))
        self.weight, self.bias = layer.weight, bias
        initial_sigma = sigma0 / math.sqrt(layer.in_features)
        self.weight_sigma = nn.Parameter(torch.full_like(layer.weight, initial_sigma))
        self.bias_sigma = nn.Parameter(torch.full_like(bias, initial_sigma))
        self._noise: tuple[torch.Tensor, torch.Tensor] | None = None

    def resample(self, rng: np.random.Generator | None) -> None:
        """Draw new noise; None removes the noise."""
        if rng is None:
            self._noise = None
            return
        normal = rng.standard_normal(self.in_features + self.out_features, dtype=np.float32)
        scaled = np.sign(normal) * np.sqrt(np.abs(normal))
        noise = torch.from_numpy(scaled).to(self.weight.device)
        self._noise = noise[: self.in_features], noise[self.in_features :]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._noise is None:
            return F.linear(input, self.weight, self.bias)
        noise_in, noise_out = self._noise
        weight = self.weight + self.weight_sigma * torch.outer(noise_out, noise_in)
        return F.linear(input, weight, self.bias + self.bias_sigma * noise_out)


def make_noisy(model: nn.Module, sigma0: float) -> int:
    """Replace every linear layer of a model with a NoisyLinear; return the number of layers."""
    count = 0
    for name, module in list(model.named_children()):
        if type(module) is nn.Linear:
            setattr(model, name, NoisyLinear(module, sigma0))
            count += 1
        else:
            count += make_noisy(module, sigma0)
    return count


def resample_noise(model: nn.Module, rng: np.random.Generator | None) -> None:
    """Draw new noise in every noisy layer of a model; None removes the noise."""
    for module in model.modules():
        if isinstance(module, NoisyLinear):
            module.resample(rng)
