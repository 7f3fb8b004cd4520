"""Operators that run sub-plans concurrently, and that exchange items with other threads."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, ClassVar, Literal, NamedTuple

from flowrl.data import Batch, MultiAgentBatch, SampleBatch
from flowrl.errors import add_note
from flowrl.iter import NOT_READY, LocalIterator, Source, Stage, _get_shared_metrics
from flowrl.iter.errors import call_in_stage
from flowrl.iter.journal import Journal
from flowrl.iter.metrics import current_journal
from flowrl.iter.stage import walk
from flowrl.iter.stages.branches import Union
from flowrl.iter.waiting import Signal, queue_signal
from flowrl.learners.thread import LearnedBatch, LearnerThread, LearnFailure, learner_thread_of
from flowrl.ops.plan_metrics import Info, record_updates
from flowrl.ops.replay import enable_replay_ratio, share_a_buffer

LIVENESS_S = 1.0  # seconds between two calls of `check` by an idle Dequeue


class Concurrently(LocalIterator[Any]):
    """Run several sub-plans (branches) and return their items in one stream.

    Args:
        ops: the sub-plans, at least two.
        mode: "round_robin" takes items of the branches in turn, in a fixed order and ratio; it
            waits for a branch whose workers are slow, while a branch that depends on another one
            gives up its turn until it is ready. "async" takes items of any branch as they become
            ready.
        output_indexes: indexes (from 0) of the branches whose items are returned; items of the
            others are dropped. None returns the items of all branches. The stream ends when all
            branches whose items are returned have ended.
        round_robin_weights: items per turn of each branch; fractions accumulate; "*" takes all
            items that are ready, at most 100. Only for "round_robin"; without effect on branches
            that share a replay buffer.

    Raises:
        TypeError: an element of `ops` is not a LocalIterator, or `output_indexes` is not a list of
            ints.
        ValueError: fewer than two branches, no index or one out of range, invalid weights, or a
            `transform` in a branch that may have to wait (for workers or a queue with "async", for
            a sibling with "round_robin").
    """

    def __init__(
        self,
        ops: Sequence[LocalIterator[Any]],
        *,
        mode: Literal["round_robin", "async"] = "round_robin",
        output_indexes: Sequence[int] | None = None,
        round_robin_weights: Sequence[float | str] | None = None,
    ):
        if not isinstance(ops, Sequence):
            raise TypeError(f"Concurrently takes a list of sub-plans, got {type(ops).__name__}")
        if len(ops) < 2:
            raise ValueError(f"Concurrently needs at least 2 sub-plans, got {len(ops)}")
        for op in ops:
            if not isinstance(op, LocalIterator):
                raise TypeError(f"Concurrently takes LocalIterators, got {type(op).__name__}")
        if mode not in ("round_robin", "async"):
            raise ValueError(f'Concurrently: mode is "round_robin" or "async", got {mode!r}')
        if mode == "async" and round_robin_weights is not None:
            raise ValueError('Concurrently: round_robin_weights need mode="round_robin"')
        if output_indexes is not None and not isinstance(output_indexes, Sequence):
            raise TypeError(
                "Concurrently: output_indexes must be a list of ints, such as "
                f"[{output_indexes!r}], got {output_indexes!r}"
            )
        if output_indexes is not None and not len(output_indexes):
            raise ValueError("Concurrently: output_indexes is empty, so no item would be returned")
        for index in output_indexes or ():
            if not isinstance(index, Integral) or isinstance(index, bool):
                raise TypeError(f"Concurrently: output_indexes are ints, got {index!r}")
            if not 0 <= index < len(ops):
                raise ValueError(
                    f"Concurrently: output_indexes contains {index}, but the {len(ops)} branches "
                    f"have the indexes 0 to {len(ops) - 1}"
                )
        stage = ConcurrentlyStage(
            [op.stage for op in ops],
            round_robin_weights,
            ordered=mode == "round_robin",
            outputs=output_indexes,
        )
        title = f"Concurrently(mode={mode!r}"
        if round_robin_weights is not None:
            title += f", round_robin_weights={list(round_robin_weights)}"
        if output_indexes is not None:
            title += f", output_indexes={list(output_indexes)}"
        stage.name, stage.title = "Concurrently", f"{title})"
        super().__init__(stage, f"Concurrently[{', '.join(repr(op) for op in ops)}]")


class ConcurrentlyStage(Union):
    """The stage of Concurrently."""

    _shares_buffer = False  # whether all branches store to one replay buffer or draw from it

    def start(self, seed: str | None) -> None:
        super().start(seed)
        enable_replay_ratio(walk(self))
        self._shares_buffer = share_a_buffer(self.parents)

    def _count_item(self, index: int) -> None:
        super()._count_item(index)
        if self._shares_buffer and self._ordered:
            # the buffer decides which branch runs: an item that is returned out of turn must not
            # cost the branch a later turn
            self._credit[index] = max(self._credit[index], 0.0)


class Enqueue:
    """for_each, item -> the same item: put the item into a bounded queue that another thread reads.

    While the queue is full, the plan pulls no items for it.

    Args:
        output_queue: a `queue.Queue`, LifoQueue or PriorityQueue; or a LearnerThread or its
            `inqueue`.

    Raises:
        ValueError: output_queue is of another type.
    """

    chained_with: ClassVar[str] = "for_each"

    def __init__(self, output_queue: queue.Queue[Any] | LearnerThread):
        self.learner_thread = thread = learner_thread_of(output_queue)
        if thread is not None and output_queue is thread.outqueue:
            raise ValueError("Enqueue: the learner thread puts its results into this queue")
        if thread is not None:
            output_queue = thread.inqueue
        self.queue = _check_queue(output_queue, "Enqueue")
        self._was_ready = True

    def ready(self) -> bool:
        """Return whether the queue has room.

        Raises:
            RuntimeError: the queue is full, and its learner thread does not run.
        """
        full = self.queue.full()
        journal = current_journal()
        if journal is not None:
            full = not self._decide_ready(journal, not full)
        if full and self.learner_thread is not None and not self.learner_thread.is_alive():
            raise RuntimeError(
                "Enqueue: the queue is full, and its learner thread does not run. Add a branch "
                "with Dequeue(learner), which starts it, to the same plan. If the thread has "
                "ended, its error is in the log"
            )
        return not full

    def _decide_ready(self, journal: Journal, ready: bool) -> bool:
        self._was_ready = bool(journal.plan_log.observe("Enqueue", ready, expected=self._was_ready))
        if journal.replays and self._was_ready and self.learner_thread is not None:
            self.learner_thread.rerun_until_room()
        return self._was_ready

    def waits(self) -> list[Any]:
        """Return the signal that fires when the queue may have room again."""
        return [queue_signal(self.queue)]

    def __call__(self, item: Any) -> Any:
        self.queue.put(item)
        return item

    def extra_stats(self) -> dict[str, Any]:
        """Return additional entries of `stats()`."""
        return {"queue_size": self.queue.qsize()}

    def __repr__(self) -> str:
        return f"Enqueue(maxsize={self.queue.maxsize})"


class Dequeue(LocalIterator[Any]):
    """The items of a queue that another thread fills.

    The items of a LearnerThread are (batch, info), one per batch that it has trained on; they are
    counted like those of TrainOneStep. An exception that the other thread puts into the queue is
    raised here. The stream has no end: after the last batch of a finite stream, a pull waits
    forever. Checkpoints contain the items of a LearnerThread, but not those of another queue.

    Args:
        input_queue: a `queue.Queue`; or a LearnerThread or its `outqueue`: the thread starts and
            stops with the plan.
        check: function that returns whether the other thread is alive; called while the queue is
            empty. None checks a LearnerThread by its `is_alive`, and other threads not at all.

    Raises:
        ValueError: input_queue is of another type.
        TypeError: `check` is no function.
        RuntimeError (when pulled): the queue is empty and `check` returns False.
    """

    def __init__(
        self,
        input_queue: queue.Queue[Any] | LearnerThread,
        check: Callable[[], bool] | None = None,
    ):
        if check is not None and not callable(check):
            raise TypeError(f"Dequeue: `check` must be a function or None, got {check!r}")
        thread = learner_thread_of(input_queue)
        if thread is not None and input_queue is thread.inqueue:
            raise ValueError("Dequeue: the learner thread takes its batches from this queue")
        if thread is not None:
            input_queue, check = thread.outqueue, check or thread.is_alive
        stage = DequeueStage(_check_queue(input_queue, "Dequeue"), check, thread)
        super().__init__(stage, "Dequeue")


class UpdateSpan(NamedTuple):
    """One batch of a learner thread.

    Attributes:
        ended_at: end of the training on it, in seconds since 1970.
        learn_s: duration [s].
        rows: rows of the batch.
    """

    ended_at: float
    learn_s: float
    rows: int


class DequeueStage(Stage):
    """The stage of Dequeue."""

    name = "Dequeue"
    is_asynchronous = True
    depends_on_sibling = True

    def __init__(
        self,
        input_queue: queue.Queue[Any],
        check: Callable[[], bool] | None,
        learner_thread: LearnerThread | None = None,
    ):
        super().__init__()
        self.queue = input_queue
        self.learner_thread = learner_thread
        if learner_thread is not None:
            self.title = f"Dequeue({learner_thread!r})"
        self.resumable = learner_thread is not None
        self._check = check
        self._signal: Signal | None = None
        self._item_sources: tuple[Source, ...] = ()
        self.last_update: UpdateSpan | None = None  # of the item returned last

    def start(self, seed: str | None) -> None:
        self._signal = queue_signal(self.queue)
        if self.learner_thread is not None:
            self.learner_thread.start(self.journal)
        elif self.journal is not None:
            self.journal.end("the plan reads the queue of a thread that is not a LearnerThread")

    def stop(self) -> None:
        if self.learner_thread is not None:
            self.learner_thread.stop()

    def pull(self, block: bool) -> Any:
        item = call_in_stage(self, self._next)
        if item is not NOT_READY:
            self.items += 1
        return item

    def _next(self) -> Any:
        item = self._get()
        if item is NOT_READY and self._check is not None and not self._check():
            item = self._get()  # the thread may have put an item before it ended
            if item is NOT_READY:
                raise RuntimeError(
                    "Dequeue: the queue is empty, and the thread that fills it has ended (check() "
                    "returned False): start the thread again, or look for its error in the log"
                )
        if isinstance(item, BaseException):
            add_note(item, "raised in the thread that fills the queue of Dequeue")
            raise item
        if item is not NOT_READY and self.learner_thread is not None:
            learned, item = item, _record(self.learner_thread, item)
            self.last_update = UpdateSpan(
                learned.ended_at, learned.learn_s, learned.batch.agent_steps()
            )
            self._item_sources = item[0].sources
        return item

    def _get(self) -> Any:
        if self.journal is not None and self.learner_thread is not None:
            has_item = not self.queue.empty()
            if not self.journal.plan_log.observe(self.name, has_item):
                return NOT_READY
            while self.queue.empty():
                self.learner_thread.rerun_step()
        try:
            return self.queue.get_nowait()
        except queue.Empty:
            return NOT_READY

    def waits(self) -> list[Any]:
        alive = [] if self._check is None else [time.monotonic() + LIVENESS_S]
        return [self._signal, *alive]

    def can_return_not_ready(self) -> bool:
        return True

    def extra_stats(self) -> dict[str, Any]:
        if self.learner_thread is not None:
            return self.learner_thread.stats()
        return {"queue_size": self.queue.qsize()}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.learner_thread is not None:
            state["learner"] = self.learner_thread.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.learner_thread is not None:
            self.learner_thread.load_state_dict(state["learner"])


def _check_queue(value: Any, operator: str) -> queue.Queue[Any]:
    if not isinstance(value, queue.Queue):
        kind = type(value)
        raise ValueError(
            f"{operator} takes a queue.Queue, got a {kind.__module__}.{kind.__qualname__}"
        )
    return value


def _record(thread: LearnerThread, result: LearnedBatch | LearnFailure) -> tuple[Batch, Info]:
    """Count a result of a learner thread and return (batch, info), as TrainOneStep does.

    Raises:
        Exception: the learner's error; the batch counts as dropped.
    """
    metrics = _get_shared_metrics()
    batch = result.batch
    if isinstance(result, LearnFailure):
        if isinstance(batch, (SampleBatch, MultiAgentBatch)):
            metrics.counters["num_env_steps_dropped"] += batch.env_steps()
        raise result.error
    metrics.timers["learner_wait"].push(result.idle_s)
    if restarts := thread.learner.take_restarts():
        metrics.counters["num_learner_restarts"] += restarts
    return batch, record_updates(metrics, thread, result.updates, batch.env_steps(), result.learn_s)
