"""ParallelIterator: a description of parallel shards and of the steps applied to their items.

Nothing is created before the first pull, `shards()` or pickling. The shards are workers in this
process or Ray actors: any actor whose class defines `items()` and `apply(fn, *args)`, which returns
fn(self, *args).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from flowrl.iter.errors import OnError, missing_attribute_error
from flowrl.iter.gather import RequestLimit, check_batch_ms
from flowrl.iter.gather_async import GatherAsync, GatherShard
from flowrl.iter.gather_sync import GatherSync
from flowrl.iter.local import LocalIterator
from flowrl.iter.pools import ActorPool, Pool
from flowrl.iter.ray_runtime import actor_class
from flowrl.iter.recovery import Recovery
from flowrl.iter.shard_server import ParallelIteratorWorker, PartitionWorker
from flowrl.iter.shards import Shard, Shards
from flowrl.iter.stage import chained_at
from flowrl.setting_values import check_int

T = TypeVar("T")
U = TypeVar("U")


class ParallelIterator(Generic[T]):
    """A set of shards and the steps that each one applies to its items.

    It only describes a stream: it can be gathered any number of times, and every gather reads the
    shards from the beginning. Pickling copies the handles of its actors.

    Args:
        shards: the shards.
        name: shown by `repr`.
        recovery: how shards that die or hang are replaced; None keeps the setting of each shard.
    """

    def __init__(self, shards: Sequence[Shard], name: str, recovery: Recovery | None = None):
        if recovery is not None:
            shards = [shard._replace(recovery=recovery) for shard in shards]
        self._shards = tuple(shards)
        self.name = name

    def _chain(self, method: str, suffix: str, *args: Any, **options: Any) -> ParallelIterator[Any]:
        step = (method, args, options, chained_at())
        shards = [shard._replace(steps=(*shard.steps, step)) for shard in self._shards]
        return ParallelIterator(shards, f"{self.name}{suffix}")

    # -- steps on the shards -------------------------------------------------------------------

    def for_each(
        self,
        fn: Callable[[T], U],
        max_concurrency: int = 1,
        resources: dict[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> ParallelIterator[U]:
        """Apply fn(item) to every item in the process of the shard.

        With `max_concurrency` other than 1 the shard runs fn as Ray tasks, see
        LocalIterator.for_each.
        """
        options: dict[str, Any] = {"max_concurrency": max_concurrency, "resources": resources}
        _validate(lambda it: it.for_each(fn, on_error=on_error, **options))
        return self._chain("for_each", ".for_each()", fn, on_error=on_error, **options)

    def filter(self, fn: Callable[[T], bool], on_error: OnError = "raise") -> ParallelIterator[T]:
        """Keep the items for which fn(item) is true."""
        _validate(lambda it: it.filter(fn, on_error))
        return self._chain("filter", ".filter()", fn, on_error=on_error)

    def batch(self, n: int) -> ParallelIterator[list[T]]:
        """Group the items of each shard into lists of n; the last list may be shorter."""
        _validate(lambda it: it.batch(n))
        return self._chain("batch", f".batch({n})", n)

    def flatten(self: ParallelIterator[list[U]]) -> ParallelIterator[U]:
        """Return the elements of items that are lists."""
        return self._chain("flatten", ".flatten()")

    def combine(
        self, fn: Callable[[T], Iterable[U]], on_error: OnError = "raise"
    ) -> ParallelIterator[U]:
        """Return the elements of fn(item), a possibly empty list, for every item."""
        _validate(lambda it: it.combine(fn, on_error))
        return self._chain("combine", ".combine()", fn, on_error=on_error)

    def transform(self, fn: Callable[[Iterator[T]], Iterable[U]]) -> ParallelIterator[U]:
        """Apply fn(iterator of the items) to the stream of each shard."""
        _validate(lambda it: it.transform(fn))
        return self._chain("transform", ".transform()", fn)

    def local_shuffle(
        self, shuffle_buffer_size: int, seed: int | None = None
    ) -> ParallelIterator[T]:
        """Return the items of each shard in random order within a sliding window.

        Fragments of rollout workers lose the relation to their episodes and weights versions: each
        has those of the fragment that was sampled last.

        Args:
            shuffle_buffer_size: items in the window; 1 keeps the order.
            seed: seed of the order of every shard; None derives one for each shard from the seed of
                the plan.
        """
        _validate(lambda it: it.shuffle(shuffle_buffer_size, seed))
        suffix = f".local_shuffle(shuffle_buffer_size={shuffle_buffer_size}, seed={seed})"
        return self._chain("shuffle", suffix, shuffle_buffer_size, seed)

    # -- sets of shards ------------------------------------------------------------------------

    def repartition(self, num_partitions: int, batch_ms: float = 0) -> ParallelIterator[T]:
        """Distribute the items over another number of shards: partition i gets every
        `num_partitions`-th item of every shard, starting with item i.

        The partitions that one gather reads share one stream per shard; each stream of `shards()`
        and `get_shard()` reads all shards again, which must return the same items. A partition that
        dies loses the items it has received and continues; a shard under it that dies is not
        recreated. Read the partitions at about the same pace: a shard buffers at most 10,000 items
        for each of them. It also buffers the items of partitions that no stream reads, so a stream
        of `get_shard()`, `shards()` or `select_shards()` ends with an error once 10,000 items are
        buffered for another partition.

        Args:
            num_partitions: number of shards afterwards.
            batch_ms: milliseconds for which a shard collects items per request.

        Raises:
            ValueError: `num_partitions` is below 1, `batch_ms` is negative, or the shards are
                rollout workers.
        """
        check_int("repartition: num_partitions", num_partitions)
        check_batch_ms("repartition", batch_ms)
        if any(shard.pool.keeps_state for shard in self._shards):
            raise ValueError(
                f"repartition: {self.name} cannot be repartitioned, because its episodes, counters "
                "and weights belong to its workers: gather the rollouts first"
            )
        key = uuid.uuid4().hex  # another repartition of these shards reads its own streams
        generators = [
            partial(_partition_items, self._shards, self.name, (i, num_partitions), batch_ms, key)
            for i in range(num_partitions)
        ]
        upstream = Shards(self._shards, self.name)
        pool = _pool(generators, False, not upstream.remote, upstream.pools())
        name = f"{self.name}.repartition[num_partitions={num_partitions}]"
        return ParallelIterator(_shards_of(pool), name, self._shards[0].recovery)

    def union(self, other: ParallelIterator[U]) -> ParallelIterator[T | U]:
        """Return the shards of both iterators, each with its own steps."""
        if not isinstance(other, ParallelIterator):
            raise TypeError(f"union() takes a ParallelIterator, got {type(other).__name__}")
        name = f"ParallelUnion[{self!r}, {other!r}]"
        return ParallelIterator((*self._shards, *other._shards), name)

    def select_shards(self, shards_to_keep: Sequence[int]) -> ParallelIterator[T]:
        """Keep only these shards, in ascending order of index.

        Raises:
            ValueError: no index, or an index that is out of range.
        """
        if not isinstance(shards_to_keep, Iterable):
            raise TypeError(
                f"select_shards: give a list of indexes, such as [0], got {shards_to_keep!r}"
            )
        indexes = sorted({self._check_index(i) for i in shards_to_keep})
        if not indexes:
            raise ValueError("select_shards: at least one shard must be selected")
        selected = [self._shards[index]._replace(adds_joined_workers=False) for index in indexes]
        name = f"{self!r}.select_shards({len(selected)} total)"
        return ParallelIterator(selected, name)

    def num_shards(self) -> int:
        """Return the number of shards."""
        return len(self._shards)

    def shards(self) -> list[LocalIterator[T]]:
        """Start the actors and return one stream per shard; the streams can be pickled."""
        for pool in Shards(self._shards, self.name).pools():
            pool.start()
        return [self.get_shard(index) for index in range(self.num_shards())]

    def get_shard(
        self, shard_index: int, batch_ms: float = 0, num_async: int = 1
    ) -> LocalIterator[T]:
        """Return the items of one shard, in the order of the shard.

        Args:
            shard_index: index of the shard, from 0.
            batch_ms: milliseconds for which the shard collects items per request.
            num_async: requests in flight.
        """
        shard = self._shards[self._check_index(shard_index)]._replace(adds_joined_workers=False)
        shards = Shards([shard], self.name)
        stage = GatherShard(shards, num_async, batch_ms=batch_ms)
        return LocalIterator(stage, f"{self.name}.shard[{shard_index}]")

    def _check_index(self, index: int) -> int:
        check_int("the index of a shard", index, 0)
        if index >= len(self._shards):
            raise ValueError(f"no shard {index}: there are {len(self._shards)} shards, from 0")
        return index

    # -- gathering -----------------------------------------------------------------------------

    def batch_across_shards(self, on_error: OnError = "raise") -> LocalIterator[list[T]]:
        """Return lists of one item per live shard, in shard order; a barrier between rounds."""
        shards = Shards(self._shards, self.name)
        stage = GatherSync(shards, on_error=on_error)
        return LocalIterator(stage, f"{self!r}.batch_across_shards()")

    def gather_sync(self, on_error: OnError = "raise") -> LocalIterator[T]:
        """Return one item of every shard per round, in shard order. No request is in flight between
        two rounds."""
        shards = Shards(self._shards, self.name)
        stage = GatherSync(shards, flat=True, on_error=on_error)
        return LocalIterator(stage, f"{self!r}.gather_sync()")

    def gather_async(
        self,
        batch_ms: float = 0,
        num_async: int = 1,
        next_request: Literal["after_item", "before_item"] = "after_item",
        on_error: OnError = "raise",
        limit: RequestLimit | None = None,
    ) -> LocalIterator[T]:
        """Return items of any shard as they arrive.

        Args:
            batch_ms: milliseconds for which a shard collects items before it replies.
            num_async: requests in flight per shard.
            next_request: when to send a shard its next request. "after_item": at the pull that
                follows its item, when the consumer has processed the item. "before_item": before
                the item is returned, so the shard works meanwhile. Between the request of an item
                and its return, at most `num_async - 1` ("after_item") or `num_async`
                ("before_item") other items of the same shard are returned. With `batch_ms`, these
                limits count replies, of any number of items.
            on_error: "raise", Skip(max), or Retry(times), for exceptions in the code of a shard.
                Retry requests the shard again, and the item that failed is lost; to retry items,
                chain `for_each(fn, on_error=Retry(n))`.
            limit: limits the requests in flight, see RequestLimit.
        """
        stage = GatherAsync(
            Shards(self._shards, self.name),
            num_async,
            next_request,
            limit,
            batch_ms=batch_ms,
            on_error=on_error,
        )
        return LocalIterator(stage, f"{self!r}.gather_async()")

    def take(self, n: int) -> list[T]:
        """Return the first n items of `gather_sync()`."""
        with self.gather_sync() as stream:
            return stream.take(n)

    def show(self, n: int = 20) -> None:
        """Print the first n items of `gather_sync()`."""
        for item in self.take(n):
            print(item)

    def __iter__(self) -> Iterator[T]:
        raise TypeError(
            "a ParallelIterator is not ordered: call gather_sync() or gather_async() first"
        )

    def __repr__(self) -> str:
        return f"ParallelIterator[{self.name}]"

    if not TYPE_CHECKING:  # type checkers report unknown names themselves

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute_error(type(self), name)


def _validate(chain: Callable[[LocalIterator[Any]], Any]) -> None:
    """Chain a step on an empty stream, so that wrong arguments raise immediately."""
    chain(LocalIterator(()))


def _partition_items(
    shards: Sequence[Shard],
    name: str,
    partition: tuple[int, int],
    batch_ms: float,
    key: str,
    stream_id: str,
    seed: str | None,
) -> LocalIterator[Any]:
    """Return the items of one partition; runs in its worker.

    The parts of `stream_id` and `seed` before the slash are equal for all partitions that one
    gather reads: they share the streams of the shards.
    """
    reader = stream_id.rpartition("/")[0]
    partitioned = Shards(shards, name, f"{reader}.{key}", partition)
    if seed is not None:
        partitioned.seed = seed.rpartition("/")[0]
    stage = GatherAsync(partitioned, next_request="before_item", batch_ms=batch_ms)
    return LocalIterator(stage, f"part {partition[0]} of {name}")


def _pool(
    generators: Sequence[Any], repeat: bool, in_process: bool, upstream: Sequence[Pool] = ()
) -> Pool:
    """Return a pool with one worker per generator, a partition of the `upstream` pools if given."""
    if not generators:
        raise ValueError("at least one shard is needed")
    for generator in generators:
        if not callable(generator) and not hasattr(generator, "__iter__"):
            raise TypeError(
                "a shard needs an iterable or a callable that returns one, got "
                f"{type(generator).__name__}"
            )
    worker_class = PartitionWorker if upstream else ParallelIteratorWorker
    has_iterator = any(not callable(g) and iter(g) is g for g in generators)  # readable once
    replayable = not has_iterator and not upstream
    if in_process:

        def make_workers() -> list[Any]:
            return [worker_class(generator, repeat) for generator in generators]

        return Pool(make_workers, len(generators), replayable, upstream)

    def make_actor(index: int) -> Any:
        return actor_class(worker_class).remote(generators[index], repeat)

    return ActorPool(make_actor, len(generators), replayable=replayable, upstream=upstream)


def _as_list(name: str, values: Iterable[T]) -> list[T]:
    try:
        iterator = iter(values)
    except TypeError:
        raise TypeError(f"{name} must be iterable, got {type(values).__name__}") from None
    return list(iterator)


def _shards_of(pool: Pool) -> list[Shard]:
    return [Shard(pool, index) for index in range(len(pool))]


def from_items(
    items: Sequence[T], num_shards: int = 2, repeat: bool = False, in_process: bool = False
) -> ParallelIterator[T]:
    """Distribute items over shards in turn.

    Args:
        items: the items.
        num_shards: number of shards, each a Ray actor.
        repeat: start again at the end.
        in_process: run the shards in this process, without actors.

    Raises:
        TypeError: `items` is not iterable.
        ValueError: `num_shards` is not an int of at least 1.
    """
    check_int("num_shards", num_shards)
    items = _as_list("from_items: items", items)
    shards: list[list[T]] = [items[i::num_shards] for i in range(num_shards)]
    item_type = type(items[0]).__name__ if items else "None"
    suffix = ", repeat=True" if repeat else ""
    name = f"from_items[{item_type}, {len(items)}, shards={num_shards}{suffix}]"
    return from_iterators(shards, repeat, name, in_process)


def from_range(
    n: int, num_shards: int = 2, repeat: bool = False, in_process: bool = False
) -> ParallelIterator[int]:
    """Distribute the ints 0 … n-1 over shards in contiguous ranges; the last one takes the rest.

    Args:
        n: number of ints.
        num_shards: number of shards, each a Ray actor.
        repeat: start again at the end.
        in_process: run the shards in this process, without actors.

    Raises:
        ValueError: a number is not an int, or too small.
    """
    check_int("n", n, 0)
    check_int("num_shards", num_shards)
    size = n // num_shards
    ends = [*(size * i for i in range(1, num_shards)), n]
    shards = [range(size * i, end) for i, end in enumerate(ends)]
    name = f"from_range[{n}, shards={num_shards}{', repeat=True' if repeat else ''}]"
    return from_iterators(shards, repeat, name, in_process)


def from_iterators(
    generators: Sequence[Iterable[T] | Callable[[], Iterable[T]]],
    repeat: bool = False,
    name: str | None = None,
    in_process: bool = False,
    recovery: Recovery | None = None,
) -> ParallelIterator[T]:
    """Create one shard per iterable, or per callable that returns one.

    A shard whose actor dies is recreated and skips the items received before, so its generator
    should return the same items each time.

    Args:
        generators: iterables or callables (generator objects cannot be pickled: pass callables).
            An iterator around a generator, such as `map(f, generator)`, ends after an error: return
            a generator to continue after it.
        repeat: start again at the end.
        name: shown by `repr`.
        in_process: run the shards in this process, without actors.
        recovery: how shards that die or hang are replaced.

    Raises:
        TypeError: `generators` is not iterable, or one of them is neither an iterable nor a
            callable.
        ValueError: `generators` is empty.
    """
    generators = _as_list("from_iterators: generators", generators)
    pool = _pool(generators, repeat, in_process)
    suffix = ", repeat=True" if repeat else ""
    name = name or f"from_iterators[shards={len(generators)}{suffix}]"
    return ParallelIterator(_shards_of(pool), name, recovery)


def from_actors(
    actors: Sequence[Any],
    name: str | None = None,
    recreate: Callable[[int], Any] | None = None,
    recovery: Recovery | None = None,
) -> ParallelIterator[Any]:
    """Create shards from existing actors that define `apply(fn, *args)` and `items()`.

    Args:
        actors: handles of the actors.
        name: shown by `repr`.
        recreate: shard index -> new actor that replaces a dead one. None: a dead shard raises
            ShardFailedError once and the stream continues with the others.
        recovery: how shards that die or hang are replaced.
    """
    if not actors:
        raise ValueError("from_actors: at least one actor is needed")
    for actor in actors:
        if not hasattr(actor, "apply"):
            raise TypeError(
                "from_actors takes handles of actors whose class has apply(fn, *args) and items(), "
                f"such as a subclass of ParallelIteratorWorker, got {actor!r}"
            )
    pool = ActorPool(recreate, len(actors), handles=actors)
    return ParallelIterator(
        _shards_of(pool), name or f"from_actors[shards={len(actors)}]", recovery
    )
