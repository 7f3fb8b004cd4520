"""PolicyRunner: an episode played with a policy, without worker, environment or Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import optree
from gymnasium import spaces

from flowrl.data.spaces import zeros_of
from flowrl.settings import ConfigError

if TYPE_CHECKING:
    from flowrl.policies.policy import Policy
    from flowrl.policies.views import ViewRequirement


class PolicyRunner:
    """Remembers what a policy wants to see of the episode so far: states, windows of observations,
    earlier actions and rewards.

        session = policy.session()
        action = session.compute_single_action(obs)
        action = session.compute_single_action(next_obs, prev_reward=1.0)
        session.reset()  # a new episode

    Args:
        policy: that acts; it is not changed but for its random stream.

    Raises:
        ConfigError: the policy wants to see other agents.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self._views = {
            name: view
            for name, view in policy.view_requirements.items()
            if view.known_for_actions(name)
        }
        for name, view in self._views.items():
            if view.agents is not None:
                raise ConfigError(f"view {name!r} shows other agents: a session has one agent")
        self.reset()

    def reset(self) -> None:
        """A new episode begins."""
        self._t = 0
        self._past: dict[str, dict[int, Any]] = {}  # column -> timestep -> value
        self._initial = self.policy.get_initial_state()

    def compute_single_action(
        self, obs: Any, prev_reward: float = 0.0, explore: bool = False
    ) -> Any:
        """The action to send to the environment.

        Args:
            obs: raw observation.
            prev_reward: that came with it, for the action before.
            explore: whether to draw from the policy, or take what is best.

        Raises:
            ConfigError: the observation is not of the observation space's shape.
        """
        policy, t = self.policy, self._t
        self._note("obs", t, self._prepared(obs))
        if not np.isfinite(prev_reward):
            raise ConfigError(f"a prev_reward that is not finite: {prev_reward!r}")
        if t:
            self._note("rewards", t - 1, np.float32(prev_reward))
        inputs = {}
        for name, view in self._views.items():
            shown = [self._at(view, view.data_col or name, t + shift) for shift in view.shifts]
            value: Any = shown[0]
            if view.is_window:
                value = optree.tree_map(lambda *v: np.stack(v), *shown)
            inputs[name] = optree.tree_map(lambda leaf: np.asarray(leaf)[None], value)
        actions, states, extra = policy.compute_actions_from_input_dict(inputs, explore=explore)
        given: dict[str, Any] = {"actions": actions, **extra}
        given |= {f"state_out_{i}": state for i, state in enumerate(states)}
        for column, values in given.items():
            self._note(column, t, optree.tree_map(_first_row, values))
        self._t += 1
        return _first(policy.actions_for_env(actions))

    def _prepared(self, obs: Any) -> Any:
        space = self.policy.observation_space
        if space.shape is not None and np.shape(obs) != space.shape:
            raise ConfigError(f"an observation of the shape {np.shape(obs)}, not of {space}")
        if not isinstance(space, spaces.Box) and not space.contains(obs):
            raise ConfigError(f"an observation that is not of {space}: {obs!r}")
        if isinstance(space, spaces.Box) and not np.can_cast(
            np.asarray(obs).dtype, space.dtype, "same_kind"
        ):
            kind = np.asarray(obs).dtype
            raise ConfigError(f"an observation of dtype {kind}, not of {space}: {obs!r}")
        if isinstance(space, spaces.Box) and not np.isfinite(np.asarray(obs)).all():
            raise ConfigError(f"an observation that is not finite: {obs!r}")
        if self.policy.observation_filter is not None:
            return self.policy.observation_filter(np.asarray(obs)[None])[0]
        return obs if space.shape is None else np.asarray(obs, space.dtype)

    def _note(self, column: str, t: int, value: Any) -> None:
        lookback = max((v.lookback for v in self._views.values()), default=0)
        rows = self._past.setdefault(column, {})
        rows[t] = value
        rows.pop(t - lookback - 2, None)

    def _at(self, view: ViewRequirement, column: str, t: int) -> Any:
        rows = self._past.get(column, {})
        if column == "obs":
            t = max(t, 0)
        if t in rows:
            return rows[t]
        if column.startswith("state_out_"):
            return self._initial[int(column.removeprefix("state_out_"))]
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
            raise ConfigError(f"view of {column!r}: give it a space, to know what is not there")
        return zeros_of(space)


def _first_row(leaf: Any) -> Any:
    return leaf[0]


def _first(actions: Any) -> Any:
    if isinstance(actions, dict):
        return {key: _first(part) for key, part in actions.items()}
    if isinstance(actions, tuple):
        return tuple(map(_first, actions))
    return actions[0]
