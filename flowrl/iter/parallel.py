"""ParallelIterator: a description of parallel shards and of what each does to its items.

Nothing is created before the first pull, `shards()` or pickling. The shards are workers in this
process, or Ray actors: any actor with a method `apply(fn, *args)` that returns
fn(actor's object, *args) and whose object has `items()`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from flowrl.iter.errors import OnError
from flowrl.iter.gather import GatherAsync, GatherShard, GatherSync
from flowrl.iter.local import LocalIterator
from flowrl.iter.recovery import Recovery
from flowrl.iter.shard_server import ParallelIteratorWorker, PartitionWorker
from flowrl.iter.shards import ActorPool, Pool, Shard, Shards
from flowrl.iter.stage import chained_at

T = TypeVar("T")
U = TypeVar("U")


class ParallelIterator(Generic[T]):
    """A set of shards and the steps that each applies to its items, where they are.

    A description: it may be gathered, selected from and united any number of times, and every
    gather reads the shards from their beginning. Pickled, it carries the handles of its actors.

    Args:
        shards: the shards.
        name: shown by `repr`.
        recovery: how shards that die or hang are replaced, if not as each says itself.
    """

    def __init__(self, shards: Sequence[Shard], name: str, recovery: Recovery | None = None):
        if recovery is not None:
            shards = [shard._replace(recovery=recovery) for shard in shards]
        self._shards = tuple(shards)
        self.name = name

    def _then(self, method: str, suffix: str, *args: Any, **options: Any) -> ParallelIterator[Any]:
        step = (method, args, options, chained_at())
        shards = [shard._replace(steps=(*shard.steps, step)) for shard in self._shards]
        return ParallelIterator(shards, f"{self.name}{suffix}")

    # -- what each shard does ------------------------------------------------------------------

    def for_each(
        self,
        fn: Callable[[T], U],
        max_concurrency: int = 1,
        resources: dict[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> ParallelIterator[U]:
        """fn(item) for every item, in the shard's process.

        With `max_concurrency` other than 1 as Ray tasks that the shard starts, so many at a time
        (see LocalIterator.for_each).
        """
        options: dict[str, Any] = {"max_concurrency": max_concurrency, "resources": resources}
        _build(lambda it: it.for_each(fn, on_error=on_error, **options))
        return self._then("for_each", ".for_each()", fn, on_error=on_error, **options)

    def filter(self, fn: Callable[[T], bool], on_error: OnError = "raise") -> ParallelIterator[T]:
        """The items for which fn(item) is true."""
        _build(lambda it: it.filter(fn, on_error))
        return self._then("filter", ".filter()", fn, on_error=on_error)

    def batch(self, n: int) -> ParallelIterator[list[T]]:
        """Lists of n items of one shard; its last may be shorter."""
        _build(lambda it: it.batch(n))
        return self._then("batch", f".batch({n})", n)

    def flatten(self) -> ParallelIterator[Any]:
        """The elements of items that are lists."""
        return self._then("flatten", ".flatten()")

    def combine(
        self, fn: Callable[[T], Iterable[U]], on_error: OnError = "raise"
    ) -> ParallelIterator[U]:
        """The elements of fn(item), a list that may be empty, for every item."""
        _build(lambda it: it.combine(fn, on_error))
        return self._then("combine", ".combine()", fn, on_error=on_error)

    def transform(self, fn: Callable[[Iterator[T]], Iterable[U]]) -> ParallelIterator[U]:
        """fn(iterator of the items), once per shard."""
        _build(lambda it: it.transform(fn))
        return self._then("transform", ".transform()", fn)

    def local_shuffle(
        self, shuffle_buffer_size: int, seed: int | None = None
    ) -> ParallelIterator[T]:
        """Each shard's items in random order within a sliding window.

        Args:
            shuffle_buffer_size: items of the window; 1 changes nothing.
            seed: of every shard's order; None for another one each time.
        """
        _build(lambda it: it.shuffle(shuffle_buffer_size, seed))
        suffix = f".local_shuffle(shuffle_buffer_size={shuffle_buffer_size}, seed={seed})"
        return self._then("shuffle", suffix, shuffle_buffer_size, seed)

    # -- which shards --------------------------------------------------------------------------

    def repartition(self, num_partitions: int, batch_ms: float = 0) -> ParallelIterator[T]:
        """The same items in another number of shards: partition i gets every
        `num_partitions`-th item of every shard, from the i-th on.

        A partition that dies loses what it has in its hands and goes on; a shard under it that
        dies is not made again. Read the partitions at about the same pace: a shard keeps at most
        10,000 items for one that lags.

        Args:
            num_partitions: shards afterwards.
            batch_ms: a shard collects items for so many milliseconds per request.
        """
        if num_partitions < 1:
            raise ValueError(f"repartition: num_partitions must be >= 1, got {num_partitions}")
        key = uuid.uuid4().hex  # other partitions of these shards have streams of their own
        generators = [
            partial(_partition, self._shards, self.name, (i, num_partitions), batch_ms, key)
            for i in range(num_partitions)
        ]
        upstream = Shards(self._shards, self.name)
        pool = _pool(generators, False, not upstream.remote, upstream.pools())
        name = f"{self.name}.repartition[num_partitions={num_partitions}]"
        return ParallelIterator(_all_of(pool), name, self._shards[0].recovery)

    def union(self, other: ParallelIterator[Any]) -> ParallelIterator[Any]:
        """The shards of both, each with its own steps."""
        if not isinstance(other, ParallelIterator):
            raise TypeError(f"union() takes a ParallelIterator, got {type(other).__name__}")
        name = f"ParallelUnion[{self!r}, {other!r}]"
        return ParallelIterator((*self._shards, *other._shards), name)

    def select_shards(self, shards_to_keep: Sequence[int]) -> ParallelIterator[T]:
        """Only these shards, in the order in which they are.

        Raises:
            ValueError: none, or one that there is not.
        """
        wanted = list(shards_to_keep)
        if not wanted:
            raise ValueError("select_shards: at least one shard must be selected")
        chosen = sorted({self._checked(i) for i in wanted})
        picked = [self._shards[index]._replace(followed=False) for index in chosen]
        name = f"{self!r}.select_shards({len(picked)} total)"
        return ParallelIterator(picked, name)

    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self._shards)

    def shards(self) -> list[LocalIterator[T]]:
        """A stream per shard, each to be read by whoever gets it (they pickle); starts the
        actors."""
        for pool in Shards(self._shards, self.name).pools():
            pool.start()
        return [self.get_shard(index) for index in range(self.num_shards())]

    def get_shard(
        self, shard_index: int, batch_ms: float = 0, num_async: int = 1
    ) -> LocalIterator[T]:
        """The items of one shard, in its order.

        Args:
            shard_index: which one, from 0.
            batch_ms: it collects items for so many milliseconds per request.
            num_async: requests in flight.
        """
        shard = self._shards[self._checked(shard_index)]._replace(followed=False)
        shards = Shards([shard], self.name)
        stage = GatherShard(shards, num_async, batch_ms=batch_ms)
        return LocalIterator(stage, f"{self.name}.shard[{shard_index}]")

    def _checked(self, index: int) -> int:
        if not 0 <= index < len(self._shards):
            raise ValueError(f"there is no shard {index} among {len(self._shards)} (from 0)")
        return index

    # -- gathering -----------------------------------------------------------------------------

    def batch_across_shards(self, on_error: OnError = "raise") -> LocalIterator[list[T]]:
        """Lists of one item per live shard, in shard order; a barrier between rounds."""
        shards = Shards(self._shards, self.name)
        stage = GatherSync(shards, on_error=on_error)
        return LocalIterator(stage, f"{self!r}.batch_across_shards()")

    def gather_sync(self, on_error: OnError = "raise") -> LocalIterator[T]:
        """Round by round, the items in shard order. Nothing is asked for between two rounds."""
        shards = Shards(self._shards, self.name)
        stage = GatherSync(shards, flat=True, on_error=on_error)
        return LocalIterator(stage, f"{self!r}.gather_sync()")

    def gather_async(
        self,
        batch_ms: float = 0,
        num_async: int = 1,
        ask_again: Literal["after", "before"] = "after",
        on_error: OnError = "raise",
        limit: Any = None,
    ) -> LocalIterator[T]:
        """Items of any shard as they come.

        Args:
            batch_ms: a shard collects items for so many milliseconds before it answers.
            num_async: requests in flight per shard.
            ask_again: a shard is asked for its next item "after" the consumer has finished with
                the one handed over (it pulls the next), or "before" it is handed over. An item is
                at most `num_async - 1` ("after") or `num_async` ("before") items of its own shard
                old (with `batch_ms` so many replies, of as many items as come in that time).
            on_error: what to do when a shard's code raises.
            limit: an object that says when enough is asked for; see GatherAsync.
        """
        stage = GatherAsync(
            Shards(self._shards, self.name),
            num_async,
            ask_again,
            limit,
            batch_ms=batch_ms,
            on_error=on_error,
        )
        return LocalIterator(stage, f"{self!r}.gather_async()")

    def take(self, n: int) -> list[T]:
        """The first n items of `gather_sync()`."""
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


def _build(chain: Callable[[LocalIterator[Any]], Any]) -> None:
    """Chain a step on nothing, so that wrong arguments are refused here and now."""
    chain(LocalIterator(()))


def _partition(
    shards: Sequence[Shard],
    name: str,
    part: tuple[int, int],
    batch_ms: float,
    key: str,
    chain: str,
) -> LocalIterator[Any]:
    """Runs in a partition's worker: its part of the items of all shards, as they come. All
    partitions that one gather reads share the streams of those."""
    reader = chain.rpartition("/")[0]
    read = Shards(shards, name, f"{reader}.{key}", part)
    stage = GatherAsync(read, ask_again="before", batch_ms=batch_ms)
    return LocalIterator(stage, f"part {part[0]} of {name}")


def _pool(
    generators: Sequence[Any], repeat: bool, in_process: bool, upstream: Sequence[Pool] = ()
) -> Pool:
    """A worker per generator."""
    if not generators:
        raise ValueError("at least one shard is needed")
    for generator in generators:
        if not callable(generator) and not hasattr(generator, "__iter__"):
            raise TypeError(
                "a shard is made of an iterable or a callable that returns one, got "
                f"{type(generator).__name__}"
            )
    worker = PartitionWorker if upstream else ParallelIteratorWorker
    once = any(not callable(g) and iter(g) is g for g in generators)
    replayable = not once and not upstream
    if in_process:

        def workers() -> list[Any]:
            return [worker(generator, repeat) for generator in generators]

        return Pool(workers, len(generators), replayable, upstream)

    def actor(index: int) -> Any:
        import ray

        kind = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(worker)
        return kind.remote(generators[index], repeat)

    return ActorPool(actor, len(generators), replayable=replayable, upstream=upstream)


def _all_of(pool: Pool) -> list[Shard]:
    return [Shard(pool, index) for index in range(len(pool))]


def from_items(
    items: Sequence[T], num_shards: int = 2, repeat: bool = False, in_process: bool = False
) -> ParallelIterator[T]:
    """The items, dealt to the shards in turn.

    Args:
        items: the items.
        num_shards: Ray actors to deal them to.
        repeat: start again at the end.
        in_process: no actors: the shards run in this process.
    """
    _check_shards(num_shards)
    if not isinstance(items, Sequence):
        items = list(items)
    shards: list[list[T]] = [list(items[i::num_shards]) for i in range(num_shards)]
    kind = type(items[0]).__name__ if items else "None"
    tail = ", repeat=True" if repeat else ""
    name = f"from_items[{kind}, {len(items)}, shards={num_shards}{tail}]"
    return from_iterators(shards, repeat, name, in_process)


def from_range(
    n: int, num_shards: int = 2, repeat: bool = False, in_process: bool = False
) -> ParallelIterator[int]:
    """0 … n-1, a contiguous piece per shard; the last takes the rest."""
    _check_shards(num_shards)
    size = n // num_shards
    ends = [*(size * i for i in range(1, num_shards)), n]
    shards = [range(size * i, end) for i, end in enumerate(ends)]
    name = f"from_range[{n}, shards={num_shards}{', repeat=True' if repeat else ''}]"
    return from_iterators(shards, repeat, name, in_process)


def _check_shards(num_shards: int) -> None:
    if not isinstance(num_shards, int) or num_shards < 1:
        raise ValueError(f"num_shards must be an int of at least 1, got {num_shards!r}")


def from_iterators(
    generators: Sequence[Any],
    repeat: bool = False,
    name: str | None = None,
    in_process: bool = False,
    recovery: Recovery | None = None,
) -> ParallelIterator[Any]:
    """One shard per iterable, or per callable that returns one.

    A shard whose actor dies is made again and skips the items that were accepted before, so its
    generator should give the same items each time.

    Args:
        generators: iterables or callables (a generator object does not pickle: give the callable).
        repeat: start again at the end.
        name: shown by `repr`.
        in_process: no actors: the shards run in this process.
        recovery: how shards that die or hang are replaced.
    """
    pool = _pool(generators, repeat, in_process)
    tail = ", repeat=True" if repeat else ""
    return ParallelIterator(
        _all_of(pool), name or f"from_iterators[shards={len(generators)}{tail}]", recovery
    )


def from_actors(
    actors: Sequence[Any],
    name: str | None = None,
    recreate: Callable[[int], Any] | None = None,
    recovery: Recovery | None = None,
) -> ParallelIterator[Any]:
    """Shards served by existing actors that have `apply(fn, *args)` and `items()`.

    Args:
        actors: the handles.
        name: shown by `repr`.
        recreate: makes the actor of a shard again, from its index, when it has died. Without it a
            dead shard raises ShardFailedError once, and the others go on.
        recovery: how shards that die or hang are replaced.
    """
    if not actors:
        raise ValueError("from_actors: at least one actor is needed")
    pool = ActorPool(recreate, len(actors), handles=actors)
    return ParallelIterator(_all_of(pool), name or f"from_actors[shards={len(actors)}]", recovery)
