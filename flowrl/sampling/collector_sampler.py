"""CollectorSampler: pass the rows of all agents to a SampleCollector, which builds the batches.

Environments, episodes and callbacks are those of MultiAgentSampler. Until the next fragment, each
row is also stored in columns, which the records of the episodes read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import optree

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.data.columns import map_leaves
from flowrl.data.fragment_columns import value_at
from flowrl.data.sample_batch import AgentID, PolicyID
from flowrl.envs.multi_agent_vector_env import MultiAgentStep
from flowrl.policies.policy import Policy
from flowrl.sampling.agent_batches import AgentBatches
from flowrl.sampling.agent_checks import AgentChecks
from flowrl.sampling.agent_records import AgentRecords
from flowrl.sampling.multi_agent_sampler import MultiAgentSampler
from flowrl.sampling.policy_lanes import PolicyLanes
from flowrl.sampling.running_episodes import RunningEpisode, Trajectory
from flowrl.sampling.sample_collector import SampleCollector
from flowrl.sampling.sampler_worker import SamplerWorker
from flowrl.sampling.segment_postprocessing import SegmentPostprocessing
from flowrl.sampling.views import Views
from flowrl.sampling.worker_config import WorkerConfig

_NOT_IN_ROWS = ("raw_obs", "obs", "pending_stats", "terminateds", "truncateds", "dones")


class Collectors:
    """The collectors of a worker: one, or one per environment for whole episodes.

    Args:
        collector_class: the class of the collectors.
        worker, settings: passed to the collectors.

    Attributes:
        all: the collectors.
        whole: whether batches have whole episodes.
        can_drop: whether the collectors can drop an episode.
    """

    def __init__(
        self,
        collector_class: type[SampleCollector],
        worker: SamplerWorker,
        settings: WorkerConfig,
    ):
        self._class, self._worker, self._settings = collector_class, worker, settings
        self.whole = settings.batch_mode == "complete_episodes"
        self.can_drop = collector_class.drop_episode is not SampleCollector.drop_episode
        self.all: list[SampleCollector] = []

    def start(self, num_envs: int) -> None:
        """Replace the collectors by empty ones."""
        settings = self._settings
        self.all = [
            self._class(
                self._worker.policy_map,
                callbacks=self._worker.callbacks,
                worker=self._worker,
                multiple_episodes_in_batch=not self.whole,
                rollout_fragment_length=settings.fragment_length,
                count_steps_by=settings.count_steps_by,
            )
            for _ in range(num_envs if self.whole else 1)
        ]

    def for_env(self, env: int) -> SampleCollector:
        """Return the collector of an environment's episodes."""
        return self.all[env if self.whole else 0]


class CollectorLanes(PolicyLanes):
    """Lanes that pass each row to a collector, and get the inputs of actions from it.

    Args:
        collectors: the collectors.
        policy_id, policy, settings: see PolicyLanes.
    """

    def __init__(
        self, collectors: Collectors, policy_id: PolicyID, policy: Policy, settings: WorkerConfig
    ):
        super().__init__(policy_id, policy, settings)
        self._collectors = collectors
        # the trajectories that wait, in the order in which their observations were added
        self.added: list[Trajectory] = []

    def _new_views(self) -> Views:
        return Views(self.policy, self.states, has_agents=True)  # the collector shows them

    def clear(self) -> None:
        super().clear()
        self.added = []

    def start(self, *args: Any) -> Trajectory:
        trajectory = super().start(*args)
        record = trajectory.episode.record
        collector = self._collectors.for_env(record.env_id)
        observation = self._added_observation(trajectory)
        collector.add_init_obs(
            record.episode_id, trajectory.agent_id, trajectory.policy_id, observation
        )
        return trajectory

    def _added_observation(self, trajectory: Trajectory) -> Any:
        """Return the observation that waits for an action, normalized."""
        self.added.append(trajectory)
        return self._normalized(self.observation(trajectory))

    def _normalized(self, raw: Any) -> Any:
        normalize = self.policy.observation_filter
        obs = raw if normalize is None else normalize(raw[None])[0]
        for array in optree.tree_leaves(obs):
            array.flags.writeable = False
        return obs

    def observe(self, trajectory: Trajectory, observation: Any, t: int, info: Any) -> None:
        super().observe(trajectory, observation, t, info)
        row = int(self.current_rows[trajectory.lane]) - 1
        self._add_row(trajectory, row, self._added_observation(trajectory), False, False)

    def end(
        self,
        trajectory: Trajectory,
        final: Any,
        t: int,
        info: Any,
        terminated: bool,
        truncated: bool,
    ) -> None:
        super().end(trajectory, final, t, info, terminated, truncated)
        after = self._normalized(map_leaves(np.copy, trajectory.final))
        self._add_row(trajectory, trajectory.end - 1, after, terminated, truncated)

    def _add_row(
        self, trajectory: Trajectory, row: int, after: Any, terminated: bool, truncated: bool
    ) -> None:
        record, at = trajectory.episode.record, (self.columns.lookback + row, trajectory.lane)
        values = {
            name: value_at(column, at)
            for name, column in self.columns.arrays.items()
            if name not in _NOT_IN_ROWS
        }
        values["infos"] = values.get("infos") or {}
        values |= {
            "new_obs": after,
            "terminateds": terminated,
            "truncateds": truncated,
            "env_id": record.env_id,
            "agent_index": trajectory.agent_index,
        }
        self._collectors.for_env(record.env_id).add_action_reward_next_obs(
            record.episode_id, trajectory.agent_id, trajectory.policy_id, values
        )

    def drop(self, trajectory: Trajectory) -> None:
        super().drop(trajectory)
        self.added = [other for other in self.added if other is not trajectory]

    def act(self) -> list[Any]:
        waiting = self.waiting
        by_collector = [
            [t for t in self.added if self._collectors.for_env(t.episode.record.env_id) is c]
            for c in self._collectors.all
        ]
        parts = [
            collector.get_inference_input_dict(self.policy)
            for collector, added in zip(self._collectors.all, by_collector, strict=True)
            if added
        ]
        inputs: Any = parts[0]
        if len(parts) > 1:
            inputs = optree.tree_map(lambda *leaves: np.concatenate(leaves), *parts)  # type: ignore[arg-type]
        self.set_waiting([trajectory for added in by_collector for trajectory in added])
        self.added = []
        actions = self._store_outputs(
            self.policy.compute_actions_from_input_dict(inputs, **self._options)
        )
        positions = {id(trajectory): n for n, trajectory in enumerate(self.waiting)}
        return [actions[positions[id(trajectory)]] for trajectory in waiting]


class CollectorBatches(AgentBatches):
    """Takes the batches from the collectors.

    Args:
        collectors: the collectors.
        policies, checks, records, postprocess: see AgentBatches.
    """

    def __init__(
        self,
        collectors: Collectors,
        policies: Mapping[PolicyID, PolicyLanes],
        checks: AgentChecks,
        records: AgentRecords,
        postprocess: SegmentPostprocessing,
    ):
        super().__init__(policies, {}, checks, records, postprocess)  # no builders
        self._collectors, self.can_drop = collectors, collectors.can_drop
        self._finished: dict[int, MultiAgentBatch] = {}  # by episode id

    def clear(self, num_envs: int) -> None:
        super().clear(num_envs)
        self._collectors.start(num_envs)
        self._finished.clear()

    def env_stepped(self, episode: RunningEpisode) -> None:
        record = episode.record
        collector = self._collectors.for_env(record.env_id)
        collector.env_stepped(record.episode_id, record.length)

    def end(self, episode: RunningEpisode) -> None:
        record = episode.record
        collector = self._collectors.for_env(record.env_id)
        collector.postprocess_trajectories_so_far(self._records.update_record(episode))
        collector.check_missing_dones(record.episode_id)
        if self._collectors.whole:
            self._finished[record.episode_id] = collector.get_multi_agent_batch_and_reset()

    def end_at_soft_horizon(self, episode: RunningEpisode, following: RunningEpisode) -> None:
        record = self._records.update_record(episode) or episode.record
        collector = self._collectors.for_env(record.env_id)
        collector.continue_episode(record, following.record.episode_id)
        if self._collectors.whole:
            self._finished[record.episode_id] = collector.get_multi_agent_batch_and_reset()

    def drop(self, episode: RunningEpisode, error: Exception) -> None:
        if not self.can_drop:
            raise error
        record = episode.record
        self._collectors.for_env(record.env_id).drop_episode(record.episode_id)

    def take(
        self, ended: list[RunningEpisode], running: list[RunningEpisode]
    ) -> dict[PolicyID, SampleBatch]:
        episodes = {id(episode) for episode in (*ended, *running)}
        for policy_id, lanes in self._policies.items():
            segments = [
                *(segment for segment in lanes.segments if id(segment.episode) in episodes),
                *self._cut_running(running, policy_id),
            ]
            lanes.segments = [s for s in lanes.segments if id(s.episode) not in episodes]
            self._checks.check_values(lanes, segments)
            lanes.update_filter()
            for segment in segments:
                self._add_returns(segment, lanes.reward_of(segment))
        if not self._collectors.whole:
            return self._collectors.all[0].get_multi_agent_batch_and_reset().policy_batches
        parts = [self._finished.pop(episode.record.episode_id) for episode in ended]
        return SampleBatch.concat_samples(parts).policy_batches

    def state_dict(self) -> dict[str, Any] | None:
        collectors = [collector.state_dict() for collector in self._collectors.all]
        if None in collectors:
            return None
        added = {pid: self._added_of(lanes) for pid, lanes in self._policies.items()}
        return {"collectors": collectors, "finished": dict(self._finished), "added": added}

    def _added_of(self, lanes: PolicyLanes) -> list[Any]:
        assert isinstance(lanes, CollectorLanes)
        return [[t.episode.record.episode_id, t.agent_id] for t in lanes.added]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._collectors.start(len(state["collectors"]))
        for collector, saved in zip(self._collectors.all, state["collectors"], strict=True):
            collector.load_state_dict(saved)
        self._finished, self._to_restore = dict(state["finished"]), state["added"]

    def restored(self, running: list[RunningEpisode]) -> None:
        by_id = {episode.record.episode_id: episode for episode in running}
        for policy_id, lanes in self._policies.items():
            assert isinstance(lanes, CollectorLanes)
            added = self._to_restore[policy_id]
            lanes.added = [by_id[episode_id].agents[agent] for episode_id, agent in added]


class CollectorSampler(MultiAgentSampler):
    """Samples into the collectors of a class; see MultiAgentSampler for the other arguments.

    Args:
        collector_class: the class of the collectors.
    """

    def __init__(self, collector_class: type[SampleCollector], *args: Any, **kwargs: Any):
        self._collector_class = collector_class
        super().__init__(*args, **kwargs)

    def _make_storage(
        self, checks: AgentChecks
    ) -> tuple[Mapping[PolicyID, PolicyLanes], AgentRecords, AgentBatches]:
        worker, settings = self.worker, self.settings
        collectors = Collectors(self._collector_class, worker, settings)
        policies = {
            policy_id: CollectorLanes(collectors, policy_id, policy, settings)
            for policy_id, policy in worker.policy_map.items()
        }
        records = AgentRecords(worker, self.agent_envs, policies, is_used=True)
        postprocess = SegmentPostprocessing(worker.policy_map, worker.callbacks, worker)
        return (
            policies,
            records,
            CollectorBatches(collectors, policies, checks, records, postprocess),
        )

    def _is_regular(self, env_index: int, sent: dict[AgentID, Any], step: MultiAgentStep) -> bool:
        return False  # rows are added one by one
