"""Plans wait for events without polling and miss no event."""

import queue
import threading
import time

import pytest

from flowrl.iter import ParallelIteratorWorker, from_actors
from flowrl.iter.waiting import Signal, Waiter, queue_signal
from flowrl.ops import Concurrently, Dequeue


class Gate(ParallelIteratorWorker):
    """Serves items as soon as a file exists."""

    def __init__(self, path):
        super().__init__(self.generator)
        self.path = path

    def generator(self):
        while True:
            while not self.path.exists():
                time.sleep(0.02)
            yield "served"


def test_signal_wakes_a_waiter():
    signal, waiter = Signal(), Waiter()
    waiter.clear()
    waiter.wait([signal])  # returns at once: the signal was not subscribed to before
    waiter.clear()
    fired = []

    def fire():
        fired.append(True)
        signal.fire()

    threading.Timer(0.1, fire).start()
    waiter.wait([signal])
    assert fired


def test_signal_fired_before_the_wait_is_not_missed():
    signal, waiter = Signal(), Waiter()
    waiter.wait([signal])
    waiter.clear()
    signal.fire()
    waiter.wait([signal])  # otherwise the test times out


def test_wait_ends_at_a_time():
    waiter = Waiter()
    started = time.monotonic()
    waiter.wait([started + 0.05])
    assert time.monotonic() - started >= 0.05


def test_queue_signal_fires_on_put_and_get_of_any_queue_class():
    for queue_class in (queue.Queue, queue.LifoQueue, queue.PriorityQueue):
        watched = queue_class()
        signal, event = queue_signal(watched), threading.Event()
        assert queue_signal(watched) is signal
        signal.subscribe(event)
        watched.put(1)
        assert event.is_set()
        event.clear()
        assert watched.get() == 1
        assert event.is_set()


def test_one_wait_covers_refs_and_queues(ray_session, tmp_path):
    gate, items = tmp_path / "gate", queue.Queue()
    actor = ray_session.remote(num_cpus=0)(Gate).remote(gate)
    plan = Concurrently([from_actors([actor]).gather_async(), Dequeue(items)], mode="async")
    threading.Timer(0.3, items.put, ["queued"]).start()
    assert plan.take(1) == ["queued"]
    threading.Timer(0.3, gate.touch).start()
    assert plan.take(1) == ["served"]
    ray_session.kill(actor)


def idle_plan(ray_session, tmp_path):
    """Return a plan with four waiting branches: three gathers of actors and a queue."""
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


@pytest.mark.slow
def test_idle_plan_is_pulled_only_on_events(ray_session, tmp_path):
    plan, items, actors = idle_plan(ray_session, tmp_path)
    pulls = []
    pull = plan.stage.pull
    plan.stage.pull = lambda block: pulls.append(1) or pull(block)
    threading.Timer(2.5, items.put, ["late"]).start()
    started = time.monotonic()
    assert next(plan) == "late"
    # the start, the first subscription, a liveness check each second, the arrival of the item
    assert len(pulls) <= 6 + time.monotonic() - started
    for actor in actors:
        ray_session.kill(actor)


@pytest.mark.slow
def test_idle_plan_uses_no_cpu(ray_session, tmp_path):
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


def test_signal_can_fire_while_plans_subscribe():
    signal, stop, errors = Signal(), threading.Event(), []

    def fire():
        while not stop.is_set():
            try:
                signal.fire()
            except RuntimeError as error:
                errors.append(error)

    thread = threading.Thread(target=fire)
    thread.start()
    events = [threading.Event() for _ in range(2000)]
    for event in events:
        signal.subscribe(event)
    stop.set()
    thread.join()
    assert errors == []
