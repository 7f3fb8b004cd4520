"""PettingZoo environments as MultiAgentEnvs (extra `marl`).

An environment that a creator returns is wrapped automatically.
"""

from __future__ import annotations

import copy
from typing import Any

from gymnasium import spaces

from flowrl.envs.multi_agent import MultiAgentEnv, StepResult, is_multi_agent
from flowrl.envs.validation import copied_info
from flowrl.errors import ConfigError


def _is_turn_based(env: Any) -> bool:
    return hasattr(env, "agent_iter")


class _PettingZoo(MultiAgentEnv):
    def __init__(self, env: Any):
        self.env = env
        self.possible_agents = list(getattr(env, "possible_agents", ()))
        if not self.possible_agents:
            raise ConfigError(f"env: {env} does not define possible_agents")

    @property
    def unwrapped(self) -> Any:
        """The environment without its wrappers."""
        return self.env.unwrapped

    @property
    def metadata(self) -> Any:
        """The metadata of the wrapped environment."""
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
    """A parallel PettingZoo environment: all agents act in every step.

    The episode ends when no agents remain.

    Raises:
        ConfigError: the environment is turn-based, or does not define possible_agents.
    """

    def __init__(self, env: Any):
        if _is_turn_based(env):
            raise ConfigError(f"env: {env} is turn-based (AEC): wrap it in a PettingZooEnv")
        super().__init__(env)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, dict[str, Any]]]:
        observations, infos = self.env.reset(seed=seed, options=options)
        return observations, infos or {}

    def step(self, action_dict: dict[Any, Any]) -> StepResult:
        observations, rewards, terminateds, truncateds, infos = self.env.step(action_dict)
        flags = _flags_with_all(terminateds, truncateds, done=not self.env.agents)
        return observations, rewards, *flags, infos


class PettingZooEnv(_PettingZoo):
    """A turn-based (AEC) PettingZoo environment: one agent acts in each step.

    An agent is observed on its turn and at the end of the game. Rewards that it receives between
    its turns are credited to its last action.

    Raises:
        ConfigError: the environment is parallel, or does not define possible_agents.
    """

    def __init__(self, env: Any):
        if not _is_turn_based(env):
            raise ConfigError(f"env: {env} is parallel: wrap it in a ParallelPettingZooEnv")
        super().__init__(env)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, dict[str, Any]]]:
        self.env.reset(seed=seed, options=options)
        agent = self.env.agent_selection
        return {agent: self.env.observe(agent)}, {agent: self.env.infos[agent]}

    def step(self, action_dict: dict[Any, Any]) -> StepResult:
        env = self.env
        env.step(action_dict[env.agent_selection])
        # `env.rewards` holds this step's rewards; `env.last()` returns sums since the agent's turn
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
            # the environment may reuse its arrays for the next agent
            observations[agent] = copy.deepcopy(observations[agent])
            infos[agent] = copied_info(infos[agent])
            env.step(None)  # PettingZoo removes a finished agent on this call
        flags = _flags_with_all(terminateds, truncateds, done=not env.agents)
        return observations, rewards, *flags, infos


def wrap_pettingzoo(env: Any) -> Any:
    """Return a PettingZoo environment as a MultiAgentEnv, and any other object as it is."""
    by_agent = (getattr(env, f"{kind}_space", None) for kind in ("observation", "action"))
    if is_multi_agent(env) or not all(callable(space) for space in by_agent):
        return env
    return PettingZooEnv(env) if _is_turn_based(env) else ParallelPettingZooEnv(env)


def _flags_with_all(
    terminateds: dict[Any, bool], truncateds: dict[Any, bool], done: bool
) -> tuple[dict[Any, bool], dict[Any, bool]]:
    """Add `"__all__"`: an episode counts as truncated if its last agents were only truncated."""
    truncated = done and any(truncateds.values()) and not any(terminateds.values())
    return (
        {**terminateds, "__all__": done and not truncated},
        {**truncateds, "__all__": truncated},
    )
