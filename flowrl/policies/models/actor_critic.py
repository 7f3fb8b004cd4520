"""ActorCritic: an actor and several Q-networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from flowrl.data.spaces import is_image
from flowrl.errors import ConfigError
from flowrl.policies.config import ModelConfig
from flowrl.policies.models.base import ModelV2, State
from flowrl.policies.models.catalog import make_model
from flowrl.policies.models.fcnet import uses_numpy
from flowrl.policies.models.flatten import flat_size, flatten, flatten_numpy
from flowrl.policies.models.numpy_forward import outputs_by_numpy
from flowrl.policies.models.tensor_batch import InputDict


class ActorCritic(ModelV2):
    """An actor that computes action distribution inputs, and critics that compute Q-values.

    Args:
        actor: the network that acts.
        action_space: a Box, where critics take the action and return one Q-value, or a Discrete,
            where they return one Q-value per action.
        num_critics: number of critics, with the same layers and separate weights.
        config: settings of the critics' networks.
        rng: generator of the critics' initial weights.
        extra: further parameters by name, such as a temperature.

    Attributes:
        use_numpy: evaluate networks with numpy while learning, where they support it.
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
        self._takes_actions = isinstance(action_space, spaces.Box)
        nested = isinstance(self.obs_space, (spaces.Dict, spaces.Tuple))
        self._is_flat = not nested and not is_image(self.obs_space)
        critic_space: spaces.Space = self.obs_space
        num_outputs = 1
        if not self._takes_actions:
            num_outputs = int(action_space.n)  # type: ignore[attr-defined]
        elif self._is_flat:
            size = flat_size(self.obs_space) + flat_size(action_space)
            critic_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        else:
            critic_space = spaces.Tuple((self.obs_space, action_space))
        single = config.updated(vf_share_layers=True)
        try:
            critics = [
                make_model(critic_space, action_space, num_outputs, single, rng=rng)
                for _ in range(num_critics)
            ]
        except ConfigError as error:
            if config.custom_model is None:
                raise
            raise ConfigError(
                f"{error} (for a critic: obs_space is {critic_space}, which contains the action, "
                f'num_outputs is {num_outputs}). q_model={{"custom_model": None}} uses networks of '
                "flowrl for the critics"
            ) from error
        self.critics = nn.ModuleList(critics)
        for name, value in (extra or {}).items():
            self.register_parameter(name, nn.Parameter(value))
        self.critic_list: list[Any] = list(self.critics)  # faster access than a ModuleList
        self.use_numpy = True

    # -- acting ------------------------------------------------------------------------------------

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        result: tuple[torch.Tensor, State] = self.actor(input_dict, state, seq_lens)
        return result

    def compute_outputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]:
        if uses_numpy(self.actor):
            return self.actor.outputs_numpy(inputs["obs"]), None, []
        outputs, _, state = self.actor.compute_outputs(inputs)
        return outputs, None, state

    @property
    def acting_network(self) -> ModelV2:
        return self.actor

    def get_initial_state(self) -> list[np.ndarray]:
        return self.actor.get_initial_state()

    def bind_numpy_views(self) -> None:
        for network in (self.actor, *self.critic_list):
            network.bind_numpy_views()

    # -- learning ----------------------------------------------------------------------------------

    def compile_for_learning(self) -> None:
        self.use_numpy = False
        for network in (self.actor, *self.critic_list):
            network.compile_for_learning()

    def outputs(self, obs: Any) -> torch.Tensor:
        """Return the actor's outputs [B, num_outputs] of observations, tensors [B, …]."""
        return self._run(self.actor, obs, False)

    def q_values(
        self, obs: Any, actions: Any = None, frozen: bool = False, first: int | None = None
    ) -> torch.Tensor:
        """Return Q-values [critics, B], or [critics, B, n] for a Discrete action space.

        Args:
            obs: observations, tensors [B, …].
            actions: tensor [B, …]; None for a Discrete action space.
            frozen: compute gradients of the actions only, not of the critics.
            first: number of critics to evaluate; None evaluates all.
        """
        inputs, critics = self._critic_inputs(obs, actions), self.critic_list[:first]
        q = torch.stack([self._run(critic, inputs, frozen) for critic in critics])
        return q.squeeze(-1) if self._takes_actions else q

    def _critic_inputs(self, obs: Any, actions: Any) -> Any:
        if self._takes_actions and self._is_flat:
            flat_actions = actions.reshape(len(actions), -1)
            return torch.cat([flatten(self.obs_space, obs), flat_actions], 1)
        return (obs, actions) if self._takes_actions else obs

    def _run(self, network: Any, obs: Any, frozen: bool) -> torch.Tensor:
        if self.use_numpy and uses_numpy(network):
            return outputs_by_numpy(network, flatten(network.obs_space, obs), frozen)
        if not network.training:
            network.train()  # acting has switched dropout and similar layers off
        parameters = [p for p in network.parameters() if frozen and p.requires_grad]
        for parameter in parameters:
            parameter.requires_grad_(False)
        try:
            outputs: torch.Tensor = network.train_forward(InputDict(obs=obs), [], None)[0]
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)
        return outputs

    # -- without gradients -------------------------------------------------------------------------

    def evaluate_actor(self, obs: Any) -> torch.Tensor:
        """Return `outputs` without gradients and dropout; observations may be terminal."""
        return _evaluate(self.actor, obs)

    def evaluate_critics(self, obs: Any, actions: Any = None) -> torch.Tensor:
        """Return `q_values` without gradients and dropout."""
        inputs = self._critic_inputs(obs, actions)
        q = torch.stack([_evaluate(critic, inputs) for critic in self.critic_list])
        return q.squeeze(-1) if self._takes_actions else q

    def outputs_numpy(self, obs: Any) -> np.ndarray:
        """Return the actor's outputs [B, num_outputs] of observations, arrays [B, …]."""
        return self.compute_outputs({"obs": obs})[0]

    def q_values_numpy(self, obs: Any, actions: np.ndarray) -> np.ndarray:
        """Return `q_values` of continuous actions, all arrays, for critics that numpy computes."""
        inputs: Any = (obs, actions)
        if self._is_flat:
            features = [flatten_numpy(self.obs_space, obs), actions.reshape(len(actions), -1)]
            inputs = np.concatenate(features, 1, dtype=np.float32)
        return np.stack([critic.outputs_numpy(inputs)[:, 0] for critic in self.critic_list])


def _evaluate(network: Any, obs: Any) -> torch.Tensor:
    with torch.no_grad():
        if network.training:
            network.eval()
        outputs: torch.Tensor = network(InputDict(obs=obs), [], None)[0]
    return outputs.float()
