"""Memory does not grow with the number of items."""

import itertools
import os
import queue
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from flowrl.data import SampleBatch
from flowrl.iter import LocalIterator, ParallelIteratorWorker, from_actors, from_iterators
from flowrl.ops import Concurrently, Dequeue, Enqueue


def rss_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def local_plan():
    a, b = (
        LocalIterator(lambda: itertools.count(), "count")
        .for_each(lambda x: x + 1)
        .filter(lambda x: x % 3)
        .batch(4)
        .flatten()
        .combine(lambda x: [x])
        .shuffle(8, seed=1)
        .tap("see", lambda x: None)
        .zip_with_source()
        .duplicate(2, max_buffered=3)
    )
    return a.union(b, round_robin_weights=[1, 1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_is_constant_over_three_million_items_of_local_stages():
    program = """
import itertools
from tests.iter.test_memory import local_plan, rss_mb
plan = local_plan()
for _ in itertools.islice(plan, 200_000):
    pass
warm = rss_mb()
for _ in itertools.islice(plan, 3_000_000):
    pass
print(rss_mb() - warm)
"""
    # in a process of its own: after other tests, threads of Ray allocate memory in this one
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert float(output.stdout) < 5


@pytest.mark.slow
def test_memory_is_constant_over_three_hundred_thousand_items_of_actors(ray_session):
    parallel = from_iterators([itertools.count] * 2)
    for options, items in (({"num_async": 4}, 30_000), ({"batch_ms": 1}, 270_000)):
        with parallel.gather_async(**options) as stream:
            for _ in itertools.islice(stream, items // 10):
                pass
            warm = rss_mb()
            for _ in itertools.islice(stream, items):
                pass
            assert rss_mb() - warm < 20
    total = ray_session.cluster_resources()["object_store_memory"]
    assert ray_session.available_resources()["object_store_memory"] > 0.99 * total


LARGE_MB = 16.8


class Large(ParallelIteratorWorker):
    """Serves fragments of 16.8 MB."""

    def __init__(self):
        super().__init__(lambda: (self.make(i) for i in itertools.count()))

    @staticmethod
    def make(number):
        return SampleBatch({"obs": np.full((1024, 4096), number, np.float32)})


class StoreWatch(threading.Thread):
    """Records the peak size of Ray's object store [MB]."""

    def __init__(self, ray):
        super().__init__(daemon=True)
        self.ray, self.peak_mb, self.running = ray, 0.0, True

    def run(self):
        total = self.ray.cluster_resources()["object_store_memory"]
        while self.running:
            free = self.ray.available_resources().get("object_store_memory", total)
            self.peak_mb = max(self.peak_mb, (total - free) / 1e6)
            time.sleep(0.02)


@pytest.mark.slow
def test_slow_reader_of_large_fragments_stops_the_shards(ray_session):
    """Only the fragments in flight and in the queue exist, and none is copied in this process."""
    shards, num_async, queue_size, items = 4, 2, 2, 60
    actors = [ray_session.remote(num_cpus=0)(Large).remote() for _ in range(shards)]
    work, done = queue.Queue(queue_size), queue.Queue(1)

    def slow():
        while (batch := work.get()) is not None:
            time.sleep(0.05)
            done.put((batch["obs"].flags.owndata, float(batch["obs"][-1, -1])))

    thread = threading.Thread(target=slow, daemon=True)
    thread.start()
    gather = from_actors(actors).gather_async(num_async=num_async).for_each(Enqueue(work))
    plan = Concurrently([gather, Dequeue(done)], mode="async", output_indexes=[1])
    watch = StoreWatch(ray_session)
    watch.start()
    before = rss_mb()
    results = plan.take(items)
    watch.running = False
    full_s = [stage["backpressure_s"] for stage in plan.stats() if "backpressure_s" in stage]
    plan.stop()
    work.put(None)
    assert [owned for owned, _ in results] == [False] * items
    assert sum(full_s) > 0  # the queue was full
    limit = shards * num_async + queue_size + 2  # one in the reader, one in the plan
    assert LARGE_MB < watch.peak_mb < (limit + 2) * LARGE_MB
    assert rss_mb() - before < (limit + 2) * LARGE_MB  # fragments in the store are memory-mapped
    for actor in actors:
        ray_session.kill(actor)
