"""ShardStream: the stream of one shard, in the process of its worker, and its messages.

A stream consists of the items of a worker with the recorded steps chained on. It is created by the
first request, which carries the steps. A reply holds items or the end of the shard; the end of a
stream is never an exception.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from flowrl.iter.local import LocalIterator

log = logging.getLogger("flowrl")

# a LocalIterator method, its arguments and keyword arguments, and the line where it was chained
Step = tuple[str, tuple[Any, ...], dict[str, Any], str]

MAX_ERRORS_SKIPPED = 1000  # consecutive errors while a recreated stream skips items
MAX_BACKLOG = 10_000  # items that one partition of a `repartition` may be behind another
STATS_INTERVAL_S = 1.0  # between two reports of the stream's stats


class Reply(NamedTuple):
    """The reply of a shard."""

    items: list[Any]
    tags: list[dict[str, Any]]  # reported by the worker, one per item
    end: bool = False
    stream_handle: int | None = None  # identifies the stream in later requests
    step_stats: list[dict[str, Any]] | None = None  # the stream's `stats()`; None if not due


class ShardRequest(NamedTuple):
    """A request to a shard.

    Attributes:
        stream_id: id of the stream, unique on the worker.
        steps: the steps of the stream; None if the worker has the stream.
        skip: items to skip in a recreated stream.
        batch_ms: milliseconds for which the shard collects items; 0 requests one item.
        partition: (index, number of partitions) of a repartition.
        seed: seed of the steps.
        skip_errors: errors to ignore after the skipped items, because they were raised before.
    """

    stream_id: str
    steps: Sequence[Step] | None
    skip: int = 0
    batch_ms: float = 0
    partition: tuple[int, int] | None = None
    seed: str | None = None
    skip_errors: int = 0


def _bind(argument: Any, worker: Any) -> Any:
    """Return an argument of a step, bound to the worker if it has `bound_to(worker)`."""
    bound_to = getattr(argument, "bound_to", None)
    return bound_to(worker) if callable(bound_to) else argument


def _copied(operator: Any) -> Any:
    """Return a copy of an operator of `combine` that has a state (`load_state_dict`), because it
    keeps items of one shard. The shards of a process share other operators.

    Raises:
        TypeError: it cannot be copied.
    """
    if not hasattr(operator, "load_state_dict"):
        return operator
    try:
        return copy.deepcopy(operator)
    except Exception as error:
        raise TypeError(
            f"combine({type(operator).__name__}): each shard needs a copy of the operator, which "
            f"cannot be copied: {error}"
        ) from error


class ShardStream:
    """The stream of one shard, in the process of its worker."""

    def __init__(self, worker: Any, request: ShardRequest):
        assert request.steps is not None
        if not hasattr(worker, "items"):
            raise TypeError(
                f"{type(worker).__name__} lacks items(), which returns the items of the shard: "
                "derive it from ParallelIteratorWorker"
            )
        items_for = getattr(worker, "items_for", None)
        items: Any = worker.items
        if items_for is not None:
            items = partial(items_for, request.stream_id, request.seed)
        stream: Any = LocalIterator(items, type(worker).__name__)
        for method, args, options, line in request.steps:
            bound_args = [_bind(arg, worker) for arg in args]
            if method == "combine":
                bound_args = [_copied(arg) for arg in bound_args]
            stream = getattr(stream, method)(*bound_args, **options)
            stream.stage.line = line
        self._stream = stream
        self._tags = getattr(worker, "reply_tags", None)
        self._stats_due = time.monotonic() + STATS_INTERVAL_S
        self._error: BaseException | None = None
        replayable = getattr(worker, "replayable", False)
        self._skip = request.skip if replayable else 0
        self._skip_errors = request.skip_errors if replayable else 0
        stream.start(request.seed)

    def reply(self, request: ShardRequest) -> Reply:
        """Return the next item, or the items of the next `batch_ms` milliseconds."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        items: list[Any] = []
        tags: list[dict[str, Any]] = []
        until = time.monotonic() + request.batch_ms / 1000 if request.batch_ms else 0.0
        while True:
            try:
                items.append(self._next(request))
            except StopIteration:
                return Reply(items, tags, end=True, step_stats=self._stats())
            except BaseException as error:
                if not items:
                    raise
                self._error = error  # raised by the next request, after these items
                return Reply(items, tags)
            tags.append(self._tags() if self._tags is not None else {})
            now = time.monotonic()
            if not request.batch_ms or now >= until:
                if now < self._stats_due:
                    return Reply(items, tags)
                self._stats_due = now + STATS_INTERVAL_S
                return Reply(items, tags, step_stats=self._stats())

    def _stats(self) -> list[dict[str, Any]] | None:
        """Return the stream's stats; None if an operator's `extra_stats` raises, because the items
        of the reply would be lost."""
        try:
            return self._stream.stats()
        except Exception as error:
            log.warning("no statistics of a shard: %s: %s", type(error).__name__, error)
            return None

    def _next(self, request: ShardRequest) -> Any:
        if self._skip:
            self._skip_items()
        while self._skip_errors:
            try:
                item = next(self._stream)
            except StopIteration:
                raise
            except Exception:
                self._skip_errors -= 1
            else:
                self._skip_errors = 0
                return item
        return next(self._stream)

    def _skip_items(self) -> None:
        """Skip the items that the previous incarnation returned; ignore errors meanwhile."""
        errors = 0
        while self._skip:
            try:
                next(self._stream)
            except StopIteration:
                raise
            except Exception:
                errors += 1
                if errors > MAX_ERRORS_SKIPPED:
                    raise
            else:
                errors = 0
                self._skip -= 1

    def stop(self) -> None:
        """Release the resources of the stream."""
        self._stream.stop()


class PartitionedStream(ShardStream):
    """The stream of one shard that the partitions of a `repartition` share: partition i of n gets
    every n-th item, starting at item i."""

    def __init__(self, worker: Any, request: ShardRequest):
        super().__init__(worker, request)
        self._num_items = 0
        self._backlogs: dict[int, deque[Any]] = {}

    def _next(self, request: ShardRequest) -> Any:
        assert request.partition is not None
        index, num_partitions = request.partition
        backlog = self._backlogs.setdefault(index, deque())
        while not backlog:
            target = self._num_items % num_partitions
            target_backlog = self._backlogs.setdefault(target, deque())
            if len(target_backlog) >= MAX_BACKLOG:
                raise RuntimeError(
                    f"repartition: partition {target} is {MAX_BACKLOG} items behind partition "
                    f"{index}: read all partitions at about the same pace"
                )
            target_backlog.append(super()._next(request))
            self._num_items += 1
        return backlog.popleft()
