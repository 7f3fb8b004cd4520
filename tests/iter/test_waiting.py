"""Waiting is for events: nothing polls, and what happens in between is not missed."""

import queue
import threading
import time

import pytest

from flowrl.iter import ParallelIteratorWorker, from_actors
from flowrl.iter.waiting import Signal, Waiter, queue_signal
from flowrl.ops import Concurrently, Dequeue


class Gate(ParallelIteratorWorker):
    """Serves an item when the file exists, and waits for it until then."""

    def __init__(self, path):
        super().__init__(self.generator)
        self.path = path

    def generator(self):
        while True:
            while not self.path.exists():
                time.sleep(0.02)
            yield "served"


def test_a_signal_wakes_a_waiter():
    signal, waiter = Signal(), Waiter()
    waiter.clear()
    waiter.wait([signal])  # the first time it looks again instead of waiting
    waiter.clear()
    threading.Timer(0.1, signal.fire).start()
    started = time.monotonic()
    waiter.wait([signal])
    assert time.monotonic() - started > 0.05


def test_what_fired_before_the_wait_is_not_missed():
    signal, waiter = Signal(), Waiter()
    waiter.wait([signal])
    waiter.clear()
    signal.fire()
    waiter.wait([signal])  # returns at once, or this test never ends


def test_a_time_ends_a_wait():
    waiter = Waiter()
    started = time.monotonic()
    waiter.wait([started + 0.05])
    assert time.monotonic() - started >= 0.05


def test_a_queue_fires_on_put_and_get_of_any_kind():
    for kind in (queue.Queue, queue.LifoQueue, queue.PriorityQueue):
        watched = kind()
        signal, event = queue_signal(watched), threading.Event()
        assert queue_signal(watched) is signal
        signal.subscribe(event)
        watched.put(1)
        assert event.is_set()
        event.clear()
        assert watched.get() == 1
        assert event.is_set()


def test_one_wait_serves_refs_and_queues(ray_session, tmp_path):
    gate, items = tmp_path / "gate", queue.Queue()
    actor = ray_session.remote(num_cpus=0)(Gate).remote(gate)
    plan = Concurrently([from_actors([actor]).gather_async(), Dequeue(items)], mode="async")
    threading.Timer(0.3, items.put, ["queued"]).start()
    threading.Timer(0.9, gate.touch).start()
    assert plan.take(2) == ["queued", "served"]
    ray_session.kill(actor)


def idle_plan(ray_session, tmp_path):
    """Four branches that wait: two actors, a queue, and two stand-ins on actors."""
    actor = ray_session.remote(num_cpus=0)(Gate)
    actors = [actor.remote(tmp_path / f"never{i}") for i in range(4)]
    items: queue.Queue = queue.Queue()
    branches = [
        from_actors(actors[:2]).gather_async(num_async=2),
        Dequeue(items, check=lambda: True),
        from_actors(actors[2:3], name="replay").gather_async(),
        from_actors(actors[3:], name="learner").gather_sync(),
    ]
    ray_session.get([a.apply.remote(lambda worker: None) for a in actors])
    return Concurrently(branches, mode="async"), items, actors


def test_an_idle_plan_looks_only_when_something_happens(ray_session, tmp_path):
    plan, items, actors = idle_plan(ray_session, tmp_path)
    looks = []
    pull = plan.stage.pull
    plan.stage.pull = lambda block: looks.append(1) or pull(block)
    threading.Timer(2.5, items.put, ["late"]).start()
    assert next(plan) == "late"
    # the start, the first subscription, a liveness check each second, the arrival
    assert len(looks) <= 9
    for actor in actors:
        ray_session.kill(actor)


@pytest.mark.slow
def test_an_idle_plan_uses_no_cpu(ray_session, tmp_path):
    plan, items, actors = idle_plan(ray_session, tmp_path)
    items.put("first")
    next(plan)
    threading.Timer(10.0, items.put, ["late"]).start()
    wall, cpu = time.monotonic(), time.process_time()
    assert next(plan) == "late"
    share = (time.process_time() - cpu) / (time.monotonic() - wall)
    assert share < 0.02
    for actor in actors:
        ray_session.kill(actor)


def test_signals_may_be_fired_while_plans_subscribe():
    signal, stop, errors = Signal(), threading.Event(), []

    def fire():
        while not stop.is_set():
            try:
                signal.fire()
            except RuntimeError as error:
                errors.append(error)

    thread = threading.Thread(target=fire)
    thread.start()
    kept = [threading.Event() for _ in range(2000)]
    for event in kept:
        signal.subscribe(event)
    stop.set()
    thread.join()
    assert errors == []
