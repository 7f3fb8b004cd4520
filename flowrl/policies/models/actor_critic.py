"""ActorCritic: a network that acts, and others that say what its actions are worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from flowrl.policies.config import ModelConfig
from flowrl.policies.learning.kernels.backprop import outputs_by_numpy
from flowrl.policies.models.base import Inputs, ModelV2, State
from flowrl.policies.models.catalog import make_model
from flowrl.policies.models.encoders import flat, flat_size, is_image
from flowrl.policies.models.fcnet import flat_numpy, is_quick


class ActorCritic(ModelV2):
    """Acts as its actor does; has critics besides, which see observations and actions.

    Args:
        actor: the network that acts.
        action_space: a Box: critics see the action and have one value; a Discrete: they have a
            value for each action.
        num_critics: networks of the same shape, each with weights of its own.
        config: the settings of the critics' networks.
        rng: what their weights are drawn from.
        extra: further parameters, by name, such as a temperature.
    """

    def __init__(
        self,
        actor: ModelV2,
        action_space: spaces.Space,
        num_critics: int,
        config: ModelConfig,
        rng: np.random.Generator,
        extra: Mapping[str, torch.Tensor] | None = None,
    ):
        super().__init__(actor.obs_space, action_space, actor.num_outputs, config)
        self.view_requirements = actor.view_requirements
        self.actor = actor
        self._of_actions = isinstance(action_space, spaces.Box)
        nested = isinstance(self.obs_space, (spaces.Dict, spaces.Tuple))
        self._flat = not nested and not is_image(self.obs_space)
        seen: spaces.Space = self.obs_space
        outputs = 1
        if not self._of_actions:
            outputs = int(action_space.n)  # type: ignore[attr-defined]
        elif self._flat:
            size = flat_size(self.obs_space) + flat_size(action_space)
            seen = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        else:
            seen = spaces.Tuple((self.obs_space, action_space))
        single = config.updated(vf_share_layers=True)
        self.critics = nn.ModuleList(
            make_model(seen, action_space, outputs, single, rng=rng) for _ in range(num_critics)
        )
        for name, value in (extra or {}).items():
            self.register_parameter(name, nn.Parameter(value))
        self._each: list[Any] = list(self.critics)
        self.by_numpy = True  # where numpy can compute the networks

    # -- acting ------------------------------------------------------------------------------------

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        made: tuple[torch.Tensor, State] = self.actor(input_dict, state, seq_lens)
        return made

    def compute_outputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]:
        if is_quick(self.actor):
            return self.actor.outputs_numpy(inputs["obs"]), None, []
        outputs, _, state = self.actor.compute_outputs(inputs)
        return outputs, None, state

    def get_initial_state(self) -> list[np.ndarray]:
        return self.actor.get_initial_state()

    def link_numpy(self) -> None:
        for network in (self.actor, *self._each):
            network.link_numpy()

    # -- learning ----------------------------------------------------------------------------------

    def compile_for_learning(self) -> None:
        self.by_numpy = False
        for network in (self.actor, *self._each):
            network.compile_for_learning()

    def outputs(self, obs: Any) -> torch.Tensor:
        """The actor's outputs [B, num_outputs] for observations, tensors [B, …]."""
        return self._run(self.actor, obs, False)

    def q_values(
        self, obs: Any, actions: Any = None, frozen: bool = False, first: int | None = None
    ) -> torch.Tensor:
        """Values [critics, B], or [critics, B, n] of all actions of a Discrete space.

        Args:
            obs, actions: tensors [B, …]; no actions of a Discrete space.
            frozen: the gradient goes to the actions alone, not to the critics.
            first: so many of the critics; None: all.
        """
        seen = obs
        if self._of_actions and self._flat:
            seen = torch.cat([flat(self.obs_space, obs), actions.flatten(1)], 1)
        elif self._of_actions:
            seen = (obs, actions)
        values = torch.stack([self._run(critic, seen, frozen) for critic in self._each[:first]])
        return values.squeeze(-1) if self._of_actions else values

    def _run(self, network: Any, obs: Any, frozen: bool) -> torch.Tensor:
        if self.by_numpy and is_quick(network):
            return outputs_by_numpy(network, flat(network.obs_space, obs), frozen)
        learning = [p for p in network.parameters() if frozen and p.requires_grad]
        for parameter in learning:
            parameter.requires_grad_(False)
        try:
            outputs: torch.Tensor = network._learning(Inputs(obs=obs), [], None)[0]
        finally:
            for parameter in learning:
                parameter.requires_grad_(True)
        return outputs

    # -- without gradients -------------------------------------------------------------------------

    def outputs_numpy(self, obs: Any) -> np.ndarray:
        """The actor's outputs [B, num_outputs] for observations, arrays [B, …]."""
        return self.compute_outputs({"obs": obs})[0]

    def q_values_numpy(self, obs: Any, actions: np.ndarray | None = None) -> np.ndarray:
        """`q_values` of arrays."""
        seen = obs
        if self._of_actions and self._flat:
            assert actions is not None
            parts = [flat_numpy(self.obs_space, obs), actions.reshape(len(actions), -1)]
            seen = np.concatenate(parts, 1, dtype=np.float32)
        elif self._of_actions:
            seen = (obs, actions)
        made = [
            (c.outputs_numpy(seen) if is_quick(c) else c.compute_outputs({"obs": seen})[0])
            for c in self._each
        ]
        values = np.stack(made)
        return values[..., 0] if self._of_actions else values
