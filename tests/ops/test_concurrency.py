"""Concurrently, Enqueue and Dequeue: concurrent sub-plans, and queues of other threads."""

import multiprocessing
import queue
import threading
import time
from collections import Counter

import pytest

from flowrl.iter import NOT_READY, LocalIterator
from flowrl.ops import Concurrently, Dequeue, Enqueue


def endless(value):
    return LocalIterator(lambda: iter(lambda: value, None), str(value))


def test_round_robin_and_weights():
    plan = Concurrently([endless("a"), endless("b")], mode="round_robin")
    assert plan.take(4) == ["a", "b", "a", "b"]
    plan = Concurrently([endless("a"), endless("b")], round_robin_weights=[1, 0.5])
    assert Counter(plan.take(300)) == {"a": 200, "b": 100}
    assert "Concurrently(mode='round_robin', round_robin_weights=[1, 0.5])" in plan.explain()


def test_all_branches_run_but_only_selected_items_are_returned():
    first = LocalIterator([1, 2, 3])
    plan = Concurrently([first, LocalIterator(["x", "y"])], output_indexes=[1])
    assert list(plan) == ["x", "y"]
    assert first.stage.items == 3


def test_error_notes_include_the_branch():
    def train(x):
        raise ValueError("diverged")

    plan = Concurrently([endless(1), endless(2).for_each(train)]).for_each(str)
    next(plan)
    with pytest.raises(ValueError, match="diverged") as caught:
        next(plan)
    assert "for_each(str) › Concurrently[1] › for_each(train)" in "".join(caught.value.__notes__)


def test_items_pass_through_a_learner_thread():
    inqueue, outqueue = queue.Queue(maxsize=2), queue.Queue()

    def learn():
        while (item := inqueue.get()) is not None:
            outqueue.put(item * 10)

    learner = threading.Thread(target=learn)
    learner.start()
    feed = LocalIterator(range(50)).for_each(Enqueue(inqueue))
    plan = Concurrently(
        [feed, Dequeue(outqueue, check=learner.is_alive)], mode="async", output_indexes=[1]
    )
    assert plan.take(50) == [10 * i for i in range(50)]
    inqueue.put(None)
    learner.join()
    with pytest.raises(RuntimeError, match="check"):
        next(plan)


def test_full_queue_stops_pulling_and_loses_no_item():
    full = queue.Queue(maxsize=1)
    source = LocalIterator([1, 2, 3])
    plan = source.for_each(Enqueue(full))
    plan.start()
    assert plan.stage.pull(False) == 1
    assert plan.stage.pull(False) is NOT_READY
    assert source.stage.items == 1
    assert plan.stats()[0]["queue_size"] == 1
    assert full.get() == 1
    assert plan.stage.pull(False) == 2


def test_single_branch_waits_for_room_in_the_queue():
    small = queue.Queue(maxsize=1)
    plan = LocalIterator(range(5)).for_each(Enqueue(small))
    assert next(plan) == 0
    threading.Timer(0.2, small.get).start()
    assert next(plan) == 1


@pytest.mark.parametrize("first", ["feed", "results"])
def test_round_robin_over_a_thread_does_not_deadlock(first):
    inqueue, outqueue = queue.Queue(maxsize=1), queue.Queue(maxsize=1)

    def learn():
        while (item := inqueue.get()) is not None:
            outqueue.put(item)

    learner = threading.Thread(target=learn)
    learner.start()
    feed = LocalIterator(range(20)).for_each(Enqueue(inqueue))
    results = Dequeue(outqueue, check=learner.is_alive).for_each(lambda x: -x)
    branches = [feed, results] if first == "feed" else [results, feed]
    plan = Concurrently(branches, output_indexes=[branches.index(results)])
    assert plan.take(20) == [-i for i in range(20)]
    inqueue.put(None)
    learner.join()


def test_exception_in_the_queue_is_raised_in_the_plan():
    outqueue = queue.Queue()
    outqueue.put(1)
    outqueue.put(FloatingPointError("loss is nan"))
    plan = Dequeue(outqueue, check=lambda: False).for_each(str)
    assert next(plan) == "1"  # earlier items first
    with pytest.raises(FloatingPointError, match="loss is nan") as caught:
        next(plan)
    assert "fills the queue" in "".join(caught.value.__notes__)
    with pytest.raises(RuntimeError, match="the thread that fills it has ended"):
        next(plan)


def test_building_a_plan_starts_no_threads():
    q = queue.Queue()
    before = set(threading.enumerate())
    Concurrently([Dequeue(q), endless(1).for_each(Enqueue(q))], mode="async")
    assert not set(threading.enumerate()) - before
    assert "_put" not in vars(q)


def test_invalid_arguments_are_rejected_on_construction():
    a, b = endless(1), endless(2)
    with pytest.raises(ValueError, match="at least 2"):
        Concurrently([a])
    with pytest.raises(TypeError, match="LocalIterators"):
        Concurrently([a, 3])
    with pytest.raises(ValueError, match="mode"):
        Concurrently([a, b], mode="sync")
    with pytest.raises(ValueError, match="output_indexes is empty, so no item would be returned"):
        Concurrently([a, b], output_indexes=[])
    with pytest.raises(ValueError, match="round_robin_weights need"):
        Concurrently([a, b], mode="async", round_robin_weights=[1, 1])
    with pytest.raises(ValueError, match="contains 2, but the 2 branches"):
        Concurrently([a, b], output_indexes=[2])
    with pytest.raises(ValueError, match="at least one weight"):
        Concurrently([a, b], round_robin_weights=["*", "*"])
    with pytest.raises(ValueError, match=r"queue\.Queue"):
        Enqueue([])
    with pytest.raises(ValueError, match=r"queue\.Queue"):
        Dequeue(queue.SimpleQueue())
    with pytest.raises(TypeError, match="Dequeue: `check` must be a function or None, got True"):
        Dequeue(queue.Queue(), check=True)


def test_error_of_a_dying_thread_is_raised():
    """The thread puts its error and dies after the queue was found empty, before `check`."""
    q = queue.Queue()

    def check():
        q.put(ValueError("thread failed"))
        return False

    with pytest.raises(ValueError, match="thread failed") as caught:
        next(Dequeue(q, check))
    assert "Dequeue" in "".join(caught.value.__notes__)


def test_stop_iteration_in_a_queue_does_not_end_the_stream():
    q = queue.Queue()
    for item in (1, StopIteration(), 2):
        q.put(item)
    plan = Dequeue(q).for_each(str)
    assert next(plan) == "1"
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(plan)
    assert next(plan) == "2"


def test_transform_of_a_queue_in_the_same_plan_is_rejected():
    q = queue.Queue(1)
    feed = LocalIterator([1, 2]).for_each(Enqueue(q))
    with pytest.raises(ValueError, match="cannot pause"):
        Concurrently([feed, Dequeue(q).transform(iter)])


@pytest.mark.parametrize("mode", ["async", "round_robin"])
def test_dropped_branches_wait_for_room_before_the_plan_ends(mode):
    first, second = LocalIterator(range(10)).duplicate(2, max_buffered=4)
    received, items = [], queue.Queue(1)

    def read_slowly():
        while len(received) < 10:
            received.append(items.get(timeout=10))
            time.sleep(0.002)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    branches = [first, second.for_each(Enqueue(items))]
    assert list(Concurrently(branches, mode=mode, output_indexes=[0])) == [*range(10)]
    reader.join()
    assert received == [*range(10)]


def test_dropped_branch_makes_room_for_another_one_before_the_plan_ends():
    first, second = LocalIterator(range(10)).duplicate(2, max_buffered=4)
    items, taken = queue.Queue(1), []
    branches = [first, second.for_each(Enqueue(items)), Dequeue(items).for_each(taken.append)]
    plan = Concurrently(branches, mode="async", output_indexes=[0])
    assert list(plan) == [*range(10)]
    assert taken in ([*range(10)], [*range(9)])  # the last item may stay in the queue


@pytest.mark.slow
def test_errors_of_tasks_in_dropped_branches_are_raised_before_the_plan_ends(ray_session):
    def fails_on_9(item):
        time.sleep(0.05)
        if item == 9:
            raise ValueError("9 failed")
        return item

    first, second = LocalIterator(range(10)).duplicate(2)
    seen = []
    tasks = second.for_each(fails_on_9, max_concurrency=2).for_each(seen.append)
    plan = Concurrently([first, tasks], mode="async", output_indexes=[0])
    assert plan.take(10) == [*range(10)]
    with pytest.raises(ValueError, match="9 failed"):
        next(plan)
    assert sorted(seen) == [*range(9)]


def test_message_names_the_module_of_another_queue():
    with pytest.raises(ValueError, match=r"got a multiprocessing\.queues\.Queue"):
        Enqueue(multiprocessing.Queue())


def test_plan_ends_although_nothing_reads_a_queue(monkeypatch, caplog):
    monkeypatch.setattr("flowrl.iter.stages.branches.DRAIN_TIMEOUT_S", 0.2)
    first, second = LocalIterator(range(10)).duplicate(2, max_buffered=100)
    branches = [first, second.for_each(Enqueue(queue.Queue(1)))]
    assert list(Concurrently(branches, mode="async", output_indexes=[0])) == [*range(10)]
    assert "are dropped at the end of the stream, because the stage has waited" in caplog.text
