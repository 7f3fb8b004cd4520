"""Overhead of flowrl.iter per stage, per gathered item and per wake-up, compared with peers.

Peers are ray.util.iter (as shipped with Ray), plain generators, and a bare ray.wait loop with the
same number of requests in flight. The entries run alternately; prints medians over the rounds.

    python benchmarks/iterators.py [--rounds 5] [--only chains gathers workers waiting]
"""

from __future__ import annotations

import argparse
import itertools
import queue
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from flowrl.iter import LocalIterator, ParallelIteratorWorker, from_actors
from flowrl.iter.gather_async import GatherAsync
from flowrl.iter.pools import Pool
from flowrl.iter.shard_stream import Reply
from flowrl.iter.shards import Shard, Shards
from flowrl.ops import Concurrently, Dequeue

CHAIN_ITEMS = 100_000


def increment(x: int) -> int:
    return x + 1


def seconds(run: Callable[..., Any], *args: Any) -> float:
    started = time.perf_counter()
    run(*args)
    return time.perf_counter() - started


def run_alternately(entries: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure all entries once per round; return the figures of each entry."""
    figures: dict[str, list[float]] = {name: [] for name in entries}
    for _ in range(rounds):
        for name, entry in entries.items():
            figures[name].append(entry())
    return figures


def ratio(figures: list[float], base: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(figures, base, strict=True))


# -- chains ------------------------------------------------------------------------------------


def flowrl_chain(stages: int) -> None:
    it = LocalIterator(range(CHAIN_ITEMS))
    for _ in range(stages):
        it = it.for_each(increment)
    for _ in it:
        pass


def ray_chain(stages: int) -> None:
    from ray.util.iter import LocalIterator as RayIterator
    from ray.util.iter_metrics import SharedMetrics

    it = RayIterator(lambda timeout=None: iter(range(CHAIN_ITEMS)), SharedMetrics())
    for _ in range(stages):
        it = it.for_each(increment)
    for _ in it:
        pass


def generator_chain(stages: int) -> None:
    it: Iterator[int] = iter(range(CHAIN_ITEMS))
    for _ in range(stages):
        it = (increment(x) for x in it)
    for _ in it:
        pass


def per_stage(run: Callable[[int], None], stages: int) -> float:
    """Return the seconds per item and stage that a chain takes more than an empty one."""
    return (seconds(run, stages) - seconds(run, 0)) / CHAIN_ITEMS / stages


def chains(rounds: int) -> None:
    print("\nμs per item and stage, including the function; 100,000 items\n")
    print("| stages | generators | ray.util.iter | flowrl | flowrl / ray.util.iter |")
    print("|---:|---:|---:|---:|---:|")
    kinds = {"generators": generator_chain, "ray": ray_chain, "flowrl": flowrl_chain}
    for stages in (1, 5, 10):
        entries = {name: partial(per_stage, run, stages) for name, run in kinds.items()}
        figures = run_alternately(entries, rounds)
        cells = " | ".join(f"{1e6 * statistics.median(v):.3f}" for v in figures.values())
        print(
            f"| {stages} | {cells} | {ratio(figures['flowrl'], figures['ray']):.2f} |", flush=True
        )


# -- gathers -----------------------------------------------------------------------------------


class Server(ParallelIteratorWorker):
    """Repeats one item endlessly as a shard; `raw()` returns it without flowrl."""

    def __init__(self, item: Any):
        super().__init__(lambda: itertools.repeat(item))
        self.item = item

    def raw(self) -> Any:
        return self.item


def bare_async(actors: list[Any], num_async: int, items: int) -> None:
    import ray

    flight = {actor.raw.remote(): actor for actor in actors for _ in range(num_async)}
    for _ in range(items):
        (ref,), _ = ray.wait(list(flight), num_returns=1)
        actor = flight.pop(ref)
        ray.get(ref)
        flight[actor.raw.remote()] = actor


def bare_sync(actors: list[Any], items: int) -> None:
    import ray

    for _ in range(items // len(actors)):
        ray.get([actor.raw.remote() for actor in actors])


def read(stream: Any, items: int) -> None:
    for _ in range(items):
        next(stream)


def read_new(make_stream: Callable[[], Any], items: int) -> None:
    """Read the first items of a new stream, which starts without requests in flight."""
    with make_stream() as stream:
        read(stream, items)


def drained(actors: list[Any], run: Callable[..., None], *args: Any) -> float:
    """Return the seconds of a call; then wait, outside of this time, until the actors are idle, so
    that no entry finds the replies or the remaining requests of the last one."""
    import ray

    elapsed = seconds(run, *args)
    ray.get([actor.raw.remote() for actor in actors])
    return elapsed


def gathers(rounds: int) -> None:
    import ray

    print("\nItems/s from 2 actors\n")
    print("| item | gather | bare loop | flowrl | flowrl / bare |")
    print("|---|---|---:|---:|---:|")
    actor = ray.remote(num_cpus=0)(Server)
    for label, size, items in (("tiny", 0, 2000), ("1 MB", 1 << 20, 600), ("10 MB", 10 << 20, 150)):
        item = np.zeros(size, np.uint8) if size else 1
        actors = [actor.remote(item) for _ in range(2)]
        ray.get([each.raw.remote() for each in actors])
        for gather, num_async in (("async", 1), ("async", 4), ("sync", 1)):
            shards = from_actors(actors)
            if gather == "async":
                make = partial(shards.gather_async, num_async=num_async)
                bare = partial(drained, actors, bare_async, actors, num_async, items)
            else:
                make = shards.gather_sync
                bare = partial(drained, actors, bare_sync, actors, items)
            entries = {"bare": bare, "flowrl": partial(drained, actors, read_new, make, items)}
            run_alternately(entries, 1)  # warm-up
            times = run_alternately(entries, rounds)
            figures = {name: [items / t for t in values] for name, values in times.items()}
            cells = " | ".join(f"{statistics.median(v):,.0f}" for v in figures.values())
            method = f"gather_{gather}" + (f"(num_async={num_async})" if gather == "async" else "")
            value = ratio(figures["flowrl"], figures["bare"])
            print(f"| {label} | {method} | {cells} | {value:.2f} |", flush=True)
        for each in actors:
            ray.kill(each)


# -- the number of workers ---------------------------------------------------------------------


class FakePool(Pool):
    """Returns results immediately in this process, which leaves only the cost of the gather."""

    def __init__(self, count: int):
        super().__init__(lambda: [None] * count, count)

    def submit(self, index: int, request: Any) -> Any:
        return object()

    def result(self, ref: Any) -> Reply:
        return Reply([1], [{}])


def workers(rounds: int) -> None:
    print("\nμs per item of gather_async over fake sources\n")
    print("| workers | num_async=1 | num_async=4 |")
    print("|---:|---:|---:|")
    for count in (2, 8, 64):
        cells = []
        for num_async in (1, 4):
            pool = FakePool(count)
            shards = Shards([Shard(pool, i) for i in range(count)], "fake")
            stream: Any = LocalIterator(GatherAsync(shards, num_async=num_async))
            stream.take(1000)
            times = [seconds(read, stream, 20_000) / 20_000 for _ in range(rounds)]
            cells.append(f"{1e6 * statistics.median(times):.2f}")
        print(f"| {count} | {' | '.join(cells)} |", flush=True)


# -- waiting -----------------------------------------------------------------------------------


class Clock(ParallelIteratorWorker):
    """Each item is the time of a call of `tick()`; blocks until the next call."""

    def __init__(self) -> None:
        super().__init__(lambda: iter(self.wait, None))
        self.event = threading.Event()
        self.time = 0.0

    def wait(self) -> float:
        self.event.wait()
        self.event.clear()
        return self.time

    def tick(self) -> None:
        self.time = time.time()
        self.event.set()


def waiting(rounds: int) -> None:
    import ray

    actor = ray.remote(num_cpus=0, max_concurrency=2)(Clock)
    actors = [actor.remote() for _ in range(4)]
    items: queue.Queue[float] = queue.Queue()
    plan = Concurrently(
        [
            from_actors(actors[:2]).gather_async(),
            Dequeue(items),
            from_actors(actors[2:3], name="replay").gather_async(),
            from_actors(actors[3:], name="learner").gather_async(),
        ],
        mode="async",
    )
    ray.get([clock.tick.remote() for clock in actors])
    plan.take(4)
    threading.Timer(10.0, lambda: items.put(time.time())).start()
    cpu, wall = time.process_time(), time.perf_counter()
    next(plan)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    print(f"\nAn idle plan with four branches uses {100 * share:.2f} % of a core (10 s)")
    queue_delays, actor_delays, ray_delays = [], [], []
    for _ in range(40 * rounds // 5):
        threading.Timer(0.02, lambda: items.put(time.time())).start()
        queue_delays.append(-next(plan) + time.time())
        threading.Timer(0.02, actors[3].tick.remote).start()
        actor_delays.append(-next(plan) + time.time())
        ref = actors[0].apply.remote(lambda worker: time.time())
        ray_delays.append(-ray.get(ref) + time.time())
    delays = (queue_delays, actor_delays, ray_delays)
    queue_ms, actor_ms, ray_ms = (1000 * statistics.median(values) for values in delays)
    print(
        f"The plan returns an item {queue_ms:.2f} ms after it is put into a queue, and "
        f"{actor_ms:.2f} ms after an actor produces it (a bare ray.get: {ray_ms:.2f} ms); medians"
    )
    for each in actors:
        ray.kill(each)


def main() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parts = {"chains": chains, "gathers": gathers, "workers": workers, "waiting": waiting}
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    options = parser.parse_args()
    if {"gathers", "waiting"} & set(options.only):
        import ray

        ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    for name in options.only:
        parts[name](options.rounds)
    if {"gathers", "waiting"} & set(options.only):
        ray.shutdown()


if __name__ == "__main__":
    main()
