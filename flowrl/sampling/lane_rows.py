"""LaneRows: what environments return for the agents of one policy, in lanes of columns.

A lane has the rows of one agent after another, of the same environment. Each lane counts its own
rows, because agents may act in different steps. The latest observation of an agent is in the
current row of its lane; its action, reward and info are added when they are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.data.columns import map_leaves
from flowrl.data.fragment_columns import FragmentColumns, write
from flowrl.data.sample_batch import AgentID, PolicyID
from flowrl.data.spaces import stack_values, zeros_of
from flowrl.envs.validation import ObservationCheck, copied_info
from flowrl.policies.acting_views import InitialStates
from flowrl.policies.policy import Policy
from flowrl.sampling.running_episodes import RunningEpisode, Segment, Trajectory
from flowrl.sampling.segments import Event
from flowrl.sampling.worker_config import WorkerConfig

FLAGS = ("terminateds", "truncateds", "dones")


class LaneRows:
    """Stores the rows of a policy's agents.

    Args:
        policy_id, policy: the policy.
        settings: the sampling settings.
        shows_agents: whether views show rows of other agents, which need the env step of each
            observation and the ends of trajectories as columns.

    Attributes:
        columns: the rows.
        current_rows: current row of each lane, [lanes].
        envs: environment of each lane, [lanes].
        segments: the segments that are in no fragment yet.
        free: lanes without a trajectory, by environment.
        states: the initial states of the lanes.
        waiting: the trajectories that act in the next step.
        waits: with a filter of observations, whether the current row of each lane was written since
            the policy has acted on the lane, bool [lanes].
        time: number of steps that all environments have made together; unlike `t`, it does not
            start again with an episode.
    """

    def __init__(
        self, policy_id: PolicyID, policy: Policy, settings: WorkerConfig, shows_agents: bool
    ):
        self.policy_id, self.policy, self.shows_agents = policy_id, policy, shows_agents
        self._replaces = settings.on_invalid_step == "replace"
        self.states = InitialStates(policy, 0)
        self.columns = FragmentColumns(0, settings.fragment_length)
        self._check = ObservationCheck(policy.observation_space)
        self.current_rows, self.envs = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.waits = np.zeros(0, bool)
        self.time = 0
        self._allocate()
        self.clear()

    def _allocate(self) -> None:
        """Allocate the columns of what environments return."""
        columns, space = self.columns, self.policy.observation_space
        zeros = zeros_of(space)
        columns.allocate_like("raw_obs", map_leaves(lambda z: z[None][:0], zeros))
        if self.policy.observation_filter is None:
            columns.share("obs", "raw_obs")
        else:
            columns.allocate("obs", space.shape or (), np.dtype(np.float32))
            # observations to add to the filter's statistics
            columns.allocate("pending_stats", (), np.dtype(bool))
        if self.shows_agents:
            columns.allocate("time", (), np.dtype(np.int64))
            for name in FLAGS:
                columns.allocate(name, (), np.dtype(bool))
        columns.allocate("rewards", (), np.dtype(np.float32))
        columns.allocate("t", (), np.dtype(np.int64))

    def clear(self) -> None:
        """Remove all rows."""
        self.current_rows[:] = 0
        self.free: dict[int, list[int]] = {}
        for lane in reversed(range(len(self.current_rows))):
            self.free.setdefault(int(self.envs[lane]), []).append(lane)
        if "pending_stats" in self.columns.arrays:
            self.columns["pending_stats"][:] = False
        self.segments: list[Segment] = []
        self.set_waiting([])

    def set_waiting(self, trajectories: list[Trajectory]) -> None:
        """Set the trajectories that act in the next step, in the order of their actions."""
        self.waiting = trajectories
        self._lanes = np.array([trajectory.lane for trajectory in trajectories], np.int64)
        # the first row of each trajectory; negative in later fragments
        self._resets = np.array([t.begin - t.age for t in trajectories], np.int64)

    # -- trajectories ------------------------------------------------------------------------------

    def start(
        self,
        env: int,
        agent_id: AgentID,
        agent_index: int,
        episode: RunningEpisode,
        check: ObservationCheck,
        observation: Any,
        counts_in_filter: bool,
    ) -> Trajectory:
        """Start an agent's trajectory with its first observation.

        Args:
            env: the environment.
            agent_id, agent_index, episode: the agent.
            check: the check of its observations.
            observation: the observation.
            counts_in_filter: whether to add the observation to the filter's statistics.
        """
        free = self.free.setdefault(env, [])
        if not free:  # adding lanes copies all columns: add half as many as there are
            count = max(1, int(np.count_nonzero(self.envs == env)) // 2)
            free.extend(reversed(self.add_lanes([env] * count)))
        lane = free.pop()
        self.states.restart([lane])
        row, states = int(self.current_rows[lane]), self.states.new
        trajectory = Trajectory(
            self.policy_id, lane, agent_id, agent_index, episode, check, row, row, states
        )
        self._write(trajectory, observation, counts_in_filter)
        return trajectory

    def add_lanes(self, envs: Sequence[int]) -> range:
        """Add a lane for each of these environments; return the numbers of the lanes."""
        first = len(self.envs)
        self.columns.add_lanes(len(envs))
        self.states.add_lanes(len(envs))
        self.current_rows = np.append(self.current_rows, np.zeros(len(envs), np.int64))
        self.envs = np.append(self.envs, np.array(envs, np.int64))
        self.waits = np.append(self.waits, np.zeros(len(envs), bool))
        return range(first, len(self.envs))

    def _write(
        self, trajectory: Trajectory, observation: Any, counts_in_filter: bool = True
    ) -> None:
        """Write the latest observation of a trajectory."""
        observation = trajectory.check.copy(observation)
        if self._replaces:
            observation = trajectory.check.repair(observation)
        lane = trajectory.lane
        at = self.columns.lookback + self.current_rows[lane], lane
        write(self.columns["raw_obs"], at, observation)
        if "pending_stats" in self.columns.arrays:
            self.columns["pending_stats"][at] = counts_in_filter
            self.waits[lane] = True
        if self.shows_agents:
            self.columns["time"][at] = self.time

    def observe(self, trajectory: Trajectory, observation: Any, t: int, info: Any) -> None:
        """Complete the current row with the observation that followed.

        Args:
            trajectory: the trajectory.
            observation: the observation.
            t: env steps of the episode before this one.
            info: info of the agent in this step.
        """
        self._complete(trajectory, t, info)
        self._write(trajectory, observation)
        trajectory.needs_action = True

    def end(
        self,
        trajectory: Trajectory,
        final: Any,
        t: int,
        info: Any,
        terminated: bool,
        truncated: bool,
    ) -> None:
        """Complete the last row of a trajectory, and end it.

        Args:
            trajectory: the trajectory.
            final: its final observation; None: its latest one.
            t, info: see `observe`.
            terminated, truncated: how it ended.
        """
        final = self.observation(trajectory) if final is None else trajectory.check.copy(final)
        trajectory.final = trajectory.check.repair(final) if self._replaces else final
        self._complete(trajectory, t, info, terminated, truncated)
        trajectory.end, trajectory.end_time = int(self.current_rows[trajectory.lane]), self.time
        self.segments.append(trajectory.cut(trajectory.end, Event.ENDED, terminated, truncated))
        self._release(trajectory)

    def _complete(
        self,
        trajectory: Trajectory,
        t: int,
        info: Any,
        terminated: bool = False,
        truncated: bool = False,
    ) -> None:
        columns, lane = self.columns, trajectory.lane
        at = columns.lookback + self.current_rows[lane], lane
        columns["rewards"][at] = trajectory.pending_reward
        trajectory.pending_reward = 0.0
        columns["t"][at] = t
        self._write_infos(at, copied_info(info) if info else None)
        if self.shows_agents:
            flags = terminated, truncated, terminated or truncated
            for name, flag in zip(FLAGS, flags, strict=True):
                columns[name][at] = flag
        self.current_rows[lane] += 1

    def _write_infos(self, at: Any, infos: Any) -> None:
        """Write infos, which are a column once an environment returned some."""
        if infos is None and "infos" not in self.columns.arrays:
            return
        self.columns.allocate("infos", (), np.dtype(object))[at] = infos

    def _release(self, trajectory: Trajectory) -> None:
        trajectory.alive = trajectory.needs_action = False
        self.free[int(self.envs[trajectory.lane])].append(trajectory.lane)

    def drop(self, trajectory: Trajectory) -> None:
        """End a trajectory, and drop its rows that are in no segment."""
        lane = trajectory.lane
        if "pending_stats" in self.columns.arrays:
            rows = slice(trajectory.begin, int(self.current_rows[lane]) + 1)
            self.columns["pending_stats"][self.columns.lookback :][rows, lane] = False
        trajectory.end = trajectory.begin
        self.ensure_room()
        # skip the current row: a kept segment that a soft horizon ended reads it as its next
        # observation
        self.current_rows[lane] += 1
        self._release(trajectory)

    def drop_segments(self, episode: RunningEpisode) -> None:
        """Drop the segments of an episode."""
        for segment in self.segments:
            if segment.episode is episode and "pending_stats" in self.columns.arrays:
                rows = slice(segment.begin, segment.end)
                self.columns["pending_stats"][self.columns.lookback :][rows, segment.lane] = False
        self.segments = [segment for segment in self.segments if segment.episode is not episode]

    def observation(self, trajectory: Trajectory) -> Any:
        """Return a copy of the latest observation of a trajectory."""
        at = self.columns.lookback + self.current_rows[trajectory.lane], trajectory.lane
        return map_leaves(lambda array: np.array(array[at]), self.columns["raw_obs"])

    # -- a step of many trajectories ---------------------------------------------------------------

    def observe_many(
        self,
        lanes: list[int],
        observations: Any,
        rewards: list[float],
        steps: list[int],
        infos: list[Any] | None,
    ) -> None:
        """Complete the current rows of trajectories that acted in this step; see `observe`.

        Args:
            lanes: the lanes of the trajectories.
            observations: of each, arrays [k, …].
            rewards, steps, infos: of each; None: there are no infos.
        """
        columns = self.columns
        index = self._lanes if len(lanes) == len(self._lanes) else np.array(lanes)
        at = columns.lookback + self.current_rows[index], index
        columns["rewards"][at] = rewards
        columns["t"][at] = steps
        self._write_infos(at, infos)
        if self._replaces:
            columns["rewards"][at] = np.nan_to_num(columns["rewards"][at], posinf=0.0, neginf=0.0)
        self.current_rows[index] += 1
        after = at[0] + 1, index
        write(columns["raw_obs"], after, observations)
        if "pending_stats" in columns.arrays:
            columns["pending_stats"][after] = True
            self.waits[index] = True
        if self.shows_agents:
            columns["time"][after] = self.time
            for name in FLAGS:
                columns[name][at] = False

    def stacked(self, observations: list[Any]) -> Any:
        """Return observations as arrays [k, …]; None if they must be checked one by one: the shape,
        dtype or structure of one differs from the policy's space, or invalid ones are replaced."""
        check, count = self._check, len(observations)
        if self._replaces:
            return None
        if not check.is_array:
            if not all(map(check.matches_shape_and_dtype, observations)):
                return None
            return stack_values([check.copy(observation) for observation in observations])
        shape: Any = check.space.shape
        try:
            values = np.concatenate(observations) if shape else np.array(observations)
            fits = not shape or set(map(len, observations)) == {shape[0]}
        except (TypeError, ValueError):
            return None
        if not fits or values.dtype != check.dtype or values.shape[1:] != shape[1:]:
            return None
        return values.reshape(count, *shape) if values.size == count * math.prod(shape) else None

    # -- a fragment --------------------------------------------------------------------------------

    def ensure_room(self) -> int:
        """Make room for at least one step; return the number of steps that fit."""
        last = int(self.current_rows.max(initial=0))
        if last == self.columns.length:
            self.columns.resize(2 * last)
        return self.columns.length - last

    def update_filter(self) -> None:
        """Add the observations that policies act on to the statistics of the filter."""
        normalize, columns = self.policy.observation_filter, self.columns
        if normalize is not None and columns["pending_stats"].any():
            normalize.new_stats.update(columns["raw_obs"][columns["pending_stats"]])
            columns["pending_stats"][:] = False

    def reward_of(self, segment: Segment) -> float:
        """Return the sum of rewards of a segment."""
        rows = self.columns["rewards"][self.columns.lookback :, segment.lane]
        return float(rows[segment.begin : segment.end].sum(dtype=np.float64))

    def advance(
        self, running: list[Trajectory], ended: list[Trajectory], since: np.ndarray | None = None
    ) -> None:
        """Start the next fragment, with the rows of the remaining segments and of running
        trajectories that are in no segment yet.

        Args:
            running: the trajectories that have not ended.
            ended: other trajectories that views may show.
            since: the first env step of each environment that views may show, [envs].
        """
        firsts = self.current_rows.copy()
        kept: list[Segment | Trajectory] = [*self.segments, *running]
        for part in kept:
            firsts[part.lane] = min(firsts[part.lane], part.begin)
        if since is not None:
            times = self.columns["time"][self.columns.lookback :]
            for lane, env in enumerate(self.envs.tolist()):
                lane_times = times[: self.current_rows[lane], lane]
                firsts[lane] = min(firsts[lane], int(np.searchsorted(lane_times, since[env])))
        columns = self.columns
        columns.advance_lanes(firsts, self.current_rows)
        self.current_rows -= firsts
        # rows before row 0 that every running trajectory from an earlier fragment still has
        moved = [int(firsts[t.lane]) for t in running if t.age > firsts[t.lane]]
        known = columns.known + min(moved) if moved else columns.lookback
        columns.known = min(known, columns.lookback)
        for trajectory in running:
            trajectory.begin -= int(firsts[trajectory.lane])
            trajectory.recorded -= int(firsts[trajectory.lane])
        for trajectory in ended:
            trajectory.begin -= int(firsts[trajectory.lane])
            trajectory.end -= int(firsts[trajectory.lane])
        for segment in self.segments:
            first = int(firsts[segment.lane])
            segment.begin, segment.end = segment.begin - first, segment.end - first
