"""MaskedModel: action masks in observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces

from flowrl.errors import ConfigError
from flowrl.policies.config import ModelConfig
from flowrl.policies.exploration import MASKED_OUTPUT
from flowrl.policies.models.base import ModelV2, State
from flowrl.policies.models.tensor_batch import InputDict
from flowrl.policies.views import ACTION_MASK, ViewRequirement, forward_views


class MaskedModel(ModelV2):
    """Apply the leaf `action_mask` of a Dict observation to the outputs of another model.

    Outputs of masked actions are -1e9: as logits they have neither probability nor gradient
    (Huang & Ontañón 2020), as Q-values they are never the maximum.

    Args:
        model: the model; it receives the observation without the mask (the leaf itself if only
            one remains).
        obs_space: Dict with the leaf `action_mask`: [n] for Discrete(n), the concatenated masks
            of all components for a MultiDiscrete; 0 masks an action.
        action_space, num_outputs, config: see ModelV2.
        outputs_per_action: number of outputs of each action. Outputs after those of all actions
            are not masked.

    Raises:
        ConfigError: the mask does not have the size of the action space, or the action space does
            not support masks.
    """

    def __init__(
        self,
        model: ModelV2,
        obs_space: spaces.Dict,
        action_space: spaces.Space,
        num_outputs: int,
        config: ModelConfig,
        outputs_per_action: int = 1,
    ):
        super().__init__(obs_space, action_space, num_outputs, config, model.name)
        self._outputs_per_action = outputs_per_action
        if isinstance(action_space, spaces.Discrete):
            self._sizes = [int(action_space.n)]
        elif isinstance(action_space, spaces.MultiDiscrete):
            self._sizes = action_space.nvec.reshape(-1).tolist()
        else:
            raise ConfigError(
                "action_mask: only Discrete and MultiDiscrete action spaces support masks, not "
                f"{action_space}"
            )
        shape = obs_space[ACTION_MASK].shape
        self._num_unmasked = num_outputs - sum(self._sizes) * outputs_per_action
        if shape != (sum(self._sizes),) or self._num_unmasked < 0:
            raise ConfigError(
                f"action_mask: {action_space} needs a mask of shape ({sum(self._sizes)},), the "
                f"observation space has {obs_space[ACTION_MASK]}"
            )
        self.model = model
        self._keys = [key for key in sorted(obs_space) if key != ACTION_MASK]
        self.view_requirements = {
            **model.view_requirements,
            "obs": ViewRequirement(space=obs_space),
        }

    def get_initial_state(self) -> list[np.ndarray]:
        return self.model.get_initial_state()

    @property
    def has_value_function(self) -> bool:
        return self.model.has_value_function

    def bind_numpy_views(self) -> None:
        self.model.bind_numpy_views()

    def _without_mask(self, observations: Any) -> Any:
        if len(self._keys) == 1:
            return observations[self._keys[0]]
        return {key: observations[key] for key in self._keys}

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        observations = input_dict["obs"]
        inner = InputDict()
        for name in forward_views(self.view_requirements):
            if name in input_dict:
                inner[name] = input_dict[name]
        inner["obs"] = self._without_mask(observations)
        outputs, state = self.model(inner, state, seq_lens)
        allowed = observations[ACTION_MASK] != 0
        if outputs.shape != allowed.shape:
            allowed = allowed.repeat_interleave(self._outputs_per_action, 1)
            allowed = F.pad(allowed, (0, self._num_unmasked), value=True)
        return torch.where(allowed, outputs, MASKED_OUTPUT), state

    def value_function(self) -> torch.Tensor:
        return self.model.value_function()

    def compute_outputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]:
        """See ModelV2.

        Raises:
            ValueError: a mask allows no action, or has another shape.
        """
        observations = inputs["obs"]
        outputs, values, state = self.model.compute_outputs(
            {**inputs, "obs": self._without_mask(observations)}
        )
        allowed = np.asarray(observations[ACTION_MASK]) != 0
        if allowed.shape != (len(outputs), sum(self._sizes)):
            expected = len(outputs), sum(self._sizes)
            raise ValueError(
                f"action_mask: expected the shape {expected} [batch, actions], got {allowed.shape}"
            )
        self._check_mask(allowed)
        if allowed.shape != outputs.shape:
            unmasked = np.ones((len(outputs), self._num_unmasked), bool)
            allowed = np.concatenate([allowed.repeat(self._outputs_per_action, 1), unmasked], 1)
        return np.where(allowed, outputs, np.float32(MASKED_OUTPUT)), values, state

    def _check_mask(self, allowed: np.ndarray) -> None:
        start = 0
        for size in self._sizes:
            rows = np.flatnonzero(~allowed[:, start : start + size].any(1))
            if len(rows):
                raise ValueError(
                    f"action_mask: no action is allowed in observation {rows[0]} of "
                    f"{len(allowed)}: {allowed[rows[0]].astype(int)}"
                )
            start += size

    def compute_values(self, inputs: Mapping[str, Any]) -> np.ndarray | None:
        return self.model.compute_values({**inputs, "obs": self._without_mask(inputs["obs"])})
