"""Operators that sample experience and form train batches."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast, overload

import numpy as np

from flowrl.data import Batch, BatchRef, MultiAgentBatch, SampleBatch
from flowrl.data.item_checks import AnyBatch, check_batch
from flowrl.iter import LocalIterator, ParallelIterator, Source, _get_shared_metrics
from flowrl.iter.metrics import MetricsContext, count_bytes_between_nodes, current_metrics
from flowrl.ops.aggregation import leave_in_store
from flowrl.ops.offline import WriteParquet
from flowrl.ops.plan_metrics import PlanMetrics, record_sampled_steps
from flowrl.ops.staleness import StalenessLimit
from flowrl.sampling.worker_set import WorkerSet, check_workers
from flowrl.setting_values import check_int, check_names
from flowrl.state_schema import Fields, Natural


@overload
def ParallelRollouts(workers: WorkerSet, *, mode: Literal["raw"]) -> ParallelIterator[Batch]: ...


@overload
def ParallelRollouts(
    workers: WorkerSet,
    *,
    mode: Literal["bulk_sync", "async"] = ...,
    num_async: int = ...,
    max_policy_lag: int | None = ...,
    limit: StalenessLimit | None = ...,
    by_reference: Literal[False] = ...,
) -> LocalIterator[Batch]: ...


@overload
def ParallelRollouts(
    workers: WorkerSet,
    *,
    mode: Literal["async"],
    num_async: int = ...,
    max_policy_lag: int | None = ...,
    limit: StalenessLimit | None = ...,
    by_reference: bool,
) -> LocalIterator[Batch | BatchRef]: ...


def ParallelRollouts(
    workers: WorkerSet,
    *,
    mode: Literal["bulk_sync", "async", "raw"] = "bulk_sync",
    num_async: int = 1,
    max_policy_lag: int | None = None,
    limit: StalenessLimit | None = None,
    by_reference: bool = False,
) -> Any:
    """Return an endless stream of experience from all workers.

    Counts `num_env_steps_sampled` and `num_agent_steps_sampled`; times `sample`, from the request
    for a batch until it has arrived. Batches carry their `sources`. If the setting `output` names a
    folder, batches are also written there (see WriteParquet).

    Args:
        workers: the WorkerSet; without remote workers the local worker samples.
        mode: "bulk_sync" concatenates one fragment per worker into a batch, all sampled with the
            newest weights; "async" returns fragments as they arrive; "raw" returns the
            ParallelIterator, to chain operators that run on the workers; it counts nothing, see
            CountRollouts.
        num_async: requests in flight per worker in "async" mode.
        by_reference: remote workers leave their fragments in Ray's object store, and the stream
            contains BatchRefs, so fragments do not pass through the driver. Only for "async".
        limit: in "async" mode, limits how far sampling runs ahead of training; with None,
            only the capacity of the plan's queues limits it.
        max_policy_lag: in "async" mode, drop fragments whose policy lag is more than this number of
            updates; their steps count as `num_env_steps_dropped`. None keeps
            all.

    Raises:
        ValueError: the options contradict each other or the settings.
        TypeError: `workers` is not a WorkerSet.
    """
    if not isinstance(workers, WorkerSet):
        raise TypeError(
            "ParallelRollouts takes a WorkerSet, the first argument of a plan, got a "
            f"{type(workers).__name__}"
        )
    if mode not in ("bulk_sync", "async", "raw"):
        raise ValueError(
            f'ParallelRollouts: mode must be "bulk_sync", "async" or "raw", got {mode!r}'
        )
    if mode != "async":
        for name, is_default in (
            ("num_async", num_async == 1),
            ("max_policy_lag", max_policy_lag is None),
            ("limit", limit is None),
            ("by_reference", not by_reference),
        ):
            if not is_default:
                raise ValueError(f'{name} is for mode="async", not {mode!r}')
    output = workers.config.output
    if output is not None and mode == "raw":
        raise ValueError(
            'output: in mode="raw" fragments stay on the workers, so nothing can be written'
        )
    if output is not None and by_reference and workers.num_workers:
        raise ValueError(
            "output: the fragments of this plan do not pass through the driver, which writes them: "
            "use num_workers=0, or by_reference=False in the plan"
        )
    check_lag(max_policy_lag)
    shards: ParallelIterator[Any] = workers.parallel_iterator()
    if mode == "raw":
        return shards
    if limit is not None:
        if not isinstance(limit, StalenessLimit):
            raise TypeError(
                f"limit must be a StalenessLimit, got {limit!r}: StalenessLimit(batch_size, "
                "max_batches)"
            )
        limit.steps_per_fragment = workers.steps_per_fragment()
    if by_reference and workers.num_workers:
        shards = shards.for_each(leave_in_store)
    fragments: LocalIterator[Any] = (
        shards.batch_across_shards()
        if mode == "bulk_sync"
        else shards.gather_async(num_async=num_async, limit=limit)
    )
    rollouts = fragments.zip_with_source().for_each(CountRollouts(workers))
    name = f"ParallelRollouts(mode={mode!r})"
    rollouts.stage.name, rollouts.stage.title = "ParallelRollouts", name
    if output is not None:
        rollouts = rollouts.for_each(WriteParquet(output, workers.config.output_rows_per_file))
    if max_policy_lag is not None:
        rollouts = rollouts.filter(DropStale(workers, max_policy_lag))
    return LocalIterator[Any](rollouts.stage, name)


def check_lag(max_policy_lag: int | None) -> None:
    """Raise ValueError unless `max_policy_lag` is None or an int of at least 0."""
    if max_policy_lag is not None:
        check_int("max_policy_lag", max_policy_lag, 0)


class CountRollouts:
    """for_each, (sources, fragment or list of fragments) -> batch: concatenate and count the
    fragments, and set the `sources` of the batch.

    ParallelRollouts includes it, except with `mode="raw"`: there, chain it after the gather.
    Counts `num_env_steps_sampled`, `num_agent_steps_sampled` and ended episodes; times `sample`,
    from the request for a batch until it has arrived. Merges the workers' updates of observation
    filters into the local policies, and sets `global_vars["timestep"]`, which schedules follow, so
    a raw plan that counts steps itself needs it, too. Other results of workers are accepted if they
    have `env_steps()` and `steps_by_policy()` like a batch.

    Example:
        >>> raw = ParallelRollouts(workers, mode="raw").for_each(scale)  # doctest: +SKIP
        >>> fragments = raw.gather_sync().zip_with_source()  # doctest: +SKIP
        >>> rollouts = fragments.for_each(CountRollouts(workers))  # doctest: +SKIP

    Args:
        workers: the WorkerSet that has sampled the fragments.

    Raises:
        TypeError (when called): the item is not a pair of sources and fragments.
    """

    timer_name = "sample"
    chained_with: ClassVar[str] = "for_each"

    def __init__(self, workers: WorkerSet):
        check_workers(workers, type(self).__name__)
        self.workers = workers
        config = workers.config
        self._has_time_limits = bool(config.env_step_timeout_s or config.env_reset_timeout_s)
        self._fetch_started: float | None = None

    def _on_fetch_start(self) -> None:
        self._fetch_started = time.perf_counter()

    def __call__(self, pair: tuple[tuple[Source, ...], Any]) -> Any:
        sources, item = self._check_pair(pair)
        self._count_transfers(sources, item if isinstance(item, list) else [item])
        batch = SampleBatch.concat_samples(item) if isinstance(item, list) else item
        batch.sources = sources
        metrics = _get_shared_metrics()
        agent_steps = batch.steps_by_policy()
        record_sampled_steps(metrics, self.workers, batch.env_steps(), agent_steps)
        for source in sources:
            self._record_tags(source, metrics)
        if self._fetch_started is not None:
            timer = metrics.timers[self.timer_name]
            timer.push(time.perf_counter() - self._fetch_started)
            timer.push_units_processed(batch.env_steps())
        return batch

    def _check_pair(self, pair: Any) -> tuple[tuple[Source, ...], Any]:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], tuple)):
            raise TypeError(
                f"{self!r} takes pairs of sources and fragments, got {type(pair).__name__}: chain "
                ".zip_with_source() before it"
            )
        return pair

    def _record_tags(self, source: Source, metrics: MetricsContext) -> None:
        """Record what a worker has reported with a fragment: episodes, timings, statistics of
        filters, failures of environments."""
        tags, plan = source.tags, PlanMetrics.of(metrics)
        plan.add_episodes(source.shard, tags.get("episodes", ()))
        plan.sampler_timings[source.shard, source.incarnation] = tags.get("timings", {})
        samples_here = not self.workers.num_workers
        for updates in tags.get("filters", ()):
            self.workers.weight_sync.add_filter_updates(updates, wait=samples_here)
        env_restarts = tags.get("env_restarts", 0)
        metrics.counters["num_env_restarts"] += env_restarts
        metrics.counters["num_faulty_episodes"] += tags.get("faulty_episodes", 0)
        if env_restarts and metrics.journal is not None and self._has_time_limits:
            metrics.journal.end("an environment failed or exceeded its time limit")

    def _count_transfers(self, sources: tuple[Source, ...], items: list[Any]) -> None:
        """Count the env steps of each worker, and the bytes that were sent by other nodes."""
        for source, item in zip(sources, items, strict=False):
            node, index = source.tags.get("node"), source.shard
            self.workers.nodes[index] = node
            steps = self.workers.env_steps_by_worker
            steps[index] = steps.get(index, 0) + source.tags.get("env_steps", 0)
            if node != self.workers.node and hasattr(item, "size_bytes"):
                count_bytes_between_nodes(item.size_bytes())

    def __repr__(self) -> str:
        return "CountRollouts"


@dataclass(repr=False)
class DropStale:
    """filter, batch: False if its policy lag is more than `max_policy_lag`."""

    chained_with: ClassVar[str] = "filter"

    workers: WorkerSet
    max_policy_lag: int

    def __call__(self, batch: Any) -> bool:
        newest = self.workers.weight_sync.versions()
        lags = [
            newest[policy_id] - version
            for source in batch.sources
            for policy_id, version in source.tags["weights_versions"].items()
        ]
        is_fresh = max(lags) <= self.max_policy_lag
        if not is_fresh:
            _get_shared_metrics().counters["num_env_steps_dropped"] += batch.env_steps()
            self.workers.weight_sync.update_also(source.shard for source in batch.sources)
        return is_fresh

    def __repr__(self) -> str:
        return f"DropStale({self.max_policy_lag})"


@dataclass
class ConcatBatches:
    """combine, batch -> [batch] or []: concatenate batches into batches of at least
    `min_batch_size` steps.

    Batches are not split, so the result may have more steps. Empty batches are dropped. BatchRefs
    are concatenated into a BatchRef.

    Args:
        min_batch_size: minimum number of steps of a returned batch.
        count_steps_by: "env_steps" or "agent_steps".

    Raises:
        ValueError: an argument is invalid; when called: the batches do not fit together, and all of
            them are dropped.
        TypeError (when called): the item is not a batch.
    """

    state_fields: ClassVar[Fields] = {
        "pending": list[Batch],
        "steps": Natural,
    }

    chained_with: ClassVar[str] = "combine"

    min_batch_size: int
    count_steps_by: Literal["env_steps", "agent_steps"] = "env_steps"
    _pending: list[Any] = field(default_factory=list, init=False, repr=False)
    _steps: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.count_steps_by not in ("env_steps", "agent_steps"):
            raise ValueError(
                f'count_steps_by must be "env_steps" or "agent_steps", got {self.count_steps_by!r}'
            )
        check_int("min_batch_size", self.min_batch_size)

    def __call__(self, batch: AnyBatch) -> list[AnyBatch]:
        check_batch(batch, "ConcatBatches", by_reference=True)
        if batch.agent_steps() or batch.env_steps():  # some turns complete no agent's row
            self._pending.append(batch)
            by_agent = self.count_steps_by == "agent_steps"
            self._steps += batch.agent_steps() if by_agent else batch.env_steps()
        if self._steps < self.min_batch_size:
            return []
        # if the batches do not fit together, all of them are dropped
        pending, self._pending, self._steps = self._pending, [], 0
        has_refs = any(isinstance(one, BatchRef) for one in pending)
        try:
            return [cast(Any, BatchRef if has_refs else SampleBatch).concat_samples(pending)]
        except Exception:
            metrics = current_metrics()
            if metrics is not None:
                for earlier in pending[:-1]:  # the stage reports `batch`
                    metrics.report_lost(earlier)
            raise

    def state_dict(self) -> dict[str, Any]:
        return {"pending": list(self._pending), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending = list(state["pending"])
        self._steps = state["steps"]


@dataclass
class SelectExperiences:
    """for_each, batch -> batch: keep the rows of the policies `policy_ids`; the number of env steps
    does not change.

    A SampleBatch, which has one policy, passes unchanged. The rows of a BatchRef are selected when
    they are fetched.

    Args:
        policy_ids: ids of the policies to keep.

    Raises:
        TypeError: `policy_ids` is a string or not a collection; when called: the item is not a
            batch.
        ValueError: `policy_ids` is empty.
    """

    chained_with: ClassVar[str] = "for_each"

    policy_ids: Collection[str]

    def __post_init__(self) -> None:
        check_names("policy_ids", self.policy_ids, "no rows would be kept: name a policy")

    def __call__(self, batch: AnyBatch) -> AnyBatch:
        check_batch(batch, "SelectExperiences", by_reference=True)
        rows: Any = batch
        return batch if isinstance(batch, SampleBatch) else rows.select(self.policy_ids)


@dataclass
class StandardizeFields:
    """for_each, batch -> batch: standardize the columns `fields` [rows] to mean 0 and standard
    deviation 1, per policy, over the whole batch. Standard deviations are at least 1e-4.

    Args:
        fields: names of columns [rows].

    Raises:
        TypeError: `fields` is a string or not a collection; when called: the item is not a batch.
        ValueError: `fields` is empty.
        KeyError (when called): a batch lacks a column.
    """

    chained_with: ClassVar[str] = "for_each"

    fields: Collection[str]

    def __post_init__(self) -> None:
        check_names("fields", self.fields, "nothing would be standardized: name a column")

    def __call__(self, batch: Batch) -> Batch:
        check_batch(batch, "StandardizeFields")
        if isinstance(batch, MultiAgentBatch):
            return batch.with_batches(
                {pid: self._standardize(b) for pid, b in batch.policy_batches.items()}
            )
        return self._standardize(batch)

    def _standardize(self, batch: SampleBatch) -> SampleBatch:
        if not batch.count:
            return batch
        columns = {}
        for name in self.fields:
            column = batch[name]
            columns[name] = ((column - column.mean()) / max(1e-4, column.std())).astype(
                np.float32, copy=False
            )
        return batch.with_columns(**columns)
