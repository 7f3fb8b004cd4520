"""LearnerThread: a learner in a background thread, fed by one queue and read from another."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

from flowrl.data import Batch
from flowrl.errors import add_note
from flowrl.iter.journal import Journal, ReplayError
from flowrl.iter.private_api import queued_items, restore_items
from flowrl.iter.stage import describe
from flowrl.iter.waiting import Signal, Waiter, queue_signal
from flowrl.learners.actors import make_learner
from flowrl.learners.learner import LocalLearner, PolicyUpdate, Updates
from flowrl.sampling.worker_set import WorkerSet, check_workers
from flowrl.setting_values import check_int
from flowrl.state_schema import Amount, Fields, Positive, check_own_state, check_state
from flowrl.threads import limit_this_thread

log = logging.getLogger("flowrl")

JOIN_TIMEOUT_S = 30.0  # maximum time for which stop() waits for the running update


_LEARNED: Fields = {
    "batch": Batch,
    "updates": dict[str, dict[str, Any]],
    "learn_s": Amount,
    "idle_s": Amount,
    "ended_at": Amount,
}


class LearnedBatch(NamedTuple):
    """A batch that the learner has learned from.

    Attributes:
        batch: the batch.
        updates: policy id -> PolicyUpdate.
        learn_s: seconds of learning since the previous result.
        idle_s: seconds without a batch since the previous result.
        ended_at: end of the update, in seconds since 1970.
    """

    batch: Batch
    updates: Updates
    learn_s: float
    idle_s: float
    ended_at: float = 0.0


class LearnFailure(NamedTuple):
    """A batch on which learning raised an error."""

    batch: Batch
    error: BaseException


class MinibatchBuffer:
    """A queue of batches that are each used several times.

    The defaults use each batch once, as Espeholt et al. 2018 do.

    Args:
        size: maximum number of batches in the buffer.
        num_passes: how many times each batch is returned.

    Raises:
        ValueError: an argument is below 1.
    """

    state_fields: ClassVar[Fields] = {"batches": list[list[Any]]}

    def __init__(self, size: int = 1, num_passes: int = 1):
        check_int("MinibatchBuffer: size", size)
        check_int("MinibatchBuffer: num_passes", num_passes)
        self.size, self.num_passes = size, num_passes
        self._batches: deque[tuple[Batch, int]] = deque()  # with the remaining passes

    def __len__(self) -> int:
        return len(self._batches)

    def put(self, batch: Batch) -> None:
        """Add a batch."""
        self._batches.append((batch, self.num_passes))

    def get(self) -> tuple[Batch, bool]:
        """Return the next batch, and whether this is its last pass."""
        batch, remaining = self._batches.popleft()
        if remaining > 1:
            self._batches.append((batch, remaining - 1))
        return batch, remaining == 1

    def put_back(self, batch: Batch, was_last_pass: bool) -> None:
        """Undo `get`, which has returned these values."""
        remaining = 1 if was_last_pass else self._batches.pop()[1] + 1
        self._batches.appendleft((batch, remaining))

    def remove(self, batch: Batch) -> None:
        """Remove a batch and its remaining passes."""
        self._batches = deque(entry for entry in self._batches if entry[0] is not batch)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": [[batch, remaining] for batch, remaining in self._batches]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_own_state(self, state)
        for entry in state["batches"]:
            passes = {"batch": Batch, "passes": Positive}
            check_state(dict(zip(passes, entry, strict=True)), passes, "batches")
        self._batches = deque((batch, remaining) for batch, remaining in state["batches"])


class LearnerThread:
    """Runs a learner in a thread while the plan gathers the next batches.

    Chain `Enqueue(learner)` to feed it. `Dequeue(learner)` yields its results, starts and stops it
    with the plan, and raises its errors. The thread learns while `inqueue` has batches and
    `outqueue` has room. Workers get the weights of its last update.

    Args:
        workers: the WorkerSet whose policies learn.
        policies: ids of the policies to update; None updates all that `policies_to_train` allows.
        queue_size: capacity of each queue, in batches.
        minibatch_buffer_size, num_sgd_iter: use each batch `num_sgd_iter` times, cycling through
            `minibatch_buffer_size` batches.
        sgd_minibatch_size: rows per update, 0 for the whole batch.
        num_learners, num_gpus: learn on that many Ray actors instead; see `make_learner`.

    Attributes:
        num_steps: calls of `learner.update` so far, in this process.

    Raises:
        ValueError: a number is out of range.
    """

    state_fields: ClassVar[Fields] = {
        "waiting": list[Batch],
        "minibatches": dict[str, Any],
        "learned": list[dict[str, Any]],
    }

    trains = True  # see ops.report.training_operators

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
        check_workers(workers, type(self).__name__)
        check_int("queue_size", queue_size)
        check_int("minibatch_buffer_size", minibatch_buffer_size)
        check_int("num_sgd_iter", num_sgd_iter)
        cycles = minibatch_buffer_size > 1
        self._minibatches = MinibatchBuffer(minibatch_buffer_size, num_sgd_iter if cycles else 1)
        self.learner = make_learner(
            workers,
            policies,
            # without cycling, all passes run at once and no weights are published in between
            1 if cycles else num_sgd_iter,
            sgd_minibatch_size,
            num_gpus=num_gpus,
            num_learners=num_learners,
        )
        self.workers = workers
        self.policies = policies
        self.inqueue: queue.Queue[Batch] = _LearnerQueue(queue_size, self)
        self.outqueue: queue.Queue[LearnedBatch | LearnFailure] = _LearnerQueue(queue_size, self)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._stop_signal = Signal()
        weakref.finalize(self, self._stop_signal.fire).atexit = False
        self._learn_s = self._idle_s = 0.0  # since the last result
        self._update_since: float | None = None  # start of the running update
        self._has_learned = False  # waiting for the first batch does not count as idle
        self.num_steps = 0
        self._has_taken = False  # the batches of the next step
        self._num_observed_steps = 0  # at the last call of `observe`
        self._journal: Journal | None = None
        self._timestep = 0  # of the last step
        self._total_learn_s = self._total_idle_s = 0.0

    # -- lifecycle -------------------------------------------------------------------------------

    def start(self, journal: Journal | None = None) -> None:
        """Start the thread; wait until an earlier one has finished its last update.

        Args:
            journal: records or replays the plan. In a replay there is no thread: the plan's own
                thread makes each step when the plan observes its result.
        """
        if self._thread is not None and (self._stopping or not self._thread.is_alive()):
            self._thread.join()
            self._thread = None
        if self._thread is None:
            self._stopping = False
            self.learner.start()
            self.workers.weight_sync.publish()
            if journal is not None:
                if not isinstance(self.learner, LocalLearner):
                    journal.end("its learners are Ray actors")
                if self.workers.weight_sync.learner_thread is not None:
                    journal.end("the plan has several learner threads")
                self._journal = journal
                self.workers.weight_sync.learner_thread = self
                if journal.replays:
                    return
            signals = [queue_signal(self.inqueue), queue_signal(self.outqueue), self._stop_signal]
            arguments = weakref.ref(self), self.workers.local_worker().lock, signals
            self._thread = threading.Thread(
                target=_run, args=arguments, name="flowrl-learner", daemon=True
            )
            self._thread.start()
        elif journal is not None and journal is not self._journal:
            journal.end("its learner thread was started before the plan")

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        if self._journal is not None and self._journal.replays:
            return True
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Stop the thread after the running update; wait for that at most JOIN_TIMEOUT_S."""
        thread = self._thread
        if thread is not None:
            self._stopping = True
            self._stop_signal.fire()
        until = time.monotonic() + JOIN_TIMEOUT_S
        self.learner.stop()  # so that the thread does not wait for actors
        if thread is not None:
            thread.join(max(until - time.monotonic(), 1.0))
            if thread.is_alive():
                log.warning(
                    "the learner thread is still in an update after %d s; it ends after the update",
                    JOIN_TIMEOUT_S,
                )
            else:
                self._thread = None
                self.workers.weight_sync.unpublish()

    def _learn(self, lock: AbstractContextManager[Any]) -> bool | None:
        """Train on the next batch; return whether there was one, None if the thread must end."""
        if self._stopping:
            return None
        with lock:  # so that a checkpoint contains the batch in use
            return self._step()

    def _lacks_batch(self) -> bool:
        """Return whether only a batch is missing for the next update."""
        return self._has_learned and not self.outqueue.full()

    def _step(self) -> bool:
        """Train on the next batch; return False without a batch or room for a result."""
        if not self._take_batches():
            return False
        buffer = self._minibatches
        batch, is_last_pass = buffer.get()
        self._has_taken = False
        self.num_steps += 1
        self.learner.global_vars = self._global_vars()
        self._has_learned = True
        started = self._update_since = time.perf_counter()
        try:
            updates = self.learner.update(batch)
            if not self._stopping:
                self.workers.weight_sync.publish(self.num_steps)
        except BaseException as error:
            if self._stopping:  # the learner's actors were killed
                buffer.put_back(batch, is_last_pass)
                return False
            buffer.remove(batch)
            add_note(error, f"raised in the learner thread, on a {describe(batch)}")
            self.outqueue.put_nowait(LearnFailure(batch, error))
            return True
        finally:
            self._learn_s += time.perf_counter() - started
            self._update_since = None
        if is_last_pass:
            learn_s, self._learn_s = self._learn_s, 0.0
            idle_s, self._idle_s = self._idle_s, 0.0
            self._total_learn_s += learn_s
            self._total_idle_s += idle_s
            learned = LearnedBatch(batch, updates, learn_s, idle_s, time.time())
            self.outqueue.put_nowait(learned)
        return True

    def _take_batches(self) -> bool:
        """Take the batches of the next step from the queue; return whether it can be made."""
        if self._has_taken:
            return True
        if self.outqueue.full():
            return False
        buffer, journal = self._minibatches, self._journal
        room = max(buffer.size - len(buffer), 0)  # a saved buffer may exceed the size of this one
        count = min(room, self.inqueue.qsize())  # this thread is the only one that takes batches
        if journal is not None and journal.replays:
            count = journal.learner_log.observe("batches taken", 0, expected=1)
            self._check_replayed(count <= self.inqueue.qsize())
        for _ in range(count):
            buffer.put(self.inqueue.get_nowait())
        if journal is not None and not journal.replays and len(buffer):
            journal.learner_log.observe("batches taken", count, expected=1)
        self._has_taken = bool(len(buffer))
        return self._has_taken

    def _global_vars(self) -> dict[str, Any]:
        """Return the global variables of the next step."""
        global_vars = self.workers.global_vars
        if self._journal is None:
            return global_vars
        timestep = int(global_vars["timestep"])
        timestep = self._journal.learner_log.observe("timestep", timestep, expected=self._timestep)
        self._timestep = timestep
        return {**global_vars, "timestep": timestep}

    # -- recording and replaying -----------------------------------------------------------------

    def observe(self, num_steps: int) -> int:
        """Record the number of steps that the plan observes, and return it. In a replay, make the
        recorded number of steps and return that number.

        Raises:
            ReplayError: the replay lacks a batch that the recorded run learned from.
        """
        if self._journal is None:
            return num_steps
        last = self._num_observed_steps
        num_steps = self._journal.plan_log.observe("learner", num_steps, expected=last)
        self._num_observed_steps = num_steps
        while self._journal.replays and self.num_steps < num_steps:
            self.rerun_step()
        return num_steps

    def rerun_step(self) -> None:
        """Make the next step of a replay, in the plan's own thread.

        Raises:
            ReplayError: there is no batch, or no room for the result.
        """
        with self.workers.local_worker().lock:
            self._check_replayed(self._step())

    def rerun_until_room(self) -> None:
        """Make room in `inqueue` in a replay: take the batches of the next step.

        Raises:
            ReplayError: see `rerun_step`.
        """
        while self.inqueue.full():
            if self._has_taken:
                self.rerun_step()
            self._check_replayed(self._take_batches())

    def _check_replayed(self, is_done: bool) -> None:
        if not is_done:
            raise ReplayError(
                f"the replay differs from the run: step {self.num_steps + 1} of the learner has no "
                "batch, or no room for its result"
            )

    # -- inspection ------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return the sizes of both queues, and since the first batch the seconds of learning
        (`learn_s`, with those of the running update), the seconds without a batch
        (`learner_idle_s`) and their share (`learner_idle`)."""
        since = self._update_since
        running_s = 0.0 if since is None else time.perf_counter() - since
        learn_s = self._total_learn_s + self._learn_s + running_s
        total = learn_s + self._total_idle_s
        return {
            "inqueue_size": self.inqueue.qsize(),
            "outqueue_size": self.outqueue.qsize(),
            "learn_s": learn_s,
            "learner_idle_s": self._total_idle_s,
            "learner_idle": round(self._total_idle_s / total, 3) if total else 0.0,
        }

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all batches held and their results; a batch that failed counts as waiting."""
        with self.workers.local_worker().lock:
            results = queued_items(self.outqueue)
            learned = [result for result in results if isinstance(result, LearnedBatch)]
            failed = [result.batch for result in results if isinstance(result, LearnFailure)]
            waiting = [*failed, *queued_items(self.inqueue)]
            return {
                "waiting": waiting,
                "minibatches": self._minibatches.state_dict(),
                "learned": [
                    {
                        "batch": result.batch,
                        "updates": {pid: u.state_dict() for pid, u in result.updates.items()},
                        "learn_s": result.learn_s,
                        "idle_s": result.idle_s,
                        "ended_at": result.ended_at,
                    }
                    for result in learned
                ],
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_own_state(self, state)
        learned = []
        for saved in state["learned"]:
            check_state(saved, _LEARNED, "learned")
            updates = {p: PolicyUpdate.from_state_dict(u) for p, u in saved["updates"].items()}
            learned.append(
                LearnedBatch(
                    saved["batch"], updates, saved["learn_s"], saved["idle_s"], saved["ended_at"]
                )
            )
        self.stop()  # a thread that runs already; the plan starts it again
        self._minibatches.load_state_dict(state["minibatches"])
        # a saved queue may be longer than the capacity of this one
        restore_items(self.inqueue, state["waiting"])
        restore_items(self.outqueue, learned)

    def __repr__(self) -> str:
        count = getattr(self.learner, "num_learners", None)
        return "LearnerThread" if count is None else f"LearnerThread(num_learners={count})"


class _LearnerQueue(queue.Queue[Any]):
    """A queue of a learner thread."""

    def __init__(self, maxsize: int, learner_thread: LearnerThread):
        super().__init__(maxsize)
        self.learner_thread = learner_thread


def learner_thread_of(value: Any) -> LearnerThread | None:
    """Return a LearnerThread, or the one that a queue belongs to; None for other queues."""
    if isinstance(value, _LearnerQueue):
        return value.learner_thread
    return value if isinstance(value, LearnerThread) else None


def _run(
    reference: weakref.ref[LearnerThread], lock: AbstractContextManager[Any], signals: list[Any]
) -> None:
    """Train on the batches of a LearnerThread until it is stopped or dropped.

    Args:
        reference: weak, so that waiting does not keep a dropped algorithm and its workers.
        lock: of the local worker.
        signals: fire when there may be something to do.
    """
    limit_this_thread()
    waiter = Waiter()
    while True:
        waiter.clear()
        learner_thread = reference()
        progressed = None if learner_thread is None else learner_thread._learn(lock)
        if learner_thread is None or progressed is None:
            return
        lacks_batch = learner_thread._lacks_batch()
        del learner_thread
        if progressed:
            continue
        started = time.perf_counter()
        waiter.wait(signals)
        learner_thread = reference()
        if lacks_batch and learner_thread is not None:
            learner_thread._idle_s += time.perf_counter() - started
        del learner_thread
