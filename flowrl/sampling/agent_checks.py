"""AgentChecks: check what environments return for their agents."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from gymnasium import spaces

from flowrl.data.columns import map_leaves
from flowrl.data.sample_batch import AgentID, PolicyID
from flowrl.data.serialization import can_be_saved
from flowrl.data.spaces import fits_into, stack_values
from flowrl.envs.gymnasium_vector_env import GymnasiumVectorEnv
from flowrl.envs.multi_agent_vector_env import MAX_CACHED_AGENTS, MultiAgentVectorEnv
from flowrl.envs.single_agent_adapter import SingleAgentAdapter
from flowrl.envs.validation import (
    OUTSIDE_WARNING,
    ObservationCheck,
    OnInvalidStep,
    check_reward,
    invalid_step_error,
)
from flowrl.errors import ConfigError, add_note
from flowrl.policies.policy import Policy
from flowrl.sampling.policy_lanes import PolicyLanes
from flowrl.sampling.running_episodes import Segment

log = logging.getLogger("flowrl")


def check_spaces(
    owner: str,
    observation_space: spaces.Space,
    action_space: spaces.Space,
    policy_id: PolicyID,
    policy: Policy,
    *,
    needs_all_actions: bool,
) -> None:
    """Check that a policy can represent all observations, and that all its actions are allowed.

    The bounds of Box observations may differ.

    Args:
        owner: whose the spaces are, for the message, such as "the environment".
        observation_space, action_space: the spaces in which the policy acts.
        policy_id, policy: the policy.
        needs_all_actions: whether the action spaces must be equal. If not, the policy may have
            fewer actions.

    Raises:
        ConfigError: an observation or an action does not fit.
    """
    if not fits_into(observation_space, policy.observation_space, with_bounds=False):
        raise ConfigError(
            f"policies: the observation space {policy.observation_space} of policy {policy_id!r} "
            f"cannot represent the observations of {owner}, {observation_space}"
        )
    if needs_all_actions and policy.action_space != action_space:
        raise ConfigError(
            f"policies: the action space {policy.action_space} of policy {policy_id!r} differs "
            f"from that of {owner}, {action_space}: map the agent to another policy"
        )
    if not fits_into(policy.action_space, action_space, with_bounds=True):
        raise ConfigError(
            f"policies: the action space {policy.action_space} of policy {policy_id!r} allows "
            f"other actions than {owner}, {action_space}"
        )


class AgentChecks:
    """Checks observations and rewards against the spaces of agents and policies.

    Args:
        agent_envs: the environments.
        on_invalid_step: the setting; "warn" accepts observations outside of the bounds of a Box.
        worker_index: for the warning.
    """

    def __init__(
        self,
        agent_envs: MultiAgentVectorEnv,
        on_invalid_step: OnInvalidStep,
        worker_index: int,
    ):
        self._agent_envs = agent_envs
        self._can_drop = not isinstance(getattr(agent_envs, "vector_env", None), GymnasiumVectorEnv)
        self._warn_only = on_invalid_step == "warn"
        self._replaces = on_invalid_step == "replace"
        self._worker_index = worker_index
        self._fitting: set[tuple[AgentID, str]] = set()  # agents that fit a policy
        self._warned: set[str] = set()

    def check_policy(self, agent: AgentID, lanes: PolicyLanes) -> None:
        """Check an agent's id, and compare its spaces with those of its policy.

        Raises:
            ConfigError: the spaces do not fit, or checkpoints cannot contain the id.
        """
        if (agent, lanes.policy_id) in self._fitting:
            return
        if not can_be_saved(agent):
            raise ConfigError(
                f"env: the agent id {agent!r} is of type {type(agent).__name__}, which checkpoints "
                "cannot contain: use strings, numbers, or tuples of them"
            )
        if len(self._fitting) >= MAX_CACHED_AGENTS:
            self._fitting.clear()
        envs = self._agent_envs
        given = envs.observation_space(agent), envs.action_space(agent)
        check_spaces(
            f"agent {agent!r}",
            *given,
            lanes.policy_id,
            lanes.policy,
            needs_all_actions=True,  # the policy may have got its space from another agent
        )
        self._fitting.add((agent, lanes.policy_id))

    def check_structure(self, env_index: int, agent: AgentID, observation: Any) -> None:
        """Compare the structure of an agent's observation with its space.

        Raises:
            ConfigError: it does not fit the agent's space.
        """
        check = self._agent_envs.observation_check(agent)
        try:
            check.check_structure(observation)
        except ConfigError as error:
            add_note(error, f"returned{self._for_agent(agent)} by sub-environment {env_index}")
            raise
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise ConfigError(
                f"env: an observation of agent {agent!r} does not fit the space {check.space}: "
                f"{error}"
            ) from error

    def check_reward(self, env_index: int, agent: AgentID, reward: Any) -> None:
        """Check that an agent's reward is a single number.

        Raises:
            ConfigError: it is not.
        """
        try:
            check_reward(reward)
        except ConfigError as error:
            add_note(error, f"returned{self._for_agent(agent)} by sub-environment {env_index}")
            raise

    def stack_and_check(
        self, policy_lanes: PolicyLanes, lanes: list[int], observations: list[Any]
    ) -> Any:
        """Check observations one by one, and return them as arrays [k, …].

        Args:
            policy_lanes: the rows of their policy.
            lanes: the lane of each.
            observations: the observations.

        Raises:
            ConfigError: one does not fit the space of its agent.
        """
        by_lane = {trajectory.lane: trajectory for trajectory in policy_lanes.waiting}
        copies = []
        for lane, observation in zip(lanes, observations, strict=True):
            agent = by_lane[lane].agent_id
            self.check_structure(int(policy_lanes.envs[lane]), agent, observation)
            check = self._agent_envs.observation_check(agent)
            copied = check.copy(observation)
            copies.append(check.repair(copied) if self._replaces else copied)
        return stack_values(copies)

    def _for_agent(self, agent: AgentID) -> str:
        """Return the agent's name for a message; "" if the environment has no agents' names."""
        return "" if isinstance(self._agent_envs, SingleAgentAdapter) else f" for agent {agent!r}"

    def check_waiting(self, lanes: PolicyLanes) -> None:
        """Check the observations that a policy acts on, after it has raised an error.

        Raises:
            InvalidStepError: one is invalid.
        """
        for trajectory in lanes.waiting:
            observation = lanes.observation(trajectory)
            if not self._accepts(trajectory.check, observation):
                name = self._for_agent(trajectory.agent_id)
                problem = trajectory.check.describe_problem(observation)
                env = lanes.envs[trajectory.lane]
                raise invalid_step_error(
                    f"sub-environment {env} returned{name} {problem} (obs)", self._can_drop
                )

    def check_values(self, lanes: PolicyLanes, segments: list[Segment]) -> None:
        """Check the observations and rewards of segments.

        Raises:
            InvalidStepError: a value is not finite, or an observation is outside its space.
        """
        columns, num_rows = lanes.columns, int(lanes.current_rows.max(initial=0))
        raw, rewards = (
            columns.part("raw_obs", 0, num_rows + 1),
            columns.part("rewards", 0, num_rows),
        )
        checks = {id(segment.trajectory.check): segment.trajectory.check for segment in segments}
        finals = [segment for segment in segments if segment.final is not None]
        if (
            all(check.in_bounds(raw) for check in checks.values())
            and all(s.trajectory.check.in_bounds(s.final) for s in finals)
            and np.isfinite(rewards).all()
        ):
            return
        for segment in segments:
            check, agent = segment.trajectory.check, segment.trajectory.agent_id
            end = segment.end + (segment.final is None)
            shown = map_leaves(lambda a, s=segment, e=end: a[s.begin : e, s.lane], raw)
            (wrong,) = check.invalid_rows(shown, 1, self._warn_only).nonzero()
            steps = columns.part("t", 0, num_rows)[:, segment.lane]
            env = lanes.envs[segment.lane]
            problem = None
            if len(wrong):
                row = segment.begin + int(wrong[0])
                observation = map_leaves(lambda a, r=row, s=segment: a[r, s.lane], raw)
                place = f"at step {steps[row - 1]} of its episode"
                if row == segment.begin and not segment.age:
                    place = "its first observation"
                problem = f"{check.describe_problem(observation)} (obs), {place}"
            elif segment.final is not None and not self._accepts(check, segment.final):
                what = check.describe_problem(segment.final)
                problem = f"{what} (obs), at step {steps[segment.end - 1]} of its episode"
            segment_rewards = rewards[segment.begin : segment.end, segment.lane]
            if problem is None and not np.isfinite(segment_rewards).all():
                row = int((~np.isfinite(segment_rewards)).argmax())
                problem = (
                    f"a reward that is not finite: {segment_rewards[row]} (rewards), at step "
                    f"{steps[segment.begin + row]} of its episode"
                )
            if problem is not None:
                name = self._for_agent(agent)
                raise invalid_step_error(
                    f"sub-environment {env} returned{name} {problem}", self._can_drop
                )
            self._warn_outside(int(env), check, shown, segment.final)

    def _accepts(self, check: ObservationCheck, observation: Any) -> bool:
        return check.in_bounds(observation) or (self._warn_only and check.is_usable(observation))

    def _warn_outside(self, env: int, check: ObservationCheck, rows: Any, final: Any) -> None:
        """Warn of the first observation outside its space."""
        (outside,) = check.invalid_rows(rows, 1).nonzero()
        if len(outside):
            first = int(outside[0])
            problem = check.describe_problem(map_leaves(lambda array: array[first], rows))
        elif final is not None and not check.in_bounds(final):
            problem = check.describe_problem(final)
        else:
            return
        self.warn(OUTSIDE_WARNING, self._worker_index, env, problem)

    def is_possible(self, agent: AgentID) -> bool:
        """Return whether an id is one of the `possible_agents`."""
        return agent in self._agent_envs.possible_agents

    def warn(self, text: str, *values: Any) -> None:
        """Log a warning, once."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text, *values)
