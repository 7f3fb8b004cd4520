"""TorsoNetwork: an encoder for any space, hidden layers, and heads for policy and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from flowrl.data.spaces import has_image
from flowrl.policies.config import ModelConfig
from flowrl.policies.models.base import ModelV2, State, full_precision, last_features
from flowrl.policies.models.encoders import (
    ImageEncoder,
    init_orthogonal,
    make_encoder,
    mlp,
)


def shares_layers(config: ModelConfig, obs_space: spaces.Space) -> bool:
    """Return whether policy and value share a network: `vf_share_layers`; if that is None, whether
    the observation has images."""
    shared = config.vf_share_layers
    return has_image(obs_space) if shared is None else shared


class Torso(nn.Module):
    """An encoder, then the hidden layers (`fcnet_hiddens`).

    A single image has no further hidden layers: its encoder ends in `post_fcnet_hiddens`.

    Args:
        space: observation space of one frame.
        config: the settings.

    Attributes:
        size: number of features.
    """

    def __init__(self, space: spaces.Space, config: ModelConfig):
        super().__init__()
        encoder: Any = make_encoder(space, config, config.num_framestacks)
        self.encoder = encoder
        size: int = encoder.size
        hiddens = [] if isinstance(encoder, ImageEncoder) else config.fcnet_hiddens
        self.hidden = mlp([size, *hiddens], config.fcnet_activation)
        self.size: int = hiddens[-1] if hiddens else size

    def forward(self, observations: Any) -> torch.Tensor:
        features: torch.Tensor = self.hidden(self.encoder(observations))
        return features


class Heads(nn.Module):
    """Linear layers from features to distribution inputs and to values, in float32.

    Args:
        size: number of features.
        num_outputs: number of inputs of the action distribution.
        free_log_std: the second half of the distribution inputs is a parameter.
    """

    def __init__(self, size: int, num_outputs: int, free_log_std: bool):
        super().__init__()
        num_means = num_outputs // 2 if free_log_std else num_outputs
        self.policy = init_orthogonal(nn.Linear(size, num_means), 0.01)
        self.value = init_orthogonal(nn.Linear(size, 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(num_means)) if free_log_std else None

    def outputs(self, features: torch.Tensor) -> torch.Tensor:
        """Return distribution inputs [rows, num_outputs] of features [rows, size]."""
        with full_precision(features):
            outputs: torch.Tensor = self.policy(features.float())
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], -1)
        return outputs

    def values(self, features: torch.Tensor) -> torch.Tensor:
        """Return values [rows] of features [rows, size]."""
        with full_precision(features):
            values: torch.Tensor = self.value(features.float()).squeeze(-1)
        return values


class TorsoNetwork(ModelV2):
    """Policy and value heads on one torso, or on a separate torso each.

    Initialization: orthogonal, gain sqrt(2) in hidden layers, 0.01 at the policy head, 1 at the
    value head.

    Args:
        obs_space, action_space, num_outputs, model_config, name: see ModelV2.
        free_log_std: the second half of the outputs is a parameter.
    """

    def __init__(
        self,
        obs_space: spaces.Space,
        action_space: spaces.Space,
        num_outputs: int,
        model_config: ModelConfig,
        name: str = "model",
        free_log_std: bool = False,
    ):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        self.torso: Any = Torso(obs_space, model_config)
        shared = shares_layers(model_config, obs_space)
        self.value_torso = None if shared else Torso(obs_space, model_config)
        self.heads = Heads(self.torso.size, num_outputs, free_log_std)
        self._features: torch.Tensor | None = None

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        features = self.torso(input_dict["obs"])
        self._features = features
        if self.value_torso is not None:
            self._observations = input_dict["obs"]
        return self.heads.outputs(features), state

    def value_function(self) -> torch.Tensor:
        features = last_features(self._features)
        if self.value_torso is not None:
            features = self.value_torso(self._observations)
        return self.heads.values(features)
