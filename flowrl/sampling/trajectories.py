"""Trajectory: one agent's rows in lists; RowViews: one policy's views of trajectories."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import optree

from flowrl.data.indexed_columns import NOTHING
from flowrl.data.serialization import can_be_saved
from flowrl.data.spaces import stack_values, zeros_of
from flowrl.data.types import AgentID, EpisodeID, PolicyID
from flowrl.policies.acting_views import View, nontrivial_views, signature_of
from flowrl.policies.policy import Policy
from flowrl.policies.views import ViewRequirement
from flowrl.sampling.episode import MultiAgentEpisode
from flowrl.sampling.views import check_repeats, max_seq_len
from flowrl.settings import ConfigError

DTYPES = {"rewards": np.float32, "terminateds": bool, "truncateds": bool}


class Trajectory:
    """One agent's rows in one episode, as dicts.

    Attributes:
        observations: one more than `values`.
        values: the stored rows.
        rows: number of rows so far, including dropped ones.
        begin: first row that is in no segment.
        dropped: number of rows dropped from the front.
        times: env step of each row's action, and of the next one.
        ended: whether the last row is terminated or truncated.
        sums: running discounted sum of rewards, for the reward scaler.
        before: the trajectory that this one continues after a soft horizon.
        initial: initial recurrent states.
    """

    __slots__ = (
        "agent_id",
        "before",
        "begin",
        "dropped",
        "ended",
        "episode_id",
        "initial",
        "observations",
        "policy_id",
        "rows",
        "sums",
        "times",
        "values",
    )  # fmt: skip

    def __init__(self, episode_id: EpisodeID, agent_id: AgentID, policy_id: PolicyID):
        self.episode_id = episode_id
        self.agent_id = agent_id
        self.policy_id = policy_id
        self.observations: list[Any] = []
        self.values: list[dict[str, Any]] = []
        self.rows = self.begin = self.dropped = 0
        self.times: list[int] = []
        self.ended = False
        self.initial: list[Any] = []
        self.sums: Any = None
        self.before: Trajectory | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return all fields for a checkpoint; infos only if they can be saved."""
        self.take_sums()
        state = {name: getattr(self, name) for name in self.__slots__ if name != "before"}
        return {**state, "values": [savable_row(row) for row in self.values]}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Trajectory:
        """Return a trajectory from the result of `state_dict`."""
        trajectory = cls(state["episode_id"], state["agent_id"], state["policy_id"])
        for name, value in state.items():
            setattr(trajectory, name, list(value) if isinstance(value, list) else value)
        return trajectory

    def part(self, name: str, begin: int, end: int) -> list[Any]:
        """Return a column's values of rows begin ... end-1; zeros for rows without the column."""
        begin, end = begin - self.dropped, end - self.dropped
        if name == "obs":
            return self.observations[begin:end]
        rows = self.values[begin:end]
        if name == "dones":
            return [row["terminateds"] or row["truncateds"] for row in rows]
        try:
            return [row[name] for row in rows]
        except KeyError:
            known = next((row[name] for row in rows if name in row), None)
            if known is None:
                raise ConfigError(f"cannot view column {name!r}: it is not collected") from None
            zero = optree.tree_map(np.zeros_like, known)
            return [row.get(name, zero) for row in rows]

    def take_sums(self) -> None:
        """Take over the reward sums of the previous trajectory, whose rows are all in batches."""
        if self.before is not None:
            self.before.take_sums()
            self.sums, self.before = self.before.sums, None

    def forget(self, lookback: int, since: int | None = None) -> None:
        """Drop rows of finished segments, except the last `lookback` ones and those from env step
        `since` on."""
        count = max(0, self.begin - lookback) - self.dropped
        if since is not None:
            count = min(count, bisect.bisect_left(self.times, since))
        if count > 0:
            del self.values[:count], self.observations[:count], self.times[:count]
            self.dropped += count


class Segment:
    """Rows begin ... end-1 of a trajectory."""

    __slots__ = ("begin", "end", "episode", "trajectory", "unroll_id")

    def __init__(self, trajectory: Trajectory, unroll_id: int, episode: MultiAgentEpisode | None):
        self.trajectory = trajectory
        self.begin = trajectory.begin
        self.end = trajectory.rows
        self.unroll_id = unroll_id
        self.episode = episode
        trajectory.begin = self.end

    def __len__(self) -> int:
        return self.end - self.begin

    def names(self) -> list[str]:
        """Return the columns of its last row."""
        return list(self.trajectory.values[self.end - 1 - self.trajectory.dropped])


class RowViews:
    """One policy's views of trajectories that are stored as lists."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.requirements = dict(policy.view_requirements)
        self.signature = signature_of(self.requirements)
        views: dict[str, ViewRequirement] = nontrivial_views(self.requirements)
        self.training = {n: View(n, v) for n, v in views.items() if v.used_for_training}
        self.acting = {
            name: View(name, view)
            for name, view in self.requirements.items()
            if view.known_for_actions(name)
        }
        check_repeats(self.training)
        resolved = [*self.training.values(), *self.acting.values()]
        self.lookback = max((-min(view.shifts) for view in resolved), default=0)
        self.lookback = max(self.lookback, 0)
        self.of_agents = any(view.agents is not None for view in resolved)

    @property
    def max_seq_len(self) -> int:
        """Rows per sequence in batches; 0 if they are not cut into sequences."""
        return max_seq_len(self.policy, self.training)

    @property
    def replace_observations(self) -> bool:
        """Whether views replace both `obs` and `new_obs`."""
        return {"obs", "new_obs"} <= set(self.training)

    def possible_agents(self, worker: Any) -> list[Any]:
        agents = getattr(worker, "possible_agents", None)
        if not agents:
            raise ConfigError(
                'a view with agents="others" needs an environment with possible_agents'
            )
        return agents

    def zero(self, view: View) -> Any:
        """Return the fill value of a view."""
        source = view.source
        if source.startswith("state_out_"):
            return np.asarray(
                self.policy.get_initial_state()[int(source.removeprefix("state_out_"))]
            )
        if view.space is not None:
            return zeros_of(view.space)
        if source in DTYPES or source == "dones":
            return np.zeros((), DTYPES.get(source, bool))
        if source == "actions":
            return zeros_of(self.policy.action_space)
        if source == "obs":
            return zeros_of(self.policy.observation_space)
        raise ConfigError(f"view of {source!r}: needs a space, which defines the fill value")

    def zero_of_agent(self, view: View, agent: AgentID, worker: Any) -> Any:
        """Return the fill value of a view of an agent without rows."""
        if view.space is None and view.source in ("obs", "actions") and worker is not None:
            return zeros_of(worker.space_of(agent, view.source))
        return self.zero(view)

    def before(self, view: View, trajectory: Trajectory, row: int) -> Any:
        """Return a column's value at a row, or its fill value outside of the stored rows."""
        if view.source == "obs":
            return trajectory.observations[max(row - trajectory.dropped, 0)]
        if not trajectory.dropped <= row < trajectory.rows:
            if view.source.startswith("state_out_"):
                return np.asarray(trajectory.initial[int(view.source.removeprefix("state_out_"))])
            values = trajectory.values
            if values and view.source in values[-1] and view.source not in DTYPES:
                return optree.tree_map(np.zeros_like, values[-1][view.source])
            return self.zero(view)
        value = trajectory.part(view.source, row, row + 1)[0]
        dtype = DTYPES.get(view.source)
        return value if dtype is None else dtype(value)

    def base(self, view: View, segments: list[Segment]) -> tuple[Any, list[int]]:
        """Return the column values that a view of the segments may show, and the offset of each
        segment in them. The initial recurrent state follows each segment's states."""
        values: list[Any] = []
        starts = []
        extra = 1 if view.source == "obs" else 0
        for segment in segments:
            trajectory = segment.trajectory
            first = max(segment.begin - self.lookback, trajectory.dropped)
            starts.append(len(values) - first)
            values += trajectory.part(view.source, first, segment.end + extra)
            if view.source.startswith("state_out_"):
                values.append(self.before(view, trajectory, trajectory.dropped - 1))
        base = column_of(view.source, values)
        for leaf in optree.tree_leaves(base):
            leaf.flags.writeable = False
        return base, starts

    def positions(self, view: View, segment: Segment, start: int) -> np.ndarray:
        """Return the indices in the base of the values that a view shows for a segment: [rows] or
        [rows, shifts]."""
        rows = np.arange(segment.begin, segment.end, view.repeat)
        first = max(segment.begin - self.lookback, segment.trajectory.dropped)
        nothing = start + segment.end if view.source.startswith("state_out_") else NOTHING
        parts = []
        for shift in view.shifts:
            at = rows + shift
            if view.source == "obs":
                part = np.where(at <= segment.end, start + np.maximum(at, first), nothing)
            else:
                valid = (at >= first) & (at < segment.end)
                part = np.where(valid, start + at, nothing)
            parts.append(part)
        return np.stack(parts, 1) if view.is_window else parts[0]


def savable_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without infos that cannot be saved."""
    infos = row.get("infos")
    return row if not infos or can_be_saved(infos) else {**row, "infos": {}}


def column_of(name: str, values: list[Any]) -> Any:
    if name == "infos":
        column = np.empty(len(values), object)
        column[:] = values
        return column
    if name in DTYPES:
        return np.array(values, DTYPES[name])
    return stack_values(values)
