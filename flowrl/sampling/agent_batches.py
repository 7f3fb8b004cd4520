"""AgentBatches: build the batches of a fragment from the segments of all policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flowrl.data import SampleBatch
from flowrl.data.sample_batch import PolicyID
from flowrl.sampling.agent_checks import AgentChecks
from flowrl.sampling.agent_records import AgentRecords
from flowrl.sampling.fragment_builder import FragmentBuilder
from flowrl.sampling.policy_lanes import PolicyLanes
from flowrl.sampling.running_episodes import RunningEpisode, Segment, Trajectory
from flowrl.sampling.segment_postprocessing import SegmentPostprocessing, parts_of
from flowrl.sampling.segments import Event


class Postprocessed(NamedTuple):
    """The postprocessed rows of a segment."""

    episode: RunningEpisode
    order: tuple[int, ...]  # see Segment.order
    policy_id: PolicyID
    rows: SampleBatch


class AgentBatches:
    """Builds a batch of each policy.

    If a policy or a callback postprocesses the rows of each agent, the rows of an episode are built
    and postprocessed when it ends; otherwise, all rows of a policy are built at once.

    Args:
        policies: the rows of each policy.
        builders: build the batches of each policy.
        checks: checks the rows.
        records: the records of episodes.
        postprocess: postprocesses the rows of each agent.

    Attributes:
        ready: postprocessed rows that are in no fragment yet.
        can_drop: whether the rows of a single episode can be dropped.
    """

    def __init__(
        self,
        policies: Mapping[PolicyID, PolicyLanes],
        builders: Mapping[PolicyID, FragmentBuilder],
        checks: AgentChecks,
        records: AgentRecords,
        postprocess: SegmentPostprocessing,
    ):
        self._policies, self._builders, self._checks = policies, builders, checks
        self._records, self._postprocess = records, postprocess
        self.ready: list[Postprocessed] = []
        self.can_drop = True

    def clear(self, num_envs: int) -> None:
        """Drop the rows of all episodes.

        Args:
            num_envs: number of environments.
        """
        self.ready.clear()

    def env_stepped(self, episode: RunningEpisode) -> None:
        """Do nothing; a subclass may note a step of an episode, whose rows are added afterwards."""

    def drop(self, episode: RunningEpisode, error: Exception) -> None:
        """Do nothing: AgentEpisodes drops the rows of an episode whose environment failed."""

    def end_at_soft_horizon(self, episode: RunningEpisode, following: RunningEpisode) -> None:
        """End an episode at a soft horizon."""
        self.end(episode)

    def end(self, episode: RunningEpisode) -> None:
        """Postprocess the segments of an episode that ended, if a policy or a callback does so."""
        if not self._postprocess.is_needed:
            return
        for lanes in self._policies.values():
            self._checks.check_values(lanes, [s for s in lanes.segments if s.episode is episode])
        self._postprocess_episode(episode)

    def _postprocess_episode(self, episode: RunningEpisode) -> None:
        for lanes in self._policies.values():
            lanes.normalize_current()
        segments: list[Segment] = []
        parts = []
        for policy_id, lanes in self._policies.items():
            own = [segment for segment in lanes.segments if segment.episode is episode]
            if not own:
                continue
            lanes.segments = [s for s in lanes.segments if s.episode is not episode]
            own.sort(key=Segment.order)
            rows = parts_of(self._take(lanes, own), [s.end - s.begin for s in own])
            parts += [
                (segment.trajectory.agent_id, policy_id, part)
                for segment, part in zip(own, rows, strict=True)
            ]
            segments += own
        results = self._postprocess(parts, self._records.update_record(episode)) if parts else []
        self.ready += [
            Postprocessed(episode, segment.order(), segment.trajectory.policy_id, rows)
            for segment, rows in zip(segments, results, strict=True)
        ]

    def take(
        self, ended: list[RunningEpisode], running: list[RunningEpisode]
    ) -> dict[PolicyID, SampleBatch]:
        """Return the batches of a fragment by policy.

        Args:
            ended: the episodes of the fragment that ended.
            running: the running episodes of which the fragment has a part.
        """
        episodes = {id(episode): episode for episode in (*ended, *running)}
        for policy_id, lanes in self._policies.items():
            lanes.segments += self._cut_running(running, policy_id)
            self._checks.check_values(lanes, lanes.segments)
            lanes.update_filter()
        if self._postprocess.is_needed:
            for episode in episodes.values():
                self._postprocess_episode(episode)
            return self._take_ready(episodes)
        batches = {}
        for lanes in self._policies.values():
            lanes.normalize_current()
        for policy_id, lanes in self._policies.items():
            chosen = [s for s in lanes.segments if id(s.episode) in episodes]
            lanes.segments = [s for s in lanes.segments if id(s.episode) not in episodes]
            if chosen:
                batches[policy_id] = self._take(lanes, sorted(chosen, key=Segment.order))
        return batches

    def _take_ready(self, episodes: Mapping[int, RunningEpisode]) -> dict[PolicyID, SampleBatch]:
        """Return the postprocessed rows of episodes by policy."""
        taken = [part for part in self.ready if id(part.episode) in episodes]
        self.ready = [part for part in self.ready if id(part.episode) not in episodes]
        taken.sort(key=lambda part: part.order)
        batches = {}
        for policy_id in self._policies:
            rows = [part.rows for part in taken if part.policy_id == policy_id]
            if rows:
                batches[policy_id] = SampleBatch.concat_samples(rows)
        return batches

    def _take(self, lanes: PolicyLanes, segments: list[Segment]) -> SampleBatch:
        """Return the rows of segments, and add their rewards to the returns of the agents."""
        for segment in segments:
            self._add_returns(segment, lanes.reward_of(segment))
        return lanes.take(segments, self._builders[lanes.policy_id])

    def _add_returns(self, segment: Segment, reward: float) -> None:
        returns, agent = segment.episode.returns, segment.trajectory.agent_id
        returns[agent] = returns.get(agent, 0.0) + reward

    def _cut_running(self, running: list[RunningEpisode], policy_id: PolicyID) -> list[Segment]:
        """Cut the running trajectories of a policy; return the segments that have rows."""
        lanes = self._policies[policy_id]
        return [
            trajectory.cut(row, Event.OPEN)
            for trajectory in trajectories_of(running, policy_id)
            if (row := int(lanes.current_rows[trajectory.lane])) > trajectory.begin
        ]

    def restored(self, running: list[RunningEpisode]) -> None:
        """Do nothing; a subclass may note that the episodes of a saved state were loaded."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that a subclass has in addition; None if it cannot be saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""


def trajectories_of(episodes: list[RunningEpisode], policy_id: PolicyID) -> list[Trajectory]:
    """Return the trajectories of a policy that have not ended."""
    return [
        trajectory
        for episode in episodes
        for trajectory in episode.agents.values()
        if trajectory.policy_id == policy_id
    ]
