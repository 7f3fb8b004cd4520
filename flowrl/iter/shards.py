"""Who serves the shards of a ParallelIterator: pools of workers, here or in Ray actors."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from flowrl.iter.recovery import PendingRequest, Recovery, is_death
from flowrl.iter.shard_server import (
    Reply,
    ShardRequest,
    Step,
    forget,
    serve,
    serve_remote,
    serve_ticket,
)

NOT_YET = -1  # a shard was told its steps and has not answered


_users = 0  # of a Ray that `start_ray` has joined or started


def start_ray(address: str | None = None, **options: Any) -> bool:
    """Join a Ray cluster, or start one on this machine, where this process has none yet.

    Whether it is one that was joined or started here: then the caller is to call `leave_ray()` when
    it needs it no more, once.

    Args:
        address: of a running cluster; None starts a new one, though others may be running.
        options: of `ray.init`.
    """
    import ray

    global _users
    if not ray.is_initialized():
        own: dict[str, Any] = {} if address else {"include_dashboard": False}
        ray.init(address or "local", logging_level=logging.WARNING, **own, **options)
        _users = 0
    elif not _users:
        return False  # whoever uses flowrl has done it
    _users += 1
    return True


def leave_ray() -> None:
    """One that `start_ray` said True to needs it no more; the last one shuts it down."""
    import ray

    global _users
    _users = max(0, _users - 1)
    if not _users and ray.is_initialized():
        ray.shutdown()


def node_id() -> str | None:
    """The node of a Ray cluster that this process runs on; None without Ray."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return str(ray.get_runtime_context().get_node_id())


class Pool:
    """Workers in this process.

    Args:
        make: returns them; called at the first request.
        count: how many.
        replayable: whether a worker made again gives the same items.
        upstream: pools that the workers read from, kept while this one has readers.
    """

    remote = False
    changes = 0  # how often workers have joined or left

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
        self._readers = 0
        self.replayable = replayable

    def __len__(self) -> int:
        return self._count

    def acquire(self) -> None:
        """A reader has come."""
        self.start()
        if not self._readers:
            for pool in self._upstream:
                pool.acquire()
        self._readers += 1

    def release(self) -> None:
        """A reader has gone; the last one ends the workers."""
        self._readers -= 1
        if not self._readers:
            self.stop()
            for pool in self._upstream:
                pool.release()

    def start(self) -> None:
        """Make the workers, if they are not there yet."""
        if self._workers is None:
            self._workers = self._make()

    def handle(self, index: int) -> Any:
        """The worker, or the actor it runs in."""
        self.start()
        assert self._workers is not None
        return self._workers[index]

    def ask(self, index: int, order: ShardRequest) -> Any:
        """Send an order; what is returned stands for the answer. (Here it is worked out when
        `result` asks for it.)"""
        return _Deferred(self.handle(index), order)

    def asker(self, index: int, ticket: int) -> Callable[[], Any]:
        """What asks for the next item of a stream that a reply gave a ticket for."""
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

    def mark_failed(self, index: int) -> None:
        """A worker has failed for good."""

    def kill(self, index: int) -> None:
        """End a worker that does not answer."""

    def forget(self, index: int, chain: str) -> None:
        """Drop a stream of a worker."""
        if self._workers is not None:
            forget(self._workers[index], chain)

    def stop(self) -> None:
        """End the workers."""
        self._workers = None


class _Deferred:
    """An order to a worker in this process, carried out when its result is asked for."""

    __slots__ = ("order", "worker")

    def __init__(self, worker: Any, order: ShardRequest):
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
        self._owned: set[int] = set(range(count)) if handles is None else set()
        self._incarnations = [0] * count
        self._readers = 0
        self.replayable = replayable

    def start(self) -> None:
        if self._handles is None:
            assert self._make_one is not None
            self._handles = [self._make_one(index) for index in range(self._count)]

    def handle(self, index: int) -> Any:
        self.start()
        assert self._handles is not None
        return self._handles[index]

    def ask(self, index: int, order: ShardRequest) -> Any:
        return self.handle(index).apply.remote(serve_remote, order)

    def asker(self, index: int, ticket: int) -> Callable[[], Any]:
        handle = self.handle(index)
        if ticket == 0 and hasattr(handle, "flowrl_next_item"):
            return handle.flowrl_next_item.remote
        return partial(handle.apply.remote, serve_ticket, ticket)

    def result(self, ref: Any) -> Reply:
        import ray

        try:
            return Reply(*ray.get(ref))
        except ray.exceptions.RayTaskError as error:
            if type(error.cause) in (ray.exceptions.RayTaskError, str):
                raise  # the error itself could not be pickled
            if is_death(error.cause):
                raise  # of another actor, that the shard's code has asked
            raise error.cause from None  # with its own type; the notes say what happened there

    def incarnation(self, index: int) -> int:
        return self._incarnations[index]

    def replace(self, index: int) -> bool:
        if self._make_one is None:
            return False
        self.kill(index)
        assert self._handles is not None
        self._handles[index] = self._make_one(index)
        self._owned.add(index)
        self._incarnations[index] += 1
        return True

    def kill(self, index: int) -> None:
        import ray

        ray.kill(self.handle(index))

    def forget(self, index: int, chain: str) -> None:
        import ray

        if self._handles is not None and ray.is_initialized():
            self._handles[index].apply.remote(forget, chain)

    def stop(self) -> None:
        if self._handles is not None and self._owned:
            import ray

            if ray.is_initialized():
                for index in self._owned:
                    ray.kill(self._handles[index])
            self._handles = None if len(self._owned) == self._count else self._handles

    def __getstate__(self) -> dict[str, Any]:
        self.start()
        passive: dict[str, Any] = {
            "_make_one": None,
            "_owned": set(),
            "_readers": 0,
            "_upstream": [],
        }
        return {**self.__dict__, **passive}


class Shard(NamedTuple):
    """The description of one shard: a worker of a pool, and the steps on its items.

    followed: it stands for the whole pool: workers that join serve shards like this one.
    """

    pool: Pool
    worker: int
    steps: tuple[Step, ...] = ()
    recovery: Recovery = Recovery()
    followed: bool = False


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
        self.replayable = part is None and all(map(_replayable, shards))
        self.seed = uuid.uuid4().hex  # of what is random in the steps
        self._shards = list(shards)
        self._part = part
        self.chain = chain or uuid.uuid4().hex
        self._names: dict[int, str] = {}  # of chains
        self._told: dict[int, int] = {}
        self._askers: dict[int, Callable[[], Any]] = {}
        self._reading = False
        self._followed: list[Shard] = []
        for shard in shards:
            if shard.followed and not any(_alike(shard, one) for one in self._followed):
                self._followed.append(shard)

    def __len__(self) -> int:
        return len(self._shards)

    def changes(self) -> int:
        """How often workers have joined or left."""
        return sum(shard.pool.changes for shard in self._followed)

    def present(self) -> list[bool]:
        """For each shard whether its worker has not left; those of workers that have joined come
        last."""
        for one in self._followed:
            there = {shard.worker for shard in self._shards if _alike(shard, one)}
            for worker in range(len(one.pool)):
                if worker not in there:
                    self._shards.append(one._replace(worker=worker))
        return [not s.followed or s.worker < len(s.pool) for s in self._shards]

    def pools(self) -> list[Pool]:
        """The pools, each once."""
        return list({id(shard.pool): shard.pool for shard in self._shards}.values())

    def recovery(self, index: int) -> Recovery:
        return self._shards[index].recovery

    def start(self) -> None:
        """Start the workers, and keep them until `stop()`."""
        if self._part is None and not self._reading:
            for pool in self.pools():
                pool.acquire()
            self._reading = True

    def request(self, index: int, batch_ms: float = 0, skip: int = 0) -> Any:
        """Ask a shard; `skip` items are left out if its stream must be made again."""
        pool, worker, steps, *_ = self._shards[index]
        incarnation = pool.incarnation(worker)
        told = self._told.get(index) == incarnation
        if told and not batch_ms and index in self._askers:
            return self._askers[index]()
        self._askers.pop(index, None)
        self._told.setdefault(index, NOT_YET)
        # partitions share a chain that another may have made: each of them brings the steps
        seed = f"{self.seed}/{index}"
        order = ShardRequest(
            self._chain_of(index), None if told else steps, skip, batch_ms, self._part, seed
        )
        return pool.ask(worker, order)

    def _chain_of(self, index: int) -> str:
        """The name of a shard's stream where its worker is. Several shards may be of one worker:
        what stands before the slash tells them apart, and is alike for all partitions of a pool."""
        if index not in self._names:
            own = self._shards[index]
            same = [one.pool is own.pool and one.worker == own.worker for one in self._shards]
            self._names[index] = f"{self.chain}.{sum(same[:index])}/{index}"
        return self._names[index]

    def result(self, asked: PendingRequest, ref: Any) -> Reply:
        """The answer to a request."""
        reply = self._shards[asked.shard.index].pool.result(ref)
        self._note(asked, reply)
        return reply

    def results(self, asked: Sequence[PendingRequest], refs: list[Any]) -> list[Reply | None]:
        """The answers to requests to actors, fetched together; raises if one did."""
        import ray

        replies: list[Reply | None] = []
        for request, fields in zip(asked, ray.get(refs), strict=True):
            reply = Reply(*fields)
            self._note(request, reply)
            replies.append(reply)
        return replies

    def _note(self, asked: PendingRequest, reply: Reply) -> None:
        """The worker has the stream, and may have a ticket for it."""
        index = asked.shard.index
        self._told[index] = asked.incarnation
        if reply.ticket is not None and self._part is None:
            shard = self._shards[index]
            self._askers[index] = shard.pool.asker(shard.worker, reply.ticket)

    def incarnation(self, index: int) -> int:
        return self._shards[index].pool.incarnation(self._shards[index].worker)

    def handle(self, index: int) -> Any:
        return self._shards[index].pool.handle(self._shards[index].worker)

    def replace(self, index: int) -> bool:
        return self._shards[index].pool.replace(self._shards[index].worker)

    def kill(self, index: int) -> None:
        self._shards[index].pool.kill(self._shards[index].worker)

    def mark_failed(self, index: int) -> None:
        self._shards[index].pool.mark_failed(self._shards[index].worker)

    def __getstate__(self) -> dict[str, Any]:
        # a copy in another process reads a stream of its own
        chain = self.chain if self._part is not None else uuid.uuid4().hex
        anew = {"chain": chain, "_names": {}, "_told": {}, "_askers": {}, "_reading": False}
        return {**self.__dict__, **anew}

    def stop(self) -> None:
        for index, here in enumerate(self.present()):
            if here and index in self._told:
                shard = self._shards[index]
                shard.pool.forget(shard.worker, self._chain_of(index))
        self._told.clear()
        self._askers.clear()
        if self._reading:
            self._reading = False
            for pool in self.pools():
                pool.release()


def _alike(one: Shard, other: Shard) -> bool:
    """Whether shards of the same workers do the same."""
    if one.pool is not other.pool or len(one.steps) != len(other.steps):
        return False
    return all(a is b for a, b in zip(one.steps, other.steps, strict=True))


def _replayable(shard: Shard) -> bool:
    """Whether the shard, made again, gives the same items in the same order."""
    in_order = all(
        options.get("max_concurrency", 1) == 1 and options.get("resources") is None
        for _, _, options, _ in shard.steps
    )
    return in_order and shard.pool.replayable
