"""Environments as slots that speak of agents: one interface for one agent and for several."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from flowrl.envs.multi_agent import is_multi_agent
from flowrl.envs.restarting_envs import EnvSlots
from flowrl.envs.validation import copied
from flowrl.envs.vector_env import DirectStepper, Stepper, same
from flowrl.policies.views import zeros_of
from flowrl.settings import ConfigError

SINGLE_AGENT = "agent0"

_GOES_ON = {"__all__": False}


class SlotStep:
    """What one environment gave in one step, by agent id.

    obs, rewards, terminateds, truncateds, infos: of the step; flags of "__all__" end the episode.
    start, start_infos: the first observations of the next episode, where one begins now.
    failed: the error of an environment that broke; `start` is that of the one that replaced it.
    skipped: nothing was stepped (a vector environment was busy with a reset).
    taken: copies of observations that were found right together with those of other environments.
    """

    __slots__ = (
        "failed", "infos", "obs", "rewards", "skipped", "start", "start_infos", "taken",
        "terminateds", "truncateds",
    )  # fmt: skip

    def __init__(self) -> None:
        self.obs: dict[Any, Any] = {}
        self.rewards: dict[Any, float] = {}
        self.terminateds: dict[Any, bool] = _GOES_ON
        self.truncateds: dict[Any, bool] = _GOES_ON
        self.infos: dict[Any, dict[str, Any]] = {}
        self.start: dict[Any, Any] | None = None
        self.start_infos: dict[Any, dict[str, Any]] = {}
        self.failed: Exception | None = None
        self.skipped = False
        self.taken: dict[Any, Any] = {}


class AgentSlots(Protocol):
    """N environments that speak of agents."""

    num_envs: int
    possible_agents: list[Any]

    @property
    def num_restarts(self) -> int:
        """Environments made in the place of broken ones."""
        return 0

    def observation_space(self, agent_id: Any) -> spaces.Space:
        """An agent's observation space."""

    def action_space(self, agent_id: Any) -> spaces.Space:
        """An agent's action space."""

    def reset(self) -> list[tuple[dict[Any, Any], dict[Any, dict[str, Any]]]]:
        """Start an episode everywhere: first observations and infos, by agent id."""

    def step(self, actions: list[dict[Any, Any]]) -> list[SlotStep]:
        """Step every environment with its agents' actions."""

    def restart(self, index: int, error: Exception) -> SlotStep:
        """Environment `index` gave what cannot be used: replace it; a step with its start."""

    def get_sub_environments(self) -> list[Any]:
        """The environments themselves; of a vector environment the one that it is."""

    def settle(self, slots: Any) -> None:
        """These environments got through a fragment."""

    def get_state(self) -> dict[str, Any] | None:
        """How each environment came to be where it is."""

    def set_state(self, state: Any, observations: list[dict[Any, Any]]) -> dict[int, Any]:
        """Go on where other environments were, whose agents were observed like this last.

        Returns:
            first observations and infos of those that cannot go on and begin anew, by index.
        """

    def close(self) -> None:
        """Close the environments."""


class SingleAgentSlots:
    """The environments of a stepper, each with one agent, `"agent0"`."""

    possible_agents = [SINGLE_AGENT]

    def __init__(self, stepper: Stepper):
        self.stepper = stepper
        self.num_envs = n = stepper.num_envs
        self._observations: list[Any] = [None] * n
        self._rewards: list[Any] = [0.0] * n
        # what an environment gets that is busy with a reset
        self._idle = zeros_of(stepper.action_space)
        if isinstance(stepper.action_space, spaces.Discrete):
            self._idle = int(stepper.action_space.start)

    @property
    def num_restarts(self) -> int:
        return self.stepper.num_restarts

    def observation_space(self, agent_id: Any) -> spaces.Space:
        return self.stepper.observation_space

    def action_space(self, agent_id: Any) -> spaces.Space:
        return self.stepper.action_space

    def reset(self) -> list[tuple[dict[Any, Any], dict[Any, dict[str, Any]]]]:
        self.stepper.reset(self._observations)
        return [({SINGLE_AGENT: obs}, {}) for obs in self._observations]

    def step(self, actions: list[dict[Any, Any]]) -> list[SlotStep]:
        n = self.num_envs
        given = [agents.get(SINGLE_AGENT, self._idle) for agents in actions]
        terminateds, truncateds = [False] * n, [False] * n
        step = self.stepper.step(given, self._observations, self._rewards, terminateds, truncateds)
        results = []
        final = dict(zip((int(i) for i in step.ended), step.final, strict=True))
        failed = dict(step.failed)
        skipped = {int(i) for i in step.skipped}
        resets_later = {i for i in final if self._resets_later}
        for i in range(n):
            one = SlotStep()
            results.append(one)
            obs = self._observations[i]
            if i in failed:
                one.failed, one.start = failed[i], {SINGLE_AGENT: obs}
                continue
            if i in skipped:
                one.skipped, one.start = True, {SINGLE_AGENT: obs}
                continue
            if i in final:
                one.terminateds = {"__all__": bool(terminateds[i])}
                one.truncateds = {"__all__": bool(truncateds[i])}
                one.obs = {SINGLE_AGENT: final[i]}
                one.start = None if i in resets_later else {SINGLE_AGENT: obs}
            else:
                one.obs = {SINGLE_AGENT: obs}
            one.rewards = {SINGLE_AGENT: self._rewards[i]}
            if step.infos:
                one.infos = {SINGLE_AGENT: step.infos[i]}
        return results

    @property
    def _resets_later(self) -> bool:
        from gymnasium.vector import AutoresetMode

        return getattr(self.stepper, "mode", None) is AutoresetMode.NEXT_STEP

    def restart(self, index: int, error: Exception) -> SlotStep:
        if not isinstance(self.stepper, DirectStepper):
            raise error  # one environment of a vector environment cannot be replaced
        one = SlotStep()
        one.failed, one.start = error, {SINGLE_AGENT: self.stepper.restart(index, error)}
        return one

    def get_sub_environments(self) -> list[Any]:
        stepper: Any = self.stepper
        return list(stepper.envs) if isinstance(stepper, DirectStepper) else [stepper.env]

    def settle(self, slots: Any) -> None:
        self.stepper.settle(slots)

    def get_state(self) -> dict[str, Any] | None:
        return self.stepper.get_state()

    def set_state(self, state: Any, observations: list[dict[Any, Any]]) -> dict[int, Any]:
        self._observations = [seen.get(SINGLE_AGENT) for seen in observations]
        anew = self.stepper.set_state(state, self._observations)
        return {i: ({SINGLE_AGENT: self._observations[i]}, {}) for i in anew}

    def close(self) -> None:
        self.stepper.close()


_STEP_GIVES = ("observations", "rewards", "terminateds", "truncateds", "infos")


class MultiAgentSlots:
    """Environments of several agents, stepped one after another.

    Args:
        slots: the environments.
        horizon: steps after which an episode is truncated for everybody; None: never.
    """

    def __init__(self, slots: EnvSlots, horizon: int | None):
        first = slots.at(0)
        if not is_multi_agent(first):
            raise ConfigError(
                f"env: the creator gave a {type(first).__name__}, not a gymnasium Env or "
                "VectorEnv and not a MultiAgentEnv"
            )
        self._slots = slots
        self._horizon = horizon
        self.num_envs = len(slots.envs)
        self.possible_agents = list(getattr(first, "possible_agents", []))
        self._lengths = [0] * self.num_envs

    @property
    def num_restarts(self) -> int:
        return self._slots.num_restarts

    def observation_space(self, agent_id: Any) -> spaces.Space:
        return self._slots.at(0).get_observation_space(agent_id)

    def action_space(self, agent_id: Any) -> spaces.Space:
        return self._slots.at(0).get_action_space(agent_id)

    def reset(self) -> list[tuple[dict[Any, Any], dict[Any, dict[str, Any]]]]:
        return [self._start(i) for i in range(self.num_envs)]

    def _start(self, index: int) -> tuple[dict[Any, Any], dict[Any, dict[str, Any]]]:
        self._lengths[index] = 0
        observations, infos = self._slots.reset(index)
        _check_dict("reset", "observations", observations)
        return observations, infos

    def step(self, actions: list[dict[Any, Any]]) -> list[SlotStep]:
        return [self._step(index, given) for index, given in enumerate(actions)]

    def _step(self, index: int, actions: dict[Any, Any]) -> SlotStep:
        one = SlotStep()
        self._slots.journals[index].append(copied_actions(actions))
        try:
            given = self._slots.at(index).step(actions)
            one.obs, one.rewards, one.terminateds, one.truncateds, one.infos = given
        except ConfigError:
            raise
        except Exception as error:
            return self.restart(index, error)
        for name, value in zip(_STEP_GIVES, given, strict=True):
            if not isinstance(value, dict):
                _check_dict("step", name, value)
        if "__all__" not in one.terminateds or "__all__" not in one.truncateds:
            lacking = "truncateds" if "__all__" in one.terminateds else "terminateds"
            raise ConfigError(
                f'env: step() must say in {lacking}["__all__"] whether the episode is over, it '
                f"gave {getattr(one, lacking)!r}"
            )
        self._lengths[index] += 1
        over = one.terminateds["__all__"] or one.truncateds["__all__"]
        if not over and self._lengths[index] == self._horizon:
            one.truncateds = {**one.truncateds, "__all__": True}
            over = True
        if over:
            self._slots.settle((index,))
            spaces_of = {agent: self.observation_space(agent) for agent in one.obs}
            # the reset may write over the arrays of the last step
            one.obs = {agent: copied(spaces_of[agent], obs) for agent, obs in one.obs.items()}
            one.start, one.start_infos = self._start(index)
        return one

    def restart(self, index: int, error: Exception) -> SlotStep:
        one = SlotStep()
        self._slots.blame(index, error, "by step()")
        one.failed = error
        one.start, one.start_infos = self._start(index)
        return one

    def get_sub_environments(self) -> list[Any]:
        return list(self._slots.envs)

    def settle(self, slots: Any) -> None:
        self._slots.settle(slots)

    def get_state(self) -> dict[str, Any] | None:
        return {**self._slots.get_state(), "lengths": list(self._lengths)}

    def set_state(self, state: Any, observations: list[dict[Any, Any]]) -> dict[int, Any]:
        self._slots.set_state(state)
        self._lengths = list(state["lengths"])
        anew = {}
        for index, seen in enumerate(observations):

            def matches(given: Any, seen: dict[Any, Any] = seen) -> bool:
                return all(same(seen[a], obs) for a, obs in given.items() if a in seen)

            if not self._slots.replay(index, state, matches):
                anew[index] = self._start(index)
        return anew

    def close(self) -> None:
        self._slots.close()


def copied_actions(actions: dict[Any, Any]) -> dict[Any, Any]:
    """The actions, which an environment may write into."""
    return {a: v if type(v) is int else copy.deepcopy(v) for a, v in actions.items()}


def _check_dict(method: str, what: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ConfigError(
            f"env: {method}() gives {what} as a dict by agent id, it gave a "
            f"{type(value).__name__}: {np.shape(value) if hasattr(value, 'shape') else value!r}"
        )
