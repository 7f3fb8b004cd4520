"""PolicyRunner: act in one episode with a policy, without worker, environment or Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import optree
from gymnasium import spaces

from flowrl.data.spaces import zeros_of
from flowrl.policies.filters import ObservationFilter
from flowrl.policies.observations import convert_observation
from flowrl.policies.views import ViewRequirement
from flowrl.settings import ConfigError


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
        self._views = {
            name: view
            for name, view in policy.view_requirements.items()
            if view.known_for_actions(name)
        }
        for name, view in self._views.items():
            if view.agents is not None:
                raise ConfigError(
                    f"view {name!r} shows other agents, but a PolicyRunner has only one agent"
                )
        self.reset()

    def reset(self) -> None:
        """Start a new episode."""
        self._t = 0
        self._history: dict[str, dict[int, Any]] = {}  # column -> timestep -> value
        self._initial_state = self.policy.get_initial_state()

    def compute_single_action(
        self, obs: Any, prev_reward: float = 0.0, explore: bool = False
    ) -> Any:
        """Compute the action to pass to the environment.

        Args:
            obs: raw observation.
            prev_reward: reward of the previous action.
            explore: sample from the policy; False returns the best action.

        Raises:
            ConfigError: the observation is not in the observation space, or the reward is not
                finite.
        """
        policy, t = self.policy, self._t
        self._store("obs", t, preprocess(policy, obs))
        if not np.isfinite(prev_reward):
            raise ConfigError(f"prev_reward is not finite: {prev_reward!r}")
        if t:
            self._store("rewards", t - 1, np.float32(prev_reward))
        inputs = {}
        for name, view in self._views.items():
            values = [self._lookup(view, view.data_col or name, t + shift) for shift in view.shifts]
            value: Any = values[0]
            if view.is_window:
                value = optree.tree_map(lambda *leaves: np.stack(leaves), *values)
            inputs[name] = optree.tree_map(lambda leaf: np.asarray(leaf)[None], value)
        actions, states, extra = policy.compute_actions_from_input_dict(inputs, explore=explore)
        columns: dict[str, Any] = {"actions": actions, **extra}
        columns |= {f"state_out_{i}": state for i, state in enumerate(states)}
        for column, value in columns.items():
            self._store(column, t, optree.tree_map(lambda leaf: leaf[0], value))
        self._t += 1
        return _first_action(policy.actions_for_env(actions))

    def _store(self, column: str, t: int, value: Any) -> None:
        lookback = max((view.lookback for view in self._views.values()), default=0)
        rows = self._history.setdefault(column, {})
        rows[t] = value
        rows.pop(t - lookback - 2, None)

    def _lookup(self, view: ViewRequirement, column: str, t: int) -> Any:
        """Return the value of a column at timestep t, or its value before the episode's start."""
        rows = self._history.get(column, {})
        if column == "obs":
            t = max(t, 0)
        if t in rows:
            return rows[t]
        if column.startswith("state_out_"):
            return self._initial_state[int(column.removeprefix("state_out_"))]
        if rows:
            return optree.tree_map(np.zeros_like, next(iter(rows.values())))
        if column in ("terminateds", "truncateds", "dones"):
            return np.zeros((), bool)
        if column == "rewards":
            return np.zeros((), np.float32)
        space = view.space
        if space is None and column == "actions":
            space = self.policy.action_space
        if space is None:
            raise ConfigError(
                f"view of {column!r}: needs a space, for its value before the episode's start"
            )
        return zeros_of(space)


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
