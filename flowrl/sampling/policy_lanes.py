"""PolicyLanes: the rows of all agents of one policy, in lanes of its columns.

A lane has the rows of one agent after another, of the same environment. Each lane counts its own
rows, because agents may act in different steps. The latest observation of an agent is in the
current row of its lane; its action, reward and info are added when they are known.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.data import SampleBatch
from flowrl.data.fragment_columns import FragmentColumns, map_leaves, write
from flowrl.data.spaces import stack_values, zeros_of
from flowrl.data.types import AgentID, PolicyID
from flowrl.envs.validation import ObservationCheck
from flowrl.policies.acting_views import InitialStates, signature_of
from flowrl.policies.policy import Policy
from flowrl.sampling.fragment_builder import FragmentBuilder
from flowrl.sampling.ids import IdCounter
from flowrl.sampling.policy_outputs import PolicyOutputs
from flowrl.sampling.running_episodes import RunningEpisode, Segment, Trajectory
from flowrl.sampling.segments import Event, Segments
from flowrl.sampling.views import Views
from flowrl.sampling.worker_config import WorkerConfig


class PolicyLanes:
    """Stores the rows of a policy's agents, and builds its batches.

    Args:
        policy_id, policy: the policy.
        settings: the sampling settings.
        unroll_ids: the counter of the column `unroll_id`.
        separately: whether each segment is postprocessed on its own afterwards.

    Attributes:
        columns: the rows.
        rows: current row of each lane, [lanes].
        envs: environment of each lane, [lanes].
        segments: the segments that are in no fragment yet.
        free: lanes without a trajectory, by environment.
        states: the initial states of the lanes.
        waiting: the trajectories that act in the next step.
    """

    def __init__(
        self,
        policy_id: PolicyID,
        policy: Policy,
        settings: WorkerConfig,
        unroll_ids: IdCounter,
        separately: bool,
    ):
        self.policy_id, self.policy = policy_id, policy
        self._options: dict[str, Any] = {} if settings.explore else {"explore": False}
        self._replaces = settings.on_invalid_step == "replace"
        self.states = InitialStates(policy, 0)
        self._views = Views(policy, self.states)
        self.columns = FragmentColumns(0, settings.fragment_length, self._views.lookback)
        self.columns.known = self._views.lookback
        self._check = ObservationCheck(policy.observation_space)
        self._outputs = PolicyOutputs(
            policy, self.columns, self._check, True, f"policy {policy_id!r}", self._describe_actor
        )
        self._is_first = True  # step of a fragment
        self._builder = FragmentBuilder(policy, settings.no_done_at_end, unroll_ids, separately)
        self.rows, self.envs = np.zeros(0, np.int64), np.zeros(0, np.int64)
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
            # observations that are not in the statistics of the filter
            columns.allocate("unseen", (), np.dtype(bool))
        columns.allocate("rewards", (), np.dtype(np.float32))
        columns.allocate("t", (), np.dtype(np.int64))

    def clear(self) -> None:
        """Remove all rows."""
        self.rows[:] = 0
        self.free: dict[int, list[int]] = {}
        for lane in reversed(range(len(self.rows))):
            self.free.setdefault(int(self.envs[lane]), []).append(lane)
        if "unseen" in self.columns.arrays:
            self.columns["unseen"][:] = False
        self.segments: list[Segment] = []
        self.wait([])

    # -- trajectories ------------------------------------------------------------------------------

    def start(
        self,
        env: int,
        agent_id: AgentID,
        agent_index: int,
        episode: RunningEpisode,
        check: ObservationCheck,
        observation: Any,
        counts: bool,
    ) -> Trajectory:
        """Start an agent's trajectory with its first observation.

        Args:
            env: the environment.
            agent_id, agent_index, episode: the agent.
            check: the check of its observations.
            observation: the observation.
            counts: whether the observation is part of the filter's statistics.
        """
        free = self.free.setdefault(env, [])
        if not free:
            free.append(self.add_lane(env))
        lane = free.pop()
        self.states.restart([lane])
        row, states = int(self.rows[lane]), self.states.new
        trajectory = Trajectory(
            self.policy_id, lane, agent_id, agent_index, episode, check, row, states
        )
        self._write(trajectory, observation, counts)
        return trajectory

    def add_lane(self, env: int) -> int:
        """Add a lane for an environment; return its number."""
        self.columns.add_lanes(1)
        self.states.add_lanes(1)
        self.rows, self.envs = np.append(self.rows, 0), np.append(self.envs, env)
        return len(self.rows) - 1

    def _write(self, trajectory: Trajectory, observation: Any, counts: bool = True) -> None:
        """Write the latest observation of a trajectory."""
        if self._replaces:
            observation = trajectory.check.repair(observation)
        lane = trajectory.lane
        at = self.columns.lookback + self.rows[lane], lane
        write(self.columns["raw_obs"], at, observation)
        if "unseen" in self.columns.arrays:
            self.columns["unseen"][at] = counts

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
        trajectory.waits = True

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
        self._complete(trajectory, t, info)
        trajectory.end = int(self.rows[trajectory.lane])
        self.segments.append(
            Segment(trajectory, trajectory.end, Event.ENDED, terminated, truncated)
        )
        self._release(trajectory)

    def _complete(self, trajectory: Trajectory, t: int, info: Any) -> None:
        columns, lane = self.columns, trajectory.lane
        at = columns.lookback + self.rows[lane], lane
        columns["rewards"][at], trajectory.pending_reward = trajectory.pending_reward, 0.0
        columns["t"][at] = t
        self._write_infos(at, info or None)
        self.rows[lane] += 1

    def _write_infos(self, at: Any, infos: Any) -> None:
        """Write infos, which are a column once an environment returned some."""
        if infos is None and "infos" not in self.columns.arrays:
            return
        self.columns.allocate("infos", (), np.dtype(object))[at] = infos

    def _release(self, trajectory: Trajectory) -> None:
        trajectory.alive = trajectory.waits = False
        self.free[int(self.envs[trajectory.lane])].append(trajectory.lane)

    def drop(self, trajectory: Trajectory) -> None:
        """End a trajectory, and drop its rows that are in no segment."""
        lane = trajectory.lane
        if "unseen" in self.columns.arrays:
            rows = slice(trajectory.begin, int(self.rows[lane]) + 1)
            self.columns["unseen"][self.columns.lookback :][rows, lane] = False
        self.rows[lane] += 1  # a segment before a soft horizon may end with the current row
        self._release(trajectory)

    def drop_segments(self, episode: RunningEpisode) -> None:
        """Drop the segments of an episode."""
        for segment in self.segments:
            if segment.episode is episode and "unseen" in self.columns.arrays:
                rows = slice(segment.begin, segment.end)
                self.columns["unseen"][self.columns.lookback :][rows, segment.lane] = False
        self.segments = [segment for segment in self.segments if segment.episode is not episode]

    def observation(self, trajectory: Trajectory, name: str = "raw_obs") -> Any:
        """Return a copy of the latest observation of a trajectory."""
        at = self.columns.lookback + self.rows[trajectory.lane], trajectory.lane
        return map_leaves(lambda array: np.array(array[at]), self.columns[name])

    # -- a step of all trajectories that wait ------------------------------------------------------

    def wait(self, trajectories: list[Trajectory]) -> None:
        """Set the trajectories that act in the next step, in the order of their actions."""
        self.waiting = trajectories
        self._lanes = np.array([trajectory.lane for trajectory in trajectories], np.int64)
        # the first row of each trajectory; negative in later fragments
        self._resets = np.array([t.begin - t.age for t in trajectories], np.int64)

    def act(self) -> list[Any]:
        """Return the actions of the trajectories that wait, as their environments take them."""
        columns, policy, views, lanes = self.columns, self.policy, self._views, self._lanes
        rows = self.rows[lanes]
        at = columns.lookback + rows, lanes
        if policy.observation_filter is not None:
            columns["obs"][at] = policy.observation_filter(columns["raw_obs"][at])
        obs = map_leaves(lambda array: array[at], columns["obs"])
        if views.shows_columns:
            actions, states, extra = policy.compute_actions(obs, **self._options)
        else:
            inputs = views.inputs_at(
                columns, rows, lanes, rows - self._resets, obs, self._initial_states
            )
            actions, states, extra = policy.compute_actions_from_input_dict(inputs, **self._options)
        if self._is_first:
            self._outputs.allocate(len(lanes), actions, states, extra)
            self._is_first = False
        to_env = self._outputs.store(at, actions, states, extra)
        if isinstance(to_env, np.ndarray):
            return to_env.tolist() if to_env.ndim == 1 else list(to_env)
        return to_env

    def _initial_states(self, source: str) -> np.ndarray:
        return self.states.of_lanes(source, self._lanes)

    def _describe_actor(self, n: int) -> str:
        trajectory = self.waiting[n]
        env = self.envs[trajectory.lane]
        return f"agent {trajectory.agent_id!r} of sub-environment {env}"

    def observe_many(
        self,
        lanes: list[int],
        observations: list[Any],
        rewards: list[float],
        steps: list[int],
        infos: list[Any] | None,
    ) -> None:
        """Complete the current rows of trajectories that acted in this step; see `observe`.

        Args:
            lanes: the lanes of the trajectories.
            observations, rewards, steps, infos: of each; None: there are no infos.
        """
        columns = self.columns
        index = self._lanes if len(lanes) == len(self._lanes) else np.array(lanes)
        at = columns.lookback + self.rows[index], index
        columns["rewards"][at] = rewards
        columns["t"][at] = steps
        self._write_infos(at, infos)
        values = self._stacked(observations)
        if self._replaces:
            values = self._check.repair(values)
            columns["rewards"][at] = np.nan_to_num(columns["rewards"][at], posinf=0.0, neginf=0.0)
        self.rows[index] += 1
        after = at[0] + 1, index
        write(columns["raw_obs"], after, values)
        if "unseen" in columns.arrays:
            columns["unseen"][after] = True

    def _stacked(self, observations: list[Any]) -> Any:
        """Return observations as arrays [k, …]."""
        check = self._check
        if not check.is_array:
            return stack_values([check.copy(observation) for observation in observations])
        shape = check.space.shape
        if not shape:
            return np.array(observations, check.dtype)
        return np.concatenate(observations).reshape(len(observations), *shape)

    def fits(self, observations: list[Any]) -> bool:
        """Return whether observations have the shape and dtype of the policy's space."""
        return all(map(self._check.matches_shape_and_dtype, observations))

    # -- a fragment --------------------------------------------------------------------------------

    def begin_fragment(self) -> None:
        """Prepare for the steps of another fragment."""
        if self._views.signature != signature_of(self.policy.view_requirements):
            self._views = Views(self.policy, self.states)
            self.columns.look_back(self._views.lookback)
        self.states.begin()
        self._is_first = True

    def steps_of_room(self) -> int:
        """Return the number of steps for which there is room, at least 1; make room if needed."""
        last = int(self.rows.max(initial=0))
        if last == self.columns.length:
            self.columns.resize(2 * last)
        return self.columns.length - last

    def update_filter(self) -> None:
        """Add the observations that policies act on to the statistics of the filter."""
        normalize, columns = self.policy.observation_filter, self.columns
        if normalize is not None and columns["unseen"].any():
            normalize.new_stats.update(columns["raw_obs"][columns["unseen"]])
            columns["unseen"][:] = False

    def take(self, segments: list[Segment]) -> tuple[SampleBatch, np.ndarray]:
        """Return the rows of segments, and the sum of rewards of each segment."""
        columns, normalize = self.columns, self.policy.observation_filter
        arrays = self._arrays(segments)
        begin, used = columns.lookback, int(arrays.ends.max())
        finals = [segment.final for segment in segments if segment.final is not None]
        final = map_leaves(lambda array: array[:0, 0], columns["raw_obs"])
        if finals:
            final = stack_values([self._check.copy(observation) for observation in finals])
        if normalize is not None:
            final = normalize(final)
            current = begin + self.rows, np.arange(columns.lanes)
            columns["obs"][current] = normalize(columns["raw_obs"][current])
        for name in ("terminateds", "truncateds"):
            flags = columns.allocate(name, (), np.dtype(bool))
            flags[begin : begin + used] = False
            values = [getattr(segment, name[:-1]) for segment in segments]
            flags[begin + arrays.ends - 1, arrays.lanes] = values
        if "dones" in self._views.sources:
            dones = columns.allocate("dones", (), np.dtype(bool))
            np.logical_or(columns["terminateds"], columns["truncateds"], out=dones)
        batch = self._builder.build(columns, self._views, used, arrays, final)
        row, segment = arrays.rows()
        rewards = columns["rewards"][begin + row, arrays.lanes[segment]].astype(np.float64)
        return batch, np.add.reduceat(rewards, np.cumsum(arrays.lengths) - arrays.lengths)

    def _arrays(self, segments: list[Segment]) -> Segments:
        """Return segments as arrays."""
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
            envs=self.envs[lanes],
            agents=agents,
            initial_states=[np.stack(values) for values in states],
        )

    def advance(self, running: list[Trajectory]) -> None:
        """Start the next fragment with the rows that are kept: those of the remaining segments, and
        those of running trajectories that are in no segment."""
        firsts = self.rows.copy()
        kept: list[Segment | Trajectory] = [*self.segments, *running]
        for part in kept:
            firsts[part.lane] = min(firsts[part.lane], part.begin)
        self.columns.advance_lanes(firsts, self.rows)
        self.rows -= firsts
        for trajectory in running:
            trajectory.begin -= int(firsts[trajectory.lane])
            trajectory.recorded -= int(firsts[trajectory.lane])
        for segment in self.segments:
            first = int(firsts[segment.lane])
            segment.begin, segment.end = segment.begin - first, segment.end - first
