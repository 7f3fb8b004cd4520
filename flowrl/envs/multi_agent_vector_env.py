"""MultiAgentVectorEnv: N environments whose observations and actions are dicts by agent id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from gymnasium import spaces

from flowrl.data.spaces import copy_value
from flowrl.envs.env_state import copy_actions
from flowrl.envs.multi_agent import is_multi_agent
from flowrl.envs.restarting_envs import RestartingEnvs
from flowrl.envs.validation import (
    FLAG_TYPES,
    LARGEST_REWARD,
    InvalidStepError,
    ObservationCheck,
    check_flags,
    check_result,
    check_reward,
    copied_info,
    invalid_step_error,
)
from flowrl.envs.vector_env import DirectEnvs, SteppedEnvs
from flowrl.errors import ConfigError, add_note

T = TypeVar("T")
ResetResult = tuple[dict[Any, Any], dict[Any, dict[str, Any]]]  # observations and infos by agent

MAX_CACHED_AGENTS = 10_000  # agents whose spaces are cached
MAX_STEPS_WITHOUT_ACTIONS = 1000  # consecutive steps of an episode in which no agent may act

_NOT_DONE = {"__all__": False}
_STEP_RESULTS = ("observations", "rewards", "terminateds", "truncateds", "infos")


@dataclass(slots=True, eq=False)
class MultiAgentStep:
    """Results of one environment in one step, by agent id.

    Attributes:
        obs, rewards, terminateds, truncateds, infos: results of the step. An "__all__" flag ends
            the episode.
        start, start_infos: first observations and infos of the next episode, if one starts now.
        failed: the error if the environment failed; `start` then comes from its replacement.
        skipped: whether the environment was reset instead of stepped (NEXT_STEP autoreset mode).
    """

    obs: dict[Any, Any] = field(default_factory=dict)
    rewards: dict[Any, float] = field(default_factory=dict)
    terminateds: dict[Any, bool] = field(default_factory=_NOT_DONE.copy)
    truncateds: dict[Any, bool] = field(default_factory=_NOT_DONE.copy)
    infos: dict[Any, dict[str, Any]] = field(default_factory=dict)
    start: dict[Any, Any] | None = None
    start_infos: dict[Any, dict[str, Any]] = field(default_factory=dict)
    failed: Exception | None = None
    skipped: bool = False


class MultiAgentVectorEnv(SteppedEnvs, Protocol):
    """N environments with agents; callbacks receive it as `base_env`."""

    possible_agents: list[Any]

    def observation_space(self, agent_id: Any) -> spaces.Space:
        """Return the observation space of an agent."""

    def observation_check(self, agent_id: Any) -> ObservationCheck:
        """Return the check of an agent's observations; agents with equal spaces share it."""

    def action_space(self, agent_id: Any) -> spaces.Space:
        """Return the action space of an agent."""

    def reset(self) -> list[ResetResult]:
        """Start an episode in every environment; return observations and infos by agent id."""

    def step(self, actions: list[dict[Any, Any]]) -> list[MultiAgentStep]:
        """Step every environment with the actions of its agents."""

    def get_sub_environments(self) -> list[Any]:
        """Return the environments; a gymnasium VectorEnv is the only element."""

    def load_state_dict(
        self, state: Any, observations: list[dict[Any, Any]]
    ) -> dict[int, ResetResult]:
        """Bring the environments to the step at which a state was saved.

        Args:
            state: result of `state_dict()`.
            observations: each agent's last observation before the checkpoint, by environment.

        Returns:
            index -> first observations and infos of the environments that could not be restored
            and start a new episode.
        """


class DirectMultiAgentVectorEnv(DirectEnvs):
    """Step MultiAgentEnvs one after another in this process.

    Args:
        envs: the environments.
        horizon: number of steps after which an episode is truncated for all agents; None: no limit.
        drop_invalid: whether a step with invalid values is a failure, too.

    Raises:
        ConfigError: the creator returns neither a gymnasium environment nor a MultiAgentEnv.
    """

    def __init__(self, envs: RestartingEnvs, horizon: int | None, drop_invalid: bool = False):
        first = envs.get(0)
        if not is_multi_agent(first):
            raise ConfigError(
                f"env: the creator returned a {type(first).__name__}, not a gymnasium Env or "
                "VectorEnv and not a MultiAgentEnv"
            )
        super().__init__(envs)
        self._horizon, self._drop_invalid = horizon, drop_invalid
        self._checks: dict[Any, ObservationCheck] = {}
        self._latest_check: ObservationCheck | None = None
        self.possible_agents = list(getattr(first, "possible_agents", None) or [])
        self._lengths = [0] * self.num_envs  # env steps of the current episodes
        self._idle_steps = [0] * self.num_envs  # the last of them, in which no agent acted

    def observation_space(self, agent_id: Any) -> spaces.Space:
        return self._envs.get(0).get_observation_space(agent_id)

    def observation_check(self, agent_id: Any) -> ObservationCheck:
        check = self._checks.get(agent_id)
        if check is None:
            if len(self._checks) >= MAX_CACHED_AGENTS:
                self._checks.clear()
            space, check = self.observation_space(agent_id), self._latest_check
            if check is None or (check.space is not space and check.space != space):
                check = self._latest_check = ObservationCheck(space)
            self._checks[agent_id] = check
        return check

    def action_space(self, agent_id: Any) -> spaces.Space:
        return self._envs.get(0).get_action_space(agent_id)

    def reset(self) -> list[ResetResult]:
        return [self._noted(index, self._reset) for index in range(self.num_envs)]

    def _noted(self, index: int, method: Callable[..., T], *args: Any) -> T:
        """Return method(index, *args); a ConfigError gets a note of the environment."""
        try:
            return method(index, *args)
        except ConfigError as error:
            add_note(error, f"raised by {self._envs.label(index)}")
            raise

    def _reset(self, index: int) -> ResetResult:
        self._lengths[index] = self._idle_steps[index] = 0
        while True:
            observations, infos = self._envs.reset(index)
            _check_dict("reset", "observations", observations)
            _check_agents("reset", observations)
            try:
                if self._drop_invalid:
                    self._check_values(index, observations, {})
                return observations, infos
            except InvalidStepError as error:
                self._envs.handle_failure(index, error, "reset")

    def _check_values(
        self, index: int, observations: dict[Any, Any], rewards: dict[Any, float]
    ) -> None:
        """Raise InvalidStepError if an environment returned an invalid value."""
        for agent, reward in rewards.items():
            with _noting_agent(agent):
                check_reward(reward)
        for agent, observation in observations.items():
            check = self.observation_check(agent)
            with _noting_agent(agent):
                check.check_structure(observation)
            returned = f"sub-environment {index} returned for agent {agent!r}"
            check.check_step(observation, rewards.get(agent, 0.0), returned)
        for agent, reward in rewards.items():
            if not -LARGEST_REWARD <= reward <= LARGEST_REWARD:
                problem = f"for agent {agent!r} a reward that is not finite: {reward}"
                raise invalid_step_error(
                    f"sub-environment {index} returned {problem}", can_drop=False
                )

    def step(self, actions: list[dict[Any, Any]]) -> list[MultiAgentStep]:
        return [self._noted(index, self._step, sent) for index, sent in enumerate(actions)]

    def _step(self, index: int, actions: dict[Any, Any]) -> MultiAgentStep:
        self._idle_steps[index] = 0 if actions else self._idle_steps[index] + 1
        if self._idle_steps[index] > MAX_STEPS_WITHOUT_ACTIONS:
            raise ConfigError(
                f"env: no agent acted in the last {MAX_STEPS_WITHOUT_ACTIONS} steps of "
                f"sub-environment {index}, and its episode has not ended: when all agents have "
                'ended, step() must return "__all__": True in terminateds or truncateds '
                "(PettingZoo: remove the agents from self.agents); in a game with turns, it must "
                "return the observation of the agent whose turn is next"
            )
        step = MultiAgentStep()
        self._envs.action_logs[index].append(copy_actions(actions))
        try:
            result = self._envs.get(index).step(dict(actions))  # the environment may change it
            check_result("step", result, _STEP_RESULTS)
            step.obs, step.rewards, step.terminateds, step.truncateds, step.infos = result
        except ConfigError:
            raise
        except Exception as error:
            return self._restart(index, error)
        if not all(type(value) is dict for value in result):
            for name, value in zip(_STEP_RESULTS, result, strict=True):
                _check_dict("step", name, value)
        if "__all__" not in step.terminateds or "__all__" not in step.truncateds:
            raise _missing_flag_error(step)
        _check_agents("step", step.obs)
        for flags in (step.terminateds, step.truncateds):
            if not FLAG_TYPES.issuperset(map(type, flags.values())):
                check_flags(flags.values(), f"the flags of sub-environment {index}")
        for agent, info in step.infos.items():
            if info.__class__ is not dict and not isinstance(info, Mapping | None):
                raise ConfigError(
                    f"env: step() of sub-environment {index} returned the info {info!r} for agent "
                    f"{agent!r}: infos are dicts, {{}} if there are none"
                )
        if self._drop_invalid:
            try:
                self._check_values(index, step.obs, step.rewards)
            except InvalidStepError as error:
                return self._restart(index, error)
        self._lengths[index] += 1
        done = step.terminateds["__all__"] or step.truncateds["__all__"]
        if not done and self._horizon is not None and self._lengths[index] >= self._horizon:
            step.truncateds = {**step.truncateds, "__all__": True}
            done = True
        if done:
            self._envs.mark_finished(index)
            # the reset may overwrite the arrays and dicts of the last step
            step.obs = {agent: self._copied(agent, obs) for agent, obs in step.obs.items()}
            step.rewards, step.infos = dict(step.rewards), copied_info(step.infos)
            step.terminateds, step.truncateds = dict(step.terminateds), dict(step.truncateds)
            step.start, step.start_infos = self._reset(index)
        return step

    def _copied(self, agent: Any, observation: Any) -> Any:
        """Return a copy of an agent's last observation, which must fit its space: the copy has the
        dtype of the space."""
        check = self.observation_check(agent)
        with _noting_agent(agent):
            check.check_structure(observation)
        return copy_value(check.space, observation)

    def _restart(self, index: int, error: Exception) -> MultiAgentStep:
        step = MultiAgentStep()
        self._envs.handle_failure(index, error, "step")
        step.failed = error
        step.start, step.start_infos = self._reset(index)
        return step

    def get_sub_environments(self) -> list[Any]:
        return list(self._envs.envs)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "lengths": list(self._lengths)}

    def load_state_dict(
        self, state: Any, observations: list[dict[Any, Any]]
    ) -> dict[int, ResetResult]:
        self._envs.load_state_dict(state)
        self._lengths = list(state["lengths"])
        restarted = {}
        for index, saved in enumerate(observations):
            if not self._envs.replay(index, state, _SavedObservations(saved, self).match):
                restarted[index] = self._reset(index)
        return restarted


class _SavedObservations:
    """Compare the observations of a replayed episode with each agent's last one before a
    checkpoint.

    Args:
        saved: by agent.
        agent_envs: checks the observations.
    """

    def __init__(self, saved: dict[Any, Any], agent_envs: DirectMultiAgentVectorEnv):
        self._saved, self._agent_envs = saved, agent_envs
        self._equal: dict[Any, bool] = {}  # by agent, of its latest observation

    def match(self, observations: dict[Any, Any]) -> bool:
        """Return whether the latest observation of each saved agent equals the saved one.

        Args:
            observations: result of a step, by agent.
        """
        for agent, observation in observations.items():
            if agent in self._saved:
                check = self._agent_envs.observation_check(agent)
                self._equal[agent] = check.equals_saved(self._saved[agent], observation)
        return len(self._equal) == len(self._saved) and all(self._equal.values())


def _check_agents(method: str, observations: dict[Any, Any]) -> None:
    """Raise ConfigError for an observation of "__all__", which is no agent."""
    if "__all__" in observations:
        raise ConfigError(
            f'env: {method}() returned an observation of "__all__": only the flags terminateds and '
            "truncateds have this entry; observations are by agent id"
        )


def _missing_flag_error(step: MultiAgentStep) -> ConfigError:
    name = "truncateds" if "__all__" in step.terminateds else "terminateds"
    return ConfigError(
        f'env: step() must set {name}["__all__"] to whether the episode is over, it returned '
        f"{getattr(step, name)!r}"
    )


@contextmanager
def _noting_agent(agent: Any) -> Iterator[None]:
    """Add a note with the agent to a ConfigError."""
    try:
        yield
    except ConfigError as error:
        add_note(error, f"returned for agent {agent!r}")
        raise


def _check_dict(method: str, name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ConfigError(
            f"env: {method}() must return {name} as a dict by agent id, it returned a "
            f"{type(value).__name__}: {np.shape(value) if hasattr(value, 'shape') else value!r}"
        )
