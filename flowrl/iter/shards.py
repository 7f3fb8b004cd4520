"""Who serves the shards of a ParallelIterator, in this process or in Ray actors.

A pool holds the workers: objects with `items()`. A chain is the stream of one shard: the items of
its worker with the recorded steps chained on; it lives where the worker is, and is made by the
first request, which carries the steps. A reply is tagged: items, or the end of the shard; the end
of a stream is never an exception.
"""

from __future__ import annotations

import glob
import os
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from flowrl.iter.errors import strip

U = TypeVar("U")

# a LocalIterator method, its arguments, and the line where the step was chained
Step = tuple[str, tuple[Any, ...], dict[str, Any], str]

_OURS = frozenset(glob.glob(os.path.join(os.path.dirname(__file__), "*.py")))

BACKLOG = 10_000  # items that one partition of a `repartition` may lag behind another


class Reply(NamedTuple):
    """What a shard answers: items, what the worker says about each, and whether it has ended."""

    items: list[Any]
    tags: list[dict[str, Any]]
    end: bool = False
    ticket: int | None = None  # a short name of the chain, for the requests to come


class Order(NamedTuple):
    """A request to a shard.

    chain: which stream; steps: how to make it, None if the worker has it; skip: items to leave
    out of a stream made again; batch_ms: collect items for so long; part: (partition, of how many)
    of a repartition.
    """

    chain: str
    steps: Sequence[Step] | None
    skip: int = 0
    batch_ms: float = 0
    part: tuple[int, int] | None = None


_NEXT = Order("", None)


class Chain:
    """The stream of one shard, where its worker is."""

    def __init__(self, worker: Any, steps: Sequence[Step], skip: int):
        from flowrl.iter.local import LocalIterator

        if not hasattr(worker, "items"):
            raise TypeError(
                f"{type(worker).__name__} has no items() that gives what the shard serves: derive "
                "it from ParallelIteratorWorker"
            )
        stream: Any = LocalIterator(worker.items, "shard")
        for method, args, options, line in steps:
            stream = getattr(stream, method)(*args, **options)
            stream.stage.line = line
        self._stream = stream
        self._worker = worker
        self._error: BaseException | None = None
        self._given = 0
        self._backlog: dict[int, deque[Any]] = {}
        if getattr(worker, "replayable", False):
            stream.take(skip)

    def answer(self, order: Order) -> Reply:
        """The next item, or those of the next `batch_ms` milliseconds."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        items: list[Any] = []
        tags: list[dict[str, Any]] = []
        until = time.monotonic() + order.batch_ms / 1000
        while True:
            try:
                items.append(self._next(order))
            except StopIteration:
                return Reply(items, tags, end=True)
            except BaseException as error:
                if not items:
                    raise
                self._error = error  # the items come first
                return Reply(items, tags)
            worker = self._worker
            tags.append(worker.reply_tags() if hasattr(worker, "reply_tags") else {})
            if time.monotonic() >= until:
                return Reply(items, tags)

    def _next(self, order: Order) -> Any:
        if order.part is None:
            return next(self._stream)
        mine, parts = order.part
        backlog = self._backlog.setdefault(mine, deque())
        while not backlog:
            part = self._given % parts
            others = self._backlog.setdefault(part, deque())
            if len(others) >= BACKLOG:
                raise RuntimeError(
                    f"repartition: partition {part} is {BACKLOG} items behind partition {mine}: "
                    "read all partitions at about the same pace"
                )
            others.append(next(self._stream))
            self._given += 1
        return backlog.popleft()


def serve(worker: Any, order: Order) -> Reply:
    """Runs where the worker is: answer an order."""
    chains = worker.__dict__.setdefault("_flowrl_chains", {})
    if order.chain not in chains:
        if order.steps is None:
            raise RuntimeError("this worker has lost its stream: it is not the one asked before")
        chains[order.chain] = Chain(worker, order.steps, order.skip)
    try:
        return chains[order.chain].answer(order)
    except BaseException as error:
        strip(error)  # the stages of the shard are not the reader's
        raise


# What actors return is a list with the fields of a Reply, and what they are asked with is mostly
# nothing: Ray takes a fifth of a millisecond longer for a class, and as long for an argument.


def serve_ticket(worker: Any, ticket: int) -> list[Any]:
    """Runs in an actor: the next item of the chain of this ticket."""
    return list(_with_traceback(worker._flowrl_tickets[ticket].answer, _NEXT))


def serve_remote(worker: Any, order: Order) -> list[Any]:
    """Runs in an actor: like `serve`, with a ticket for the requests to come."""
    reply = _with_traceback(serve, worker, order)
    chain = worker._flowrl_chains[order.chain]
    tickets = worker.__dict__.setdefault("_flowrl_tickets", [])
    if chain not in tickets:
        if None not in tickets:
            tickets.append(None)
        tickets[tickets.index(None)] = chain
    return list(reply._replace(ticket=tickets.index(chain)))


def _with_traceback(answer: Callable[..., Reply], *args: Any) -> Reply:
    """answer(*args); an error takes its traceback along as a note."""
    try:
        return answer(*args)
    except Exception as error:
        strip(error)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in _OURS]
        error.add_note("Traceback in the worker:\n" + "".join(traceback.format_list(frames)))
        raise


def forget(worker: Any, chain: str) -> None:
    """Runs where the worker is: drop a stream that nobody will read on."""
    dropped = worker.__dict__.get("_flowrl_chains", {}).pop(chain, None)
    tickets = worker.__dict__.get("_flowrl_tickets", [])
    if dropped in tickets:
        tickets[tickets.index(dropped)] = None


class ParallelIteratorWorker:
    """Base of shard actors: serves the items of an iterable, or of a callable returning one.

    Args:
        item_generator: the items.
        repeat: start again at the end; needs a callable, or an iterable that can be read twice.
    """

    replayable = True  # made again, it gives the same items: those accepted before are skipped

    def __init__(self, item_generator: Any, repeat: bool = False):
        if repeat and not callable(item_generator) and iter(item_generator) is item_generator:
            raise ValueError("repeat=True needs a callable or an iterable, not an iterator")
        self._item_generator = item_generator
        self._repeat = repeat

    def items(self) -> Iterable[Any]:
        """The items of the shard."""
        made = self._item_generator
        if self._repeat:
            return _Repeated(made)
        return made() if callable(made) else made

    def apply(self, fn: Callable[..., U], *args: Any) -> U:
        """fn(this object, *args), here."""
        return fn(self, *args)

    def next_item(self, ticket: int = 0) -> list[Any]:
        """A reply with the next item of the stream of this ticket."""
        return serve_ticket(self, ticket)


class _Repeated:
    """The items again and again; an error in between does not end it."""

    def __init__(self, made: Any):
        self._made = made
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> _Repeated:
        return self

    def __next__(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._made() if callable(self._made) else self._made)
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise StopIteration  # nothing to repeat


class Pool:
    """Workers in this process.

    Args:
        make: returns them; called at the first request.
        count: how many.
        replayable: whether a worker made again gives the same items.
        upstream: pools that the workers read from, stopped with this one.
    """

    remote = False

    def __init__(
        self,
        make: Callable[[], Sequence[Any]],
        count: int,
        replayable: bool = False,
        upstream: Sequence[Pool] = (),
    ):
        self._make = make
        self._upstream = list(upstream)
        self._count = count
        self._workers: Sequence[Any] | None = None
        self.replayable = replayable

    def __len__(self) -> int:
        return self._count

    def start(self) -> None:
        """Make the workers, if they are not there yet."""
        if self._workers is None:
            self._workers = self._make()

    def handle(self, index: int) -> Any:
        """The worker, or the actor it runs in."""
        self.start()
        assert self._workers is not None
        return self._workers[index]

    def ask(self, index: int, order: Order) -> Any:
        """Send an order; what is returned stands for the answer. (Here it is worked out when
        `result` asks for it.)"""
        return _Deferred(self.handle(index), order)

    def ask_next(self, index: int, ticket: int) -> Any:
        """Ask for the next item of a stream that a reply gave a ticket for."""
        raise NotImplementedError(f"{type(self).__name__} gives no tickets")

    def result(self, ref: Any) -> Reply:
        """The answer, or the error that the worker raised."""
        return serve(ref.worker, ref.order)

    def incarnation(self, index: int) -> int:
        """How often the worker was replaced."""
        return 0

    def replace(self, index: int) -> bool:
        """End a worker and put a new one in its place; False if that cannot be done."""
        return False

    def kill(self, index: int) -> None:
        """End a worker that does not answer."""

    def forget(self, index: int, chain: str) -> None:
        """Drop a stream of a worker."""
        if self._workers is not None:
            forget(self._workers[index], chain)

    def stop(self) -> None:
        """Release the workers."""
        self._workers = None
        for pool in self._upstream:
            pool.stop()


class _Deferred:
    """An order to a worker in this process, carried out when its result is asked for."""

    __slots__ = ("order", "worker")

    def __init__(self, worker: Any, order: Order):
        self.worker = worker
        self.order = order


class ActorPool(Pool):
    """Workers in Ray actors, made at the first request; ended by `stop()` if made here.

    Pickled, it carries the actors' handles, which are made for that if need be.

    Args:
        make: makes the actor of a shard from its index; None if none can be made.
        count: how many.
        handles: actors that exist already.
    """

    remote = True

    def __init__(
        self,
        make: Callable[[int], Any] | None,
        count: int,
        handles: Sequence[Any] | None = None,
        replayable: bool = False,
        upstream: Sequence[Pool] = (),
    ):
        self._make_one = make
        self._upstream = list(upstream)
        self._count = count
        self._handles = list(handles) if handles is not None else None
        self._owned = [handles is None] * count
        self._incarnations = [0] * count
        self.replayable = replayable

    def start(self) -> None:
        if self._handles is None:
            assert self._make_one is not None
            self._handles = [self._make_one(index) for index in range(self._count)]
            self._owned = [True] * self._count

    def handle(self, index: int) -> Any:
        self.start()
        assert self._handles is not None
        return self._handles[index]

    def ask(self, index: int, order: Order) -> Any:
        return self.handle(index).apply.remote(serve_remote, order)

    def ask_next(self, index: int, ticket: int) -> Any:
        handle = self.handle(index)
        if hasattr(handle, "next_item"):
            return handle.next_item.remote(ticket) if ticket else handle.next_item.remote()
        return handle.apply.remote(serve_ticket, ticket)

    def result(self, ref: Any) -> Reply:
        import ray

        try:
            return Reply(*ray.get(ref))
        except ray.exceptions.RayTaskError as error:
            if type(error.cause) in (ray.exceptions.RayTaskError, str):
                raise  # the error itself could not be pickled
            raise error.cause from None  # with its own type; the notes say what happened there

    def incarnation(self, index: int) -> int:
        return self._incarnations[index]

    def can_replace(self) -> bool:
        return self._make_one is not None

    def replace(self, index: int) -> bool:
        if self._make_one is None:
            return False
        self.kill(index)
        assert self._handles is not None
        self._handles[index] = self._make_one(index)
        self._owned[index] = True
        self._incarnations[index] += 1
        return True

    def kill(self, index: int) -> None:
        import ray

        ray.kill(self.handle(index))

    def forget(self, index: int, chain: str) -> None:
        if self._handles is not None and not self._owned[index]:
            self._handles[index].apply.remote(forget, chain)

    def stop(self) -> None:
        if self._handles is not None and any(self._owned):
            import ray

            if ray.is_initialized():
                for index, owned in enumerate(self._owned):
                    if owned:
                        ray.kill(self._handles[index])
            self._handles = None if all(self._owned) else self._handles
        for pool in self._upstream:
            pool.stop()

    def __getstate__(self) -> dict[str, Any]:
        self.start()
        passive = {"_make_one": None, "_owned": [False] * self._count, "_upstream": []}
        return {**self.__dict__, **passive}


class Shard(NamedTuple):
    """The description of one shard: a worker of a pool, and the steps on its items."""

    pool: Pool
    worker: int
    steps: tuple[Step, ...] = ()


class Shards:
    """The shards that one gather reads: numbered from 0, each asked with its own chain."""

    def __init__(
        self,
        shards: Sequence[Shard],
        name: str,
        chain: str | None = None,
        part: tuple[int, int] | None = None,
    ):
        if not shards:
            raise ValueError("at least one shard is needed")
        remote = {shard.pool.remote for shard in shards}
        if len(remote) > 1:
            raise ValueError(
                f"{name} has shards in this process and in actors, which cannot be gathered as "
                "one: gather them apart and unite the streams"
            )
        self.name = name
        self.remote = remote.pop()
        self.replayable = part is None and all(shard.pool.replayable for shard in shards)
        self._shards = list(shards)
        self._part = part
        self.chain = chain or uuid.uuid4().hex
        self._told: dict[int, int] = {}
        self._tickets: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._shards)

    def pools(self) -> list[Pool]:
        """The pools, each once."""
        return list({id(shard.pool): shard.pool for shard in self._shards}.values())

    def start(self) -> None:
        for pool in self.pools():
            pool.start()

    def request(self, index: int, batch_ms: float = 0, skip: int = 0) -> Any:
        """Ask a shard; `skip` items are left out if its stream must be made again."""
        pool, worker, steps = self._shards[index]
        incarnation = pool.incarnation(worker)
        told = self._told.get(index) == incarnation
        if told and not batch_ms and index in self._tickets:
            return pool.ask_next(worker, self._tickets[index])
        self._tickets.pop(index, None)
        self._told[index] = incarnation
        # partitions share a chain that another may have made: each of them brings the steps
        order = Order(self.chain, None if told else steps, skip, batch_ms, self._part)
        return pool.ask(worker, order)

    def result(self, index: int, ref: Any) -> Reply:
        reply = self._shards[index].pool.result(ref)
        self._note_ticket(index, reply)
        return reply

    def results(self, refs: dict[Any, int]) -> list[Reply]:
        """The answers to requests to actors (ref -> shard), fetched together; raises if one did."""
        import ray

        replies = [Reply(*fields) for fields in ray.get(list(refs))]
        for index, reply in zip(refs.values(), replies, strict=True):
            self._note_ticket(index, reply)
        return replies

    def _note_ticket(self, index: int, reply: Reply) -> None:
        if reply.ticket is not None and self._part is None:
            self._tickets[index] = reply.ticket

    def incarnation(self, index: int) -> int:
        return self._shards[index].pool.incarnation(self._shards[index].worker)

    def handle(self, index: int) -> Any:
        return self._shards[index].pool.handle(self._shards[index].worker)

    def replace(self, index: int) -> bool:
        return self._shards[index].pool.replace(self._shards[index].worker)

    def kill(self, index: int) -> None:
        self._shards[index].pool.kill(self._shards[index].worker)

    def __getstate__(self) -> dict[str, Any]:
        # a copy in another process reads a stream of its own
        chain = self.chain if self._part is not None else uuid.uuid4().hex
        return {**self.__dict__, "chain": chain, "_told": {}, "_tickets": {}}

    def stop(self) -> None:
        for pool, worker, _ in self._shards:
            pool.forget(worker, self.chain)
        for pool in self.pools():
            pool.stop()
        self._told.clear()
        self._tickets.clear()
