"""ActsOnObservations: actions for observations as environments return them."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
from gymnasium import spaces

from flowrl.errors import ConfigError
from flowrl.policies.observations import convert_observation, is_single_observation
from flowrl.policies.policy_runner import ActingPolicy, PolicyRunner, preprocess
from flowrl.policies.views import acting_views

State = list[np.ndarray]


class ActsOnObservations:
    """The methods of Policy that act on raw observations, for evaluation and deployment."""

    def compute_single_action(self: ActingPolicy, obs: Any, explore: bool = False) -> Any:
        """Return the action for one raw observation, in the environment's form.

        Raises:
            ConfigError: the observation does not fit the space, or the policy needs more than the
                current observation (use `session()`).
        """
        views = acting_views(self.view_requirements)
        if views.keys() != {"obs"} or self.view_requirements["obs"].shift != 0:
            raise ConfigError(_needs_session(self, "the current observation"))
        return PolicyRunner(self).compute_single_action(obs, explore=explore)

    def predict(
        self: ActingPolicy,
        obs: Any,
        state: list[np.ndarray] | None = None,
        *,
        deterministic: bool = True,
    ) -> tuple[Any, list[np.ndarray] | None]:
        """Return actions for raw observations, in the environment's form.

        Args:
            obs: one observation, or a batch of them with shapes [B, …]; arrays, numbers or lists of
                numbers, in the structure of the observation space. For Dict spaces also a list of
                observations.
            state: recurrent state of the previous call; None starts new episodes.
            deterministic: return greedy actions instead of sampling them.

        Returns:
            one action or actions [B, …]; and the recurrent state, None without recurrence.

        Raises:
            ConfigError: an observation is not in the space, the state does not fit, `deterministic`
                is not a bool, or the policy needs more than observation and state (use
                `session()`).
        """
        if not isinstance(deterministic, (bool, np.bool_)):
            raise ConfigError(f"predict: deterministic must be a bool, got {deterministic!r}")
        return _predict(self, obs, state, explore=not deterministic)

    def session(self: ActingPolicy) -> PolicyRunner:
        """Return a PolicyRunner, which plays episodes with this policy without a worker."""
        return PolicyRunner(self)


def _needs_session(policy: ActingPolicy, given: str) -> str:
    """Return the message for a policy that needs more than is given."""
    views = acting_views(policy.view_requirements)
    windows = sorted(name for name, view in views.items() if view.is_window)
    what = f"several steps of {' and '.join(windows)}" if windows else ", ".join(sorted(views))
    settings = {"obs": " (model.num_framestacks)", "state_in_0": " (model.use_attention)"}
    what += settings.get(windows[0], "") if windows else ""
    return (
        f"{type(policy).__name__} acts on {what}, not only on {given}: use policy.session(), "
        "which remembers the episode (of an algorithm: algorithm.get_policy().session())"
    )


def _predict(
    policy: ActingPolicy, obs: Any, state: State | None, explore: bool
) -> tuple[Any, State | None]:
    """Implement `Policy.predict`."""
    views = acting_views(policy.view_requirements)
    initial_state = policy.get_initial_state()
    names = [f"state_in_{i}" for i in range(len(initial_state))]
    windows = [name for name, view in views.items() if view.is_window]
    if views.keys() - {"obs", *names} or windows or policy.view_requirements["obs"].shift != 0:
        raise ConfigError(_needs_session(policy, "the current observation and state"))
    space = policy.observation_space
    if isinstance(space, spaces.Dict) and isinstance(obs, list) and obs:
        singles = [convert_observation(space, row) for row in obs]
        is_single, obs = False, optree.tree_map(lambda *leaves: np.stack(leaves), *singles)
    else:
        is_single = is_single_observation(space, obs)
    rows: Any = preprocess(policy, obs, batch=not is_single)
    if is_single:
        rows = optree.tree_map(lambda leaf: np.asarray(leaf)[None], rows)
    num_rows = len(optree.tree_leaves(rows)[0])
    inputs = {"obs": rows}
    if state is not None and not isinstance(state, (list, tuple)):
        raise ConfigError(
            f"predict: state must be the list that the last call returned, got {state!r}"
        )
    if state is None:
        state = [np.repeat(part[None], num_rows, axis=0) for part in initial_state]
    elif is_single:
        state = [np.asarray(part)[None] for part in state]
    if len(state) != len(names):
        raise ConfigError(f"predict: the state must have {len(names)} parts, got {len(state)}")
    for name, part, initial in zip(names, state, initial_state, strict=True):
        if np.shape(part) != (num_rows, *initial.shape):
            raise ConfigError(
                f"predict: {name} has shape {np.shape(part)}, expected "
                f"{(num_rows, *initial.shape)[int(is_single) :]}"
            )
        inputs[name] = np.asarray(part, initial.dtype)
    actions, new_state, _ = policy.compute_actions_from_input_dict(inputs, explore=explore)
    actions = policy.actions_for_env(actions)
    if is_single:
        actions = optree.tree_map(lambda leaf: leaf[0], actions)
        new_state = [part[0] for part in new_state]
    return actions, new_state if names else None
