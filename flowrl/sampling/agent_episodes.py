"""AgentEpisodes: the running episodes of environments with several agents.

Agents may join, leave, and act at different times. A reward is credited to the agent's latest
action, also in later steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl.data.sample_batch import AgentID, EpisodeID, PolicyID
from flowrl.envs.multi_agent_vector_env import MultiAgentStep, MultiAgentVectorEnv, ResetResult
from flowrl.envs.validation import LARGEST_REWARD, ObservationCheck, copied_info
from flowrl.sampling.agent_batches import AgentBatches
from flowrl.sampling.agent_checks import AgentChecks
from flowrl.sampling.agent_records import AgentRecords
from flowrl.sampling.episode import MultiAgentEpisode
from flowrl.sampling.ids import IdCounter
from flowrl.sampling.policy_lanes import PolicyLanes
from flowrl.sampling.running_episodes import RunningEpisode, Trajectory
from flowrl.sampling.sampler_worker import SamplerWorker
from flowrl.sampling.segments import Event
from flowrl.sampling.worker_config import WorkerConfig


class AgentEpisodes:
    """Starts and ends episodes and trajectories, and calls the callbacks.

    Args:
        agent_envs: the environments.
        worker: passed to the records of episodes; maps agents to policies.
        settings: the sampling settings.
        policies: the rows of each policy.
        checks: checks what the environments return.
        records: the records of episodes; calls the callbacks.
        batches: receives the ends of episodes.
        first_id: the first episode id.

    Attributes:
        running: the episode of each environment; None between the end of an episode and the reset
            in the next step.
        ended: the episodes that ended and are in no fragment yet, in the order of time.
        changed: environments in which other agents may act next than in the step before.
        failed: environments that failed in this fragment.
        has_agent_views: whether the history of episodes is kept, for views of other agents.
    """

    def __init__(
        self,
        agent_envs: MultiAgentVectorEnv,
        worker: SamplerWorker,
        settings: WorkerConfig,
        policies: Mapping[PolicyID, PolicyLanes],
        checks: AgentChecks,
        records: AgentRecords,
        batches: AgentBatches,
        first_id: int,
    ):
        self._worker, self._agent_envs, self._policies = worker, agent_envs, policies
        self._soft_horizon = settings.horizon if settings.soft_horizon else None
        self._replaces = settings.on_invalid_step == "replace"
        self.ids = IdCounter(first_id)
        self.checks, self.records, self._batches = checks, records, batches
        self.running: list[RunningEpisode | None] = [None] * agent_envs.num_envs
        self.ended: list[RunningEpisode] = []
        self.changed: set[int] = set()
        self.failed: set[int] = set()
        self.num_faulty = 0
        self.has_agent_views = any(lanes.shows_agents for lanes in policies.values())

    def find(self, episode_id: int) -> MultiAgentEpisode | None:
        """Return the record of a running episode; None without callbacks of episodes."""
        for episode in self.all_running():
            if episode.record.episode_id == episode_id:
                return self.records.update_record(episode)
        return None

    def all_running(self) -> list[RunningEpisode]:
        """Return the running episodes."""
        return [episode for episode in self.running if episode is not None]

    def past(self, policy_id: PolicyID) -> list[Trajectory]:
        """Return the trajectories of a policy that have ended, and that views may show."""
        found: dict[int, Trajectory] = {}
        for episode in (*self.all_running(), *self.ended):
            for past in episode.history.values():
                found |= {id(t): t for t in past if t.policy_id == policy_id and not t.alive}
        return list(found.values())

    def forget(self, taken: list[RunningEpisode], lookback: int) -> None:
        """Forget the history of episodes that are in a fragment, and trajectories that ended more
        than `lookback` rows ago."""
        for episode in taken:
            episode.history.clear()
        for episode in (*self.all_running(), *self.ended):
            for agent, past in list(episode.history.items()):
                kept = [t for t in past if t.alive or t.end > -lookback]
                episode.history[agent] = kept
                if not kept:
                    del episode.history[agent]

    @property
    def follows_steps(self) -> bool:
        """Whether `after_step` is needed after each step."""
        return self.records.needs_steps or self._soft_horizon is not None

    def store_agents(self, env_index: int, sent: dict[AgentID, Any], step: MultiAgentStep) -> None:
        """Store the results of an environment agent by agent."""
        episode = self.running[env_index]
        assert episode is not None
        for agent in sent:
            episode.agents[agent].needs_action = False
        self._batches.env_stepped(episode)
        t = episode.record.length
        episode.record.length += 1
        episode.new_steps += 1
        self._add_rewards(episode, step)
        whole = bool(step.terminateds["__all__"]), bool(step.truncateds["__all__"])
        alive = list(episode.agents.values())
        if any(whole) and not step.obs and not alive:
            self.checks.warn(
                'step() ended an episode after all its agents had ended: return "__all__" in the '
                "step in which the last agent ends"
            )

        for flags in (step.terminateds, step.truncateds):
            self._check_flags(episode, step, flags)

        def ends_of(agent: AgentID) -> tuple[bool, bool]:
            ends = bool(step.terminateds.get(agent)), bool(step.truncateds.get(agent))
            return ends if any(ends) else whole

        for agent, observation in step.obs.items():
            trajectory, ends = episode.agents.get(agent), ends_of(agent)
            if trajectory is None:
                if not any(ends):
                    self._start_agent(env_index, episode, agent, observation, step.infos.get(agent))
                continue
            self.checks.check_structure(env_index, agent, observation)
            self._complete(episode, trajectory, observation, t, step.infos.get(agent), ends)
        for trajectory in alive:
            agent = trajectory.agent_id
            if agent not in step.obs and any(ends := ends_of(agent)):
                # no final observation was returned: use the latest one
                self._complete(episode, trajectory, None, t, step.infos.get(agent), ends)

    def _check_flags(
        self, episode: RunningEpisode, step: MultiAgentStep, flags: dict[AgentID, bool]
    ) -> None:
        """Warn of flags of agents that had no observation in the episode, once."""
        for agent, flag in flags.items():
            if not flag or agent == "__all__" or agent in episode.record.records:
                continue
            if agent not in step.obs and not self.checks.is_possible(agent):
                self.checks.warn(
                    "step() returned an end of agent %r, which had no observation in the episode",
                    agent,
                )

    def _complete(
        self,
        episode: RunningEpisode,
        trajectory: Trajectory,
        observation: Any,
        t: int,
        info: Any,
        ends: tuple[bool, bool],
    ) -> None:
        """Complete the row of an agent."""
        lanes = self._policies[trajectory.policy_id]
        episode.new_rows += 1
        if any(ends):
            episode.record.records[trajectory.agent_id].alive = False
            lanes.end(trajectory, observation, t, info, *ends)
            self.records.update(trajectory)
            del episode.agents[trajectory.agent_id]
        else:
            lanes.observe(trajectory, observation, t, info)

    def _add_rewards(self, episode: RunningEpisode, step: MultiAgentStep) -> None:
        """Add rewards to each agent's latest action, also in later steps."""
        for agent, reward in step.rewards.items():
            self.checks.check_reward(episode.record.env_id, agent, reward)
            trajectory = episode.agents.get(agent)
            if trajectory is not None:
                if self._replaces:
                    reward = np.nan_to_num(reward, posinf=0.0, neginf=0.0)
                trajectory.pending_reward += reward
                if self._replaces and abs(trajectory.pending_reward) > LARGEST_REWARD:
                    trajectory.pending_reward = 0.0
            elif reward:
                self.checks.warn(
                    "dropped the reward of agent %r: it has no observation yet, or none since its "
                    "end",
                    agent,
                )

    # -- starts and ends ---------------------------------------------------------------------------

    def start(self, first: list[ResetResult]) -> None:
        """Start an episode in every environment.

        Args:
            first: observations and infos by agent, of each environment.
        """
        self.ended.clear()
        self.failed.clear()
        for env_index, (observations, infos) in enumerate(first):
            self.begin(env_index, observations, infos, counts_in_filter=False)

    def begin(
        self,
        env_index: int,
        observations: dict[AgentID, Any],
        infos: Any,
        counts_in_filter: bool = True,
    ) -> None:
        """Start an episode with these observations.

        Args:
            env_index: the environment.
            observations, infos: by agent.
            counts_in_filter: whether to add the observations to the filters' statistics.
        """
        episode = self.running[env_index] = RunningEpisode(
            self.new_record(env_index, next(self.ids))
        )
        infos = infos if isinstance(infos, Mapping) else {}
        for agent, observation in observations.items():
            info = infos.get(agent)
            self._start_agent(env_index, episode, agent, observation, info, counts_in_filter)
        self.changed.add(env_index)
        self.records.call("on_episode_start", episode)

    def check_of(self, agent: AgentID) -> ObservationCheck:
        """Return the check of an agent's observations."""
        return self._agent_envs.observation_check(agent)

    def new_record(self, env_index: int, episode_id: EpisodeID) -> MultiAgentEpisode:
        """Return the record of a new episode in an environment."""
        return MultiAgentEpisode(episode_id, env_index, self._worker, self._worker.policy_for)

    def _start_agent(
        self,
        env_index: int,
        episode: RunningEpisode,
        agent: AgentID,
        observation: Any,
        info: Any,
        counts_in_filter: bool = True,
    ) -> None:
        """Start an agent's trajectory with its first observation."""
        record = episode.record.agent_record(agent)
        lanes = self._policies[record.policy_id]
        self.checks.check_policy(agent, lanes)
        self.checks.check_structure(env_index, agent, observation)
        check = self.check_of(agent)
        trajectory = episode.agents[agent] = lanes.start(
            env_index, agent, record.agent_index, episode, check, observation, counts_in_filter
        )
        if self.has_agent_views:
            episode.history.setdefault(agent, []).append(trajectory)
        record.alive, record.info = True, copied_info(info) if info else {}

    def after_step(self, env_index: int, step: MultiAgentStep) -> None:
        """Call the callbacks after a step of an environment, and end its episode if it is over."""
        episode = self.running[env_index]
        if episode is None:  # this step of a vector environment was the reset
            assert step.start is not None
            self.begin(env_index, step.start, step.start_infos)
        elif step.failed is not None:
            self._drop(env_index, episode, step)
        else:
            self.records.call("on_episode_step", episode)
            if step.terminateds["__all__"] or step.truncateds["__all__"]:
                self._batches.end(episode)
                self.records.call("on_episode_end", episode)
                self.ended.append(episode)
                self.running[env_index] = None
                if step.start is not None:
                    self.begin(env_index, step.start, step.start_infos)
            elif self._soft_horizon is not None and episode.record.length >= self._soft_horizon:
                self._pass_horizon(env_index, episode)

    def _pass_horizon(self, env_index: int, episode: RunningEpisode) -> None:
        """Start another episode at a soft horizon, without a reset."""
        following = RunningEpisode(self.new_record(env_index, next(self.ids)))
        for agent, trajectory in episode.agents.items():
            lanes = self._policies[trajectory.policy_id]
            row = int(lanes.current_rows[trajectory.lane])
            if row > trajectory.begin:
                lanes.segments.append(trajectory.cut(row, Event.SOFT_HORIZON))
            following.agents[agent] = trajectory
            # these rewards are part of the next row, but of this episode's return
            pending = trajectory.pending_reward
            episode.returns[agent] = episode.returns.get(agent, 0.0) + pending
            following.returns[agent] = -pending
        self._batches.end_at_soft_horizon(episode, following)
        self.records.call("on_episode_end", episode)
        for trajectory in following.agents.values():
            trajectory.episode = following
        following.record.continue_from(episode.record)
        following.history = {agent: list(past) for agent, past in episode.history.items()}
        self.ended.append(episode)
        self.running[env_index] = following
        self.records.call("on_episode_start", following)

    def _drop(self, env_index: int, episode: RunningEpisode, step: MultiAgentStep) -> None:
        """Drop the episode of a failed environment, and start one in the environment that replaces
        it."""
        assert step.start is not None
        assert step.failed is not None
        self._batches.drop(episode, step.failed)
        step.failed = None  # frames in the traceback of this error refer to `step`
        self.failed.add(env_index)
        self.num_faulty += 1
        episode.record.is_faulty = True
        for trajectory in episode.agents.values():
            trajectory.needs_action = False  # so that records show the action that failed
        self.records.call("on_episode_end", episode)
        self._remove(episode)
        self.begin(env_index, step.start, step.start_infos, counts_in_filter=False)

    def _remove(self, episode: RunningEpisode) -> None:
        """Remove the rows of a running episode that are in no fragment."""
        for lanes in self._policies.values():
            lanes.drop_segments(episode)
        for trajectory in episode.agents.values():
            self._policies[trajectory.policy_id].drop(trajectory)

    def restart(self, env_index: int, observations: dict[AgentID, Any], infos: Any) -> None:
        """Replace the episode of an environment that could not be restored."""
        episode = self.running[env_index]
        if episode is not None:
            error = RuntimeError(f"sub-environment {env_index} could not be restored")
            self._batches.drop(episode, error)
            self._remove(episode)
        self.begin(env_index, observations, infos, counts_in_filter=False)

    def last_observations(self) -> list[dict[AgentID, Any]]:
        """Return the latest observation of each agent in each environment."""
        return [
            {}
            if episode is None
            else {
                agent: self._policies[t.policy_id].observation(t)
                for agent, t in episode.agents.items()
            }
            for episode in self.running
        ]
