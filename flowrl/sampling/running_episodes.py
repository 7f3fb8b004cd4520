"""RunningEpisode, Trajectory, Segment: which rows belong to which agent of which episode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.data.sample_batch import AgentID, PolicyID
from flowrl.envs.validation import ObservationCheck
from flowrl.sampling.episode import MultiAgentEpisode
from flowrl.sampling.segments import Segments


@dataclass(slots=True, eq=False)
class RunningEpisode:
    """An episode in one environment.

    Attributes:
        record: the episode as callbacks see it; its agents are updated when a callback is called.
        agents: the trajectory of each agent that has not ended.
        history: each agent's trajectories in the order of time, including trajectories before a
            soft horizon; empty if no view shows other agents.
        returns: sum of rewards of each agent, without those of the current fragment.
        new_steps: env steps that are in no fragment yet.
        new_rows: rows of agents that are in no fragment yet.
    """

    record: MultiAgentEpisode
    agents: dict[AgentID, Trajectory] = field(default_factory=dict)
    history: dict[AgentID, list[Trajectory]] = field(default_factory=dict)
    returns: dict[AgentID, float] = field(default_factory=dict)
    new_steps: int = 0
    new_rows: int = 0


@dataclass(slots=True, eq=False)
class Trajectory:
    """The rows of one agent, from its first observation to its end, in a lane of its policy.

    Attributes:
        policy_id: the policy.
        lane: the lane.
        agent_id, agent_index: the agent, and its index in the episode.
        episode: the episode; None for a past trajectory of a restored state whose episode is in a
            fragment.
        check: the check of its observations.
        begin: first row that is in no segment.
        recorded: first row that is not in the episode's record.
        initial_states: the recurrent states before its first row.
        age: number of rows before `begin`.
        alive: whether it has not ended.
        needs_action: whether its latest observation has no action.
        final: its final observation, once it has ended.
        end, end_time: the row after its last one, and the env step of its final observation, once
            it has ended.
        pending_reward: rewards since its latest action, while no observation followed the action.
    """

    policy_id: PolicyID
    lane: int
    agent_id: AgentID
    agent_index: int
    episode: RunningEpisode
    check: ObservationCheck
    begin: int
    recorded: int
    initial_states: list[np.ndarray]
    age: int = 0
    alive: bool = True
    needs_action: bool = True
    final: Any = None
    end: int = 0
    end_time: int = 0
    pending_reward: float = 0.0

    def cut(
        self, end: int, event: int, terminated: bool = False, truncated: bool = False
    ) -> Segment:
        """Return the rows since the last cut as a segment; later rows belong to the next one.

        Args:
            end: the row after the last one.
            event, terminated, truncated: see Segment.
        """
        segment = Segment(
            self, self.episode, self.begin, end, self.age, event, terminated, truncated, self.final
        )
        self.age += end - self.begin
        self.begin = end
        return segment


@dataclass(slots=True, eq=False)
class Segment:
    """Rows `begin` … `end` - 1 of a trajectory; created by `Trajectory.cut`.

    Attributes:
        trajectory, episode: the trajectory, and its episode at the last row.
        age: rows of the trajectory before `begin`.
        event: what followed the last row.
        terminated, truncated: the flags of the last row.
        final: the observation after the last row; None if it is in the columns.
    """

    trajectory: Trajectory
    episode: RunningEpisode
    begin: int
    end: int
    age: int
    event: int
    terminated: bool = False
    truncated: bool = False
    final: Any = None

    def order(self) -> tuple[int, int, int]:
        """Return the key that sorts segments by environment, episode and agent."""
        record = self.episode.record
        return record.env_id, record.episode_id, self.trajectory.agent_index

    @property
    def lane(self) -> int:
        """The lane of the rows."""
        return self.trajectory.lane


def arrays_of(segments: list[Segment], envs: np.ndarray) -> Segments:
    """Return segments of a policy as arrays.

    Args:
        segments: the segments.
        envs: environment of each lane, [lanes].
    """
    lanes, begins, ends, rows_before, events, agents, ids = np.array(
        [
            (
                s.lane, s.begin, s.end, s.age, s.event, s.trajectory.agent_index,
                s.episode.record.episode_id,
            )
            for s in segments
        ],
        np.int64,
    ).T  # fmt: skip
    final_index = np.full(len(segments), -1)
    has_final = np.array([segment.final is not None for segment in segments])
    final_index[has_final] = np.arange(has_final.sum())
    states = zip(*(segment.trajectory.initial_states for segment in segments), strict=True)
    return Segments(
        lanes=lanes,
        begins=begins,
        ends=ends,
        first_t=rows_before,
        rows_before=rows_before,
        episode_ids=ids,
        events=events,
        final_index=final_index,
        continued=np.zeros(len(segments), bool),
        envs=envs[lanes],
        agents=agents,
        initial_states=[np.stack(values) for values in states],
    )
