"""PolicyRunner: act in one episode with a policy, without worker, environment or Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import optree
from gymnasium import spaces

from flowrl.data.fragment_columns import FragmentColumns, write
from flowrl.errors import ConfigError
from flowrl.policies.acting_views import ActingViews, InitialStates
from flowrl.policies.filters import ObservationFilter
from flowrl.policies.observations import convert_observation
from flowrl.policies.views import ViewRequirement


class ActingPolicy(Protocol):
    """The part of a policy that a PolicyRunner uses; see Policy."""

    observation_space: spaces.Space
    action_space: spaces.Space
    observation_filter: ObservationFilter | None

    @property
    def view_requirements(self) -> Mapping[str, ViewRequirement]: ...

    def get_initial_state(self) -> list[np.ndarray]: ...

    def compute_actions_from_input_dict(
        self, input_dict: dict[str, Any], explore: bool = True
    ) -> tuple[Any, list[np.ndarray], dict[str, np.ndarray]]: ...

    def actions_for_env(self, actions: Any) -> Any: ...


def check_explore(explore: Any) -> None:
    """Raise ConfigError if `explore` is not a bool, but for example a recurrent state, which is the
    second argument in RLlib."""
    if not isinstance(explore, (bool, np.bool_)):
        raise ConfigError(
            f"explore must be True or False, got {explore!r:.80}: pass policy_id by its name, and "
            "a recurrent state to predict(obs, state)"
        )


class PolicyRunner:
    """Act step by step in one episode, and remember what the policy's views need: recurrent states,
    earlier observations, actions and rewards.

        runner = policy.session()
        action = runner.compute_single_action(obs)
        action = runner.compute_single_action(next_obs, prev_reward=1.0)
        runner.reset()  # start another episode

    Args:
        policy: the policy; acting advances its random generator and exploration noise.

    Raises:
        ConfigError: a view of the policy shows other agents.
    """

    def __init__(self, policy: ActingPolicy):
        self.policy = policy
        self.reset()

    def reset(self) -> None:
        """Start a new episode."""
        self._t = 0
        states = InitialStates(self.policy, lanes=1)
        self._views = ActingViews(self.policy, states)
        # row 0 is the step of the next action
        self._columns = FragmentColumns(lanes=1, length=1, lookback=max(self._views.lookback, 1))

    def compute_single_action(
        self, obs: Any, prev_reward: float = 0.0, explore: bool = False
    ) -> Any:
        """Compute the action to pass to the environment.

        Args:
            obs: raw observation.
            prev_reward: reward of the previous action.
            explore: sample from the policy; False returns the greedy action.

        Raises:
            ConfigError: the observation is not in the observation space, or the reward is not
                finite.
        """
        check_explore(explore)
        policy, columns = self.policy, self._columns
        self._store("obs", optree.tree_map(lambda a: np.asarray(a)[None], preprocess(policy, obs)))
        _check_reward(prev_reward)
        rewards = columns.allocate("rewards", (), np.dtype(np.float32))
        rewards[columns.lookback - 1] = prev_reward if self._t else 0.0
        inputs = self._views.inputs(columns, 0, np.array([self._t]))
        actions, states, extra = policy.compute_actions_from_input_dict(inputs, explore=explore)
        outputs = {f"state_out_{i}": state for i, state in enumerate(states)}
        for column, values in {"actions": actions, **extra, **outputs}.items():
            self._store(column, values)
        columns.advance(1, num_rows=1)
        self._t += 1
        return _first_action(policy.actions_for_env(actions))

    def _store(self, column: str, values: Any) -> None:
        """Store values [1, …] in row 0."""
        write(self._columns.allocate_like(column, values), self._columns.lookback, values)


def _check_reward(reward: Any) -> None:
    try:
        is_finite = math.isfinite(reward)
    except TypeError:
        is_finite = False
    if not is_finite:
        raise ConfigError(f"prev_reward must be a finite number, got {reward!r}")


def preprocess(policy: ActingPolicy, obs: Any, batch: bool = False) -> Any:
    """Validate and normalize an observation as the environment returned it, or a batch [B, …].

    Raises:
        ConfigError: it is not in the policy's observation space.
    """
    obs = convert_observation(policy.observation_space, obs, batch)
    if policy.observation_filter is None:
        return obs
    return policy.observation_filter(obs) if batch else policy.observation_filter(obs[None])[0]


def _first_action(actions: Any) -> Any:
    """Return the first of actions [B, …] in dicts and tuples."""
    if isinstance(actions, dict):
        return {key: _first_action(part) for key, part in actions.items()}
    if isinstance(actions, tuple):
        return tuple(map(_first_action, actions))
    return actions[0]
