"""What the engine costs: per stage, per gathered item, per wake-up; beside peers, in one run.

Peers: ray.util.iter (as Ray still ships it), plain generators, a bare ray.wait loop with as many
requests in flight. Medians of several rounds, the entries in turn.

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


def in_turn(entries: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Every entry's figure, measured in turn, round by round."""
    figures: dict[str, list[float]] = {name: [] for name in entries}
    for _ in range(rounds):
        for name, entry in entries.items():
            figures[name].append(entry())
    return figures


def ratio(of: list[float], to: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


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
    """What a chain takes more than an empty one, per item and stage [s]."""
    return (seconds(run, stages) - seconds(run, 0)) / CHAIN_ITEMS / stages


def chains(rounds: int) -> None:
    print("\nμs per item and stage, the function's own time included; 100,000 items\n")
    print("| stages | generators | ray.util.iter | flowrl | flowrl / ray.util.iter |")
    print("|---:|---:|---:|---:|---:|")
    kinds = {"generators": generator_chain, "ray": ray_chain, "flowrl": flowrl_chain}
    for stages in (1, 5, 10):
        entries = {name: partial(per_stage, run, stages) for name, run in kinds.items()}
        got = in_turn(entries, rounds)
        cells = " | ".join(f"{1e6 * statistics.median(v):.3f}" for v in got.values())
        print(f"| {stages} | {cells} | {ratio(got['flowrl'], got['ray']):.2f} |", flush=True)


# -- gathers -----------------------------------------------------------------------------------


class Server(ParallelIteratorWorker):
    """An endless shard of one item; `raw()` gives the same without flowrl."""

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
    ray.get(list(flight))


def bare_sync(actors: list[Any], items: int) -> None:
    import ray

    for _ in range(items // len(actors)):
        ray.get([actor.raw.remote() for actor in actors])


def read(stream: Any, items: int) -> None:
    for _ in range(items):
        next(stream)


def gathers(rounds: int) -> None:
    import ray

    print("\nItems/s from 2 actors\n")
    print("| item | gather | bare loop | flowrl | flowrl / bare |")
    print("|---|---|---:|---:|---:|")
    actor = ray.remote(num_cpus=0)(Server)
    for what, size, items in (("tiny", 0, 2000), ("1 MB", 1 << 20, 600), ("10 MB", 10 << 20, 150)):
        item = np.zeros(size, np.uint8) if size else 1
        actors = [actor.remote(item) for _ in range(2)]
        ray.get([each.raw.remote() for each in actors])
        for gather, num_async in (("async", 1), ("async", 4), ("sync", 1)):
            served = from_actors(actors)
            if gather == "async":
                stream = served.gather_async(num_async=num_async, ask_again="before")
                bare = partial(seconds, bare_async, actors, num_async, items)
            else:
                stream = served.gather_sync()
                bare = partial(seconds, bare_sync, actors, items)
            stream.take(10)
            times = in_turn({"bare": bare, "flowrl": partial(seconds, read, stream, items)}, rounds)
            got = {name: [items / t for t in taken] for name, taken in times.items()}
            cells = " | ".join(f"{statistics.median(v):,.0f}" for v in got.values())
            named = f"gather_{gather}" + (f"(num_async={num_async})" if gather == "async" else "")
            value = ratio(got["flowrl"], got["bare"])
            print(f"| {what} | {named} | {cells} | {value:.2f} |", flush=True)
            stream.stop()
        for each in actors:
            ray.kill(each)


# -- the number of workers ---------------------------------------------------------------------


class FakePool(Pool):
    """Answers at once, in this process: what is left is the cost of the gather."""

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


class Silent(ParallelIteratorWorker):
    """Serves the time at which `tell()` was called, when it was; waits for that until then."""

    def __init__(self) -> None:
        super().__init__(lambda: iter(self.wait, None))
        self.event = threading.Event()
        self.told = 0.0

    def wait(self) -> float:
        self.event.wait()
        self.event.clear()
        return self.told

    def tell(self) -> None:
        self.told = time.time()
        self.event.set()


def waiting(rounds: int) -> None:
    import ray

    actor = ray.remote(num_cpus=0, max_concurrency=2)(Silent)
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
    ray.get([each.tell.remote() for each in actors])
    plan.take(4)
    threading.Timer(10.0, lambda: items.put(time.time())).start()
    cpu, wall = time.process_time(), time.perf_counter()
    next(plan)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    print(f"\nAn idle plan of four branches for 10 s: {100 * share:.2f} % of a core")
    from_queue, from_actor, raw = [], [], []
    for _ in range(40 * rounds // 5):
        threading.Timer(0.02, lambda: items.put(time.time())).start()
        from_queue.append(-next(plan) + time.time())
        threading.Timer(0.02, actors[3].tell.remote).start()
        from_actor.append(-next(plan) + time.time())
        ref = actors[0].apply.remote(lambda worker: time.time())
        raw.append(-ray.get(ref) + time.time())
    queued, acted, latency = (1000 * statistics.median(v) for v in (from_queue, from_actor, raw))
    print(
        f"An item is handed out {queued:.2f} ms after it is put into a queue, and {acted:.2f} ms "
        f"after an actor has it (a bare ray.get: {latency:.2f} ms); medians"
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
