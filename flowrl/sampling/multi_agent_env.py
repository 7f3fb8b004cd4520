"""Environments of several agents."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from flowrl.policies.config import ConfigError

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
