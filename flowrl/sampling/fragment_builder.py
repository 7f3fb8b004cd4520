"""FragmentBuilder: build a batch from the segments of a policy's columns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import optree

from flowrl.data import SampleBatch
from flowrl.data.columns import leaves_of, map_leaves
from flowrl.data.fragment_columns import FragmentColumns, by_lane
from flowrl.data.indexed_columns import IndexedColumn, NextRows
from flowrl.data.lazy_columns import LazyColumn
from flowrl.iter.stage import describe
from flowrl.policies.policy import Policy
from flowrl.sampling.ids import IdCounter
from flowrl.sampling.segments import Segments
from flowrl.sampling.views import Views, columns_to_drop
from flowrl.sampling.worker_config import WorkerConfig

_OBJECT = np.dtype(object)
# rows per call that computes values: the outputs of the layers fit into the processor's cache
_ROWS_AT_A_TIME = 1024
_NOT_IN_BATCHES = ("raw_obs", "dones", "pending_stats", "time")  # batches derive dones


class FragmentBuilder:
    """Builds batches of a policy's rows: advantages, ids, views.

    Args:
        policy: postprocesses the rows.
        settings: the sampling settings.
        unroll_ids: the counter of the column `unroll_id`.
        by_segment: whether each segment is postprocessed on its own afterwards; batches then have
            the column `next_values`, if the policy records values.
        timings: the time in which values are computed is added to `inference_s`.
    """

    def __init__(
        self,
        policy: Policy,
        settings: WorkerConfig,
        unroll_ids: IdCounter,
        by_segment: bool,
        timings: dict[str, float],
    ):
        self.policy = policy
        self._timings = timings
        self._by_segment = by_segment
        self._unroll_ids = unroll_ids
        self._no_done_at_end = settings.no_done_at_end
        self._clip_rewards = settings.clip_rewards

    def build(
        self,
        columns: FragmentColumns,
        views: Views,
        num_rows: int,
        segments: Segments,
        finals: Any,
        infos: list[Any] | None = None,
        agent_inputs: Callable[[np.ndarray], dict[str, Any]] | None = None,
    ) -> SampleBatch:
        """Return the rows of segments, in their order; with `vf_preds` if they were not stored with
        the actions, and with `next_values` if each segment is postprocessed afterwards.

        Args:
            columns: the rows of all lanes.
            views: the views of the policy.
            num_rows: number of rows of the fragment.
            segments: the rows to return.
            finals: final observations of the episodes that ended, normalized, [ended, …].
            infos: for each row, a list with one dict per lane; empty if no environment returned an
                info. None: infos are a column.
            agent_inputs: indices of segments [k] -> what the views of other agents show after each
                of them, name -> [k, …].
        """
        count = int(segments.lengths.sum())
        row_index = None
        if count < num_rows * columns.lanes or not segments.in_lane_order:
            row, segment = segments.rows()
            row_index = row * columns.lanes + segments.lanes[segment]
        grid = {
            name: columns.part(name, 0, num_rows)
            for name in columns.names()
            if name not in _NOT_IN_BATCHES
        }
        obs = grid.pop("obs")
        recorded: dict[str, Any] = {name: grid.pop(name) for name in ("infos", "t") if name in grid}
        grid = self._prepared(grid, segments, row_index)
        # the second case: the views have changed, and the policy has not acted with the new ones
        if views.defers_values or (self.policy.defers_values and "vf_preds" not in grid):
            started = time.perf_counter()
            grid["vf_preds"] = values_of(self.policy, obs, row_index)
            self._timings["inference_s"] += time.perf_counter() - started
        last = _last_observations(columns, segments, finals)
        added = self._postprocessed(columns, views, segments, obs, grid, last, agent_inputs)
        rows: dict[str, Any] = {}
        if not views.replaces_observations:
            rows = _observations(obs, row_index, last, np.cumsum(segments.lengths) - 1)
        for name, column in {**grid, **recorded, **added}.items():
            if isinstance(column, np.ndarray):
                rows[name] = by_lane(column, row_index)
            else:
                rows[name] = optree.tree_map(lambda array: by_lane(array, row_index), column)
        rows = {**self._ids(segments), **rows}
        if not views.acts_on_obs_only:
            rows.update(views.training_columns(columns, num_rows, segments, last))
            lengths_of_sequences = views.sequence_lengths(segments)
            if lengths_of_sequences is not None:
                rows["seq_lens"] = lengths_of_sequences
        for name in columns_to_drop(self.policy.view_requirements, rows):
            rows.pop(name, None)
        make = partial(_dicts, rows.pop("infos", None), count)
        if infos is not None:
            make = partial(_infos, infos, segments)
        rows["infos"] = IndexedColumn(
            LazyColumn("infos", make, (count,), _OBJECT), np.arange(count)
        )
        return SampleBatch.unchecked(rows)

    def _prepared(
        self, grid: dict[str, Any], segments: Segments, row_index: np.ndarray | None
    ) -> dict[str, Any]:
        """Return the columns from which advantages are estimated: flags of ends as the settings
        define them, scaled and clipped rewards.

        Args:
            grid: columns [rows, N] of the fragment.
            segments: the rows to return.
            row_index: their indices in columns of [rows * N]; None: all rows.
        """
        in_segments = None
        if row_index is not None:
            in_segments = np.zeros(grid["rewards"].shape[:2], bool)
            in_segments.reshape(-1)[row_index] = True
            # sums and estimates must not depend on rows that are not returned
            grid = {
                name: map_leaves(lambda a: _zero_others(a, in_segments), column)
                for name, column in grid.items()
            }
        life_lost = grid.pop("life_lost", None)
        if life_lost is not None:
            grid["terminateds"] = grid["terminateds"] | life_lost
        if self._no_done_at_end:
            none = np.zeros(grid["rewards"].shape[:2], bool)
            grid["terminateds"], grid["truncateds"] = none, none
        if self.policy.reward_scaler is not None:
            grid["rewards"] = self._scaled(grid["rewards"], segments, in_segments)
        grid["rewards"] = clipped_rewards(grid["rewards"], self._clip_rewards)
        return grid

    def _ids(self, segments: Segments) -> dict[str, np.ndarray]:
        """Return episode step, episode, unroll, agent and environment ids, [rows]."""
        lengths = segments.lengths
        first = self._unroll_ids.take(len(segments))
        unrolls = np.arange(first, first + len(segments))
        count = int(lengths.sum())
        starts = lengths.cumsum() - lengths
        return {
            "eps_id": segments.episode_ids.repeat(lengths),
            "unroll_id": unrolls.repeat(lengths),
            "agent_index": segments.agents.repeat(lengths),
            "env_id": segments.envs.repeat(lengths),
            "t": np.arange(count) + (segments.first_t - starts).repeat(lengths),
        }

    def _scaled(
        self, rewards: np.ndarray, segments: Segments, in_segments: np.ndarray | None
    ) -> np.ndarray:
        """Return scaled rewards [rows, N]; only those of the segments are observed.

        Args:
            rewards: [rows, N], 0 where no segment has the row.
            segments: the rows to return.
            in_segments: which rows are in segments, bool [rows, N]; None if all are.
        """
        scaler = self.policy.reward_scaler
        assert scaler is not None
        sums = np.zeros(rewards.shape[1])
        if scaler.discounted_sums is not None:  # it may come from a sampler with more lanes
            known = scaler.discounted_sums[: len(sums)]
            sums[: len(known)] = known
        starts = np.zeros(rewards.shape, bool)
        first = segments.rows_before == 0
        starts[segments.begins[first], segments.lanes[first]] = True
        scaler.discounted_sums = scaler.observe(rewards, sums, starts, in_segments)
        return scaler.scale(rewards)

    def _postprocessed(
        self,
        columns: FragmentColumns,
        views: Views,
        segments: Segments,
        obs: Any,
        grid: dict[str, Any],
        last: Any,
        agent_inputs: Callable[[np.ndarray], dict[str, Any]] | None,
    ) -> dict[str, Any]:
        """Return the columns that the policy adds, [rows, N, …]; if each segment is postprocessed
        afterwards, only `next_values`."""
        policy = self.policy
        next_values = {}
        if "vf_preds" in grid:
            values = self._next_values(columns, views, segments, grid, last, agent_inputs)
            next_values = {"next_values": values}
        if self._by_segment:
            return next_values
        fragment = {"obs": obs, **grid, **next_values}
        if type(policy).postprocess_fragment is Policy.postprocess_fragment:
            return {}
        # estimates end where segments end and begin, even if the episode continues
        dones = grid["terminateds"].copy()
        dones[segments.ends - 1, segments.lanes] = True
        later = segments.begins > 0
        dones[segments.begins[later] - 1, segments.lanes[later]] = True
        fragment["dones"] = dones
        added = policy.postprocess_fragment(fragment)
        _check_added(policy, added, dones.shape)
        return added

    def _next_values(
        self,
        columns: FragmentColumns,
        views: Views,
        segments: Segments,
        grid: dict[str, Any],
        last: Any,
        agent_inputs: Callable[[np.ndarray], dict[str, Any]] | None,
    ) -> np.ndarray:
        """Return the value of each next observation, [rows, N]: 0 after terminated rows."""
        values, terminateds = grid["vf_preds"], grid["terminateds"]
        next_values = np.zeros_like(values)
        next_values[:-1] = values[1:]
        next_values[terminateds] = 0.0  # also where a life was lost
        # the observations that the segments end with are in no row
        lanes, ends = segments.lanes, segments.ends
        next_values[ends - 1, lanes] = 0.0
        (cut,) = (~terminateds[ends - 1, lanes]).nonzero()
        if len(cut):
            observations = map_leaves(lambda array: array[cut], last)
            if views.acts_on_obs_only:
                found = self.policy.compute_values(observations)
            else:
                inputs = views.inputs_after(columns, segments.select(cut), observations)
                if agent_inputs is not None:
                    inputs |= agent_inputs(cut)
                found = self.policy.compute_values_from_input_dict(inputs)
            acts_on_views = not views.acts_on_obs_only
            check_values(self.policy, found, len(cut), acts_on_views)
            next_values[ends[cut] - 1, lanes[cut]] = found
        return next_values


def values_of(policy: Policy, obs: Any, row_index: np.ndarray | None = None) -> np.ndarray:
    """Return the policy's values [T, N], float32, of observations [T, N, …].

    Args:
        policy: the policy; its `compute_values` is called for some rows at a time.
        obs: the observations.
        row_index: indices of the time-major rows [T * N] to compute; the others are 0. None: all.

    Raises:
        ValueError: `compute_values` did not return one value per row.
    """
    shape = optree.tree_leaves(obs)[0].shape[:2]
    rows = map_leaves(lambda array: array.reshape(-1, *array.shape[2:]), obs)
    values = np.zeros(shape[0] * shape[1], np.float32)
    count = len(values) if row_index is None else len(row_index)
    for begin in range(0, count, _ROWS_AT_A_TIME):
        part: Any = slice(begin, min(begin + _ROWS_AT_A_TIME, count))
        part = part if row_index is None else row_index[part]
        found: Any = policy.compute_values(map_leaves(lambda a, part=part: a[part], rows))
        check_values(policy, found, len(values[part]))
        values[part] = found
    return values.reshape(shape)


def check_values(policy: Policy, values: Any, count: int, from_views: bool = False) -> None:
    """Raise ValueError if a policy did not return one value for each of `count` observations.

    Args:
        policy: the policy.
        values: what it returned.
        count: number of observations.
        from_views: whether `compute_values_from_input_dict` returned them.
    """
    if np.shape(values) != (count,):
        what = "None" if values is None else f"values of shape {np.shape(values)}"
        method = "compute_values_from_input_dict" if from_views else "compute_values"
        raise ValueError(
            f"{type(policy).__name__}.{method}() returned {what} for {count} observations"
        )


def _check_added(policy: Policy, columns: Any, shape: tuple[int, ...]) -> None:
    """Raise an error if `postprocess_fragment` did not return columns [T, N, …].

    Args:
        policy: the policy.
        columns: what it returned.
        shape: (T, N).
    """
    where = f"{type(policy).__name__}.postprocess_fragment()"
    if not isinstance(columns, Mapping):
        raise TypeError(f"{where} must return a dict of columns, it returned {describe(columns)}")
    for name, column in columns.items():
        for leaf in leaves_of(column):
            if np.shape(leaf)[:2] != shape:
                raise ValueError(
                    f"{where} returned {name!r} of shape {list(np.shape(leaf))}, expected "
                    f"[{shape[0]}, {shape[1]}, …]"
                )


def clipped_rewards(rewards: np.ndarray, clip: bool | float | None) -> np.ndarray:
    """Return rewards to learn from, as the setting `clip_rewards` says."""
    if not clip:
        return rewards
    return np.sign(rewards) if clip is True else np.clip(rewards, -clip, clip)


def _zero_others(column: np.ndarray, in_segments: np.ndarray) -> np.ndarray:
    """Return a copy of a column [T, N, …] with zeros in the rows that are in no segment."""
    copied = column.copy()
    copied[~in_segments] = 0
    return copied


def _last_observations(columns: FragmentColumns, segments: Segments, finals: Any) -> Any:
    """Return the observation after each segment, [segments, …]."""
    if segments.is_whole_fragment:
        return map_leaves(np.copy, columns.row("obs", int(segments.ends[0])))
    at = columns.lookback + segments.ends
    last = map_leaves(lambda array: array[at, segments.lanes], columns["obs"])
    (ended,) = (segments.final_index >= 0).nonzero()
    if len(ended):
        for array, final in zip(optree.tree_leaves(last), optree.tree_leaves(finals), strict=True):
            array[ended] = final[segments.final_index[ended]]
    return last


def _observations(
    obs: Any, row_index: np.ndarray | None, last: Any, cuts: np.ndarray
) -> dict[str, Any]:
    """Return `obs` and `new_obs`.

    Each observation is stored once: `new_obs` is `obs` one row later, except at segment ends, and
    is built when it is read.
    """

    def base_of(rows: np.ndarray, after: np.ndarray) -> np.ndarray:
        if row_index is None and rows.shape[1] == 1:
            base = np.concatenate([rows[:, 0], after])
            base.flags.writeable = False  # two columns share it
            return base
        count = rows.shape[0] * rows.shape[1] if row_index is None else len(row_index)
        base = np.empty((count + len(after), *rows.shape[2:]), rows.dtype)
        if row_index is None:
            base[:count].reshape(rows.shape[1], rows.shape[0], *rows.shape[2:])[:] = np.swapaxes(
                rows, 0, 1
            )
        else:
            flat = rows.reshape(-1, *rows.shape[2:])
            np.take(flat, row_index, 0, out=base[:count], mode="clip")
        base[count:] = after
        base.flags.writeable = False
        return base

    if isinstance(obs, np.ndarray):
        base = base_of(obs, last)
        count = len(base) - len(cuts)
        return {"obs": base[:count], "new_obs": NextRows(base, count, cuts)}
    bases = optree.tree_map(base_of, obs, last)
    count = len(optree.tree_leaves(bases)[0]) - len(cuts)
    return {
        "obs": map_leaves(lambda base: base[:count], bases),
        "new_obs": map_leaves(lambda base: np.asarray(NextRows(base, count, cuts)), bases),
    }


def _dicts(infos: np.ndarray | None, count: int) -> np.ndarray:
    """Return an array [count] of infos, with an empty dict for rows without one."""
    array = np.empty(count, object)
    for i in range(count):
        array[i] = (infos[i] if infos is not None else None) or {}
    return array


def _infos(infos: list[Any], segments: Segments) -> np.ndarray:
    """Return the info of each row."""
    rows, segment = segments.rows()
    array = np.empty(len(rows), object)
    lanes = segments.lanes[segment].tolist()
    for i, (row, lane) in enumerate(zip(rows.tolist(), lanes, strict=True)):
        array[i] = infos[row][lane] if len(infos[row]) else {}
    return array
