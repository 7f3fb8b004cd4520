"""PettingZoo's environments as MultiAgentEnvs (extra `marl`)."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from flowrl.envs.multi_agent import Dicts, MultiAgentEnv
from flowrl.settings import ConfigError


class _PettingZoo(MultiAgentEnv):
    def __init__(self, env: Any):
        self.env = env
        self.possible_agents = list(getattr(env, "possible_agents", ()))
        if not self.possible_agents:
            raise ConfigError(f"env: {env} does not say its possible_agents")

    @property
    def unwrapped(self) -> Any:
        """The environment inside of all wrappers."""
        return self.env.unwrapped

    @property
    def metadata(self) -> Any:
        """What the environment says of itself."""
        return getattr(self.env, "metadata", {})

    def render(self) -> Any:
        return self.env.render()

    def get_observation_space(self, agent_id: Any) -> spaces.Space:
        return self.env.observation_space(agent_id)

    def get_action_space(self, agent_id: Any) -> spaces.Space:
        return self.env.action_space(agent_id)

    def close(self) -> None:
        self.env.close()


class ParallelPettingZooEnv(_PettingZoo):
    """A parallel PettingZoo environment: all agents act at once.

    The episode is over when no agent is left.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, dict[str, Any]]]:
        observations, infos = self.env.reset(seed=seed, options=options)
        return observations, infos or {}

    def step(self, action_dict: dict[Any, Any]) -> Dicts:
        observations, rewards, terminateds, truncateds, infos = self.env.step(action_dict)
        over = not self.env.agents
        # one whose agents all ended in the same step by a limit was truncated as a whole
        cut = over and any(truncateds.values()) and not any(terminateds.values())
        return (
            observations,
            rewards,
            {**terminateds, "__all__": over and not cut},
            {**truncateds, "__all__": cut},
            infos,
        )


class PettingZooEnv(_PettingZoo):
    """A turn-based (AEC) PettingZoo environment: one agent acts in each step.

    An agent is observed when its turn comes, and at the end of the game; rewards that it gets
    while it waits count for its last action.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, dict[str, Any]]]:
        self.env.reset(seed=seed, options=options)
        agent = self.env.agent_selection
        return {agent: self.env.observe(agent)}, {agent: self.env.infos[agent]}

    def step(self, action_dict: dict[Any, Any]) -> Dicts:
        env = self.env
        env.step(action_dict[env.agent_selection])
        # `rewards` are those of this very step (last() would give sums since the agent's turn)
        rewards: dict[Any, float] = {a: r for a, r in env.rewards.items() if r}
        observations: dict[Any, Any] = {}
        terminateds: dict[Any, bool] = {}
        truncateds: dict[Any, bool] = {}
        infos: dict[Any, dict[str, Any]] = {}
        while env.agents:
            agent = env.agent_selection
            observations[agent], infos[agent] = env.observe(agent), env.infos[agent]
            if not (env.terminations[agent] or env.truncations[agent]):
                break
            terminateds[agent] = bool(env.terminations[agent])
            truncateds[agent] = bool(env.truncations[agent])
            env.step(None)  # an agent that is out steps away
        over = not env.agents
        cut = over and any(truncateds.values()) and not any(terminateds.values())
        return (
            observations,
            rewards,
            {**terminateds, "__all__": over and not cut},
            {**truncateds, "__all__": cut},
            infos,
        )
