"""VectorEnv: the interface for stepping N environments together, and flowrl's implementation.

A VectorEnv writes the results of a step directly into the sampler's arrays. All implementations
behave alike at the end of an episode: they return the observation to act on next, the final
observation of each episode that ended, the rows that are resets rather than steps (a gymnasium
VectorEnv in NEXT_STEP mode spends one call per episode on the reset), and the environments that
failed and were recreated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from flowrl.envs.restarting_envs import RestartingEnvs
from flowrl.envs.validation import (
    FLAG_TYPES,
    NUMBERS,
    STEP_RESULTS,
    InvalidStepError,
    ObservationCheck,
    check_flags,
    check_result,
    check_reward,
    copied_info,
    space_of,
)
from flowrl.errors import ConfigError, add_note

StartInfos = Mapping[int, dict[str, Any]]
"""Infos that environments returned with the first observation of an episode, by index."""


class SteppedEnvs(Protocol):
    """N environments that are stepped together: what VectorEnv and MultiAgentVectorEnv share."""

    num_envs: int

    @property
    def num_restarts(self) -> int:
        """Number of failed environments that were recreated."""

    @property
    def reset_s(self) -> float:
        """Seconds in `reset` of the environments, as far as this class calls it."""

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Return fn(environment) for each environment, called in the process that steps it; a
        gymnasium VectorEnv is the only argument."""

    def mark_healthy(self, indices: Iterable[int]) -> None:
        """Note that environments completed a fragment.

        The count of failures at late steps becomes 0. That of other failures does at the next
        failure, unless it is at the same step of the episode. Long logs of actions are dropped.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the environments."""

    def close(self) -> None:
        """Close the environments."""


class VectorEnv(SteppedEnvs, Protocol):
    """N single-agent environments."""

    observation_space: spaces.Space
    action_space: spaces.Space
    resets_in_next_step: bool
    """Whether the end of an episode costs a call of `step` that only resets its environment."""

    @property
    def envs(self) -> list[Any]:
        """The environments in this process; a gymnasium VectorEnv is the only element."""

    def reset(self, observations: Any) -> StartInfos:
        """Start an episode in every environment; write the first observations [N, …]."""

    def step(
        self, actions: Any, observations: Any, rewards: Any, terminateds: Any, truncateds: Any
    ) -> VectorStep:
        """Step every environment.

        Args:
            actions: [N, …].
            observations: output, the observations to act on next [N, …].
            rewards: output, float32 [N].
            terminateds, truncateds: output, bool [N], filled with False by the caller.

        All are arrays or lists of length N.
        """

    def load_state_dict(self, state: dict[str, Any], observations: Any) -> StartInfos:
        """Bring the environments to the step at which a state was saved.

        Args:
            state: result of `state_dict()`.
            observations: the last observations before the checkpoint [N, …]. Those of
                environments that start a new episode are overwritten.

        Returns:
            infos of the environments that could not be restored and start a new episode.
        """


@dataclass(slots=True, eq=False)
class VectorStep:
    """Results of a step that are not in its output arrays.

    Attributes:
        ended: indices of the environments whose episode ended.
        final: their final observations [k, …], an array or a list.
        skipped: indices of the environments that were reset instead of stepped.
        failed: (index, error) of the environments whose step raised; their next observation starts
            an episode of a new environment.
        infos: one dict per environment; may be empty if no environment returned infos.
        start_infos: of the environments that start an episode; those without infos may be left out.
    """

    ended: Any = field(default_factory=list)
    final: Any = field(default_factory=list)
    skipped: Any = ()
    failed: list[tuple[int, Exception]] = field(default_factory=list)
    infos: Sequence[dict[str, Any]] = ()
    start_infos: StartInfos = field(default_factory=dict)


class DirectEnvs:
    """Environments in this process: the parts of DirectVectorEnv and DirectMultiAgentVectorEnv.

    Args:
        envs: the environments.
    """

    def __init__(self, envs: RestartingEnvs):
        self._envs = envs
        self.num_envs = len(envs.envs)

    @property
    def num_restarts(self) -> int:
        return self._envs.num_restarts

    @property
    def reset_s(self) -> float:
        return self._envs.reset_s

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        return [fn(self._envs.get(i)) for i in range(self.num_envs)]

    def mark_healthy(self, indices: Iterable[int]) -> None:
        self._envs.mark_healthy(indices)

    def state_dict(self) -> dict[str, Any]:
        return self._envs.state_dict()

    def close(self) -> None:
        self._envs.close()


class DirectVectorEnv(DirectEnvs):
    """Step gymnasium environments in turn in this process; reset each when its episode ends.

    An environment that raises is recreated; only its own episode is lost.

    Args:
        envs: the environments.
        drop_invalid: whether a step with invalid values is a failure, too.
    """

    resets_in_next_step = False

    def __init__(self, envs: RestartingEnvs, drop_invalid: bool = False):
        super().__init__(envs)
        self.observation_space = space_of(envs.get(0), "observation_space")
        self.action_space = space_of(envs.get(0), "action_space")
        self._check = ObservationCheck(self.observation_space)
        self._drop_invalid = drop_invalid
        self._unchecked = [True] * self.num_envs  # until the first step of each environment
        self._shape = self.observation_space.shape or None
        # types of scalar observations, which have no shape or dtype to check
        self._scalar_types = (int, np.integer) if self._check.is_array else ()
        space = self.action_space
        self._action_range = (
            (int(space.start), int(space.start + space.n))
            if isinstance(space, spaces.Discrete)
            else None
        )

    @property
    def envs(self) -> list[Any]:
        """The environments."""
        return self._envs.envs

    def reset(self, observations: Any) -> StartInfos:
        infos: dict[int, dict[str, Any]] = {}
        for i in range(self.num_envs):
            observations[i] = self._reset(i, infos)
        return infos

    def _reset(self, index: int, infos: dict[int, dict[str, Any]]) -> Any:
        """Return the first observation of an environment, or of the one that replaces it; add its
        info to `infos`. Anything but a mapping counts as no info."""
        while True:
            observation, info = self._envs.reset(index)
            # a copy: an environment may reuse its dict
            infos[index] = copied_info(info) if isinstance(info, Mapping) else {}
            if self._unchecked[index]:
                self._check_reset(index, observation)
            elif not self._check.matches_shape_and_dtype(observation):
                try:
                    self._check.check_structure(observation)  # numpy would broadcast and cast it
                except ConfigError as error:
                    add_note(error, f"raised by {self._envs.label(index)}")
                    raise
            if not self._drop_invalid:
                return observation
            try:
                self._check.check_step(observation, 0.0, f"{self._envs.label(index)} returned")
                return observation
            except InvalidStepError as error:
                self._fail(index, error, "reset")

    def _check_reset(self, index: int, observation: Any) -> None:
        """Check the spaces and the first observation of an environment."""
        env = self._envs.get(index)
        env_spaces = env.observation_space, env.action_space
        if env_spaces != (self.observation_space, self.action_space):
            raise ConfigError(
                f"env: sub-environment {index} has the spaces {env_spaces}, sub-environment 0 "
                f"has {(self.observation_space, self.action_space)}"
            )
        self._check.check_structure(observation)

    def _fail(self, index: int, error: Exception, method: str) -> None:
        """Replace an environment."""
        self._envs.handle_failure(index, error, method)
        self._unchecked[index] = True

    def step(
        self, actions: Any, observations: Any, rewards: Any, terminateds: Any, truncateds: Any
    ) -> VectorStep:
        result = VectorStep()
        start_infos: dict[int, dict[str, Any]] = {}
        result.start_infos = start_infos
        infos: list[dict[str, Any]] = []
        ended, final, unchecked = [], [], self._unchecked
        shape, dtype, scalar_types = self._shape, self._check.dtype, self._scalar_types
        drop_invalid, matches = self._drop_invalid, self._check.matches_shape_and_dtype
        # environments handle Python scalars faster than numpy scalars
        env_actions = actions.tolist() if getattr(actions, "ndim", 0) == 1 else actions
        if self._action_range is not None:
            low, end = self._action_range
            if min(env_actions) < low or max(env_actions) >= end:
                raise self._action_error(env_actions, low, end)
            logged = env_actions
        elif isinstance(env_actions, np.ndarray):  # an environment may modify its action in place
            logged = env_actions.copy()
        else:
            logged = copy.deepcopy(env_actions)
        for action_log, action in zip(self._envs.action_logs, logged, strict=False):
            action_log.append(action)
        for i, env in enumerate(self._envs.envs):
            try:
                returned = env.step(env_actions[i])
                if type(returned) is not tuple or len(returned) != 5:
                    check_result("step", returned, STEP_RESULTS)
                observation, reward, terminated, truncated, info = returned
                if terminated.__class__ not in FLAG_TYPES or truncated.__class__ not in FLAG_TYPES:
                    check_flags((terminated, truncated), "terminated and truncated")
                if info.__class__ is not dict and not isinstance(info, dict):
                    raise ConfigError(f"env: step() returned the info {info!r}: infos are dicts")
                if unchecked[i]:
                    self._check.check_structure(observation)
                    unchecked[i] = False
                elif shape is None:
                    is_fine = (
                        isinstance(observation, scalar_types)
                        if scalar_types
                        else matches(observation)
                    )
                    if not is_fine:
                        self._check.check_structure(observation)
                elif getattr(observation, "shape", None) != shape or observation.dtype != dtype:
                    self._check.check_structure(observation)  # numpy would broadcast and cast it
                if reward.__class__ not in NUMBERS:  # numpy would convert None and text
                    check_reward(reward)
                rewards[i] = reward
                if drop_invalid:
                    self._check.check_step(observation, reward, f"{self._envs.label(i)} returned")
            except ConfigError as error:
                add_note(error, f"raised by {self._envs.label(i)}")
                raise
            except Exception as error:
                self._fail(i, error, "step")
                result.failed.append((i, error))
                infos.append({})
                rewards[i] = 0.0
                observations[i] = self._reset(i, start_infos)
                continue
            infos.append(copied_info(info) if info else info)  # an environment may reuse it
            if terminated or truncated:
                terminateds[i] = terminated
                truncateds[i] = truncated
                ended.append(i)
                final.append(self._check.copy(observation))
                self._envs.mark_finished(i)
                observation = self._reset(i, start_infos)
            observations[i] = observation
        result.ended, result.final, result.infos = ended, final, infos
        return result

    def _action_error(self, actions: Any, low: int, end: int) -> ValueError:
        index = next(i for i, action in enumerate(actions) if not low <= action < end)
        return ValueError(
            f"the policy returned the action {actions[index]!r} for {self._envs.label(index)}, "
            f"whose actions are {low} ... {end - 1}"
        )

    def load_state_dict(self, state: dict[str, Any], observations: Any) -> StartInfos:
        self._envs.load_state_dict(state)
        restarted: dict[int, dict[str, Any]] = {}
        for i in range(self.num_envs):
            self._unchecked[i] = True
            if not self._envs.replay(i, state, partial(self._check.equals_saved, observations[i])):
                observations[i] = self._reset(i, restarted)
        return restarted
