"""RunningEpisode, Trajectory, Segment: which rows belong to which agent of which episode."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.data.types import AgentID, PolicyID
from flowrl.envs.validation import ObservationCheck
from flowrl.sampling.episode import MultiAgentEpisode
from flowrl.sampling.segments import Segments


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

    __slots__ = ("agents", "history", "new_rows", "new_steps", "record", "returns")

    def __init__(self, record: MultiAgentEpisode):
        self.record = record
        self.agents: dict[AgentID, Trajectory] = {}
        self.history: dict[AgentID, list[Trajectory]] = {}
        self.returns: dict[AgentID, float] = {}
        self.new_steps = self.new_rows = 0


class Trajectory:
    """The rows of one agent, from its first observation to its end, in a lane of its policy.

    Args:
        policy_id: the policy.
        lane: the lane.
        agent_id, agent_index: the agent, and its index in the episode.
        episode: the episode.
        check: the check of its observations.
        row: its first row.
        initial_states: the recurrent states before its first row.

    Attributes:
        begin: first row that is in no segment.
        age: number of rows before `begin`.
        alive: whether it has not ended.
        needs_action: whether its latest observation has no action.
        final: its final observation, once it has ended.
        end, end_time: the row after its last one, and the env step of its final observation, once
            it has ended.
        pending_reward: rewards since its latest action, while no observation followed the action.
        recorded: first row that is not in the episode's record.
    """

    __slots__ = (
        "age",
        "agent_id",
        "agent_index",
        "alive",
        "begin",
        "check",
        "end",
        "end_time",
        "episode",
        "final",
        "initial_states",
        "lane",
        "needs_action",
        "pending_reward",
        "policy_id",
        "recorded",
    )  # fmt: skip

    def __init__(
        self,
        policy_id: PolicyID,
        lane: int,
        agent_id: AgentID,
        agent_index: int,
        episode: RunningEpisode,
        check: ObservationCheck,
        row: int,
        initial_states: list[np.ndarray],
    ):
        self.policy_id, self.lane = policy_id, lane
        self.agent_id, self.agent_index, self.episode = agent_id, agent_index, episode
        self.check = check
        self.begin = self.recorded = row
        self.age = 0
        self.initial_states = initial_states
        self.alive = self.needs_action = True
        self.final: Any = None
        self.end = self.end_time = 0
        self.pending_reward = 0.0

    def cut(
        self, end: int, event: int, terminated: bool = False, truncated: bool = False
    ) -> Segment:
        """Return the rows since the last cut as a segment; later rows belong to the next one.

        Args:
            end: the row after the last one.
            event, terminated, truncated: see Segment.
        """
        segment = Segment(self, end, event, terminated, truncated)
        self.age += end - self.begin
        self.begin = end
        return segment


class Segment:
    """Rows `begin` … `end` - 1 of a trajectory; created by `Trajectory.cut`.

    Attributes:
        age: rows of the trajectory before `begin`.
        event: what followed the last row.
        terminated, truncated: the flags of the last row.
        final: the observation after the last row; None if it is in the columns.
    """

    __slots__ = (
        "age", "begin", "end", "episode", "event", "final", "terminated", "trajectory", "truncated",
    )  # fmt: skip

    def __init__(
        self,
        trajectory: Trajectory,
        end: int,
        event: int,
        terminated: bool = False,
        truncated: bool = False,
    ):
        self.trajectory, self.episode, self.event = trajectory, trajectory.episode, event
        self.begin, self.end, self.age = trajectory.begin, end, trajectory.age
        self.terminated, self.truncated, self.final = terminated, truncated, trajectory.final

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
    lanes, begins, ends, ages, events, agents, ids = np.array(
        [
            (
                s.lane, s.begin, s.end, s.age, s.event, s.trajectory.agent_index,
                s.episode.record.episode_id,
            )
            for s in segments
        ],
        np.int64,
    ).T  # fmt: skip
    finals = np.full(len(segments), -1)
    has_final = np.array([segment.final is not None for segment in segments])
    finals[has_final] = np.arange(has_final.sum())
    states = zip(*(segment.trajectory.initial_states for segment in segments), strict=True)
    return Segments(
        lanes=lanes,
        begins=begins,
        ends=ends,
        steps=ages,
        ages=ages,
        episode_ids=ids,
        events=events,
        finals=finals,
        continued=np.zeros(len(segments), bool),
        envs=envs[lanes],
        agents=agents,
        initial_states=[np.stack(values) for values in states],
    )
