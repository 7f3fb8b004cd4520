"""Operators that run sub-plans beside each other, and that hand items to threads and back."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from flowrl.iter import NOT_READY, LocalIterator, Source, Stage, _get_shared_metrics
from flowrl.iter.errors import note_origin, operator_error
from flowrl.iter.stages.branches import Union
from flowrl.iter.waiting import Signal, queue_signal
from flowrl.learners.learner import Batch
from flowrl.learners.thread import LearnedBatch, LearnerThread, LearnFailure
from flowrl.ops.plan_metrics import Info, record_updates

LIVENESS_S = 1.0  # an idle Dequeue asks its `check` again after so many seconds


class Concurrently(LocalIterator[Any]):
    """The items of several sub-plans, all of them driven by pulling this one.

    Args:
        ops: the sub-plans, at least two.
        mode: "round_robin" takes items in turn, in a fixed order and ratio, waiting for the branch
            whose turn it is; "async" takes whatever is ready.
        output_indexes: which branches' items come out; all are driven. None: all.
        round_robin_weights: items of each branch per turn; fractions accumulate; "*" takes all
            that is ready. Only for "round_robin".

    Raises:
        ValueError: fewer than two branches, an index out of range, wrong weights, a `transform`
            in an "async" branch.
    """

    def __init__(
        self,
        ops: Sequence[LocalIterator[Any]],
        *,
        mode: Literal["round_robin", "async"] = "round_robin",
        output_indexes: Sequence[int] | None = None,
        round_robin_weights: Sequence[float | str] | None = None,
    ):
        if len(ops) < 2:
            raise ValueError(f"Concurrently needs at least 2 sub-plans, got {len(ops)}")
        for op in ops:
            if not isinstance(op, LocalIterator):
                raise TypeError(f"Concurrently takes LocalIterators, got {type(op).__name__}")
        if mode not in ("round_robin", "async"):
            raise ValueError(f'Concurrently: mode is "round_robin" or "async", got {mode!r}')
        if mode == "async" and round_robin_weights is not None:
            raise ValueError('Concurrently: round_robin_weights need mode="round_robin"')
        for index in output_indexes or ():
            if not 0 <= index < len(ops):
                raise ValueError(f"Concurrently: no branch {index} among {len(ops)} (from 0)")
        stage = Union(
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


class Enqueue:
    """for_each, item -> item: puts it into a bounded queue that another thread reads.

    While the queue is full nothing is fetched, so no item waits in between.

    Args:
        output_queue: a `queue.Queue` (or LifoQueue, PriorityQueue); or a learner, for its
            `inqueue`.

    Raises:
        ValueError: another kind of queue.
    """

    def __init__(self, output_queue: queue.Queue[Any] | LearnerThread):
        self._learner = output_queue if isinstance(output_queue, LearnerThread) else None
        if isinstance(output_queue, LearnerThread):
            output_queue = output_queue.inqueue
        self.queue = _checked(output_queue, "Enqueue")

    def ready(self) -> bool:
        """Whether the queue has room.

        Raises:
            RuntimeError: it is a learner's that nothing in the plan has started.
        """
        full = self.queue.full()
        if full and self._learner is not None and not self._learner.is_alive():
            raise RuntimeError(
                "Enqueue: its learner has not been started: Dequeue(learner) in a branch of the "
                "same plan starts it"
            )
        return not full

    def waits(self) -> list[Any]:
        """What fires when it may have room again."""
        return [queue_signal(self.queue)]

    def __call__(self, item: Any) -> Any:
        self.queue.put(item)
        return item

    def extra_stats(self) -> dict[str, Any]:
        """For `stats()`."""
        return {"queue_size": self.queue.qsize()}

    def __repr__(self) -> str:
        return f"Enqueue(maxsize={self.queue.maxsize})"


class Dequeue(LocalIterator[Any]):
    """The items of a queue that another thread fills; of a learner (batch, info) of each batch that
    it has learned from, which are counted as TrainOneStep does.

    An exception in the queue is raised here: that is how a learner's thread says what went wrong.

    Args:
        input_queue: a `queue.Queue`; or a learner, which starts and stops with the plan.
        check: whether the other side still lives; asked when the queue is empty. A learner is asked
            itself.

    Raises:
        ValueError: another kind of queue.
        RuntimeError (when pulled): the queue is empty and `check` is false.
    """

    def __init__(
        self,
        input_queue: queue.Queue[Any] | LearnerThread,
        check: Callable[[], bool] | None = None,
    ):
        learner = None
        if isinstance(input_queue, LearnerThread):
            learner, input_queue = input_queue, input_queue.outqueue
            check = check or learner.is_alive
        stage = DequeueStage(_checked(input_queue, "Dequeue"), check, learner)
        super().__init__(stage, "Dequeue")


class DequeueStage(Stage):
    """The stage of Dequeue."""

    name = "Dequeue"
    depends_on_sibling = True

    def __init__(
        self,
        input_queue: queue.Queue[Any],
        check: Callable[[], bool] | None,
        learner: LearnerThread | None = None,
    ):
        super().__init__()
        self.queue = input_queue
        self.learner = learner
        if learner is not None:
            self.title = f"Dequeue({learner!r})"
        self.resumable = learner is not None
        self._check = check
        self._signal: Signal | None = None
        self._emitted: tuple[Source, ...] = ()

    def start(self, seed: str | None) -> None:
        self._signal = queue_signal(self.queue)
        if self.learner is not None:
            self.learner.start()

    def stop(self) -> None:
        if self.learner is not None:
            self.learner.stop()

    def pull(self, block: bool) -> Any:
        try:
            item = self._next()
        except BaseException as error:
            note_origin(error, self, None)
            raise operator_error(error) from error.__cause__
        if item is not NOT_READY:
            self.items += 1
        return item

    def _next(self) -> Any:
        item = self._get()
        if item is NOT_READY and self._check is not None and not self._check():
            item = self._get()  # its last words may have come in between
            if item is NOT_READY:
                raise RuntimeError(
                    "Dequeue: the queue is empty and check() says that nothing will fill it"
                )
        if isinstance(item, BaseException):
            item.add_note("raised in the thread that fills the queue of Dequeue")
            raise item
        if item is not NOT_READY and self.learner is not None:
            item = _record(self.learner, item)
            self._emitted = item[0].sources
        return item

    def _get(self) -> Any:
        try:
            return self.queue.get_nowait()
        except queue.Empty:
            return NOT_READY

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._emitted

    def waits(self) -> list[Any]:
        alive = [] if self._check is None else [time.monotonic() + LIVENESS_S]
        return [self._signal, *alive]

    def can_wait(self) -> bool:
        return True

    def extra_stats(self) -> dict[str, Any]:
        if self.learner is not None:
            return self.learner.stats()
        return {"queue_size": self.queue.qsize()}

    def state_dict(self) -> dict[str, Any]:
        learner = {} if self.learner is None else {"learner": self.learner.state_dict()}
        return {**super().state_dict(), **learner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.learner is not None:
            self.learner.load_state_dict(state["learner"])


def _checked(given: Any, operator: str) -> queue.Queue[Any]:
    if not isinstance(given, queue.Queue):
        raise ValueError(f"{operator} takes a queue.Queue, got {type(given).__name__}")
    return given


def _record(learner: LearnerThread, result: LearnedBatch | LearnFailure) -> tuple[Batch, Info]:
    """Count a result of a learner and return (batch, info), as TrainOneStep does.

    Raises:
        Exception: the error that learning raised; the batch counts as dropped.
    """
    metrics = _get_shared_metrics()
    batch = result.batch
    if isinstance(result, LearnFailure):
        metrics.counters["num_env_steps_dropped"] += batch.env_steps()
        raise result.error
    metrics.timers["learner_wait"].push(result.idle_s)
    if restarts := learner.learner.take_restarts():
        metrics.counters["num_learner_restarts"] += restarts
    steps = batch.env_steps()
    return batch, record_updates(
        metrics, learner, result.updates, steps, batch.count, result.learn_s
    )
