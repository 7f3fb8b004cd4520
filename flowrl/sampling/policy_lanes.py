"""PolicyLanes: the rows of all agents of one policy, its actions, and its batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.data import SampleBatch
from flowrl.data.columns import map_leaves
from flowrl.data.sample_batch import PolicyID
from flowrl.data.spaces import stack_values
from flowrl.policies.acting_views import signature_of
from flowrl.policies.policy import Policy
from flowrl.sampling.agent_views import AgentViews
from flowrl.sampling.fragment_builder import FragmentBuilder
from flowrl.sampling.lane_rows import LaneRows
from flowrl.sampling.policy_outputs import PolicyOutputs
from flowrl.sampling.running_episodes import Segment, arrays_of
from flowrl.sampling.segments import Segments
from flowrl.sampling.views import Views
from flowrl.sampling.worker_config import WorkerConfig


class PolicyLanes(LaneRows):
    """Stores the rows of a policy's agents, lets the policy act, and builds its batches.

    Args:
        policy_id, policy, settings: see LaneRows.
        agent_views: finds the rows of other agents; None if no policy has such views.
    """

    def __init__(
        self,
        policy_id: PolicyID,
        policy: Policy,
        settings: WorkerConfig,
        agent_views: AgentViews | None = None,
    ):
        super().__init__(policy_id, policy, settings, agent_views is not None)
        self._options: dict[str, Any] = {} if settings.explore else {"explore": False}
        self._agent_views = agent_views
        self._views = self._new_views()
        self.look_back(0)
        self._outputs = PolicyOutputs(
            policy, self.columns, self._check, True, f"policy {policy_id!r}", self._describe_actor
        )
        self._at_first_step = True  # of a fragment

    def _new_views(self) -> Views:
        return Views(self.policy, self.states, has_agents=self.shows_agents)

    def look_back(self, rows: int) -> None:
        """Keep at least this number of earlier rows, for the views of other policies."""
        self._least_lookback = rows
        self.columns.look_back(max(rows, self._views.lookback))
        self.columns.known = self.columns.lookback

    def restore_lookback(self) -> None:
        """Keep as many earlier rows as the views read, after columns were loaded."""
        lookback = max(self._least_lookback, self._views.lookback)
        if self.columns.lookback != lookback:
            self.columns.look_back(lookback)

    # -- a step of all trajectories that wait ------------------------------------------------------

    def normalize_waiting(self) -> None:
        """Normalize the observations of the trajectories that wait for an action."""
        self._normalize(self._lanes)

    def _normalize(self, lanes: np.ndarray) -> None:
        """Normalize the current rows of lanes."""
        normalize, columns = self.policy.observation_filter, self.columns
        if normalize is not None:
            at = columns.lookback + self.current_rows[lanes], lanes
            columns["obs"][at] = normalize(columns["raw_obs"][at])

    def act(self) -> list[Any]:
        """Return the actions of the trajectories that wait, as their environments take them."""
        columns, policy, views, lanes = self.columns, self.policy, self._views, self._lanes
        rows = self.current_rows[lanes]
        at = columns.lookback + rows, lanes
        obs = map_leaves(lambda array: array[at], columns["obs"])
        if views.acts_on_obs_only:
            return self._store_outputs(self._compute_actions(obs, **self._options))
        inputs = views.inputs_at(
            columns, rows, lanes, rows - self._resets, obs, self._initial_states
        )
        if self._agent_views is not None:
            inputs |= self._agent_views.inputs(views.agents_acting, self.waiting)
        return self._store_outputs(policy.compute_actions_from_input_dict(inputs, **self._options))

    def _store_outputs(self, outputs: tuple[Any, Any, dict[str, Any]]) -> list[Any]:
        """Store actions, states and extra outputs; return the actions for the environments."""
        lanes = self._lanes
        if self._at_first_step:
            self._outputs.allocate(len(lanes), outputs, continues=bool(self.current_rows.any()))
            self._at_first_step = False
        at = self.columns.lookback + self.current_rows[lanes], lanes
        to_env = self._outputs.store(at, *outputs)
        self.waits[lanes] = False
        if isinstance(to_env, np.ndarray):
            return to_env.tolist() if to_env.ndim == 1 else list(to_env)
        return to_env

    def _initial_states(self, source: str) -> np.ndarray:
        return self.states.of_lanes(source, self._lanes)

    def _describe_actor(self, n: int) -> str:
        trajectory = self.waiting[n]
        env = self.envs[trajectory.lane]
        return f"agent {trajectory.agent_id!r} of sub-environment {env}"

    # -- a fragment --------------------------------------------------------------------------------

    def begin_fragment(self) -> None:
        """Prepare for the steps of another fragment."""
        if self._views.signature != signature_of(self.policy.view_requirements):
            self._views = self._new_views()
            self.columns.look_back(max(self._least_lookback, self._views.lookback))
        self._views.begin_fragment()
        self._clear_flags()
        self.states.begin()
        self._at_first_step = True
        self._compute_actions = self.policy.compute_actions
        if self._views.defers_values:
            self._compute_actions = self.policy.compute_actions_only
            self.columns.drop("vf_preds")

    def normalize_current(self) -> None:
        """Normalize the current rows that have no action yet; they may follow a segment."""
        self._normalize(self.waits.nonzero()[0])

    def take(self, segments: list[Segment], builder: FragmentBuilder) -> SampleBatch:
        """Return the rows of segments; call `normalize_current` before.

        Args:
            segments: the segments, at least one.
            builder: builds the batch.
        """
        columns, normalize = self.columns, self.policy.observation_filter
        arrays = arrays_of(segments, self.envs)
        num_rows = int(arrays.ends.max())
        finals = [segment.final for segment in segments if segment.final is not None]
        final = map_leaves(lambda array: array[:0, 0], columns["raw_obs"])
        if finals:
            final = stack_values([self._check.copy(observation) for observation in finals])
        if normalize is not None:
            final = normalize(final)
        if not self.shows_agents:  # otherwise they are known
            self._write_flags(segments, arrays)
        views, agent_views = self._views, self._agent_views
        if agent_views is None:
            return builder.build(columns, views, num_rows, arrays, final)

        def agent_inputs(index: np.ndarray) -> dict[str, Any]:
            after = [segments[i] for i in index]
            return agent_views.inputs_after(views.agents_acting, after)

        batch = builder.build(columns, views, num_rows, arrays, final, None, agent_inputs)
        return batch.with_columns(**agent_views.rows(views.agents_training, segments))

    def _clear_flags(self) -> None:
        """Clear the flags of the last fragment that are at or after the current rows, for views of
        acting policies."""
        names = {"terminateds", "truncateds", "dones"}
        if not self._views.sources & names:
            return
        begin = self.columns.lookback + self.current_rows
        for name in names & self.columns.arrays.keys():
            flags = self.columns.arrays[name]
            flags[np.arange(len(flags))[:, None] >= begin] = False

    def _write_flags(self, segments: list[Segment], arrays: Segments) -> None:
        """Write the columns of ends, which are False in all rows but the last ones of segments."""
        columns, begin = self.columns, self.columns.lookback
        for name, flag in (("terminateds", "terminated"), ("truncateds", "truncated")):
            flags = columns.allocate(name, (), np.dtype(bool))
            flags[begin : begin + int(arrays.ends.max())] = False
            values = [getattr(segment, flag) for segment in segments]
            flags[begin + arrays.ends - 1, arrays.lanes] = values
        if "dones" in self._views.sources:
            dones = columns.allocate("dones", (), np.dtype(bool))
            np.logical_or(columns["terminateds"], columns["truncateds"], out=dones)
