"""Environments of several agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from flowrl.envs.registry import EnvContext, env_creator_for
from flowrl.settings import ConfigError

Dicts = tuple[
    dict[Any, Any], dict[Any, float], dict[Any, bool], dict[Any, bool], dict[Any, dict[str, Any]]
]


class MultiAgentEnv:
    """Base of environments in which several agents act. A subclass writes `reset` and `step`.

    Whoever is in the observations of a step acts in the next one; agents may come, go and act at
    different times. A reward counts for the agent's last action, whenever it comes: those of a
    waiting agent add up until it is observed again.

    Attributes:
        possible_agents: ids of all agents that may come.
        observation_spaces, action_spaces: by agent id; where they are absent,
            `observation_space` and `action_space` are every agent's.
    """

    possible_agents: list[Any] = []
    observation_spaces: dict[Any, spaces.Space] | None = None
    action_spaces: dict[Any, spaces.Space] | None = None
    observation_space: spaces.Space | None = None
    action_space: spaces.Space | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, dict[str, Any]]]:
        """Start an episode: observations of the agents that act first, and infos, by agent id."""
        raise NotImplementedError(f"{type(self).__name__} has no reset()")

    def step(self, action_dict: dict[Any, Any]) -> Dicts:
        """Act: observations, rewards, terminateds, truncateds, infos, each by agent id.

        The flags of `"__all__"` say whether the episode is over for everybody.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step()")

    def render(self) -> Any:
        """A picture of the environment, an RGB array [height, width, 3] of bytes, if it has any."""
        return None

    def close(self) -> None:
        """Release what the environment holds."""

    def get_observation_space(self, agent_id: Any) -> spaces.Space:
        """One agent's observation space.

        Raises:
            ConfigError: the environment does not say it.
        """
        return self._space("observation", agent_id)

    def get_action_space(self, agent_id: Any) -> spaces.Space:
        """One agent's action space.

        Raises:
            ConfigError: the environment does not say it.
        """
        return self._space("action", agent_id)

    def _space(self, kind: str, agent_id: Any) -> spaces.Space:
        by_agent = getattr(self, f"{kind}_spaces")
        if by_agent is not None and agent_id in by_agent:
            return by_agent[agent_id]
        shared = getattr(self, f"{kind}_space")
        if shared is None:
            raise ConfigError(
                f"env: {type(self).__name__} does not say the {kind} space of agent {agent_id!r}: "
                f"set {kind}_spaces or {kind}_space"
            )
        return shared


def is_multi_agent(env: Any) -> bool:
    """Whether an environment speaks of agents in dicts: a MultiAgentEnv, or one that has its
    methods."""
    return isinstance(env, MultiAgentEnv) or (
        hasattr(env, "get_observation_space") and hasattr(env, "get_action_space")
    )


class ManyAgents(MultiAgentEnv):
    """Copies of a single-agent environment, one for each agent.

    `env_config`:
        num_agents: how many; the agents are 0, 1, ….
        episode_steps: None: an agent whose copy has ended waits until all have, which ends the
            episode. A number: it begins anew at once as another agent, whose id is larger by
            num_agents (so `agent_id % num_agents` says which copy it has), and the episode is
            truncated after so many steps.
        The rest is for the copies.

    Args:
        creator: EnvContext -> a gymnasium environment.
        context: see above.

    Raises:
        ConfigError: fewer than one agent, or step.
    """

    def __init__(self, creator: Callable[[EnvContext], gym.Env], context: Mapping[str, Any]):
        places = [getattr(context, n, 0) for n in ("worker_index", "vector_index", "num_workers")]
        own = dict(context)
        count, self._limit = own.pop("num_agents", 2), own.pop("episode_steps", None)
        for name, value in (("num_agents", count), ("episode_steps", self._limit or 1)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"env_config: {name} is a whole number from 1, got {value!r}")
        self.np_random: np.random.Generator | None = None
        self._envs = [creator(EnvContext(dict(own), *places)) for _ in range(count)]
        self.possible_agents = list(range(count))
        self.observation_space = self._envs[0].observation_space
        self.action_space = self._envs[0].action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, dict[str, Any]]]:
        count = len(self._envs)
        if seed is not None or self.np_random is None:
            self.np_random = np.random.default_rng(seed)
        self._steps = 0
        self._acting = list(range(count))  # the agent of each copy
        self._over: set[int] = set()
        # each copy's episodes follow from this generator, which says where the whole stands
        seeds = self.np_random.integers(2**31, size=count).tolist()
        started = [
            env.reset(seed=own, options=options) for env, own in zip(self._envs, seeds, strict=True)
        ]
        return {i: obs for i, (obs, _) in enumerate(started)}, {
            i: info for i, (_, info) in enumerate(started)
        }

    def step(self, action_dict: dict[Any, Any]) -> Dicts:
        count = len(self._envs)
        made: list[dict[Any, Any]] = [{}, {}, {}, {}, {}]
        observations, rewards, terminateds, truncateds, infos = made
        self._steps += 1
        last = self._steps == self._limit
        for agent, action in action_dict.items():
            env = self._envs[agent % count]
            for column, value in zip(made, env.step(action), strict=True):
                column[agent] = value
            if not (terminateds[agent] or truncateds[agent]):
                truncateds[agent] = last
            elif self._limit is None:
                self._over.add(agent)
            elif not last:
                observations[agent + count], infos[agent + count] = env.reset()
        terminateds["__all__"] = len(self._over) == count
        truncateds["__all__"] = last
        return observations, rewards, terminateds, truncateds, infos

    def render(self) -> Any:
        """The copies beside each other."""
        frames: list[Any] = [env.render() for env in self._envs]
        alike = len({np.shape(frame) for frame in frames}) == 1
        return np.hstack(frames) if alike and np.ndim(frames[0]) == 3 else frames[0]

    def close(self) -> None:
        for env in self._envs:
            env.close()


def make_multi_agent(env: str | type | Callable[..., Any]) -> Callable[[EnvContext], MultiAgentEnv]:
    """A creator of copies of a single-agent environment, one for each agent; see ManyAgents.

    >>> from flowrl.sampling import EnvContext
    >>> four = make_multi_agent("CartPole-v1")(EnvContext({"num_agents": 4}))
    >>> sorted(four.reset(seed=0)[0])
    [0, 1, 2, 3]

    Args:
        env: an id of gymnasium's, a registered name, a class, or a creator.
    """
    return partial(ManyAgents, env_creator_for(env))
