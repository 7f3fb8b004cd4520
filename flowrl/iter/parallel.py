"""ParallelIterator: a description of parallel shards and of what each does to its items.

Nothing is created before the first pull. The shards are iterators that run in process, or Ray
actors: any actor with a method `apply(fn, *args)` that returns fn(actor's object, *args).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from flowrl.iter.gather import Gather, GatherAsync, GatherSync, Reply, Shards
from flowrl.iter.local import LocalIterator

T = TypeVar("T")
U = TypeVar("U")

Step = tuple[str, tuple[Any, ...]]  # a LocalIterator method and its arguments
_chain_ids = itertools.count()


def build_chain(items: Callable[[], Iterable[Any]], steps: Sequence[Step]) -> LocalIterator[Any]:
    """The stream of one shard: its items, with the recorded steps chained on."""
    stream: LocalIterator[Any] = LocalIterator(items, "shard")
    for method, args in steps:
        stream = getattr(stream, method)(*args)
    return stream


def serve(worker: Any, chain: int, steps: Sequence[Step] | None) -> Reply:
    """Runs in the shard actor: the next item of the chain, which the first request carries."""
    chains = worker.__dict__.setdefault("_flowrl_chains", {})
    if chain not in chains:
        if steps is None:
            raise RuntimeError("this worker was restarted and lost its stream: ask it again")
        chains[chain] = build_chain(worker.items, steps)
    try:
        return answer(chains[chain], worker)
    except BaseException as error:
        # the notes travel; the stages that they came from stay here (they may not pickle)
        for name in [name for name in vars(error) if name.startswith("_flowrl")]:
            delattr(error, name)
        raise


def answer(stream: LocalIterator[Any], worker: Any) -> Reply:
    """Pull one item, with what the worker wants to say about it (`worker.reply_tags()`)."""
    try:
        item = next(stream)
    except StopIteration:
        return Reply(end=True)
    return Reply(item, worker.reply_tags() if hasattr(worker, "reply_tags") else None)


class ParallelIteratorWorker:
    """Base of shard actors: serves the items of an iterable, or of a callable returning one.

    Args:
        item_generator: the items.
        repeat: start again at the end; needs a callable, or an iterable that can be read twice.
    """

    def __init__(self, item_generator: Any, repeat: bool = False):
        self._item_generator = item_generator
        self._repeat = repeat

    def items(self) -> Iterator[Any]:
        while True:
            made = self._item_generator
            yield from made() if callable(made) else made
            if not self._repeat:
                return

    def apply(self, fn: Callable[..., U], *args: Any) -> U:
        return fn(self, *args)


class LocalShards:
    """Shards that run in this process, one request at a time.

    Args:
        make: returns the objects whose `items()` are the shards; called at the first request.
        steps: chained on the items of each.
    """

    remote = False

    def __init__(self, make: Callable[[], Sequence[Any]], steps: Sequence[Step]):
        self._make = make
        self._steps = steps
        self._shards: list[_Deferred] | None = None

    def _opened(self) -> list[_Deferred]:
        if self._shards is None:
            self._shards = [
                _Deferred(build_chain(worker.items, self._steps), worker) for worker in self._make()
            ]
        return self._shards

    def __len__(self) -> int:
        return len(self._opened())

    def request(self, index: int) -> Any:
        return self._opened()[index]

    def result(self, ref: _Deferred) -> Reply:
        return answer(ref.stream, ref.worker)

    def incarnation(self, index: int) -> int:
        return 0

    def handle(self, index: int) -> Any:
        return self._opened()[index].worker

    def stop(self) -> None:
        self._shards = None


class _Deferred:
    """A shard in process, which is also a request to it: computed when the result is asked for."""

    def __init__(self, stream: LocalIterator[Any], worker: Any):
        self.stream = stream
        self.worker = worker


class ActorShards:
    """Shards served by Ray actors, made by `make()` at the first request.

    Args:
        make: returns the actor handles.
        steps: shipped with the first request to each actor.
        owned: whether `stop()` ends the actors.
    """

    remote = True

    def __init__(self, make: Callable[[], Sequence[Any]], steps: Sequence[Step], owned: bool):
        self._make = make
        self._steps = steps
        self._owned = owned
        self._actors: Sequence[Any] | None = None
        self._chain = next(_chain_ids)
        self._told: set[int] = set()

    def actors(self) -> Sequence[Any]:
        if self._actors is None:
            self._actors = self._make()
        return self._actors

    def __len__(self) -> int:
        return len(self.actors())

    def request(self, index: int) -> Any:
        steps = None if index in self._told else self._steps
        self._told.add(index)
        return self.actors()[index].apply.remote(serve, self._chain, steps)

    def result(self, ref: Any) -> Reply:
        import ray

        return ray.get(ref)

    def incarnation(self, index: int) -> int:
        return 0

    def handle(self, index: int) -> Any:
        return self.actors()[index]

    def stop(self) -> None:
        if self._owned and self._actors is not None:
            import ray

            for actor in self._actors:
                ray.kill(actor)
        self._actors = None
        self._told.clear()


class ParallelIterator(Generic[T]):
    """A set of shards and the steps that each applies to its items, where they are.

    Args:
        make_shards: from the steps, who serves them; called when a gather is built, and must
            create nothing before the first request.
        name: shown by `repr`.
    """

    def __init__(
        self,
        make_shards: Callable[[Sequence[Step]], Shards],
        name: str,
        steps: tuple[Step, ...] = (),
    ):
        self._make_shards = make_shards
        self._steps = steps
        self.name = name

    def _then(self, method: str, args: tuple[Any, ...], suffix: str) -> ParallelIterator[Any]:
        return ParallelIterator(
            self._make_shards, f"{self.name}{suffix}", (*self._steps, (method, args))
        )

    def for_each(self, fn: Callable[[T], U]) -> ParallelIterator[U]:
        """fn(item) for every item, in the shard's process."""
        return self._then("for_each", (fn,), ".for_each()")

    def filter(self, fn: Callable[[T], bool]) -> ParallelIterator[T]:
        """The items for which fn(item) is true."""
        return self._then("filter", (fn,), ".filter()")

    def batch(self, n: int) -> ParallelIterator[list[T]]:
        """Lists of n items of one shard; its last may be shorter."""
        return self._then("batch", (n,), f".batch({n})")

    def flatten(self) -> ParallelIterator[Any]:
        """The elements of items that are lists."""
        return self._then("flatten", (), ".flatten()")

    def combine(self, fn: Callable[[T], Iterable[U]]) -> ParallelIterator[U]:
        """The elements of fn(item), a list that may be empty, for every item."""
        return self._then("combine", (fn,), ".combine()")

    def transform(self, fn: Callable[[Iterator[T]], Iterable[U]]) -> ParallelIterator[U]:
        """fn(iterator of the items), once per shard."""
        return self._then("transform", (fn,), ".transform()")

    def _gathered(self, stage: Gather, suffix: str) -> LocalIterator[Any]:
        return LocalIterator(stage, f"{self!r}{suffix}")

    def batch_across_shards(self) -> LocalIterator[list[T]]:
        """Lists of one item per live shard, in shard order; a barrier between rounds."""
        shards = self._make_shards(self._steps)
        return self._gathered(GatherSync(shards, self.name), ".batch_across_shards()")

    def gather_sync(self) -> LocalIterator[T]:
        """Round by round, the items in shard order."""
        flat = self.batch_across_shards().flatten()
        flat.name = f"{self!r}.gather_sync()"
        return flat

    def gather_async(self, num_async: int = 1) -> LocalIterator[T]:
        """Items of any shard as they come, `num_async` requests in flight per shard."""
        shards = self._make_shards(self._steps)
        return self._gathered(GatherAsync(shards, self.name, num_async), ".gather_async()")

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


def from_items(
    items: Sequence[T], num_shards: int = 2, repeat: bool = False, in_process: bool = False
) -> ParallelIterator[T]:
    """The items, dealt to the shards in turn."""
    shards: list[list[T]] = [list(items[i::num_shards]) for i in range(num_shards)]
    kind = type(items[0]).__name__ if items else "None"
    tail = ", repeat=True" if repeat else ""
    name = f"from_items[{kind}, {len(items)}, shards={num_shards}{tail}]"
    return from_iterators(shards, repeat, name, in_process)


def from_range(
    n: int, num_shards: int = 2, repeat: bool = False, in_process: bool = False
) -> ParallelIterator[int]:
    """0 … n-1, a contiguous piece per shard; the last takes the rest."""
    size = n // num_shards
    ends = [*(size * i for i in range(1, num_shards)), n]
    shards = [range(size * i, end) for i, end in enumerate(ends)]
    name = f"from_range[{n}, shards={num_shards}{', repeat=True' if repeat else ''}]"
    return from_iterators(shards, repeat, name, in_process)


def from_iterators(
    generators: Sequence[Any],
    repeat: bool = False,
    name: str | None = None,
    in_process: bool = False,
) -> ParallelIterator[Any]:
    """One shard per iterable, or per callable that returns one."""
    name = name or f"from_iterators[shards={len(generators)}{', repeat=True' if repeat else ''}]"

    def make(steps: Sequence[Step]) -> Shards:
        if in_process:
            return LocalShards(
                lambda: [ParallelIteratorWorker(g, repeat) for g in generators], steps
            )

        def actors() -> list[Any]:
            import ray

            worker = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(
                ParallelIteratorWorker
            )
            return [worker.remote(generator, repeat) for generator in generators]

        return ActorShards(actors, steps, owned=True)

    return ParallelIterator(make, name)


def from_actors(actors: Sequence[Any], name: str | None = None) -> ParallelIterator[Any]:
    """Shards served by existing actors that have `apply(fn, *args)` and `items()`."""
    return ParallelIterator(
        lambda steps: ActorShards(lambda: actors, steps, owned=False),
        name or f"from_actors[shards={len(actors)}]",
    )
