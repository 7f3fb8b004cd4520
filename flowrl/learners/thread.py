"""Learners beside the plan: batches go in by one queue and come out of another, learned from."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from flowrl.iter import _get_shared_metrics
from flowrl.iter.stage import describe, pack
from flowrl.iter.waiting import Signal, Waiter, queue_signal
from flowrl.learners.actors import learners_of
from flowrl.ops.train import (
    Batch,
    Info,
    batch_to_learn_from,
    check_ids,
    learn,
    note_trained,
    with_sources,
)

if TYPE_CHECKING:
    from flowrl.sampling.worker_set import WorkerSet

JOIN_S = 30.0  # for an update that is under way when the plan stops


class Learned(NamedTuple):
    """What a learner gives for a batch that it has done with."""

    batch: Batch
    info: Info
    seconds: float  # of learning from it
    waited: float  # seconds without a batch before


class LearnFailure(NamedTuple):
    """What a learner gives for a batch that it could not learn from."""

    batch: Batch
    error: BaseException


class MinibatchBuffer:
    """Batches that are handed out several times, `size` of them in turn (Espeholt et al. 2018 use
    each once: the defaults).

    Args:
        size: batches kept at a time.
        num_passes: how often each is handed out.

    Raises:
        ValueError: either is below 1.
    """

    def __init__(self, size: int = 1, num_passes: int = 1):
        for name, value in (("size", size), ("num_passes", num_passes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"MinibatchBuffer: {name} is a whole number from 1, got {value!r}")
        self.size, self.num_passes = size, num_passes
        self._kept: deque[tuple[Batch, int]] = deque()  # with the passes that are left

    def __len__(self) -> int:
        return len(self._kept)

    def is_full(self) -> bool:
        """Whether there is no room for another one."""
        return len(self._kept) >= self.size

    def put(self, batch: Batch) -> None:
        """Take a batch."""
        self._kept.append((batch, self.num_passes))

    def get(self) -> tuple[Batch, bool]:
        """The batch whose turn it is, and whether this was its last pass."""
        batch, left = self._kept.popleft()
        if left > 1:
            self._kept.append((batch, left - 1))
        return batch, left == 1

    def forget(self, batch: Batch) -> None:
        """Let go of a batch, whatever passes are left."""
        self._kept = deque(one for one in self._kept if one[0] is not batch)

    def held(self) -> list[Batch]:
        """The batches that are in it."""
        return [batch for batch, _ in self._kept]

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [[batch, left] for batch, left in self._kept]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept = deque((batch, left) for batch, left in state["kept"])


class LearnerThread:
    """Learns in a thread, while the plan gathers what comes next.

    Chain Enqueue(learner), and read Dequeue(learner), which starts it with the plan, raises what it
    raises, and ends it with the plan. It learns while there are batches in `inqueue` and room in
    `outqueue`, so neither can run away. Workers are sent the weights after its last update.

    Args:
        workers: the WorkerSet whose local worker learns.
        policies: ids of those that learn; None for all in a batch that are to.
        queue_size: batches that may wait, on either side.
        minibatch_buffer_size, num_sgd_iter: batches are used so many times each, so many in turn.
        sgd_minibatch_size: rows per update, 0 for the whole batch.
        num_learners, num_gpus: learn on so many Ray actors, which take shares of each batch,
            instead of in this process; see MultiGPUTrainOneStep.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(
        self,
        workers: WorkerSet,
        *,
        policies: Collection[str] | None = None,
        queue_size: int = 4,
        minibatch_buffer_size: int = 1,
        num_sgd_iter: int = 1,
        sgd_minibatch_size: int = 0,
        num_learners: int = 0,
        num_gpus: int = 0,
    ):
        check_ids(policies)
        if queue_size < 1 or sgd_minibatch_size < 0:
            raise ValueError(
                "queue_size must be at least 1 and sgd_minibatch_size at least 0, got "
                f"{queue_size} and {sgd_minibatch_size}"
            )
        self.workers = workers
        self.policies = policies
        self.sgd_minibatch_size = sgd_minibatch_size
        self.inqueue: queue.Queue[Batch] = queue.Queue(queue_size)
        self.outqueue: queue.Queue[Learned | LearnFailure] = queue.Queue(queue_size)
        in_turn = isinstance(minibatch_buffer_size, int) and minibatch_buffer_size > 1
        self._minibatches = MinibatchBuffer(minibatch_buffer_size, num_sgd_iter)
        self._passes = 1
        if not in_turn:  # one after the other, without sending weights in between
            self._passes = num_sgd_iter
            self._minibatches = MinibatchBuffer(minibatch_buffer_size, 1)
        self.learners = learners_of(workers, num_gpus, num_learners)
        self._thread: threading.Thread | None = None
        self._ending = False
        self._end = Signal()
        self._waited = 0.0
        self._begun = False  # before the first batch workers start, which is not its waiting
        self.started = False
        self.learned_s = self.waited_s = 0.0

    # -- its life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to learn."""
        if self._thread is None:
            self._ending, self.started = False, True
            if self.learners is not None:
                self.learners.open()
            self.workers.weight_sync.publish()
            self._thread = threading.Thread(target=self._run, name="flowrl-learner", daemon=True)
            self._thread.start()

    def is_alive(self) -> bool:
        """Whether it learns."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """End after the update that is under way."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ending = True
            self._end.fire()
            if self.learners is not None:
                self.learners.close()  # the thread does not wait for them any more
            thread.join(JOIN_S)
            self.workers.weight_sync.unpublish()
        elif self.learners is not None:
            self.learners.close()

    def _run(self) -> None:
        waiter = Waiter()
        lock = self.workers.local_worker().lock
        signals = [queue_signal(self.inqueue), queue_signal(self.outqueue), self._end]
        while True:
            waiter.clear()
            if self._ending:
                return
            with lock:  # so that a checkpoint never finds a batch in between
                moved = self._step()
            if not moved:
                started = time.perf_counter()
                waiter.wait(signals)
                if self._begun:
                    self._waited += time.perf_counter() - started

    def _step(self) -> bool:
        """One pass over one batch; False if there is none, or no room for what comes of it."""
        if self.outqueue.full():
            return False
        buffer = self._minibatches
        while not buffer.is_full() and not self.inqueue.empty():
            buffer.put(self.inqueue.get_nowait())
        if not len(buffer):
            return False
        batch, last = buffer.get()
        self._begun = True
        started = time.perf_counter()
        try:
            info = self._learn(batch)
        except BaseException as error:
            if self._ending:
                return False  # its learners were closed
            buffer.forget(batch)
            error.add_note(f"raised by the learner's thread, on a {describe(batch)}")
            self.outqueue.put_nowait(LearnFailure(batch, error))
            return True
        seconds = time.perf_counter() - started
        if last:
            waited, self._waited = self._waited, 0.0
            self.outqueue.put_nowait(Learned(batch, info, seconds, waited))
        return True

    def _learn(self, batch: Batch) -> Info:
        how = self._passes, self.sgd_minibatch_size
        if self.learners is None:
            info = learn(self.workers, batch, self.policies, *how)
        else:
            learning = batch_to_learn_from(self.workers.local_worker(), batch, self.policies)
            info = self.learners.learn(learning, batch.sources, *how)
        if not self._ending:
            self.workers.weight_sync.publish()
        return info

    # -- what comes of it, in the plan -----------------------------------------------------------

    def taken(self, result: Learned | LearnFailure) -> tuple[Batch, Info]:
        """Count what came out of the queue; (batch, info), as TrainOneStep gives it.

        Raises:
            what was raised by learning; the batch counts as dropped.
        """
        metrics = _get_shared_metrics()
        if isinstance(result, LearnFailure):
            metrics.counters["num_env_steps_dropped"] += result.batch.env_steps()
            raise result.error
        metrics.timers["learn"].push(result.seconds)
        metrics.timers["learn"].push_units_processed(result.batch.count)
        metrics.timers["learner_wait"].push(result.waited)
        if self.learners is not None:
            metrics.counters["num_learner_restarts"] += self.learners.restarts
            self.learners.restarts = 0
        self.learned_s += result.seconds
        self.waited_s += result.waited
        note_trained(metrics, result.batch.env_steps(), result.info)
        return result.batch, result.info

    def numbers(self) -> dict[str, Any]:
        """For `stats()`: batches that wait on either side, and the share of time since the first
        one in which it had none."""
        total = self.learned_s + self.waited_s
        return {
            "inqueue_size": self.inqueue.qsize(),
            "outqueue_size": self.outqueue.qsize(),
            "learner_idle": round(self.waited_s / total, 3) if total else 0.0,
        }

    def held(self) -> list[Batch]:
        """The batches that are in it: that wait, or that nobody has taken yet."""
        with self.workers.local_worker().lock:
            waiting = [*self.inqueue.queue, *self._minibatches.held()]
            return [*waiting, *(one.batch for one in self.outqueue.queue)]

    def state_dict(self) -> dict[str, Any]:
        """The batches that wait and those that nobody has taken yet."""
        with self.workers.local_worker().lock:
            done = [one for one in self.outqueue.queue if isinstance(one, Learned)]
            failed = [one.batch for one in self.outqueue.queue if isinstance(one, LearnFailure)]
            waiting = [*failed, *self.inqueue.queue]
            return {
                "waiting": [[batch, pack(batch.sources)] for batch in waiting],
                "minibatches": self._minibatches.state_dict(),
                "sources": [pack(batch.sources) for batch in self._minibatches.held()],
                "learned": [[*one, pack(one.batch.sources)] for one in done],
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # what there is may be more than the queues hold now
        self._minibatches.load_state_dict(state["minibatches"])
        for batch, sources in zip(self._minibatches.held(), state["sources"], strict=True):
            with_sources(batch, sources)
        self.inqueue.queue.extend(with_sources(*one) for one in state["waiting"])
        for batch, *fields, sources in state["learned"]:
            self.outqueue.queue.append(Learned(with_sources(batch, sources), *fields))

    def __repr__(self) -> str:
        if self.learners is None:
            return type(self).__name__
        return f"{type(self).__name__}(num_learners={self.learners.num_learners})"
