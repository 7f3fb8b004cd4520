"""ColumnarCollector: collects one fragment at a time in preallocated time-major arrays.

Each step writes rows [N, ...] of arrays [T+1, N, ...]. Derived columns (episode ids, step numbers,
returns, advantages) are computed for the whole fragment afterwards.
"""

from __future__ import annotations

import itertools
import logging
import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from flowrl.data import DEFAULT_POLICY_ID, SampleBatch
from flowrl.data.indexed_columns import IndexedColumn, NextRows
from flowrl.data.lazy_columns import LazyColumn
from flowrl.envs.validation import (
    OUTSIDE_WARNING,
    ObservationCheck,
    check_extra_columns,
    first_invalid_action,
    invalid_step_error,
)
from flowrl.envs.vector_env import DirectVectorEnv, VectorEnv, VectorStep
from flowrl.policies.policy import Policy
from flowrl.sampling.episode import EpisodeMetrics, make_episode_metrics
from flowrl.sampling.sampler import TIMINGS
from flowrl.sampling.view_resolver import (
    TrajectoryViews,
    nontrivial_views,
    not_for_training,
    resized,
    signature_of,
)
from flowrl.sampling.worker_config import WorkerConfig

log = logging.getLogger("flowrl")

_OBJECT = np.dtype(object)
_NONE = np.zeros(0, np.int64)
_STATE_ARRAYS = ("episode_ids", "carried_return", "carried_length", "age", "dropped")


class Ends(NamedTuple):
    """The k episodes that ended in a fragment: step [k], environment [k] and final observation
    [k, ...]."""

    steps: np.ndarray
    envs: np.ndarray
    final: np.ndarray


class Cuts:
    """Boundaries between the segments of a fragment's rows [T, N], and which rows are valid.

    soft: a soft horizon follows the row. lost: the environment failed in the row. real: the row is
    an env step of a segment that was not dropped; None: all rows are.
    """

    __slots__ = ("lost", "real", "shape", "soft")

    def __init__(self, shape: tuple[int, int]):
        self.shape = shape
        self.soft: np.ndarray | None = None
        self.lost: np.ndarray | None = None
        self.real: np.ndarray | None = None

    def after(self, dones: np.ndarray) -> np.ndarray:
        """Return the rows after which a new segment starts, [T, N]."""
        for more in (self.soft, self.lost):
            dones = dones if more is None else dones | more
        return dones

    def limit(self, steps: int) -> None:
        """Keep the first steps only."""
        self.shape = steps, self.shape[1]
        for name in ("lost", "real", "soft"):
            rows = getattr(self, name)
            setattr(self, name, None if rows is None else rows[:steps])

    def skip(self, step: int | slice, envs: Any) -> None:
        """Mark rows that are not env steps."""
        self.real = np.ones(self.shape, bool) if self.real is None else self.real
        self.real[step, envs] = False

    def lose(self, step: int, env: int, dones: np.ndarray) -> None:
        """Drop the segment of row `step` up to and including that row."""
        cuts = self.after(dones)[:step, env].nonzero()[0]
        self.skip(slice(cuts[-1] + 1 if len(cuts) else 0, step + 1), env)
        self.lost = np.zeros(self.shape, bool) if self.lost is None else self.lost
        self.lost[step, env] = True


class ColumnarCollector:
    """Collects fragments of `length` steps of every environment of a stepper.

    If the stepper spends steps on resets, a fragment has more steps, until it has `length` rows for
    each environment; the last step may add up to one row less than there are environments.

    Episodes continue from one fragment to the next. If an environment fails, its episode's rows
    since the start of the fragment are dropped. After an exception the collector can be used again:
    the fragment is dropped and the next one starts new episodes.

    Args:
        stepper: the environments.
        policy: computes actions and postprocesses fragments.
        settings: the sampling settings; `length` is T, env steps of each environment per fragment.
        first_id: the first episode and unroll id.
    """

    def __init__(
        self, stepper: VectorEnv, policy: Policy, settings: WorkerConfig, first_id: int = 0
    ):
        self.stepper = stepper
        self.policy = policy
        self.settings = settings
        self.length = length = settings.fragment_length
        self.episodes: list[EpisodeMetrics] = []
        self.env_steps = self.faulty_episodes = 0
        self.timings = dict.fromkeys(TIMINGS, 0.0)
        self._check = ObservationCheck(stepper.observation_space)
        self._warned_of_bounds = False
        self._base = first_id
        self._next_episode = self._next_unroll = 0
        self._open = False
        self._restarted: list[int] = []  # environments with new episodes after loading a state
        space: Any = stepper.observation_space
        steps, envs = length, stepper.num_envs
        self._raw = np.empty((steps + 1, envs, *space.shape), space.dtype)
        self._obs = self._raw
        if policy.observation_filter is not None:
            self._obs = np.empty(self._raw.shape, np.float32)
        self._rewards = np.empty((steps, envs), np.float32)
        self._terminateds = np.empty((steps, envs), bool)
        self._truncateds = np.empty((steps, envs), bool)
        self._extra: dict[str, np.ndarray] = {}
        # glibc maps and unmaps each large block, at a page fault per 4 KiB, until a larger block
        # was freed; afterwards the columns of fragments reuse mapped memory
        np.empty(16 << 20, np.uint8)
        self._views: TrajectoryViews | None = (
            None  # None: the policy acts on obs and trains on columns
        )
        self._episode_ids = np.zeros(envs, np.int64)
        self._carried_return = np.zeros(envs)
        self._dropped = np.zeros(envs, np.int64)  # consecutive fragments without a valid row
        self._carried_length = np.zeros(envs, np.int64)
        # env steps of each environment since its last reset, as far as views look back
        self._age = np.zeros(envs, np.int64)

    def _start(self) -> None:
        """Start an episode in every environment."""
        self.stepper.reset(self._raw[0])
        if self.settings.on_invalid_step == "replace":
            self._raw[0] = self._check.repair(self._raw[0])
        self._episode_ids = self._base + self._next_episode + np.arange(self.stepper.num_envs)
        self._next_episode += self.stepper.num_envs
        self._carried_return[:] = 0.0
        self._carried_length[:] = 0
        self._age[:] = 0
        if self.policy.reward_scaler is not None:
            self.policy.reward_scaler.reset()
        if self._views is not None:
            self._views.forget()
        self._open = True

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of environments, episodes and counters, without the policy."""
        state: dict[str, Any] = {
            "base": self._base,
            "next_episode": self._next_episode,
            "next_unroll": self._next_unroll,
            "env_steps": self.env_steps,
            "faulty_episodes": self.faulty_episodes,
        }
        if self._open:
            state["open"] = {
                "envs": self.stepper.state_dict(),
                "obs": self._raw[-1].copy(),
                "views": None if self._views is None else self._views.state_dict(),
                **{name: getattr(self, f"_{name}").copy() for name in _STATE_ARRAYS},
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Load the result of `state_dict`.

        Returns:
            Number of episodes that could not be resumed; new episodes replace them.

        Raises:
            KeyError, ValueError: the state belongs to other environments.
        """
        self._base = state["base"]
        self._next_episode, self._next_unroll = state["next_episode"], state["next_unroll"]
        self.env_steps, self.faulty_episodes = state["env_steps"], state["faulty_episodes"]
        running = state.get("open")
        self._open = False
        if running is None:
            return 0
        if running["obs"].shape != self._raw.shape[1:]:
            raise ValueError(
                f"the state has observations of shape {running['obs'].shape}, the environments "
                f"{self._raw.shape[1:]}"
            )
        self._raw[-1] = running["obs"]
        for name in _STATE_ARRAYS:
            getattr(self, f"_{name}")[:] = running[name]
        self._prepare_views()
        if self._views is not None and running["views"] is not None:
            self._views.load_state_dict(running["views"])
        restarted = self.stepper.load_state_dict(running["envs"], self._raw[-1])
        for env in restarted:
            self._episode_ids[env] = self._base + self._next_episode
            self._next_episode += 1
            self._carried_return[env] = self._carried_length[env] = self._age[env] = 0
        self._restarted = restarted
        self._open = True
        return len(restarted)

    def _prepare_views(self) -> None:
        """Update the views if the policy's view requirements changed since the last fragment."""
        requirements = self.policy.view_requirements
        if self._views is not None and self._views.signature == signature_of(requirements):
            return
        acting = [name for name, view in requirements.items() if view.known_for_actions(name)]
        if acting == ["obs"] and not nontrivial_views(requirements):
            self._views = None
            return
        space = self.policy.action_space
        zeros = {name: np.zeros((), bool) for name in ("terminateds", "truncateds", "dones")}
        zeros["rewards"] = np.zeros((), np.float32)
        if space.shape is not None and space.dtype is not None:
            zeros["actions"] = np.zeros(space.shape, space.dtype)
        self._views = TrajectoryViews(requirements, self.length, self.stepper.num_envs, zeros)

    def collect(self) -> SampleBatch:
        """Return one fragment of length x num_envs rows, sorted by environment and time.

        Calls of a vector environment that only reset are not env steps: they give no rows, and the
        fragment gets further steps.
        """
        started = time.perf_counter()
        self._prepare_views()
        if self._restarted and self.policy.reward_scaler is not None:
            self.policy.reward_scaler.reset(self._restarted)
        self._restarted = []
        if self._open:
            self._raw[0] = self._raw[-1]
        else:
            self._start()
        self._open = False  # until the fragment is complete
        ends, cuts, infos = self._roll()
        rolled = time.perf_counter()
        batch = self._finish(ends, cuts, infos)
        self._open = True
        self.env_steps += batch.count
        failed = set() if cuts.lost is None else set(cuts.lost.nonzero()[1].tolist())
        healthy = list(set(range(self.stepper.num_envs)) - failed)
        self.stepper.mark_healthy(healthy)
        self._dropped[healthy] = 0
        finished = time.perf_counter()
        self.timings["postprocess_s"] += finished - rolled
        self.timings["sample_s"] += finished - started
        return batch

    def _roll(self) -> tuple[Ends, Cuts, list[Any]]:
        """Act and step T times; return the ends of episodes, the cuts between segments, infos."""
        if self._views is not None:
            self._views.begin(self._age)
        skips = self.stepper.resets_in_next_step
        if skips:
            self._resize(2 * self.length)  # at most every other step of an environment is a reset
        rows_left = self.length * self.stepper.num_envs
        raw, obs, policy, stepper = self._raw, self._obs, self.policy, self.stepper
        rewards, terminateds, truncateds = self._rewards, self._terminateds, self._truncateds
        terminateds[:] = False
        truncateds[:] = False
        settings = self.settings
        normalize, views = policy.observation_filter, self._views
        # DirectVectorEnv checks the actions of a Discrete space itself
        direct = isinstance(stepper, DirectVectorEnv)
        check_actions = not (direct and isinstance(policy.action_space, spaces.Discrete))
        ends: list[tuple[int, Any, Any]] = []
        cuts = Cuts(rewards.shape)
        if settings.soft_horizon:
            cuts.soft = np.zeros(rewards.shape, bool)
            since = self._carried_length.copy()
        infos: list[Any] = []
        stepping = acting = 0.0
        clock = time.perf_counter
        act, act_on_views = policy.compute_actions, policy.compute_actions_from_input_dict
        if not settings.explore:
            act, act_on_views = partial(act, explore=False), partial(act_on_views, explore=False)
        start = clock()
        for t in range(len(rewards)):
            if normalize is not None:
                obs[t] = normalize(raw[t])
            act_start = clock()
            if views is None:
                actions, _, extra = act(obs[t])
            else:
                views.record("obs", t, obs[t])
                inputs = views.inputs_now(t, obs[t])
                actions, _, extra = act_on_views(inputs)
            act_end = clock()
            if t == 0:
                self._allocate(actions, extra)
            columns = self._extra
            columns["actions"][t] = actions
            for name, value in extra.items():
                columns[name][t] = value
            if check_actions:
                self._check_actions(actions)
            to_env = policy.actions_for_env(actions)
            step_start = clock()
            acting += act_end - act_start
            try:
                step = stepper.step(to_env, raw[t + 1], rewards[t], terminateds[t], truncateds[t])
            except Exception as error:
                error.add_note(f"at step {t} of a fragment, {self.env_steps} env steps sampled")
                raise
            stepping += clock() - step_start
            if settings.on_invalid_step == "replace":
                self._repair(t, step)
            if len(step.ended):
                ends.append((t, step.ended, step.final))
            if len(step.skipped):
                cuts.skip(t, step.skipped)
            failed = [env for env, _ in step.failed]
            for env in failed:
                cuts.lose(t, env, terminateds | truncateds)
            infos.append(step.infos)
            if cuts.soft is not None:
                since += 1
                for envs in (step.ended, step.skipped, failed):
                    since[list(envs)] = 0
                cuts.soft[t] = since == settings.horizon
                since[cuts.soft[t]] = 0
            if views is not None:
                self._record_step(views, t)
                views.step(step.ended, step.skipped, failed)
            if skips:
                rows_left -= self.stepper.num_envs - len(step.skipped)
                if rows_left <= 0:
                    self._resize(t + 1)
                    cuts.limit(t + 1)
                    break
        if normalize is not None:
            self._obs[-1] = normalize(self._raw[-1])
        self.timings["env_step_s"] += stepping
        self.timings["inference_s"] += acting
        self.timings["collection_s"] += clock() - start - stepping - acting
        return self._join_ends(ends), cuts, infos

    def _resize(self, steps: int) -> None:
        """Change the number of steps of the current fragment; keep those collected so far."""
        same = self._obs is self._raw
        self._raw = resized(self._raw, steps + 1)
        self._obs = self._raw if same else resized(self._obs, steps + 1)
        self._rewards = resized(self._rewards, steps)
        self._terminateds = resized(self._terminateds, steps)
        self._truncateds = resized(self._truncateds, steps)
        self._extra = {name: resized(column, steps) for name, column in self._extra.items()}
        if self._views is not None:
            self._views.resize(steps)

    def _check_actions(self, actions: np.ndarray) -> None:
        invalid = first_invalid_action(self.policy.action_space, actions)
        if invalid is not None:
            raise ValueError(
                f"the policy returned the action {actions[invalid]!r} for sub-environment "
                f"{invalid}; its action space is {self.policy.action_space}"
            )

    def _repair(self, t: int, step: VectorStep) -> None:
        """Replace invalid numbers by valid ones."""
        self._raw[t + 1] = self._check.repair(self._raw[t + 1])
        np.nan_to_num(self._rewards[t], copy=False, posinf=0.0, neginf=0.0)
        if len(step.ended):
            step.final = [self._check.repair(np.asarray(final)) for final in step.final]

    def _record_step(self, views: TrajectoryViews, t: int) -> None:
        """Record the columns of a timestep that views read."""
        columns = {
            **self._extra,
            "rewards": self._rewards,
            "terminateds": self._terminateds,
            "truncateds": self._truncateds,
        }
        for name in views.sources:
            if name in columns:
                views.record(name, t, columns[name][t])
            elif name == "dones":
                views.record(name, t, self._terminateds[t] | self._truncateds[t])

    def _join_ends(self, ends: list[tuple[int, Any, Any]]) -> Ends:
        if not ends:
            return Ends(_NONE, _NONE, self._raw[:0, 0])
        steps = [np.full(len(envs), t) for t, envs, _ in ends]
        return Ends(
            np.concatenate([_NONE, *steps]),
            np.concatenate([_NONE, *(envs for _, envs, _ in ends)]),
            np.concatenate([self._raw[:0, 0], *(np.asarray(final) for _, _, final in ends)]),
        )

    def _allocate(self, actions: np.ndarray, extra: dict[str, np.ndarray]) -> None:
        check_extra_columns(DEFAULT_POLICY_ID, extra, self.stepper.num_envs)
        if len(actions) != self.stepper.num_envs:
            raise ValueError(
                f"the policy returned {len(actions)} actions for {self.stepper.num_envs} "
                "observations"
            )
        self._check_actions(actions)
        for name, value in {"actions": actions, **extra}.items():
            array = self._extra.get(name)
            if array is None or array.shape[1:] != value.shape or array.dtype != value.dtype:
                self._extra[name] = np.empty((len(self._rewards), *value.shape), value.dtype)

    def _finish(self, ends: Ends, cuts: Cuts, infos: list[Any]) -> SampleBatch:
        """Derive the remaining columns and sort the rows by environment and time."""
        policy = self.policy
        self._check_values(ends, cuts)
        real = cuts.real
        self.faulty_episodes += 0 if cuts.lost is None else int(cuts.lost.sum())
        if policy.observation_filter is not None:
            seen = self._raw[1:] if real is None else self._raw[1:][real]
            policy.observation_filter.new_stats.update(seen.reshape(-1, *self._raw.shape[2:]))
            ends = ends._replace(final=policy.observation_filter(ends.final))
        resets = self._terminateds | self._truncateds
        resets = resets if cuts.lost is None else resets | cuts.lost
        dones = cuts.after(resets)  # segment ends, also those that the columns hide
        steps_done, self._carried_length = self._derive_steps(dones, real, self._carried_length)
        if cuts.soft is None:
            age, self._age = steps_done, self._carried_length
        else:
            age, self._age = self._derive_steps(resets, real, self._age)
        self._record_episodes(dones, steps_done, cuts.lost)
        if self.settings.no_done_at_end:
            self._terminateds[:] = self._truncateds[:] = False
        columns: dict[str, np.ndarray] = {
            **self._extra,
            "rewards": self._rewards,
            "terminateds": self._terminateds,
            "truncateds": self._truncateds,
            **self._derive_ids(dones),
            "t": steps_done - 1,
        }
        if policy.reward_scaler is not None:
            columns["rewards"] = policy.reward_scaler(self._rewards, resets, real)
        fragment = {"obs": self._obs[:-1], **columns, "dones": dones}
        if "vf_preds" in columns:
            fragment["next_values"] = self._next_values(ends, age)
        per_segment = type(policy).postprocess_trajectory is not Policy.postprocess_trajectory
        if not per_segment:
            columns.update(policy.postprocess_fragment(fragment))
        elif "next_values" in fragment:
            columns["next_values"] = fragment["next_values"]
        order = None if real is None else _order_by_env(real)
        rows: dict[str, Any] = {}
        if self._views is None or not self._views.replace_observations:
            rows = self._observations(ends, dones, order)
        rows.update({name: _by_env(column, order) for name, column in columns.items()})
        if self._views is not None:
            last = self._last_observations(ends, dones)
            views = self._views.columns(last, age - 1, dones)
            valid = slice(None) if real is None else np.flatnonzero(real.T)
            rows.update({name: column[valid] for name, column in views.items()})
        for name in not_for_training(policy.view_requirements, rows):
            rows.pop(name, None)
        count = len(rows["rewards"])
        make = partial(_infos, infos, dones.shape, order)
        rows["infos"] = IndexedColumn(
            LazyColumn("infos", make, (count,), _OBJECT), np.arange(count)
        )
        batch = SampleBatch.unchecked(rows)
        return self._postprocess(batch) if per_segment else batch

    def _postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Let the policy postprocess the rows of each segment."""
        cuts = np.flatnonzero(np.diff(batch["unroll_id"])) + 1
        parts = []
        for begin, end in itertools.pairwise([0, *cuts.tolist(), batch.count]):
            part = self.policy.postprocess_trajectory(batch[begin:end].isolated())
            if not isinstance(part, SampleBatch):
                raise TypeError(
                    f"{type(self.policy).__name__}.postprocess_trajectory() must return the batch, "
                    f"it returned a {type(part).__name__}"
                )
            parts.append(part)
        return SampleBatch.concat_samples(parts).without_columns("next_values")

    def _observations(
        self, ends: Ends, dones: np.ndarray, order: np.ndarray | None
    ) -> dict[str, Any]:
        """Return `obs` and `new_obs`.

        Each observation is stored once: `new_obs` is `obs` one row later, except at segment ends,
        and is built when it is read.
        """
        if order is not None:
            after = self._obs[1:].copy()
            after[ends.steps, ends.envs] = ends.final
            return {"obs": _by_env(self._obs[:-1], order), "new_obs": _by_env(after, order)}
        steps, envs = dones.shape
        count, cuts = steps * envs, _cuts(dones)
        base = np.empty((count + len(cuts), *self._obs.shape[2:]), self._obs.dtype)
        base[:count].reshape(envs, steps, *base.shape[1:])[:] = np.swapaxes(self._obs[:-1], 0, 1)
        base[count:] = self._last_observations(ends, dones)
        base.flags.writeable = False  # two columns share it
        return {"obs": base[:count], "new_obs": NextRows(base, count, cuts)}

    def _last_observations(self, ends: Ends, dones: np.ndarray) -> np.ndarray:
        """Return the observation after each segment, [segments, ...], in the order of the rows."""
        if not dones.any():
            return self._obs[-1].copy()
        cuts = _cuts(dones)
        envs, steps = np.divmod(cuts, len(dones))
        last = self._obs[steps + 1, envs]
        last[np.searchsorted(cuts, ends.envs * len(dones) + ends.steps)] = ends.final
        return last

    def _check_values(self, ends: Ends, cuts: Cuts) -> None:
        """Handle observations outside their space and non-finite rewards, before they reach
        filters, advantages and weights."""
        check, warn_only = self._check, self.settings.on_invalid_step == "warn"
        fits = check.in_bounds(self._raw) and check.in_bounds(ends.final)
        if not fits and warn_only and check.is_usable(self._raw) and check.is_usable(ends.final):
            self._warn_of_bounds(ends)
            fits = True
        if fits and np.isfinite(self._rewards).all():
            return
        checked = {
            "an observation": check.invalid_mask(self._raw, usable=warn_only),
            "a reward": ~np.isfinite(self._rewards),
            "a final observation": check.invalid_mask(ends.final, usable=warn_only),
        }
        cut = cuts.after(self._terminateds | self._truncateds)
        problems: list[tuple[int, int, str, int]] = []  # step, environment, what, row or -1
        for what, invalid in checked.items():
            array = {"a reward": self._rewards, "an observation": self._raw}.get(what, ends.final)
            axes = tuple(range(2 if what != "a final observation" else 1, invalid.ndim))
            for at in np.argwhere(invalid.any(axes)):
                if what == "a final observation":
                    step, env = int(ends.steps[at[0]]), int(ends.envs[at[0]])
                else:
                    step, env = int(at[0]), int(at[1])
                found = array[tuple(at)]
                described = f"a reward that is not finite: {found}"
                if what != "a reward":
                    described = check.describe_problem(found)
                row = step
                if what == "an observation":  # step t - 1 returned that of row t
                    step = max(step - 1, 0)
                    if row == len(self._rewards):
                        row = -1 if cut[step, env] else step
                problems.append((step, env, described, row))
        problems.sort()
        step, env, what, _ = problems[0]
        error = invalid_step_error(
            f"sub-environment {env} returned {what}, at step {step} of a fragment"
        )
        if self.settings.on_invalid_step != "drop" or not isinstance(self.stepper, DirectVectorEnv):
            raise error
        self._drop_segments(problems, cuts)

    def _warn_of_bounds(self, ends: Ends) -> None:
        """Warn of the first observation outside its space; later ones are not reported."""
        if self._warned_of_bounds:
            return
        self._warned_of_bounds = True
        outside = self._check.invalid_mask(self._raw)
        steps, envs = np.nonzero(outside.any(tuple(range(2, outside.ndim))))
        if len(steps):
            env, found = int(envs[0]), self._raw[steps[0], envs[0]]
        else:
            outside = self._check.invalid_mask(ends.final)
            row = int(outside.any(tuple(range(1, outside.ndim))).argmax())
            env, found = int(ends.envs[row]), ends.final[row]
        problem = self._check.describe_problem(found)
        log.warning(OUTSIDE_WARNING, self.policy.worker_index, env, problem)

    def _drop_segments(self, problems: list[tuple[int, int, str, int]], cuts: Cuts) -> None:
        """Drop the segments with invalid values; replace the environments of those still open."""
        assert isinstance(self.stepper, DirectVectorEnv)
        dones = self._terminateds | self._truncateds
        for step, env, what, row in problems:
            closed = False
            if row >= 0:
                if cuts.real is not None and not cuts.real[row, env]:
                    continue
                later = cuts.after(dones)[row:, env].nonzero()[0]
                closed = len(later) > 0
                cuts.lose(row + int(later[0]) if closed else len(dones) - 1, env, dones)
            if not closed:
                error = invalid_step_error(f"sub-environment {env} returned {what}, at step {step}")
                self._raw[-1, env] = self.stepper.restart(env, error)
                if self.policy.observation_filter is not None:
                    self._obs[-1, env] = self.policy.observation_filter(self._raw[-1, env])
            if cuts.real is None:
                continue
            lost = ~cuts.real[:, env]
            if lost.all():
                self._dropped[env] += 1
                if self._dropped[env] > self.settings.max_num_env_restarts:
                    raise invalid_step_error(
                        f"sub-environment {env} returned {what}, at step {step} of a fragment; all "
                        f"of its rows in {self._dropped[env]} consecutive fragments were dropped"
                    )
            self._rewards[lost, env] = 0.0  # keeps the next sums finite
            self._raw[:-1][lost, env] = 0
            self._obs[:-1][lost, env] = 0
            for column in self._extra.values():
                column[lost, env] = 0

    def _derive_steps(
        self, cuts: np.ndarray, real: np.ndarray | None, carried: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the env steps since the last cut including each row, [T, N], from 1, and the
        count that the next fragment starts with, [N]."""
        if real is None and not cuts.any():
            steps = np.arange(1, len(cuts) + 1)[:, None] + carried
            return steps, steps[-1]
        ones = np.ones(cuts.shape, np.int64) if real is None else real.astype(np.int64)
        total = np.cumsum(ones, 0)
        ends = np.empty((len(cuts) + 1, cuts.shape[1]), np.int64)
        ends[0] = -carried
        ends[1:] = np.where(cuts, total, np.iinfo(np.int64).min)
        np.maximum.accumulate(ends, 0, out=ends)
        return total - ends[:-1], total[-1] - ends[-1]

    def _derive_ids(self, dones: np.ndarray) -> dict[str, np.ndarray]:
        """Return episode, unroll, agent and environment ids, [T, N]."""
        steps, envs = dones.shape
        if not dones.any():  # most short fragments
            unrolls = np.arange(self._next_unroll, self._next_unroll + envs) + self._base
            self._next_unroll += envs
            return {
                "eps_id": np.broadcast_to(self._episode_ids, (steps, envs)),
                "unroll_id": np.broadcast_to(unrolls, (steps, envs)),
                "agent_index": np.zeros((steps, envs), np.int64),
                "env_id": np.broadcast_to(np.arange(envs), (steps, envs)),
            }
        ended = np.zeros((steps, envs), np.int64)
        np.cumsum(
            dones[:-1], 0, out=ended[1:]
        )  # episodes that ended in this fragment before each row
        counts = dones.sum(0)
        first = self._base + self._next_episode + np.cumsum(counts) - counts - 1
        episode_ids = np.where(ended > 0, first + ended, self._episode_ids)
        self._episode_ids = np.where(counts > 0, first + counts, self._episode_ids)
        self._next_episode += int(counts.sum())
        segments = counts + 1
        unroll_ids = self._base + self._next_unroll + np.cumsum(segments) - segments + ended
        self._next_unroll += int(segments.sum())
        return {
            "eps_id": episode_ids,
            "unroll_id": unroll_ids,
            "agent_index": np.zeros((steps, envs), np.int64),
            "env_id": np.broadcast_to(np.arange(envs), (steps, envs)),
        }

    def _record_episodes(
        self, dones: np.ndarray, steps_done: np.ndarray, lost: np.ndarray | None
    ) -> None:
        totals = np.cumsum(self._rewards, 0, dtype=np.float64)
        envs, steps = np.nonzero(dones.T)
        if not len(envs):
            self._carried_return += totals[-1]
            return
        at_end = totals[steps, envs]
        before = np.empty_like(at_end)
        before[1:] = at_end[:-1]
        first = np.ones(len(envs), bool)
        first[1:] = envs[1:] != envs[:-1]
        before[first] = -self._carried_return[envs[first]]
        self._carried_return += totals[-1]
        last = np.ones(len(envs), bool)
        last[:-1] = first[1:]
        self._carried_return[envs[last]] = totals[-1, envs[last]] - at_end[last]
        order = np.argsort(steps, kind="stable")  # in the order in which they ended
        if lost is not None:
            order = order[~lost[steps[order], envs[order]]]
        returns = (at_end - before)[order].tolist()
        lengths = steps_done[steps, envs][order].tolist()
        nothing = itertools.repeat(None)
        fields = zip(returns, lengths, envs[order].tolist(), nothing, nothing, nothing)  # noqa: B905
        self.episodes += map(make_episode_metrics, fields)

    def _next_values(self, ends: Ends, steps_done: np.ndarray) -> np.ndarray:
        """Return the value of the state after each step, [T, N]; 0 after a termination."""
        values = self._extra["vf_preds"]
        next_values = np.empty_like(values)
        next_values[:-1] = values[1:]
        if self._views is None:
            next_values[-1] = self.policy.compute_values(self._obs[-1])
        else:
            inputs = self._views.inputs_now(len(values), self._obs[-1])
            next_values[-1] = self.policy.compute_values_from_input_dict(inputs)
        cut = ~self._terminateds[ends.steps, ends.envs]  # all, if no_done_at_end
        if cut.any():
            steps, envs, final = ends.steps[cut], ends.envs[cut], ends.final[cut]
            if self._views is None:
                final_values = self.policy.compute_values(final)
            else:
                inputs = self._views.inputs(steps + 1, envs, steps_done[steps, envs], final)
                final_values = self.policy.compute_values_from_input_dict(inputs)
            next_values[steps, envs] = final_values
        next_values[self._terminateds] = 0.0
        return next_values


def _infos(infos: list[Any], shape: tuple[int, int], order: np.ndarray | None) -> np.ndarray:
    """Return the info of each row, sorted by environment and time."""
    array = np.empty(shape, object)
    for t, step in enumerate(infos):
        for env in range(shape[1]):
            array[t, env] = step[env] if len(step) else {}
    return _by_env(array, order)


def _cuts(dones: np.ndarray) -> np.ndarray:
    """Return the indices of rows, sorted by environment, that end an episode or the fragment."""
    last = dones.T.copy()
    last[:, -1] = True
    return np.flatnonzero(last)


def _by_env(column: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """Return a column [T, N, ...] as a new array [rows, ...], sorted by environment and time.

    `order` selects from the time-major rows [T * N]; None selects all.
    """
    if order is not None:
        # order is always in range: "clip" skips the check in take
        return column.reshape(-1, *column.shape[2:]).take(order, 0, mode="clip")
    if column.shape[1] == 1:
        return column[:, 0].copy()
    return np.swapaxes(column, 0, 1).copy(order="C").reshape(-1, *column.shape[2:])


def _order_by_env(real: np.ndarray) -> np.ndarray:
    """Return the time-major indices of the real rows [T, N], sorted by environment and time."""
    return np.arange(real.size).reshape(real.shape).T[real.T]
