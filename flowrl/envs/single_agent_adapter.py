"""SingleAgentAdapter: a VectorEnv behind the MultiAgentVectorEnv interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gymnasium import spaces

from flowrl.data.spaces import first_value_of
from flowrl.envs.multi_agent_vector_env import MultiAgentStep, ResetResult
from flowrl.envs.validation import ObservationCheck
from flowrl.envs.vector_env import StartInfos, VectorEnv

SINGLE_AGENT = "agent0"


class SingleAgentAdapter:
    """Present each environment of a VectorEnv as one with a single agent, `"agent0"`.

    Attributes:
        vector_env: the wrapped VectorEnv.
    """

    possible_agents = [SINGLE_AGENT]

    def __init__(self, vector_env: VectorEnv):
        self.vector_env = vector_env
        self.num_envs = n = vector_env.num_envs
        self._check = ObservationCheck(vector_env.observation_space)
        self._observations: list[Any] = [None] * n
        self._rewards: list[Any] = [0.0] * n
        # placeholder action of environments that are being reset, which ignore it
        self._no_action = first_value_of(vector_env.action_space)

    @property
    def num_restarts(self) -> int:
        return self.vector_env.num_restarts

    @property
    def reset_s(self) -> float:
        return self.vector_env.reset_s

    def observation_space(self, agent_id: Any) -> spaces.Space:
        return self.vector_env.observation_space

    def observation_check(self, agent_id: Any) -> ObservationCheck:
        return self._check

    def action_space(self, agent_id: Any) -> spaces.Space:
        return self.vector_env.action_space

    def reset(self) -> list[ResetResult]:
        infos = self.vector_env.reset(self._observations)
        return [self._first(i, infos) for i in range(self.num_envs)]

    def _first(self, index: int, infos: StartInfos) -> ResetResult:
        """Return the first observation of an episode and its info, by agent."""
        info = infos.get(index, {})
        return {SINGLE_AGENT: self._observations[index]}, {SINGLE_AGENT: info}

    def step(self, actions: list[dict[Any, Any]]) -> list[MultiAgentStep]:
        n = self.num_envs
        env_actions = [by_agent.get(SINGLE_AGENT, self._no_action) for by_agent in actions]
        terminateds, truncateds = [False] * n, [False] * n
        result = self.vector_env.step(
            env_actions, self._observations, self._rewards, terminateds, truncateds
        )
        final = dict(zip((int(i) for i in result.ended), result.final, strict=True))
        failed = dict(result.failed)
        result.failed.clear()  # frames in the tracebacks of these errors refer to `result`
        skipped = {int(i) for i in result.skipped}
        steps = []
        for i in range(n):
            step = MultiAgentStep()
            steps.append(step)
            obs = self._observations[i]
            if i in failed or i in skipped:
                step.failed, step.skipped = failed.pop(i, None), i in skipped
                step.start, step.start_infos = self._first(i, result.start_infos)
                continue
            if i in final:
                step.terminateds = {"__all__": bool(terminateds[i])}
                step.truncateds = {"__all__": bool(truncateds[i])}
                step.obs = {SINGLE_AGENT: final[i]}
                if not self.vector_env.resets_in_next_step:
                    step.start, step.start_infos = self._first(i, result.start_infos)
            else:
                step.obs = {SINGLE_AGENT: obs}
            step.rewards = {SINGLE_AGENT: self._rewards[i]}
            if result.infos:
                step.infos = {SINGLE_AGENT: result.infos[i]}
        return steps

    def get_sub_environments(self) -> list[Any]:
        return list(self.vector_env.envs)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        return self.vector_env.foreach_env(fn)

    def mark_healthy(self, indices: Iterable[int]) -> None:
        self.vector_env.mark_healthy(indices)

    def state_dict(self) -> dict[str, Any]:
        return self.vector_env.state_dict()

    def load_state_dict(
        self, state: Any, observations: list[dict[Any, Any]]
    ) -> dict[int, ResetResult]:
        self._observations = [by_agent.get(SINGLE_AGENT) for by_agent in observations]
        restarted = self.vector_env.load_state_dict(state, self._observations)
        return {i: self._first(i, restarted) for i in restarted}

    def close(self) -> None:
        self.vector_env.close()
