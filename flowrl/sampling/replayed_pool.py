"""ReplayedPool: the remote workers of a WorkerSet in this process, to replay a recorded run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from flowrl.iter.pools import Pool
from flowrl.iter.shard_server import serve
from flowrl.iter.shard_stream import Reply, ShardRequest
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.weight_sync import load_weights
from flowrl.sampling.worker_config import WorkerConfig
from flowrl.threads import worker_threads


class ReplayedWorkers(Protocol):
    """The part of a WorkerSet that a ReplayedPool uses."""

    num_workers: int
    config: WorkerConfig

    def new_worker(self, worker_index: int) -> RolloutWorker:
        """Return a new worker with a number from 1."""

    def take_weights(self, index: int) -> Any | None:
        """Return the weights that a worker must load before it samples; None if it needs none."""


@dataclass(eq=False, slots=True)
class _Request:
    worker: RolloutWorker
    weights: Any | None  # as of the request
    request: ShardRequest
    reply: Reply | None = None
    error: Exception | None = None


class ReplayedPool(Pool):
    """Workers that compute a reply when the plan reads it or a later one of the same worker, with
    the weights as of the request.

    Args:
        workers: the WorkerSet.
    """

    remote = True  # the stages of the plan treat the workers like actors

    def __init__(self, workers: ReplayedWorkers):
        super().__init__(self._new_workers, workers.num_workers)
        self._set = workers
        self._requests: deque[_Request] = deque()  # without a reply

    def _new_workers(self) -> list[RolloutWorker]:
        with worker_threads(self._set.config.num_threads_per_process):
            return [self._set.new_worker(index + 1) for index in range(self._set.num_workers)]

    def workers(self) -> list[RolloutWorker]:
        """Return the workers, after all outstanding replies were computed: an actor would compute
        them before a later call."""
        self.start()
        while self._requests:
            self._compute(self._requests.popleft())
        return list(self._workers or ())

    def submit(self, index: int, request: ShardRequest) -> Any:
        if request.steps is not None:  # each worker has a copy of the operators, as actors have
            from ray import cloudpickle

            steps = cloudpickle.loads(cloudpickle.dumps(request.steps))
            request = request._replace(steps=steps)
        sent = _Request(self.handle(index), self._set.take_weights(index), request)
        self._requests.append(sent)
        return sent

    def result(self, ref: Any) -> Reply:
        if ref in self._requests:
            for sent in list(self._requests):  # a worker answers its requests in their order
                if sent.worker is ref.worker:
                    self._requests.remove(sent)
                    self._compute(sent)
                if sent is ref:
                    break
        if ref.error is not None:
            raise ref.error
        reply: Reply = ref.reply
        return reply

    def _compute(self, sent: _Request) -> None:
        with worker_threads(self._set.config.num_threads_per_process):
            load_weights(sent.worker, sent.weights)
            try:
                sent.reply = serve(sent.worker, sent.request)
            except Exception as error:
                sent.error = error

    def stop(self) -> None:
        """Do nothing: the set stops its workers."""

    def stop_workers(self) -> None:
        """Stop the workers."""
        for worker in self._workers or ():
            worker.stop()
        self._workers = None
