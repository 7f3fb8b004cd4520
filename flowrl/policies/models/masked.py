"""MaskedModel: actions that an observation forbids get no probability."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces

from flowrl.policies.config import ModelConfig
from flowrl.policies.models.base import Inputs, ModelV2, State
from flowrl.policies.views import ViewRequirement
from flowrl.settings import ConfigError

MASK = "action_mask"
FORBIDDEN = -1e9  # exp of it is 0, and differences of two of it are finite


class MaskedModel(ModelV2):
    """A model for the rest of a Dict observation; `action_mask` overrules its outputs.

    Outputs of actions that are forbidden are -1e9: as logits they have no probability and no
    gradient (Huang & Ontañón 2020), as values they are never the largest.

    Args:
        model: sees the observation without the mask; the leaf itself if only one is left.
        obs_space: Dict with the leaf `action_mask`: [n] numbers for Discrete(n), one after another
            for the parts of a MultiDiscrete; 0 forbids.
        action_space, num_outputs, config: see ModelV2.
        per_action: outputs of each action; those after all actions' are as the model gives them.

    Raises:
        ConfigError: the mask is not of the actions' size; the action space has no masks.
    """

    def __init__(
        self,
        model: ModelV2,
        obs_space: spaces.Dict,
        action_space: spaces.Space,
        num_outputs: int,
        config: ModelConfig,
        per_action: int = 1,
    ):
        super().__init__(obs_space, action_space, num_outputs, config, model.name)
        self._per_action = per_action
        if isinstance(action_space, spaces.Discrete):
            self._parts = [int(action_space.n)]
        elif isinstance(action_space, spaces.MultiDiscrete):
            self._parts = action_space.nvec.reshape(-1).tolist()
        else:
            raise ConfigError(
                f"action_mask: Discrete and MultiDiscrete actions have masks, not {action_space}"
            )
        shape = obs_space[MASK].shape
        self._rest_of_outputs = num_outputs - sum(self._parts) * per_action
        if shape != (sum(self._parts),) or self._rest_of_outputs < 0:
            raise ConfigError(
                f"action_mask: {action_space} needs a mask of shape ({sum(self._parts)},), the "
                f"observation space has {obs_space[MASK]}"
            )
        self.model = model
        rest = [key for key in sorted(obs_space) if key != MASK]
        self._only = rest[0] if len(rest) == 1 else None
        self._rest = rest
        self.view_requirements = {
            **model.view_requirements,
            "obs": ViewRequirement(space=obs_space),
        }

    def get_initial_state(self) -> list[np.ndarray]:
        return self.model.get_initial_state()

    @property
    def has_value_function(self) -> bool:
        return self.model.has_value_function

    def link_numpy(self) -> None:
        self.model.link_numpy()

    def _seen(self, observations: Any) -> Any:
        if self._only is not None:
            return observations[self._only]
        return {key: observations[key] for key in self._rest}

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        observations = input_dict["obs"]
        inner = Inputs()
        for name in self.view_requirements:
            if name in input_dict:
                inner[name] = self._seen(observations) if name == "obs" else input_dict[name]
        outputs, state = self.model(inner, state, seq_lens)
        allowed = observations[MASK] != 0
        if outputs.shape != allowed.shape:
            allowed = allowed.repeat_interleave(self._per_action, 1)
            allowed = F.pad(allowed, (0, self._rest_of_outputs), value=True)
        return torch.where(allowed, outputs, FORBIDDEN), state

    def value_function(self) -> torch.Tensor:
        return self.model.value_function()

    def compute_outputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]:
        observations = inputs["obs"]
        outputs, values, state = self.model.compute_outputs(
            {**inputs, "obs": self._seen(observations)}
        )
        allowed = np.asarray(observations[MASK]) != 0
        if allowed.shape != (len(outputs), sum(self._parts)):
            raise ValueError(f"action_mask: of shape {allowed.shape} for outputs {outputs.shape}")
        first = 0
        for size in self._parts:
            nothing = np.flatnonzero(~allowed[:, first : first + size].any(1))
            if len(nothing):
                raise ValueError(
                    f"action_mask: no action is allowed in observation {nothing[0]} of "
                    f"{len(allowed)}: {np.asarray(observations[MASK])[nothing[0]]}"
                )
            first += size
        if allowed.shape != outputs.shape:
            rest = np.ones((len(outputs), self._rest_of_outputs), bool)
            allowed = np.concatenate([allowed.repeat(self._per_action, 1), rest], 1)
        return np.where(allowed, outputs, np.float32(FORBIDDEN)), values, state

    def compute_values(self, inputs: Mapping[str, Any]) -> np.ndarray | None:
        return self.model.compute_values({**inputs, "obs": self._seen(inputs["obs"])})
