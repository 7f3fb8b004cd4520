"""The shards that a gather reads: workers of pools and the steps applied to their items."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flowrl.iter import ray_health
from flowrl.iter.errors import collecting, raise_first
from flowrl.iter.pools import Pool
from flowrl.iter.recovery import PendingRequest, Recovery
from flowrl.iter.shard_stream import Reply, ShardRequest, Step

UNCONFIRMED = -1  # the steps were sent to a shard that has not replied yet


class Shard(NamedTuple):
    """The description of one shard: a worker of a pool, and the steps applied to its items.

    Attributes:
        adds_joined_workers: whether a worker that joins the pool adds a shard with the same steps.
    """

    pool: Pool
    worker: int
    steps: tuple[Step, ...] = ()
    recovery: Recovery = Recovery()
    adds_joined_workers: bool = False


class Shards:
    """The shards that one gather reads, numbered from 0; each has its own stream.

    Args:
        shards: descriptions of the shards.
        name: for error messages and `explain()`.
        stream_id: prefix of the ids of the streams, equal for readers that share the streams;
            None creates a unique one.
        partition: (index, number of partitions) of a repartition.

    Attributes:
        replayable: whether recreated shards return the same items in the same order.
        keeps_state: whether the shards continue after a restart of the plan; see Pool.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        name: str,
        stream_id: str | None = None,
        partition: tuple[int, int] | None = None,
    ):
        if not shards:
            raise ValueError("at least one shard is needed")
        remote = {shard.pool.remote for shard in shards}
        if len(remote) > 1:
            raise ValueError(
                f"{name} has shards in this process and shards in actors: gather them apart and "
                "unite the streams"
            )
        self.name = name
        self.remote = remote.pop()
        self.replayable = partition is None and all(map(_is_replayable, shards))
        self.keeps_state = all(shard.pool.keeps_state for shard in shards)
        self.seed = uuid.uuid4().hex  # of the steps
        self._shards = list(shards)
        self._partition = partition
        self._stream_prefix = stream_id or uuid.uuid4().hex
        self._stream_ids: dict[int, str] = {}  # shard -> id
        self._created: dict[int, int] = {}  # shard -> incarnation with the stream, or UNCONFIRMED
        self._submit_next: dict[int, Callable[[], Any]] = {}  # shard -> request for the next item
        self._acquired: list[Pool] = []
        self._has_one_pool = len(self.pools()) == 1
        self._growing: list[Shard] = []
        for shard in shards:
            if shard.adds_joined_workers and not any(
                _is_same(shard, other) for other in self._growing
            ):
                self._growing.append(shard)

    def __len__(self) -> int:
        return len(self._shards)

    def num_membership_changes(self) -> int:
        """Return how often workers have joined or left."""
        return sum(shard.pool.num_membership_changes for shard in self._growing)

    def update_presence(self) -> list[bool]:
        """Append shards of workers that have joined; return for each shard whether its worker is
        still in its pool."""
        for growing in self._growing:
            known = {shard.worker for shard in self._shards if _is_same(shard, growing)}
            for worker in range(len(growing.pool)):
                if worker not in known:
                    self._shards.append(growing._replace(worker=worker))
        return [not s.adds_joined_workers or s.worker < len(s.pool) for s in self._shards]

    def pools(self) -> list[Pool]:
        """Return the pools, each once."""
        return list({id(shard.pool): shard.pool for shard in self._shards}.values())

    def number(self, index: int) -> int:
        """Return the number of a shard in sources and messages: that of its worker in the pool, or
        the index of the shard if there are several pools."""
        return self._shards[index].worker if self._has_one_pool else index

    def has_steps(self) -> bool:
        """Return whether operators run on the workers."""
        return any(shard.steps for shard in self._shards)

    def describe(self, index: int) -> str:
        """Return how messages name a shard."""
        shard = self._shards[index]
        worker = shard.pool.worker_name(shard.worker)
        text = f"shard {self.number(index)} of {self.name}"
        return text if worker is None else f"{text} ({worker})"

    def recovery(self, index: int) -> Recovery:
        return self._shards[index].recovery

    def start(self) -> None:
        """Start the workers and keep them until `stop()`."""
        for pool in self.pools() if self._partition is None else ():
            if not any(pool is acquired for acquired in self._acquired):
                pool.acquire()
                self._acquired.append(pool)

    def submit(self, index: int, batch_ms: float = 0, skip: int = 0, skip_errors: int = 0) -> Any:
        """Send a request to a shard and return a ref of the reply.

        Args:
            index: of the shard.
            batch_ms: milliseconds for which the shard collects items.
            skip: items to skip if its stream must be recreated.
            skip_errors: errors after these items to ignore in the recreated stream.
        """
        pool, worker, steps, *_ = self._shards[index]
        incarnation = pool.incarnation(worker)
        has_stream = self._created.get(index) == incarnation
        if has_stream and not batch_ms and index in self._submit_next:
            return self._submit_next[index]()
        self._submit_next.pop(index, None)
        self._created.setdefault(index, UNCONFIRMED)
        # partitions share one stream, which any of them may create: each one sends the steps
        seed = f"{self.seed}/{index}"
        request = ShardRequest(
            self._stream_id(index),
            None if has_stream else steps,
            skip,
            batch_ms,
            self._partition,
            seed,
            skip_errors,
        )
        return pool.submit(worker, request)

    def _stream_id(self, index: int) -> str:
        """Return the id of the stream of a shard on its worker.

        The part before the slash distinguishes several shards of one worker and is equal for all
        partitions of a pool.
        """
        if index not in self._stream_ids:
            shard = self._shards[index]
            same = [s.pool is shard.pool and s.worker == shard.worker for s in self._shards]
            self._stream_ids[index] = f"{self._stream_prefix}.{sum(same[:index])}/{index}"
        return self._stream_ids[index]

    def result(self, request: PendingRequest, ref: Any) -> Reply:
        """Return the reply to a request, or raise its error."""
        reply = self._shards[request.shard.index].pool.result(ref)
        self._confirm(request, reply)
        return reply

    def results(
        self, requests: Sequence[PendingRequest], refs: list[Any], wait_first: bool
    ) -> list[Reply | None]:
        """Return the replies to requests to actors, fetched together; raise if one failed.

        Args:
            requests: the requests.
            refs: of their replies.
            wait_first: see `ray_health.get`.
        """
        replies: list[Reply | None] = []
        for request, fields in zip(requests, ray_health.get(refs, wait_first), strict=True):
            reply = Reply(*fields)
            self._confirm(request, reply)
            replies.append(reply)
        return replies

    def _confirm(self, request: PendingRequest, reply: Reply) -> None:
        """Note that the worker has the stream, and the handle of the stream."""
        index = request.shard.index
        self._created[index] = request.incarnation
        if reply.stream_handle is not None and self._partition is None:
            shard = self._shards[index]
            self._submit_next[index] = shard.pool.next_item_submitter(
                shard.worker, reply.stream_handle
            )

    def incarnation(self, index: int) -> int:
        return self._shards[index].pool.incarnation(self._shards[index].worker)

    def handle(self, number: int) -> Any:
        """Return the worker of the shard with a `number`, or the handle of its actor."""
        if self._has_one_pool:
            return self._shards[0].pool.handle(number)
        return self._shards[number].pool.handle(self._shards[number].worker)

    def replace(self, index: int) -> bool:
        return self._shards[index].pool.replace(self._shards[index].worker)

    def why_not_replaced(self, index: int) -> str:
        """Return why `replace` returns False."""
        return self._shards[index].pool.why_not_replaced

    def startup(self, index: int) -> Any:
        """Return a ref that is ready when the worker has started."""
        return self._shards[index].pool.startup(self._shards[index].worker)

    def kill(self, index: int) -> None:
        self._shards[index].pool.kill(self._shards[index].worker)

    def mark_failed(self, index: int) -> None:
        self._shards[index].pool.mark_failed(self._shards[index].worker)

    def __getstate__(self) -> dict[str, Any]:
        # a copy in another process reads its own streams
        prefix = self._stream_prefix if self._partition is not None else uuid.uuid4().hex
        fresh: dict[str, Any] = {
            "_stream_prefix": prefix,
            "_stream_ids": {},
            "_created": {},
            "_submit_next": {},
            "_acquired": [],
        }
        return {**self.__dict__, **fresh}

    def stop(self) -> None:
        """Drop the streams and release the pools.

        Raises:
            Exception: the first error of an operator in this process; the other streams are
                dropped, too. Errors of operators on actors are logged.
        """
        errors: list[Exception] = []
        for index, is_present in enumerate(self.update_presence()):
            if is_present and index in self._created:
                shard = self._shards[index]
                with collecting(errors):
                    shard.pool.drop_stream(shard.worker, self._stream_id(index), bool(shard.steps))
        self._created.clear()
        self._submit_next.clear()
        while self._acquired:
            with collecting(errors):
                self._acquired.pop().release()
        raise_first(errors, "another shard raised {!r} while it was stopped")


def _is_same(shard: Shard, other: Shard) -> bool:
    """Return whether two shards have the same pool and the same steps."""
    if shard.pool is not other.pool or len(shard.steps) != len(other.steps):
        return False
    return all(a is b for a, b in zip(shard.steps, other.steps, strict=True))


def _is_replayable(shard: Shard) -> bool:
    """Return whether a recreated shard returns the same items in the same order."""
    ordered = all(
        options.get("max_concurrency", 1) == 1 and options.get("resources") is None
        for _, _, options, _ in shard.steps
    )
    return ordered and shard.pool.replayable
