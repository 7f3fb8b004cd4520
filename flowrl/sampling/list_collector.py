"""SimpleListCollector: stores rows in lists by agent; the built-in row-by-row collector.

A trajectory has one more observation than rows, and keeps as many returned rows as the views look
back. Rows are cut into segments at the end of each episode and before a batch is returned. The
columns of a policy's segments are built and postprocessed together, unless the policy or the
callbacks postprocess each segment separately.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import optree

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.data.indexed_columns import IndexedColumn, NextRows
from flowrl.data.lazy_columns import LazyColumn
from flowrl.data.spaces import stack_values
from flowrl.data.types import AgentID, EpisodeID, PolicyID
from flowrl.policies.acting_views import View, signature_of
from flowrl.policies.policy import Policy
from flowrl.sampling.callbacks import call, overrides
from flowrl.sampling.episode import MultiAgentEpisode
from flowrl.sampling.ids import IdCounter
from flowrl.sampling.sample_collector import SampleCollector
from flowrl.sampling.trajectories import RowViews, Segment, Trajectory, column_of
from flowrl.sampling.views import not_for_training
from flowrl.settings import ConfigError

_ALIASES = {
    "action": "actions",
    "reward": "rewards",
    "obs": "new_obs",
    "next_obs": "new_obs",
    "terminated": "terminateds",
    "truncated": "truncateds",
}
_REQUIRED = {"actions", "rewards", "new_obs", "terminateds", "truncateds"}
_IDS = ("t", "env_id", "agent_index")


class SimpleListCollector(SampleCollector):
    """Stores rows in lists by agent; see SampleCollector for the arguments."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._unroll_ids = getattr(self.worker, "unroll_ids", None) or IdCounter()
        # trajectories of each agent in an episode; the last one may be running
        self._trajectories: dict[EpisodeID, dict[AgentID, list[Trajectory]]] = {}
        self._waiting: dict[PolicyID, list[Trajectory]] = {pid: [] for pid in self.policy_map}
        self._closed: dict[PolicyID, list[Segment]] = {}
        self._postprocessed: dict[PolicyID, list[SampleBatch]] = {}
        self._steps: dict[EpisodeID, set[int]] = {}  # env steps of the running segments
        self._steps_closed = 0
        self._rows_closed = 0
        self._times: dict[
            EpisodeID, int
        ] = {}  # env steps so far, including those before a soft horizon
        self._offsets: dict[EpisodeID, int] = {}
        self._views: dict[PolicyID, RowViews] = {}
        self._per_segment = {
            pid: self._postprocesses_segments(p) for pid, p in self.policy_map.items()
        }
        self._ended: set[EpisodeID] = set()

    def _postprocesses_segments(self, policy: Policy) -> bool:
        custom = type(policy).postprocess_trajectory is not Policy.postprocess_trajectory
        return custom or overrides(self.callbacks, "on_postprocess_trajectory")

    # -- adding rows -------------------------------------------------------------------------------

    def add_init_obs(
        self, episode_id: EpisodeID, agent_id: AgentID, policy_id: PolicyID, init_obs: Any
    ) -> None:
        if policy_id not in self.policy_map:
            raise ConfigError(
                f"agent {agent_id!r}: no policy {policy_id!r}; the policies are "
                f"{sorted(self.policy_map)}"
            )
        agents = self._trajectories.setdefault(episode_id, {})
        trajectories = agents.setdefault(agent_id, [])
        if trajectories and not trajectories[-1].ended:
            raise ValueError(
                f"add_init_obs: agent {agent_id!r} of episode {episode_id} has started already"
            )
        trajectory = Trajectory(episode_id, agent_id, policy_id)
        trajectory.observations.append(_copied(init_obs))
        trajectory.initial = self.policy_map[policy_id].get_initial_state()
        trajectory.times.append(self._times.setdefault(episode_id, 0))
        self._steps.setdefault(episode_id, set())
        trajectories.append(trajectory)
        self._waiting[policy_id].append(trajectory)

    def add_action_reward_next_obs(
        self,
        episode_id: EpisodeID,
        agent_id: AgentID,
        policy_id: PolicyID,
        values: dict[str, Any],
    ) -> None:
        trajectories = self._trajectories.get(episode_id, {}).get(agent_id)
        if not trajectories:
            raise ValueError(
                f"add_action_reward_next_obs: agent {agent_id!r} of episode {episode_id} has no "
                "first observation: call add_init_obs first"
            )
        trajectory = trajectories[-1]
        if trajectory.ended:
            raise ValueError(
                f"add_action_reward_next_obs: agent {agent_id!r} of episode {episode_id} has ended"
            )
        row = values.copy()
        if not row.keys() >= _REQUIRED:
            row = _canonical(row)
        trajectory.observations.append(_copied(row.pop("new_obs")))
        trajectory.values.append(row)
        t = row.setdefault("t", trajectory.rows)
        trajectory.rows += 1
        self._steps[episode_id].add(t)
        time = t + 1 + self._offsets.get(episode_id, 0)
        trajectory.times.append(time)
        self._times[episode_id] = max(time, self._times[episode_id])
        trajectory.ended = bool(row["terminateds"] or row["truncateds"])
        if not trajectory.ended:
            self._waiting[trajectory.policy_id].append(trajectory)

    def env_stepped(self, episode_id: EpisodeID, t: int) -> None:
        self._steps.setdefault(episode_id, set()).add(t)
        self._times[episode_id] = t + 1 + self._offsets.get(episode_id, 0)

    def total_env_steps(self) -> int:
        return self._steps_closed + sum(map(len, self._steps.values()))

    def total_agent_steps(self) -> int:
        return self._rows_closed + sum(t.rows - t.begin for t in self._all_trajectories())

    def _all_trajectories(self) -> Iterable[Trajectory]:
        for agents in self._trajectories.values():
            for trajectories in agents.values():
                yield from trajectories

    def drop_episode(self, episode_id: EpisodeID) -> None:
        agents = self._trajectories.pop(episode_id, {})
        dropped = {
            id(trajectory) for trajectories in agents.values() for trajectory in trajectories
        }
        for pid, waiting in self._waiting.items():
            self._waiting[pid] = [t for t in waiting if id(t) not in dropped]
        for state in (self._steps, self._times, self._offsets):
            state.pop(episode_id, None)

    def continue_episode(self, episode: MultiAgentEpisode, new_episode_id: EpisodeID) -> None:
        old_id = episode.episode_id
        self.postprocess_trajectories_so_far(episode)
        agents = self._trajectories.setdefault(new_episode_id, {})
        agent_views = self._has_agent_views()
        for agent_id, trajectories in self._trajectories.get(old_id, {}).items():
            old = trajectories[-1]
            if old.ended:
                if agent_views:  # views of other agents may look back on it
                    agents[agent_id] = list(trajectories)
                continue
            waiting = self._waiting[old.policy_id]
            new = Trajectory(new_episode_id, agent_id, old.policy_id)
            first = old.dropped if agent_views else max(old.rows - self._lookback(), old.dropped)
            new.values = old.values[first - old.dropped :]
            new.observations = old.observations[first - old.dropped :]
            new.times = old.times[first - old.dropped :]
            new.rows = new.begin = old.rows
            new.dropped, new.before, new.initial = first, old, old.initial
            agents[agent_id] = [*(trajectories[:-1] if agent_views else ()), new]
            waiting[:] = [new if t is old else t for t in waiting]
        self._times.setdefault(old_id, self._offsets.get(old_id, 0))
        self._offsets[new_episode_id] = self._times[old_id]
        self._times[new_episode_id] = self._times[old_id]
        self._steps[new_episode_id] = set()
        self._ended.add(old_id)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        if self._closed or self._postprocessed:
            return None  # a batch is incomplete
        return {
            "trajectories": {
                episode: {
                    agent: [t.state_dict() for t in trajectories]
                    for agent, trajectories in agents.items()
                }
                for episode, agents in self._trajectories.items()
            },
            "waiting": {
                pid: [(t.episode_id, t.agent_id) for t in waiting]
                for pid, waiting in self._waiting.items()
            },
            "steps": {episode: sorted(steps) for episode, steps in self._steps.items()},
            "times": dict(self._times),
            "offsets": dict(self._offsets),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trajectories = {
            episode: {
                agent: [Trajectory.from_state_dict(t) for t in trajectories]
                for agent, trajectories in agents.items()
            }
            for episode, agents in state["trajectories"].items()
        }
        self._waiting = {
            pid: [self._trajectories[episode][agent][-1] for episode, agent in waiting]
            for pid, waiting in state["waiting"].items()
        }
        self._steps = {episode: set(steps) for episode, steps in state["steps"].items()}
        self._times, self._offsets = dict(state["times"]), dict(state["offsets"])

    # -- inputs of policies ------------------------------------------------------------------------

    def _lookback(self) -> int:
        return max((self._views_of(pid).lookback for pid in self.policy_map), default=0)

    def _views_of(self, policy_id: PolicyID) -> RowViews:
        policy = self.policy_map[policy_id]
        views = self._views.get(policy_id)
        if views is None or views.signature != signature_of(policy.view_requirements):
            views = self._views[policy_id] = RowViews(policy)
        return views

    def _has_agent_views(self) -> bool:
        """Return whether a view shows other agents."""
        return any(self._views_of(pid).of_agents for pid in self.policy_map)

    def get_inference_input_dict(self, model: Any) -> dict[str, Any]:
        policy_ids = [
            policy_id
            for policy_id, policy in self.policy_map.items()
            if policy is model or getattr(policy, "model", None) is model
        ]
        if not policy_ids:
            raise ConfigError(f"no policy of this worker has the model {model!r}")
        policy_id = policy_ids[0]
        waiting, self._waiting[policy_id] = self._waiting[policy_id], []
        return self._inputs(self._views_of(policy_id), [(t, t.rows) for t in waiting])

    def _inputs(self, views: RowViews, rows: list[tuple[Trajectory, int]]) -> dict[str, Any]:
        """Return the views for actions at B rows of trajectories, [B, ...]; a row may be the next
        one of its trajectory."""
        inputs: dict[str, Any] = {}
        if not rows:
            return inputs
        for name, view in views.acting.items():
            if view.agents is not None:
                inputs[name], inputs[f"{name}_mask"] = self._agent_view(views, view, rows)
            elif view.source == "obs" and view.shifts == (0,) and not view.is_window:
                inputs[name] = stack_values([t.observations[row - t.dropped] for t, row in rows])
            else:
                values = [[views.before(view, t, row + s) for s in view.shifts] for t, row in rows]
                inputs[name] = stack_values(
                    [stack_values(v) if view.is_window else v[0] for v in values]
                )
        return inputs

    def _agent_view(
        self, views: RowViews, view: View, rows: list[tuple[Trajectory, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a view of other agents at B rows: values and mask, [B, agents, ...]."""
        found: list[Any] = []  # by row, agent and shift
        mask: list[bool] = []
        count = 0
        for trajectory, row in rows:
            time = trajectory.times[row - trajectory.dropped]
            by_agent = self._trajectories[trajectory.episode_id]
            ids = view.agents
            if ids == "others":
                ids = [a for a in views.possible_agents(self.worker) if a != trajectory.agent_id]
            count = len(ids or ())
            for agent in ids or ():
                for shift in view.shifts:
                    value = _at_time(by_agent.get(agent, ()), view.source, time, shift)
                    mask.append(value is not None)
                    found.append(
                        views.zero_of_agent(view, agent, self.worker) if value is None else value
                    )
        shapes = {np.shape(value) for value in found}
        if len(shapes) > 1:
            raise ConfigError(
                f"view of {view.source!r} of the agents {view.agents}: the values have different "
                f"shapes, {sorted(shapes)}"
            )
        shape: tuple[int, ...] = (len(rows), count)
        if view.is_window:
            shape = (*shape, len(view.shifts))
        values = column_of(view.source, found)
        return values.reshape(*shape, *values.shape[1:]), np.array(mask, bool).reshape(shape)

    # -- batches -----------------------------------------------------------------------------------

    def has_non_postprocessed_data(self) -> bool:
        return any(t.rows > t.begin for t in self._all_trajectories())

    def postprocess_trajectories_so_far(self, episode: MultiAgentEpisode | None = None) -> None:
        ids = list(self._steps) if episode is None else [episode.episode_id]
        for episode_id in ids:
            record = episode or self._record_of(episode_id)
            segments = [
                Segment(trajectory, next(self._unroll_ids), record)
                for trajectories in self._trajectories.get(episode_id, {}).values()
                for trajectory in trajectories
                if trajectory.rows > trajectory.begin
            ]
            self._steps_closed += len(self._steps[episode_id]) if episode_id in self._steps else 0
            self._steps[episode_id] = set()
            self._rows_closed += sum(map(len, segments))
            if any(self._per_segment[s.trajectory.policy_id] for s in segments):
                self._postprocess_segments(segments, record)
            else:
                for segment in segments:
                    self._closed.setdefault(segment.trajectory.policy_id, []).append(segment)

    def _no_done_at_end(self) -> bool:
        return bool(getattr(self.worker, "no_done_at_end", False))

    def _record_of(self, episode_id: EpisodeID) -> MultiAgentEpisode | None:
        find = getattr(self.worker, "episode", None)
        return None if find is None else find(episode_id)

    def _postprocess_segments(
        self, segments: list[Segment], episode: MultiAgentEpisode | None
    ) -> None:
        """Let the policy and the callbacks postprocess each segment of an episode."""
        originals: list[tuple[AgentID, PolicyID, SampleBatch]] = []
        for policy_id, group in _by_policy(segments).items():
            rows = self._build(policy_id, group)
            begin = 0
            for segment in group:
                part = rows[begin : begin + len(segment)]
                originals.append((segment.trajectory.agent_id, policy_id, part))
                begin += len(segment)
        batches = {
            agent: (self.policy_map[pid], batch.without_columns("next_values").isolated())
            for agent, pid, batch in originals
        }
        for agent, policy_id, batch in originals:
            policy = self.policy_map[policy_id]
            others = {a: pair for a, pair in batches.items() if a != agent}
            result = policy.postprocess_trajectory(batch.isolated(), others or None, episode)
            if not isinstance(result, SampleBatch):
                raise TypeError(
                    f"{type(policy).__name__}.postprocess_trajectory() must return the batch, "
                    f"it returned a {type(result).__name__}"
                )
            result = result.without_columns("next_values").isolated()
            call(
                self.callbacks.on_postprocess_trajectory,
                worker=self.worker,
                episode=episode,
                agent_id=agent,
                policy_id=policy_id,
                policies=dict(self.policy_map),
                postprocessed_batch=result,
                original_batches={**batches, agent: (policy, batch.without_columns("next_values"))},
            )
            self._postprocessed.setdefault(policy_id, []).append(result)

    def get_multi_agent_batch_and_reset(self) -> MultiAgentBatch:
        self.postprocess_trajectories_so_far()
        batches: dict[PolicyID, SampleBatch] = {}
        for policy_id in self.policy_map:
            parts = self._postprocessed.get(policy_id, [])
            closed = self._closed.get(policy_id)
            if closed:
                closed.sort(key=_env_id)
                parts = [*parts, self._postprocess_together(policy_id, closed)]
            if parts:
                parts.sort(key=lambda part: part["env_id"][0] if "env_id" in part else 0)
                batches[policy_id] = SampleBatch.concat_samples(parts)
        batch = MultiAgentBatch(batches, self._steps_closed)
        self._postprocessed, self._closed = {}, {}
        self._steps_closed = self._rows_closed = 0
        lookback = self._lookback()
        for episode_id in self._ended:
            for state in (self._trajectories, self._steps, self._times, self._offsets):
                state.pop(episode_id, None)
        agent_views = self._has_agent_views()
        for agents in self._trajectories.values():
            live = [
                trajectories[-1] for trajectories in agents.values() if not trajectories[-1].ended
            ]
            # views of other agents look back from the live agents' pending rows
            since = min((t.times[t.begin - t.dropped] for t in live), default=0) - lookback
            for agent_id, trajectories in list(agents.items()):
                for trajectory in trajectories:
                    keep = 0 if trajectory.ended else lookback
                    trajectory.forget(keep, since if agent_views else None)
                    trajectory.take_sums()
                trajectories[:] = [t for t in trajectories if t.values or not t.ended]
                if not trajectories:
                    del agents[agent_id]
        self._ended.clear()
        return batch

    def check_missing_dones(self, episode_id: EpisodeID) -> None:
        self._ended.add(episode_id)
        for agent_id, trajectories in self._trajectories.get(episode_id, {}).items():
            if trajectories[-1].rows and not trajectories[-1].ended:
                raise ValueError(
                    f"episode {episode_id} has ended, but the last row of agent {agent_id!r} is "
                    "neither terminated nor truncated"
                )

    # -- columns of segments -----------------------------------------------------------------------

    def _build(self, policy_id: PolicyID, segments: list[Segment]) -> SampleBatch:
        """Return the columns of a policy's segments, concatenated, and `next_values`."""
        policy, views = self.policy_map[policy_id], self._views_of(policy_id)
        lengths = [len(segment) for segment in segments]
        count, ends = sum(lengths), np.cumsum(lengths)
        rows: dict[str, Any] = {}
        if not views.replace_observations:
            rows = self._observations(segments, count, ends)
        names = segments[0].names()
        for name in names:
            if name == "infos":
                build = partial(column_of, name, _chained(segments, name))
                infos = LazyColumn(name, build, (count,), np.dtype(object))
                rows[name] = IndexedColumn(infos, np.arange(count))
            elif name not in _IDS:
                rows[name] = column_of(name, _chained(segments, name))
        if self._no_done_at_end():
            for name in ("terminateds", "truncateds"):
                rows[name] = np.zeros(count, bool)
        if policy.reward_scaler is not None:
            rows["rewards"] = self._scaled(policy, segments, rows)
        for name in _IDS:
            if name in names:
                rows[name] = np.array(_chained(segments, name), np.int64)
        rows["eps_id"] = np.repeat([s.trajectory.episode_id for s in segments], lengths)
        rows["unroll_id"] = np.repeat([s.unroll_id for s in segments], lengths)
        if "vf_preds" in rows:
            rows["next_values"] = self._next_values(policy, views, segments, rows, ends)
        self._add_views(views, segments, rows)
        return SampleBatch.unchecked(rows)

    def _observations(
        self, segments: list[Segment], count: int, ends: np.ndarray
    ) -> dict[str, Any]:
        finals = [s.trajectory.part("obs", s.end, s.end + 1)[0] for s in segments]
        observations = _chained(segments, "obs")
        if isinstance(finals[0], (dict, tuple)):
            after = [
                value
                for s in segments
                for value in s.trajectory.part("obs", s.begin + 1, s.end + 1)
            ]
            return {"obs": stack_values(observations), "new_obs": stack_values(after)}
        base = np.array(observations + finals)
        base.flags.writeable = False  # two columns share it
        return {"obs": base[:count], "new_obs": NextRows(base, count, ends - 1)}

    def _scaled(self, policy: Policy, segments: list[Segment], rows: dict[str, Any]) -> np.ndarray:
        scaler = policy.reward_scaler
        assert scaler is not None
        begin = 0
        for segment in segments:
            part = slice(begin, begin + len(segment))
            trajectory = segment.trajectory
            trajectory.take_sums()
            trajectory.sums = scaler.observe(rows["rewards"][part, None], trajectory.sums)
            begin += len(segment)
        return scaler.scale(rows["rewards"])

    def _next_values(
        self,
        policy: Policy,
        views: RowViews,
        segments: list[Segment],
        rows: dict[str, Any],
        ends: np.ndarray,
    ) -> np.ndarray:
        """Return the value of the state after each row; 0 after a termination."""
        values = rows["vf_preds"]
        next_values = np.empty_like(values)
        next_values[:-1] = values[1:]
        next_values[ends - 1] = 0.0
        cut = np.flatnonzero(~rows["terminateds"][ends - 1])
        if len(cut):
            last = [(segments[i].trajectory, segments[i].end) for i in cut.tolist()]
            inputs = self._inputs(views, last)
            next_values[ends[cut] - 1] = policy.compute_values_from_input_dict(inputs)
        return next_values

    def _add_views(self, views: RowViews, segments: list[Segment], rows: dict[str, Any]) -> None:
        """Add the views for training to the rows, and remove columns that are not for training."""
        bases: dict[str, tuple[Any, list[int]]] = {}
        for name, view in views.training.items():
            if view.agents is not None:
                each = [(s.trajectory, row) for s in segments for row in range(s.begin, s.end)]
                rows[name], rows[f"{name}_mask"] = self._agent_view(views, view, each)
                continue
            if view.source not in bases:
                bases[view.source] = views.base(view, segments)
            base, starts = bases[view.source]
            index = [
                views.positions(view, segment, start)
                for segment, start in zip(segments, starts, strict=True)
            ]
            at = np.concatenate(index)
            rows[name] = optree.tree_map(lambda leaf, at=at: IndexedColumn(leaf, at), base)
        if longest := views.max_seq_len:
            rows["seq_lens"] = np.array(
                [
                    min(longest, s.end - begin)
                    for s in segments
                    for begin in range(s.begin, s.end, longest)
                ],
                np.int32,
            )
        for name in not_for_training(views.requirements, rows):
            rows.pop(name, None)

    def _postprocess_together(self, policy_id: PolicyID, segments: list[Segment]) -> SampleBatch:
        """Postprocess all segments at once; the result equals that of each segment alone."""
        batch = self._build(policy_id, segments)
        policy = self.policy_map[policy_id]
        if type(policy).postprocess_fragment is Policy.postprocess_fragment:
            return batch.without_columns("next_values")
        lengths = np.array([len(segment) for segment in segments])
        longest, count = int(lengths.max()), int(lengths.sum())
        segment = np.repeat(np.arange(len(segments)), lengths)
        step = np.arange(count) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        fragment = {}
        for name, column in batch.stored():
            if isinstance(column, np.ndarray) and name not in ("infos", "seq_lens"):
                shape = (longest, len(segments), *column.shape[1:])
                fragment[name] = np.zeros(shape, column.dtype)
                fragment[name][step, segment] = column
        # estimates end at segment ends, even if the episode continues
        fragment["dones"] = np.ones((longest, len(segments)), bool)
        fragment["dones"][step, segment] = False
        fragment["dones"][lengths - 1, np.arange(len(segments))] = True
        results = policy.postprocess_fragment(fragment)
        columns = {name: column[step, segment] for name, column in results.items()}
        base = batch if "next_values" in columns else batch.without_columns("next_values")
        return base.with_columns(**columns)


def _canonical(values: dict[str, Any]) -> dict[str, Any]:
    """Return the row with canonical column names and both end flags."""
    # of several names of the next observation, the most specific one counts
    after = next((n for n in ("new_obs", "next_obs", "obs") if n in values), None)
    others = {"new_obs", "next_obs", "obs"} - {after}
    row = {_ALIASES.get(n, n): value for n, value in values.items() if n not in others}
    done = row.pop("dones", row.pop("done", None))
    if "terminateds" not in row and done is not None:
        row["terminateds"], row["truncateds"] = bool(done), False
    row.setdefault("truncateds", False)
    missing = [n for n in ("actions", "rewards", "new_obs", "terminateds") if n not in row]
    if missing:
        raise ValueError(f"add_action_reward_next_obs: the row lacks {missing}")
    return row


def _copied(observation: Any) -> Any:
    """Return the observation, copied unless it is read-only."""
    if isinstance(observation, np.ndarray):
        return observation.copy() if observation.flags.writeable else observation
    if isinstance(observation, (dict, tuple)):
        nest: Any = observation
        return optree.tree_map(np.array, nest)
    return observation


def _by_policy(segments: list[Segment]) -> dict[PolicyID, list[Segment]]:
    groups: dict[PolicyID, list[Segment]] = {}
    for segment in segments:
        groups.setdefault(segment.trajectory.policy_id, []).append(segment)
    return groups


def _env_id(segment: Segment) -> int:
    return segment.trajectory.values[-1].get("env_id", 0)


def _chained(segments: list[Segment], name: str) -> list[Any]:
    values: list[Any] = []
    for s in segments:
        values += s.trajectory.part(name, s.begin, s.end)
    return values


def _at_time(trajectories: Iterable[Trajectory], source: str, now: int, shift: int) -> Any:
    """Return an agent's value of a column `shift` steps from the env step `now`.

    None if there is no such row, or if the outcome of its action was not observed by `now`.
    """
    for trajectory in trajectories:
        times = trajectory.times
        last = len(times) if source == "obs" else len(times) - 1
        # the final observation has no action
        if source == "obs" and trajectory.ended:
            last -= 1
        row = _find(times, now + shift, last)
        if row is None or (source != "obs" and shift < 0 and times[row + 1] > now):
            continue
        row += trajectory.dropped
        return trajectory.part(source, row, row + 1)[0]
    return None


def _find(times: list[int], time: int, last: int) -> int | None:
    row = bisect.bisect_left(times, time, 0, last)
    return row if row < last and times[row] == time else None
