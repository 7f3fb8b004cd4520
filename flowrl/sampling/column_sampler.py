"""ColumnSampler: sample single-agent environments in columns, all environments at once.

Each step writes row t [N, …] of time-major columns. Derived columns (ids, advantages, views) are
computed for the whole fragment afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from gymnasium import spaces

from flowrl.data import DEFAULT_POLICY_ID, SampleBatch
from flowrl.data.columns import map_leaves
from flowrl.data.fragment_columns import FragmentColumns
from flowrl.data.serialization import savable_info
from flowrl.envs.gymnasium_vector_env import GymnasiumVectorEnv
from flowrl.envs.validation import ObservationCheck
from flowrl.envs.vector_env import DirectVectorEnv, VectorEnv, VectorStep
from flowrl.errors import add_note
from flowrl.policies.acting_views import InitialStates, may_change_inputs, signature_of
from flowrl.policies.filters import ObservationFilter
from flowrl.sampling.agent_checks import check_spaces
from flowrl.sampling.callbacks import EVENTS_WITH_EPISODE, overrides
from flowrl.sampling.env_sampler import EnvSampler
from flowrl.sampling.episode import MultiAgentEpisode
from flowrl.sampling.episode_callbacks import EpisodeCallbacks
from flowrl.sampling.episode_returns import EpisodeReturns
from flowrl.sampling.fragment_builder import FragmentBuilder
from flowrl.sampling.ids import IdCounter
from flowrl.sampling.lost_lives import LostLives
from flowrl.sampling.policy_outputs import PolicyOutputs
from flowrl.sampling.raw_observations import RawObservations
from flowrl.sampling.sampler import EPISODE, warn_without_data
from flowrl.sampling.sampler_worker import SamplerWorker
from flowrl.sampling.segment_postprocessing import (
    parts_of,
    postprocess_segment,
    postprocesses_segments,
)
from flowrl.sampling.segments import Event, Segments, SegmentTracker
from flowrl.sampling.step_checks import StepChecks
from flowrl.sampling.views import Views
from flowrl.sampling.worker_config import WorkerConfig
from flowrl.state_schema import Fields, Natural, check_state

_step_columns_of = itemgetter("raw_obs", "obs", "rewards", "terminateds", "truncateds")

_STATE: Fields = {
    "tracker": dict[str, Any],
    "env_steps": Natural,
    "faulty_episodes": Natural,
}
_OPEN_STATE: Fields = {
    "envs": dict[str, Any],
    "columns": dict[str, Any],
    "states": list[np.ndarray],
    "returns": np.ndarray,
    "lives": np.ndarray | None,
    "infos": list[list[Any]],
    "callbacks": dict[str, Any] | None,
}


class ColumnSampler(EnvSampler):
    """Samples fragments of all environments of a vector environment; see EnvSampler.

    Args:
        vector_env: the environments.
        worker: its policy acts and its callbacks are called.
        settings: the sampling settings.
        base_env: the environments, passed to callbacks.
        unroll_ids: the counter of the column `unroll_id`.
        first_id: the first episode id.
        counts_lives: mark rows in which a life was lost, according to the infos, as terminated;
            the episode continues.
    """

    def __init__(
        self,
        vector_env: VectorEnv,
        worker: SamplerWorker,
        settings: WorkerConfig,
        base_env: Any,
        unroll_ids: IdCounter,
        first_id: int = 0,
        counts_lives: bool = False,
    ):
        super().__init__(settings)
        self.vector_env = vector_env
        self.policy = policy = worker.policy_map[DEFAULT_POLICY_ID]
        given = vector_env.observation_space, vector_env.action_space, DEFAULT_POLICY_ID
        check_spaces("the environment", *given, policy, needs_all_actions=False)
        self._num_faulty = 0
        self._obs_check = ObservationCheck(vector_env.observation_space)
        self._step_checks = StepChecks(
            self._obs_check,
            settings.on_invalid_step,
            policy.worker_index,
            can_drop=not isinstance(vector_env, GymnasiumVectorEnv),
        )
        self._by_segment = postprocesses_segments(policy)
        self._builder = FragmentBuilder(
            policy, settings, unroll_ids, self._by_segment, self.timings
        )
        self._replaces = settings.on_invalid_step == "replace"
        self._lost_lives = LostLives(vector_env.num_envs) if counts_lives else None
        horizon = settings.horizon if settings.soft_horizon else None
        self._tracker = SegmentTracker(vector_env.num_envs, first_id, horizon, self._whole)
        self._states = InitialStates(policy, vector_env.num_envs)
        self._views = Views(policy, self._states)
        self._columns = FragmentColumns(
            vector_env.num_envs, settings.fragment_length, self._views.lookback
        )
        self._raw = RawObservations(self._columns, self._obs_check, self._replaces)
        self._allocate_step_columns()
        # DirectVectorEnv checks the actions of a Discrete space itself
        discrete = isinstance(policy.action_space, spaces.Discrete)
        check_actions = not (discrete and isinstance(vector_env, DirectVectorEnv))
        self._outputs = PolicyOutputs(policy, self._columns, self._obs_check, check_actions)
        self._callbacks: EpisodeCallbacks | None = None
        if overrides(worker.callbacks, *EVENTS_WITH_EPISODE):
            ids = self._tracker.episode_ids
            self._callbacks = EpisodeCallbacks(
                worker, base_env, self._columns, self._obs_check, ids
            )
        _keep_freed_memory()
        self._num_rows = 0  # stored rows that no fragment has returned yet
        self._num_before = 0  # of these, rows of running episodes before the current fragment
        self._infos: list[Any] = []  # of the rows from 0 to _num_rows
        self._returns = EpisodeReturns(vector_env.num_envs)

    def _allocate_step_columns(self) -> None:
        """Allocate the columns that a step writes."""
        columns = self._columns
        if self.policy.observation_filter is None:
            columns.share("obs", "raw_obs")
        else:
            shape = self.vector_env.observation_space.shape or ()
            columns.allocate("obs", shape, np.dtype(np.float32))
        for name, dtype in (("rewards", np.float32), ("terminateds", bool), ("truncateds", bool)):
            columns.allocate(name, (), np.dtype(dtype))
        if self._lost_lives is not None:
            columns.allocate("life_lost", (), np.dtype(bool))

    @property
    def faulty_episodes(self) -> int:
        return self._num_faulty

    def episode(self, episode_id: int) -> MultiAgentEpisode | None:
        if self._callbacks is None:
            return None
        return self._callbacks.find(episode_id, len(self._infos), self._infos)

    # -- a fragment --------------------------------------------------------------------------------

    def _begin_fragment(self) -> None:
        if self._views.signature != signature_of(self.policy.view_requirements):
            self._views = Views(self.policy, self._states)
            self._columns.look_back(self._views.lookback)
        self._views.begin_fragment()
        if self._views.defers_values:
            self._columns.drop("vf_preds")
        self._states.begin()

    def _start(self) -> None:
        columns = self._columns
        columns.known = self._num_rows = 0
        self._infos = []
        self._tracker.start()
        self._states.restart(slice(None))
        self._states.begin()
        if self._lost_lives is not None:
            self._lost_lives.start(range(self.vector_env.num_envs))
        infos = self.vector_env.reset(self._raw.target(0))
        self._raw.complete(0)
        if self._callbacks is not None:
            self._callbacks.start_all(infos)

    def _roll(self, min_steps: int) -> None:
        columns, vector_env, policy, settings = (
            self._columns,
            self.vector_env,
            self.policy,
            self.settings,
        )
        views, tracker, callbacks = self._views, self._tracker, self._callbacks
        normalize, acts_on_obs_only = policy.observation_filter, views.acts_on_obs_only
        act, act_on_views = self._acting_functions()
        whole, nested, envs = self._whole, self._raw.nested, vector_env.num_envs
        replaces, shows_dones = self._replaces, "dones" in views.sources
        lookback, first, t = columns.lookback, self._num_rows, self._num_rows
        self._num_before = first
        num_steps = tracker.rows_closed  # for the fragment
        stepping = acting = 0.0
        clock = time.perf_counter
        start = clock()
        raw, obs, rewards, terminateds, truncateds = self._step_columns(t)
        while num_steps < min_steps:
            if self.is_stopped:
                self._raise_if_stopped()
            if t == columns.length:
                columns.resize(2 * t)
                raw, obs, rewards, terminateds, truncateds = self._step_columns(t)
            at = lookback + t
            if normalize is not None:
                obs[at] = normalize(raw[at])
            act_start = clock()
            try:
                if acts_on_obs_only:
                    outputs = act(obs[at] if nested is None else columns.row("obs", t))
                else:
                    outputs = act_on_views(views.inputs(columns, t, t - tracker.resets))
            except Exception:
                self._step_checks.check_observations(columns.row("raw_obs", t), t - first)
                raise
            act_end = clock()
            if t == first:
                self._outputs.allocate(envs, outputs, continues=t > 0)
                if shows_dones:
                    columns.allocate("dones", (), np.dtype(bool))
            actions, states, extra = outputs
            to_env = self._outputs.store(at, actions, states, extra)
            step_start = clock()
            acting += act_end - act_start
            target = raw[at + 1] if nested is None else nested
            try:
                step = vector_env.step(to_env, target, rewards[at], terminateds[at], truncateds[at])
            except Exception as error:
                before = self.env_steps
                add_note(
                    error, f"at step {t - first} of a fragment that began after {before} env steps"
                )
                raise
            stepping += clock() - step_start
            if nested is not None or replaces:
                self._raw.complete(t + 1)
            if replaces:
                self._repair(rewards[at], step)
            if shows_dones:
                columns["dones"][at] = terminateds[at] | truncateds[at]
            self._infos.append(step.infos)
            if self._lost_lives is not None:
                columns["life_lost"][at] = self._lost_lives.after(step.infos)
            soft: Any = ()
            if len(step.ended) or len(step.skipped) or step.failed or settings.soft_horizon:
                soft = self._record_ends(t, step, states)
            if callbacks is not None:
                callbacks.step(t, step, self._infos, soft, vector_env.resets_in_next_step)
            if step.failed:
                step.failed.clear()  # frames in the tracebacks of these errors refer to `step`
            t += 1
            num_steps = tracker.rows_closed if whole else num_steps + envs - len(step.skipped)
            if whole and not num_steps:
                warn_without_data(t, self.vector_env.num_envs, EPISODE)
        if normalize is not None:
            columns["obs"][lookback + t] = normalize(columns["raw_obs"][lookback + t])
        self._num_rows = t
        self.timings["env_step_s"] += stepping
        self.timings["inference_s"] += acting
        self.timings["collection_s"] += clock() - start - stepping - acting

    def _acting_functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the functions that compute actions, from observations and from views."""
        policy = self.policy
        act, act_on_views = policy.compute_actions, policy.compute_actions_from_input_dict
        if self._views.defers_values:
            act = policy.compute_actions_only
        if may_change_inputs(policy):
            act = partial(_on_a_copy, act)
        if self.settings.explore:
            return act, act_on_views
        return partial(act, explore=False), partial(act_on_views, explore=False)

    def _step_columns(self, t: int) -> tuple[Any, ...]:
        """Return the columns that a step writes; write False to the flags of ends from row t on."""
        raw, obs, rewards, terminateds, truncateds = _step_columns_of(self._columns)
        first = self._columns.lookback + t
        terminateds[first:] = truncateds[first:] = False
        return raw, obs, rewards, terminateds, truncateds

    def _record_ends(self, t: int, step: VectorStep, states: Any) -> Any:
        """Record which episodes ended after row t; return those that passed a soft horizon."""
        failed = [env for env, _ in step.failed] if step.failed else ()
        self._num_faulty += len(failed)
        soft = self._tracker.record_ends(t, step.ended, step.final, step.skipped, failed)
        for envs in (step.ended, step.skipped, failed) if states else ():
            if len(envs):
                self._states.restart(envs)
        if self._lost_lives is not None:
            self._lost_lives.start([*step.ended, *failed])
        return soft

    def _repair(self, rewards: np.ndarray, step: VectorStep) -> None:
        """Replace invalid rewards and final observations by valid ones."""
        np.nan_to_num(rewards, copy=False, posinf=0.0, neginf=0.0)
        if len(step.ended):
            step.final = [
                self._obs_check.repair(self._obs_check.copy(final)) for final in step.final
            ]

    # -- the end of a fragment ---------------------------------------------------------------------

    def _finish(self, min_steps: int) -> SampleBatch:
        num_rows, policy, columns, tracker = (
            self._num_rows,
            self.policy,
            self._columns,
            self._tracker,
        )
        segments, raw_finals = tracker.segments(num_rows), self._raw.finals(tracker.finals)
        self._step_checks.check(columns, self._num_before, num_rows, raw_finals, segments)
        finals = raw_finals
        if policy.observation_filter is not None:
            self._update_filter(policy.observation_filter, segments)
            finals = policy.observation_filter(raw_finals)
        chosen = tracker.choose(segments, min_steps)
        returned = segments if chosen.all() else segments.select(chosen)
        batch = self._builder.build(columns, self._views, num_rows, returned, finals, self._infos)
        if self._by_segment and batch.count:
            parts = parts_of(batch, returned.lengths)
            batch = SampleBatch.concat_samples([postprocess_segment(policy, p) for p in parts])
        rewards = columns.part("rewards", 0, num_rows)
        self.episodes += self._returns.end_fragment(returned, rewards, self._callbacks)
        failed: list[int] = []
        if not segments.is_whole_fragment and not self.vector_env.resets_in_next_step:
            failed = segments.lanes[segments.events == Event.DROPPED].tolist()
        self.vector_env.mark_healthy(set(range(self.vector_env.num_envs)).difference(failed))
        first = tracker.keep(num_rows, segments, chosen, raw_finals)
        if self._callbacks is not None:
            self._callbacks.update_all(num_rows, self._infos)
            self._callbacks.advance(first)
        columns.advance(first, num_rows)
        self._num_rows = num_rows - first
        self._infos = self._infos[first:]  # a new list: the fragment reads the old one
        return batch

    def _update_filter(self, observation_filter: ObservationFilter, segments: Segments) -> None:
        """Add the observations after the first row of this fragment on which the policy acts to
        its filter. The first observations after the start of the environments are left out."""
        columns, num_rows, before = self._columns, self._num_rows, self._num_before
        resets_next = self.vector_env.resets_in_next_step
        acted = segments.acted_rows(num_rows, columns.lanes, resets_next)[before + 1 :]
        seen = columns.part("raw_obs", before + 1, num_rows + 1)[acted]
        if len(seen):
            observation_filter.new_stats.update(seen)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "tracker": self._tracker.state_dict(),
            "env_steps": self.env_steps,
            "faulty_episodes": self.faulty_episodes,
        }
        if self._has_open_episodes:
            state["open"] = {
                "envs": self.vector_env.state_dict(),
                "columns": self._columns.state_dict(self._num_rows),
                "states": self._states.state_dict(),
                "returns": self._returns.so_far.copy(),
                "lives": None if self._lost_lives is None else self._lost_lives.lives.copy(),
                "infos": [list(map(savable_info, step)) for step in self._infos],
                "callbacks": None if self._callbacks is None else self._callbacks.state_dict(),
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> int:
        check_state(state, _STATE, "sampler")
        if "open" in state:
            check_state(state["open"], _OPEN_STATE, "sampler/open")
        self._tracker.load_state_dict(state["tracker"])
        self.env_steps, self._num_faulty = state["env_steps"], state["faulty_episodes"]
        running, columns = state.get("open"), self._columns
        self._has_open_episodes = False
        if running is None:
            return 0
        columns.load_state_dict(running["columns"])
        if columns.lookback != self._views.lookback:
            columns.look_back(self._views.lookback)
        self._num_rows = running["columns"]["used"]
        self._infos = list(running["infos"])
        self._states.load_state_dict(running["states"])
        self._returns.so_far[:] = running["returns"]
        if self._lost_lives is not None and running["lives"] is not None:
            self._lost_lives.lives = np.array(running["lives"])
        has_records = False
        if self._callbacks is not None and running["callbacks"] is not None:
            has_records = self._callbacks.load_state_dict(running["callbacks"])
        before = map_leaves(np.copy, columns.row("raw_obs", self._num_rows))
        observations = self._raw.load(self._num_rows)
        restarted = self.vector_env.load_state_dict(running["envs"], observations)
        self._raw.complete(self._num_rows)
        self._tracker.restart(list(restarted), self._num_rows, before)
        self._states.restart(list(restarted))
        if self._lost_lives is not None:
            self._lost_lives.start(restarted)
        if self._callbacks is not None:
            for env in restarted if has_records else range(self.vector_env.num_envs):
                length = int(self._num_rows - self._tracker.starts[env])
                begin = max(int(self._tracker.starts[env]), 0)
                rows = columns.part("rewards", begin, self._num_rows)
                so_far = float(self._returns.so_far[env] + rows[:, env].sum(dtype=np.float64))
                start = env, self._num_rows, restarted, length, so_far if length else 0.0
                self._callbacks.start(*start)
        self._has_open_episodes = True
        return len(restarted)


def _keep_freed_memory() -> None:
    """Allocate and free one large block: afterwards glibc keeps the memory of freed columns for new
    ones, instead of returning each to the system at the cost of page faults."""
    np.empty(16 << 20, np.uint8)


def _on_a_copy(act: Callable[..., Any], obs: Any, **options: Any) -> Any:
    return act(map_leaves(np.copy, obs), **options)
