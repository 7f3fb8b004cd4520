"""Pools of workers that serve shards, in this process or in Ray actors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flowrl.iter import ray_health
from flowrl.iter.recovery import original_error
from flowrl.iter.shard_server import drop_stream, serve, serve_next, serve_remote
from flowrl.iter.shard_stream import Reply, ShardRequest

log = logging.getLogger("flowrl")

STOP_TIMEOUT_S = 5.0  # limit for operators on actors to stop, before the actors are killed


class Pool:
    """Workers in this process.

    Args:
        make: creates the workers; called at the first request.
        count: number of workers.
        replayable: whether a recreated worker serves the same items.
        upstream: pools that the workers read from, acquired while this pool has readers.
    """

    remote = False
    num_membership_changes = 0  # times that workers have joined or left
    why_not_replaced = "from_actors() was called without recreate="
    keeps_state = False  # whether the owner of the workers saves and restores their state

    def __init__(
        self,
        make: Callable[[], Sequence[Any]],
        count: int,
        replayable: bool = False,
        upstream: Sequence[Pool] = (),
    ):
        self._make = make
        self._count = count
        self._workers: Sequence[Any] | None = None
        self._num_readers = 0
        self.upstream = list(upstream)
        self.replayable = replayable

    def __len__(self) -> int:
        return self._count

    def acquire(self) -> None:
        """Add a reader; start the workers."""
        self.start()
        if not self._num_readers:
            for pool in self.upstream:
                pool.acquire()
        self._num_readers += 1

    def release(self) -> None:
        """Remove a reader; the last one stops the workers."""
        self._num_readers -= 1
        if not self._num_readers:
            self.stop()
            for pool in self.upstream:
                pool.release()

    def start(self) -> None:
        """Create the workers, unless they exist."""
        if self._workers is None:
            self._workers = self._make()

    def handle(self, index: int) -> Any:
        """Return the worker, or the handle of its actor."""
        self.start()
        assert self._workers is not None
        return self._workers[index]

    def worker_name(self, index: int) -> str | None:
        """Return how messages name a worker, in addition to its shard; None if they do not."""
        return None

    def submit(self, index: int, request: ShardRequest) -> Any:
        """Send a request and return a ref of the reply. A worker in this process computes the
        reply when `result` is called."""
        return _LocalRef(self.handle(index), request)

    def next_item_submitter(self, index: int, stream_handle: int) -> Callable[[], Any]:
        """Return a function that requests the next item of a stream and returns a ref."""
        raise NotImplementedError(f"{type(self).__name__} has no stream handles")

    def result(self, ref: Any) -> Reply:
        """Return the reply, or raise the error of the worker."""
        return serve(ref.worker, ref.request)

    def incarnation(self, index: int) -> int:
        """Return how often the worker was replaced."""
        return 0

    def replace(self, index: int) -> bool:
        """Stop a worker and create a new one in its place; return False if that is impossible, for
        the reason `why_not_replaced`."""
        return False

    def startup(self, index: int) -> Any:
        """Return a ref that is ready when the worker has started; None if it has."""
        return None

    def mark_failed(self, index: int) -> None:
        """Note that a worker has failed permanently."""

    def kill(self, index: int) -> None:
        """Kill a worker that does not reply."""

    def drop_stream(self, index: int, stream_id: str, has_steps: bool) -> None:
        """Stop and remove a stream of a worker.

        Args:
            index: index of the worker.
            stream_id: the stream.
            has_steps: whether the stream has operators, which may have something to stop.
        """
        if self._workers is not None:
            drop_stream(self._workers[index], stream_id)

    def stop(self) -> None:
        """Stop the workers."""
        self._workers = None


class _LocalRef:
    """A request to a worker in this process; the reply is computed by `Pool.result`."""

    __slots__ = ("request", "worker")

    def __init__(self, worker: Any, request: ShardRequest):
        self.worker = worker
        self.request = request


class ActorPool(Pool):
    """Workers in Ray actors, created at the first request; `stop()` kills those created here.

    Pickling creates the actors and copies their handles.

    Args:
        make: shard index -> new actor; None if dead actors cannot be recreated.
        count: number of actors.
        handles: handles of existing actors.
        replayable: whether a recreated actor serves the same items.
        upstream: pools that the actors read from.
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
        self._count = count
        self._handles = list(handles) if handles is not None else None
        self._owned: set[int] = set(range(count)) if handles is None else set()
        self._incarnations = [0] * count
        self._dropped: list[Any] = []  # refs of the streams whose operators are being stopped
        self._num_readers = 0
        self.upstream = list(upstream)
        self.replayable = replayable

    def start(self) -> None:
        if self._handles is None:
            assert self._make_one is not None
            self._handles = [self._make_one(index) for index in range(self._count)]

    def handle(self, index: int) -> Any:
        self.start()
        assert self._handles is not None
        return self._handles[index]

    def submit(self, index: int, request: ShardRequest) -> Any:
        return self.handle(index).apply.remote(serve_remote, request)

    def next_item_submitter(self, index: int, stream_handle: int) -> Callable[[], Any]:
        actor = self.handle(index)
        if stream_handle == 0 and hasattr(actor, "flowrl_next_item"):
            return actor.flowrl_next_item.remote
        return partial(actor.apply.remote, serve_next, stream_handle)

    def result(self, ref: Any) -> Reply:
        import ray

        try:
            return Reply(*ray_health.get(ref, wait_first=False))  # it is ready
        except ray.exceptions.RayTaskError as error:
            raise original_error(error) from None

    def incarnation(self, index: int) -> int:
        return self._incarnations[index]

    def replace(self, index: int) -> bool:
        if self._make_one is None:
            return False
        self.kill(index)
        assert self._handles is not None
        actor = self._make_one(index)
        if not hasattr(actor, "apply"):
            raise TypeError(f"recreate({index}) must return the handle of an actor, got {actor!r}")
        self._handles[index] = actor
        self._owned.add(index)
        self._incarnations[index] += 1
        return True

    def startup(self, index: int) -> Any:
        return self.handle(index).apply.remote(id)

    def kill(self, index: int) -> None:
        import ray

        ray_health.check_ray()
        ray.kill(self.handle(index))

    def drop_stream(self, index: int, stream_id: str, has_steps: bool) -> None:
        import ray

        if self._handles is not None and ray.is_initialized() and not ray_health.is_ray_lost():
            ref = self._handles[index].apply.remote(drop_stream, stream_id)
            if has_steps and index in self._owned:
                self._dropped.append(ref)

    def stop(self) -> None:
        if self._handles is not None and self._owned:
            import ray

            if ray.is_initialized() and not ray_health.is_ray_lost():
                for ref in ray_health.wait(self._dropped, len(self._dropped), STOP_TIMEOUT_S):
                    try:
                        ray_health.get(ref)
                    except Exception as error:
                        log.warning("an operator on an actor raised %r while it stopped", error)
                self._dropped.clear()
                for index in self._owned:
                    ray.kill(self._handles[index])
            self._handles = None if len(self._owned) == self._count else self._handles

    def __getstate__(self) -> dict[str, Any]:
        self.start()
        not_owner: dict[str, Any] = {
            "_make_one": None,
            "_owned": set(),
            "_num_readers": 0,
            "_dropped": [],
            "upstream": [],
        }
        return {**self.__dict__, **not_owner}
