"""SimpleListCollector: stores rows in lists by agent, and builds batches segment by segment.

A trajectory of n rows has n + 1 observations. After a batch is returned, it keeps the last rows
that views may still show. Rows are cut into segments at the end of each episode and before a batch
is returned.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.data.sample_batch import AgentID, EpisodeID, PolicyID
from flowrl.data.spaces import stack_values
from flowrl.errors import ConfigError
from flowrl.policies.acting_views import signature_of
from flowrl.sampling.collected_trajectory import (
    CollectedTrajectory,
    TrajectoryViews,
    column_of,
    copied,
)
from flowrl.sampling.episode import MultiAgentEpisode
from flowrl.sampling.fragment_builder import check_values, clipped_rewards
from flowrl.sampling.ids import IdCounter
from flowrl.sampling.sample_collector import SampleCollector
from flowrl.sampling.segment_postprocessing import SegmentPostprocessing
from flowrl.sampling.views import columns_to_drop

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


class _CollectedSegment:
    """Rows `begin` … `end` - 1 of a trajectory."""

    def __init__(self, trajectory: CollectedTrajectory, begin: int, unroll_id: int):
        self.trajectory, self.unroll_id = trajectory, unroll_id
        self.begin, self.end = begin, trajectory.rows

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def env_id(self) -> int:
        """The environment of the last row."""
        trajectory = self.trajectory
        return trajectory.values[self.end - 1 - trajectory.dropped].get("env_id", 0)


class SimpleListCollector(SampleCollector):
    """Stores rows in lists by agent; see SampleCollector for the arguments.

    The batches equal those of flowrl's columns. But with `normalize_rewards`, and
    `complete_episodes` or a policy that overrides `postprocess_trajectory`, the rewards of an
    episode are scaled by the statistics at its end. Use it to compare, or as a base class.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._unroll_ids = getattr(self.worker, "unroll_ids", None) or IdCounter()
        # trajectories of each agent in an episode; the last one may be running
        self._trajectories: dict[EpisodeID, dict[AgentID, list[CollectedTrajectory]]] = {}
        self._waiting: dict[PolicyID, list[CollectedTrajectory]] = {
            pid: [] for pid in self.policy_map
        }
        self._closed: dict[PolicyID, list[_CollectedSegment]] = {}
        self._postprocessed: dict[PolicyID, list[SampleBatch]] = {}
        self._steps: dict[EpisodeID, set[int]] = {}  # env steps of the running segments
        self._steps_closed = self._rows_closed = 0
        # env steps so far, including those before a soft horizon
        self._times: dict[EpisodeID, int] = {}
        self._offsets: dict[EpisodeID, int] = {}
        self._views: dict[PolicyID, TrajectoryViews] = {}
        self._postprocess = SegmentPostprocessing(self.policy_map, self.callbacks, self.worker)
        self._ended: set[EpisodeID] = set()

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
        trajectory = CollectedTrajectory(episode_id, agent_id, policy_id)
        trajectory.observations.append(copied(init_obs))
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
        trajectory.observations.append(copied(row.pop("new_obs")))
        t = row.setdefault("t", trajectory.rows)
        trajectory.values.append(row)
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

    def _all_trajectories(self) -> Iterable[CollectedTrajectory]:
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
            new = CollectedTrajectory(new_episode_id, agent_id, old.policy_id)
            first = old.dropped if agent_views else max(old.rows - self._lookback(), old.dropped)
            new.values = old.values[first - old.dropped :]
            new.observations = old.observations[first - old.dropped :]
            new.times = old.times[first - old.dropped :]
            new.begin = old.rows
            new.dropped, new.sums, new.initial = first, old.sums, old.initial
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
                agent: [CollectedTrajectory.from_state_dict(t) for t in trajectories]
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

    def _views_of(self, policy_id: PolicyID) -> TrajectoryViews:
        policy = self.policy_map[policy_id]
        views = self._views.get(policy_id)
        if views is None or views.signature != signature_of(policy.view_requirements):
            views = self._views[policy_id] = TrajectoryViews(policy, self.worker)
        return views

    def _has_agent_views(self) -> bool:
        """Return whether a view shows other agents."""
        return any(self._views_of(pid).has_agent_views for pid in self.policy_map)

    def get_inference_input_dict(self, model: Any) -> dict[str, Any]:
        policy_ids = [
            policy_id
            for policy_id, policy in self.policy_map.items()
            if policy is model or getattr(policy, "model", None) is model
        ]
        if not policy_ids:
            raise ConfigError(f"no policy of this worker has the model {model!r}")
        waiting, self._waiting[policy_ids[0]] = self._waiting[policy_ids[0]], []
        return self._inputs(self._views_of(policy_ids[0]), [(t, t.rows) for t in waiting])

    def _inputs(
        self, views: TrajectoryViews, rows: list[tuple[CollectedTrajectory, int]]
    ) -> dict[str, Any]:
        """Return the views for actions at rows of trajectories, [B, …]; a row may be the next one
        of its trajectory."""
        each = [(trajectory, row, row) for trajectory, row in rows]
        return self._shown(views, views.acting, each) if rows else {}

    def _shown(
        self,
        views: TrajectoryViews,
        shown: Any,
        rows: list[tuple[CollectedTrajectory, int, int]],
        repeats: bool = False,
    ) -> dict[str, Any]:
        """Return views at rows.

        Args:
            views: the views of the policy.
            shown: those of acting, or of training.
            rows: trajectory, row, and the end of the rows that may be shown.
            repeats: return a view at every n-th row only, n being its `batch_repeat_value`.
        """
        columns: dict[str, Any] = {}
        for name, view in shown.items():
            if view.agents is not None:
                found = [
                    views.show_agents(view, t, row, self._trajectories[t.episode_id])
                    for t, row, _ in rows
                ]
                columns[name] = np.stack([values for values, _ in found])
                columns[f"{name}_mask"] = np.stack([mask for _, mask in found])
                continue
            every = view.repeat if repeats else 1
            values = [views.show(view, t, row, end) for t, row, end in rows[::every]]
            is_column = not view.is_window
            columns[name] = column_of(view.source, values) if is_column else stack_values(values)
        return columns

    # -- batches -----------------------------------------------------------------------------------

    def has_non_postprocessed_data(self) -> bool:
        return any(t.rows > t.begin for t in self._all_trajectories())

    def postprocess_trajectories_so_far(self, episode: MultiAgentEpisode | None = None) -> None:
        for episode_id in list(self._steps) if episode is None else [episode.episode_id]:
            segments = [
                _CollectedSegment(trajectory, trajectory.cut(), next(self._unroll_ids))
                for trajectories in self._trajectories.get(episode_id, {}).values()
                for trajectory in trajectories
                if trajectory.rows > trajectory.begin
            ]
            self._steps_closed += len(self._steps.get(episode_id, ()))
            self._steps[episode_id] = set()
            self._rows_closed += sum(map(len, segments))
            if self._postprocess.is_needed and segments:
                self._postprocess_agents(segments, episode or self._record_of(episode_id))
            elif segments:
                for segment in segments:
                    self._closed.setdefault(segment.trajectory.policy_id, []).append(segment)

    def _record_of(self, episode_id: EpisodeID) -> MultiAgentEpisode | None:
        find = getattr(self.worker, "episode", None)
        return None if find is None else find(episode_id)

    def _postprocess_agents(
        self, segments: list[_CollectedSegment], episode: MultiAgentEpisode | None
    ) -> None:
        """Let policies and callbacks postprocess each segment of an episode, with the others."""
        order = list(self.policy_map)
        segments = sorted(segments, key=lambda s: order.index(s.trajectory.policy_id))
        self._observe_rewards(segments)
        parts = [
            (segment.trajectory.agent_id, segment.trajectory.policy_id, self._build(segment))
            for segment in segments
        ]
        for segment, rows in zip(segments, self._postprocess(parts, episode), strict=True):
            self._postprocessed.setdefault(segment.trajectory.policy_id, []).append(rows)

    def get_multi_agent_batch_and_reset(self) -> MultiAgentBatch:
        self.postprocess_trajectories_so_far()
        batches: dict[PolicyID, SampleBatch] = {}
        for policy_id, policy in self.policy_map.items():
            parts = self._postprocessed.get(policy_id, [])
            closed = sorted(self._closed.get(policy_id, []), key=lambda segment: segment.env_id)
            self._observe_rewards(closed)
            for segment in closed:
                rows = self._build(segment)
                added = policy.postprocess_fragment(_as_fragment(rows))
                rows = rows.without_columns("next_values")
                parts.append(rows.with_columns(**{n: c[:, 0] for n, c in added.items()}))
            if parts:
                parts.sort(key=lambda part: part["env_id"][0] if "env_id" in part else 0)
                batches[policy_id] = SampleBatch.concat_samples(parts)
        batch = MultiAgentBatch(batches, self._steps_closed)
        self._postprocessed, self._closed = {}, {}
        self._steps_closed = self._rows_closed = 0
        self._forget()
        return batch

    def _forget(self) -> None:
        """Drop the rows that neither views nor later batches need."""
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
                trajectories[:] = [t for t in trajectories if t.values or not t.ended]
                if not trajectories:
                    del agents[agent_id]
        self._ended.clear()

    def check_missing_dones(self, episode_id: EpisodeID) -> None:
        self._ended.add(episode_id)
        for agent_id, trajectories in self._trajectories.get(episode_id, {}).items():
            if trajectories[-1].rows and not trajectories[-1].ended:
                raise ValueError(
                    f"episode {episode_id} has ended, but the last row of agent {agent_id!r} is "
                    "neither terminated nor truncated"
                )

    # -- rows of segments --------------------------------------------------------------------------

    def _observe_rewards(self, segments: list[_CollectedSegment]) -> None:
        """Add the rewards of segments to the statistics of their policies' scalers."""
        for segment in segments:
            trajectory = segment.trajectory
            scaler = self.policy_map[trajectory.policy_id].reward_scaler
            if scaler is not None:
                rewards = column_of("rewards", self._column(segment, "rewards"))
                trajectory.sums[0] = scaler.observe(rewards[:, None], trajectory.sums[0])

    def _column(self, segment: _CollectedSegment, name: str, shift: int = 0) -> list[Any]:
        rows = range(segment.begin + shift, segment.end + shift)
        return [segment.trajectory.value(name, row) for row in rows]

    def _build(self, segment: _CollectedSegment) -> SampleBatch:
        """Return the rows of a segment, and `next_values`."""
        trajectory, count = segment.trajectory, len(segment)
        policy = self.policy_map[trajectory.policy_id]
        views = self._views_of(trajectory.policy_id)
        rows: dict[str, Any] = {}
        if not {"obs", "new_obs"} <= set(views.training):
            rows["obs"] = column_of("obs", self._column(segment, "obs"))
            rows["new_obs"] = column_of("obs", self._column(segment, "obs", 1))
        for name in trajectory.values[segment.end - 1 - trajectory.dropped]:
            column = column_of(name, self._column(segment, name))
            rows[name] = np.array(column, np.int64) if name in _IDS else column
        if getattr(self.worker, "no_done_at_end", False):
            rows["terminateds"] = rows["truncateds"] = np.zeros(count, bool)
        if policy.reward_scaler is not None:
            rows["rewards"] = policy.reward_scaler.scale(rows["rewards"])
        clip = getattr(self.worker, "clip_rewards", None)
        rows["rewards"] = clipped_rewards(rows["rewards"], clip)
        rows["eps_id"] = np.full(count, trajectory.episode_id)
        rows["unroll_id"] = np.full(count, segment.unroll_id)
        if "vf_preds" in rows:
            last: Any = np.zeros(1, rows["vf_preds"].dtype)
            if not rows["terminateds"][-1]:
                inputs = self._inputs(views, [(trajectory, segment.end)])
                last = policy.compute_values_from_input_dict(inputs)
                check_values(policy, last, 1, from_views=True)
            rows["next_values"] = np.concatenate([rows["vf_preds"][1:], last])
        each = [(trajectory, row, segment.end) for row in range(segment.begin, segment.end)]
        rows.update(self._shown(views, views.training, each, repeats=True))
        if longest := views.max_seq_len:
            lengths = [min(longest, count - begin) for begin in range(0, count, longest)]
            rows["seq_lens"] = np.array(lengths, np.int32)
        for name in columns_to_drop(views.requirements, rows):
            rows.pop(name, None)
        return SampleBatch.unchecked(rows)


def _as_fragment(rows: SampleBatch) -> dict[str, np.ndarray]:
    """Return the columns of a segment as a fragment with one lane, [rows, 1, …], for estimates."""
    columns = {
        name: column[:, None]
        for name, column in rows.stored()
        if isinstance(column, np.ndarray) and len(column) == rows.count and name != "infos"
    }
    # estimates end where segments end, even if the episode continues
    return {**columns, "dones": np.arange(1, rows.count + 1)[:, None] == rows.count}


def _canonical(values: dict[str, Any]) -> dict[str, Any]:
    """Return the row with canonical column names and both end flags."""
    # if a row has several names of the next observation, the most specific name is used
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
