"""Multi-agent environments: the base class, and copies of a single-agent environment."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from flowrl.envs.registry import EnvContext, env_creator_for
from flowrl.envs.validation import copied_info
from flowrl.errors import ConfigError

# observations, rewards, terminateds, truncateds, infos, each by agent id
StepResult = tuple[
    dict[Any, Any], dict[Any, float], dict[Any, bool], dict[Any, bool], dict[Any, dict[str, Any]]
]


class MultiAgentEnv:
    """Base class of multi-agent environments. Subclasses implement `reset` and `step`.

    The agents in the observations of one step act in the next one. Agents may join, leave and act
    at different times. A reward is credited to the agent's last action; rewards that an agent
    receives between two of its observations are summed.

    Attributes:
        possible_agents: ids of all agents that may appear.
        observation_spaces, action_spaces: by agent id. Agents without an entry use
            `observation_space` and `action_space`.
        np_random: generator for the random numbers of the environment, seeded by `reset`; resumed
            runs restore it.
    """

    possible_agents: list[Any] = []
    observation_spaces: dict[Any, spaces.Space] | None = None
    action_spaces: dict[Any, spaces.Space] | None = None
    observation_space: spaces.Space | None = None
    action_space: spaces.Space | None = None
    np_random: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, dict[str, Any]]]:
        """Start an episode. A subclass calls this method first, which seeds `np_random`.

        Returns:
            observations of the agents that act first, and infos, each by agent id.
        """
        if type(self).reset is MultiAgentEnv.reset:
            raise NotImplementedError(f"{type(self).__name__} has no reset()")
        if seed is not None or self.np_random is None:
            self.np_random = np.random.default_rng(seed)
        return {}, {}

    def step(self, action_dict: dict[Any, Any]) -> StepResult:
        """Step the environment with the actions of the observed agents.

        Returns:
            observations, rewards, terminateds, truncateds and infos, each by agent id. The flags
            `"__all__"` end the episode for all agents.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step()")

    def render(self) -> Any:
        """Return an RGB array [height, width, 3], uint8; None if the env does not render."""
        return None

    def close(self) -> None:
        """Release the resources of the environment."""

    def get_observation_space(self, agent_id: Any) -> spaces.Space:
        """Return the observation space of an agent.

        Raises:
            ConfigError: the environment does not define one.
        """
        return self._space("observation", agent_id)

    def get_action_space(self, agent_id: Any) -> spaces.Space:
        """Return the action space of an agent.

        Raises:
            ConfigError: the environment does not define one.
        """
        return self._space("action", agent_id)

    def _space(self, kind: str, agent_id: Any) -> spaces.Space:
        spaces_by_agent = getattr(self, f"{kind}_spaces")
        if spaces_by_agent is not None and agent_id in spaces_by_agent:
            return spaces_by_agent[agent_id]
        shared = getattr(self, f"{kind}_space")
        if shared is None and agent_id is None:
            raise ConfigError(
                f"env: {type(self).__name__} has no possible_agents: set it to the ids of the "
                f"agents, or set {kind}_space, or the spaces in the PolicySpec of each policy"
            )
        if shared is None:
            raise ConfigError(
                f"env: {type(self).__name__} does not define the {kind} space of agent "
                f"{agent_id!r}: set {kind}_spaces or {kind}_space"
            )
        return shared


def is_multi_agent(env: Any) -> bool:
    """Return whether an env is a MultiAgentEnv or has its `get_..._space` methods."""
    return isinstance(env, MultiAgentEnv) or (
        hasattr(env, "get_observation_space") and hasattr(env, "get_action_space")
    )


class IndependentAgents(MultiAgentEnv):
    """A multi-agent environment in which each agent acts in its own copy of a single-agent one.

    `env_config` keys:
        num_agents: number of agents (2); their ids are 0, 1, ...
        episode_steps: None (the default): an agent whose copy has ended waits until all copies
            have ended, which ends the episode. A number: a copy that has ended restarts at once
            with a new agent, whose id is larger by num_agents (`agent_id % num_agents` is the index
            of its copy), and the episode is truncated after this many steps.
        All other keys are passed to the copies.

    Args:
        creator: EnvContext -> a gymnasium environment.
        context: an EnvContext with the keys above.

    Raises:
        ConfigError: num_agents or episode_steps is not a positive integer.
    """

    def __init__(self, creator: Callable[[EnvContext], gym.Env], context: Mapping[str, Any]):
        names = ("worker_index", "vector_index", "num_workers", "atari")
        attributes = {name: getattr(context, name) for name in names if hasattr(context, name)}
        env_config = dict(context)
        count = env_config.pop("num_agents", 2)
        self._episode_steps = env_config.pop("episode_steps", None)
        steps = 1 if self._episode_steps is None else self._episode_steps
        for name, value in (("num_agents", count), ("episode_steps", steps)):
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ConfigError(f"env_config: {name} must be a positive integer, got {value!r}")
        self._envs = [creator(EnvContext(dict(env_config), **attributes)) for _ in range(count)]
        if None in self._envs:
            raise ConfigError("env: the creator returned None: does it return the environment?")
        self.possible_agents = list(range(count))
        self.observation_space = self._envs[0].observation_space
        self.action_space = self._envs[0].action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, dict[str, Any]]]:
        super().reset(seed=seed)
        count = len(self._envs)
        self._steps = 0
        self._finished: set[int] = set()
        # the copies are seeded from one generator, whose state therefore restores all of them
        seeds = self.np_random.integers(2**31, size=count).tolist()
        starts = [
            env.reset(seed=env_seed, options=options)
            for env, env_seed in zip(self._envs, seeds, strict=True)
        ]
        return {i: obs for i, (obs, _) in enumerate(starts)}, {
            i: info for i, (_, info) in enumerate(starts)
        }

    def step(self, action_dict: dict[Any, Any]) -> StepResult:
        count = len(self._envs)
        columns: list[dict[Any, Any]] = [{}, {}, {}, {}, {}]
        observations, rewards, terminateds, truncateds, infos = columns
        self._steps += 1
        is_last = self._steps == self._episode_steps
        for agent, action in action_dict.items():
            env = self._envs[agent % count]
            for column, value in zip(columns, env.step(action), strict=True):
                column[agent] = value
            if not (terminateds[agent] or truncateds[agent]):
                truncateds[agent] = is_last
            elif self._episode_steps is None:
                self._finished.add(agent)
            elif not is_last:
                # the reset may overwrite the arrays of the last step
                observations[agent] = copy.deepcopy(observations[agent])
                infos[agent] = copied_info(infos[agent])
                observations[agent + count], infos[agent + count] = env.reset()
        terminateds["__all__"] = len(self._finished) == count
        truncateds["__all__"] = is_last
        return observations, rewards, terminateds, truncateds, infos

    def render(self) -> Any:
        """Return the frames of all copies side by side if their shapes agree, else the first."""
        frames: list[Any] = [env.render() for env in self._envs]
        same_shape = len({np.shape(frame) for frame in frames}) == 1
        return np.hstack(frames) if same_shape and np.ndim(frames[0]) == 3 else frames[0]

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # closes all, also after an error
            for env in self._envs:
                stack.callback(env.close)


def make_multi_agent(
    env: str | type | Callable[..., Any],
) -> Callable[[Mapping[str, Any]], MultiAgentEnv]:
    """Return a creator of multi-agent copies of a single-agent env; see IndependentAgents.

    >>> four = make_multi_agent("CartPole-v1")({"num_agents": 4})
    >>> sorted(four.reset(seed=0)[0])
    [0, 1, 2, 3]

    Args:
        env: a gymnasium env id, a registered name, an env class or an env creator.
    """
    return partial(IndependentAgents, env_creator_for(env))
