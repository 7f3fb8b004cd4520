"""Operators to look inside a plan: Print, Breakpoint, Record."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import optree

from flowrl.data import BatchRef, MultiAgentBatch, SampleBatch
from flowrl.iter import Source
from flowrl.iter.stage import describe
from flowrl.sampling.worker_set import WorkerSet, check_workers
from flowrl.setting_values import check_int

T = TypeVar("T")
ColumnsOrFunction = Collection[str] | Callable[[Any], Any]

before_breakpoint: list[Callable[[], None]] = []
"""Functions that Breakpoint calls before it stops, for example to release the terminal."""
MAX_LISTED = 8  # workers in a summary


class Print:
    """for_each, item -> the same item: print a summary of every n-th item.

    The summary of a batch has its rows and steps, the workers and the versions of the weights that
    sampled it, and shape, dtype, range and mean of each column. Columns that are computed or
    fetched on access are not shown unless `what` names them. Items are counted from 0, also in a
    resumed run.

    Args:
        every: print the first item, and then every `every`-th one.
        what: names of columns to show; or a function of the item, whose result is printed instead
            of the summary. None shows the stored columns.
        name: the first word of each summary.
        workers: the WorkerSet; with it, the summary has the number of updates since a batch was
            sampled.

    Raises:
        ValueError: every is below 1.
        TypeError: `what` is neither a list nor a function, or `workers` is no WorkerSet.
        KeyError (when called): a batch lacks a column that `what` names.
    """

    chained_with: ClassVar[str] = "for_each"

    def __init__(
        self,
        every: int = 1,
        what: ColumnsOrFunction | None = None,
        name: str = "Print",
        workers: WorkerSet | None = None,
    ):
        check_int("Print: every", every)
        is_valid = what is None or callable(what) or isinstance(what, Collection)
        if isinstance(what, str) or not is_valid:
            example = what if isinstance(what, str) else "rewards"
            raise TypeError(
                f"Print: `what` must be a list of columns, such as [{example!r}], or a function, "
                f"got {what!r}"
            )
        if workers is not None:
            check_workers(workers, "Print")
        self.every, self.what, self.name, self.workers = every, what, name, workers
        self._num_items = 0

    def __call__(self, item: T) -> T:
        number, self._num_items = self._num_items, self._num_items + 1
        if number % self.every == 0:
            what = self.what
            text = what(item) if callable(what) else summary(item, what, self.workers)
            print(f"{self.name} #{number}: {text}", flush=True)
        return item

    def __repr__(self) -> str:
        return f"Print(every={self.every}, name={self.name!r})"


class Breakpoint:
    """for_each, item -> the same item: stop in the debugger (`breakpoint()` of Python) with the
    item in the variable `item`.

    Chain it in this process: actors have no terminal, see `flowrl train --in-process`.

    Args:
        when: function of the item that returns whether to stop; None stops at every item.

    Raises:
        TypeError: `when` is no function.
    """

    chained_with: ClassVar[str] = "for_each"

    def __init__(self, when: Callable[[Any], bool] | None = None):
        if when is not None and not callable(when):
            raise TypeError(f"Breakpoint: `when` must be a function or None, got {when!r}")
        self.when = when

    def __call__(self, item: T) -> T:
        if self.when is None or self.when(item):
            for prepare in list(before_breakpoint):
                prepare()
            breakpoint()
        return item

    def __repr__(self) -> str:
        return "Breakpoint()"


class Record:
    """for_each, item -> the same item: keep the last n items, to look at them after an error.

    Example:
        >>> record = Record(5)
        >>> rollouts = ParallelRollouts(workers).for_each(record)  # doctest: +SKIP
        >>> record.items[-1]  # the newest batch  # doctest: +SKIP

    Args:
        n: number of items.

    Attributes:
        items: the last items, the newest at the end. They are not copied.

    Raises:
        ValueError: n is below 1.
    """

    chained_with: ClassVar[str] = "for_each"

    def __init__(self, n: int):
        check_int("Record: n", n)
        self.items: deque[Any] = deque(maxlen=int(n))

    def __call__(self, item: T) -> T:
        self.items.append(item)
        return item

    def __repr__(self) -> str:
        return f"Record({self.items.maxlen})"


def summary(
    item: Any, columns: Collection[str] | None = None, workers: WorkerSet | None = None
) -> str:
    """Return a readable summary of an item: a batch, (batch, info) of an operator that trains, a
    result, or any other value. See Print for the arguments.

    Raises:
        KeyError: a batch lacks one of the columns.
    """
    if isinstance(item, (SampleBatch, MultiAgentBatch)):
        return _batch_summary(item, columns, workers)
    if isinstance(item, BatchRef):
        return f"reference to a batch of {item.env_steps()} env steps"
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], tuple):
        sources, batch = item  # of zip_with_source
        return f"{summary(batch, columns, workers)}\n  sources: {describe(sources)}"
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], dict):
        batch, info = item
        stats = [
            f"  {policy_id}: {_numbers(entry.get('learner_stats', {}))}"
            for policy_id, entry in info.items()
            if isinstance(entry, dict)
        ]
        return "\n".join([summary(batch, columns, workers), *stats])
    if isinstance(item, dict) and "timesteps_total" in item:
        names = "training_iteration", "timesteps_total", "episode_reward_mean", "episode_len_mean"
        return f"result: {_numbers({name: item.get(name) for name in names})}"
    return describe(item)


def _numbers(values: dict[str, Any]) -> str:
    numbers = {n: v for n, v in values.items() if isinstance(v, (int, float))}
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def _batch_summary(
    batch: SampleBatch | MultiAgentBatch,
    columns: Collection[str] | None,
    workers: WorkerSet | None,
) -> str:
    steps = f"{batch.env_steps()} env steps, {batch.agent_steps()} agent steps"
    lines = [f"{steps}{_origin(batch.sources, batch.policy_batches, workers)}"]
    all_rows = batch.policy_batches.values()
    several = len(all_rows) > 1
    for policy_id, rows in batch.policy_batches.items():
        if several:
            lines.append(f"  policy {policy_id}: {rows.count} rows")
        names = columns
        if names is None:
            names = [name for name, _ in rows.stored() if not rows.is_lazy(name)]
        elif several:  # policies of other classes have other columns
            names = [n for n in names if n in rows or not any(n in other for other in all_rows)]
        width = max(map(len, names), default=0)
        indent = "    " if several else "  "
        lines += [f"{indent}{name:{width}}  {_column_summary(rows[name])}" for name in names]
    return "\n".join(lines)


def _origin(
    sources: Iterable[Source], policy_ids: Collection[str], workers: WorkerSet | None
) -> str:
    """Describe where a batch comes from: shards, versions and ages of the weights, and the episodes
    that ended; weights and returns only of the policies `policy_ids`."""
    sources = tuple(sources)
    if not sources:
        return ""
    indices = sorted({source.shard for source in sources})
    named = ", ".join(map(str, indices[:MAX_LISTED])) + (", …" if len(indices) > MAX_LISTED else "")
    text = f", from shard{'s' * (len(indices) > 1)} {named}"
    versions: dict[str, list[int]] = {}
    for source in sources:
        for policy_id, version in source.tags.get("weights_versions", {}).items():
            if policy_id in policy_ids:
                versions.setdefault(policy_id, []).append(version)
    for policy_id, of_policy in versions.items():
        low, high = min(of_policy), max(of_policy)
        name = f"{policy_id} " if len(versions) > 1 else ""
        text += f", weights {name}{low}" if low == high else f", weights {name}{low} to {high}"
        if workers is not None:
            lag = workers.weight_sync.versions()[policy_id] - low
            text += f" ({lag} update{'s' * (lag != 1)} old)"
    episodes = list(itertools.chain(*(source.tags.get("episodes", ()) for source in sources)))
    if episodes:
        mean = np.mean([_return_of(episode, policy_ids) for episode in episodes])
        text += f", {len(episodes)} episodes ended with return {mean:.4g}"
    return text


def _return_of(episode: Sequence[Any], policy_ids: Collection[str]) -> float:
    """Return the return of an episode; with several agents, only of the agents that act by the
    policies `policy_ids`.

    Args:
        episode: the fields of an EpisodeMetrics.
        policy_ids: ids of policies.
    """
    total, _, _, by_agent = episode[:4]
    if by_agent is None:
        return float(total)
    return float(sum(value for _, policy_id, value in by_agent if policy_id in policy_ids))


def _column_summary(column: Any) -> str:
    """Return shape, dtype, range and mean of a column; if it is nested, of each part with its name,
    such as `goal` or `goal/0`."""
    if not isinstance(column, (dict, tuple)):
        return _array_summary(np.asarray(column))
    nest: Any = column
    paths, leaves, _ = optree.tree_flatten_with_path(nest)
    parts = ["/".join(map(str, path)) for path in paths]
    summaries = [_array_summary(np.asarray(leaf)) for leaf in leaves]
    return "; ".join(f"{part}: {text}" for part, text in zip(parts, summaries, strict=True))


def _array_summary(array: np.ndarray) -> str:
    text = f"{array.shape} {array.dtype}"
    if not array.size or array.dtype.kind not in "biuf":
        return text
    if array.dtype.kind == "b":
        return f"{text}  {int(array.sum())} of {array.size} true"
    finite = array[np.isfinite(array)]
    bad = array.size - finite.size
    warning = f", {bad} NOT FINITE" if bad else ""
    if not finite.size:
        return f"{text}{warning}"
    if array.dtype.kind in "iu":
        return f"{text}  {array.min()} to {array.max()}"
    mean = f", mean {finite.mean(dtype=np.float64):.4g}"
    return f"{text}  {finite.min():.4g} to {finite.max():.4g}{mean}{warning}"
