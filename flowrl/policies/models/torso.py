"""TorsoNetwork: an encoder for any space, hidden layers, and heads for policy and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from flowrl.policies.config import ModelConfig
from flowrl.policies.models.base import ModelV2, State, exact
from flowrl.policies.models.encoders import (
    NestedEncoder,
    encoder_for,
    has_image,
    initialised,
    layers,
)


def shares_layers(config: ModelConfig, obs_space: spaces.Space) -> bool:
    """Whether policy and value have one network, as the settings say or the space suggests."""
    chosen = config.vf_share_layers
    return has_image(obs_space) if chosen is None else chosen


class Torso(nn.Module):
    """Observations to features: an encoder, then the hidden layers (but for a lone image, which
    has those after its convolutions)."""

    def __init__(self, space: spaces.Space, config: ModelConfig):
        super().__init__()
        encoder: Any = encoder_for(space, config, config.num_framestacks)
        self.encoder = encoder
        size: int = encoder.size
        plain = isinstance(self.encoder, NestedEncoder) or not hasattr(self.encoder, "convs")
        hiddens = config.fcnet_hiddens if plain else []
        self.hidden = layers([size, *hiddens], config.fcnet_activation)
        self.size: int = hiddens[-1] if hiddens else size

    def forward(self, observations: Any) -> torch.Tensor:
        made: torch.Tensor = self.hidden(self.encoder(observations))
        return made


class Heads(nn.Module):
    """Features to distribution inputs, and to values.

    Args:
        size: of the features.
        num_outputs: inputs of the distribution.
        free_log_std: their second half is a parameter.
    """

    def __init__(self, size: int, num_outputs: int, free_log_std: bool):
        super().__init__()
        outputs = num_outputs // 2 if free_log_std else num_outputs
        self.policy = initialised(nn.Linear(size, outputs), 0.01)
        self.value = initialised(nn.Linear(size, 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(outputs)) if free_log_std else None

    def outputs(self, features: torch.Tensor) -> torch.Tensor:
        with exact(features):
            made: torch.Tensor = self.policy(features.float())
        if self.log_std is not None:
            made = torch.cat([made, self.log_std.expand_as(made)], -1)
        return made

    def values(self, features: torch.Tensor) -> torch.Tensor:
        with exact(features):
            made: torch.Tensor = self.value(features.float()).squeeze(-1)
        return made


class TorsoNetwork(ModelV2):
    """Policy and value over one torso, or each over its own.

    Initialisation: orthogonal, gain sqrt(2), 0.01 at the policy head, 1 at the value head.

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
        features = self._features
        if self.value_torso is not None:
            features = self.value_torso(self._observations)
        assert features is not None
        return self.heads.values(features)
