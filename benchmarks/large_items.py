"""Large items: fragments of 16 MB from 4 workers, weights of 100 MB to 8 workers.

Compares with a bare `ray.wait` loop over the same number of actors, arrays and requests in flight,
and with a bare `ray.put` whose reference is sent to the same number of actors. Readers touch each
page of an item. Also prints the peak memory of the object store. The entries run alternately;
prints medians over the rounds.

    python benchmarks/large_items.py [--rounds 5] [--items 200]
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import gymnasium
import numpy as np
import ray

from flowrl.data import SampleBatch
from flowrl.iter import ParallelIteratorWorker, from_actors
from flowrl.policies import Policy
from flowrl.sampling import WorkerSet

SOURCES, IN_FLIGHT, ROWS, FLOATS = 4, 2, 1024, 4096  # 16.8 MB
READERS, WEIGHTS = 8, 25_000_000  # 100 MB
PAGE = 1024  # floats


def touch(array: np.ndarray) -> float:
    return float(array.reshape(-1)[::PAGE].sum())


def fragments() -> Iterator[SampleBatch]:
    number = 0
    while True:
        number += 1
        obs = np.full((ROWS, FLOATS), number, np.float32)
        yield SampleBatch({"obs": obs, "rewards": np.zeros(ROWS, np.float32)})


class Source(ParallelIteratorWorker):
    """A shard of large fragments; `raw()` returns the same arrays without flowrl."""

    def __init__(self) -> None:
        super().__init__(fragments)
        self.raw_fragments = fragments()

    def raw(self) -> Any:
        batch = next(self.raw_fragments)
        return batch["obs"], batch["rewards"]


def bare_fragments(actors: list[Any], items: int) -> None:
    flight = {actor.raw.remote(): actor for actor in actors for _ in range(IN_FLIGHT)}
    for _ in range(items):
        (ref,), _ = ray.wait(list(flight), num_returns=1)
        actor = flight.pop(ref)
        touch(ray.get(ref)[0])
        flight[actor.raw.remote()] = actor


def flowrl_fragments(actors: list[Any], items: int) -> None:
    with from_actors(actors).gather_async(num_async=IN_FLIGHT) as stream:
        for _ in range(items):
            batch = next(stream)
            touch(batch["obs"])
        assert not batch["obs"].flags.owndata  # the memory belongs to Ray's object store


def wait_until_idle(actors: list[Any]) -> None:
    """Wait until the actors have served the requests that were in flight at the end of an entry."""
    ray.get([actor.apply.remote(lambda source: None) for actor in actors])


class Weights(Policy):
    """A policy whose weights are one large array."""

    def __init__(self, *spaces_and_config: Any):
        super().__init__(*spaces_and_config)
        self.weights = {"w": np.zeros(WEIGHTS, np.float32)}

    def compute_actions(self, obs_batch: Any, explore: bool = True) -> Any:
        return np.zeros(len(obs_batch), np.int64), [], {}

    def get_weights(self) -> dict[str, np.ndarray]:
        return self.weights

    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = weights
        touch(weights["w"])
        self.version += 1


class Reader:
    """An actor that receives weights."""

    def take(self, weights: np.ndarray) -> None:
        self.weights = weights
        touch(weights)


def bare_weights(readers: list[Any], array: np.ndarray) -> None:
    array[0] += 1
    ref = ray.put(array)
    ray.get([reader.take.remote(ref) for reader in readers])


def flowrl_weights(workers: WorkerSet) -> None:
    policy = workers.local_worker().policy
    policy.set_weights({"w": policy.get_weights()["w"]})
    workers.sync_weights()


def seconds(run: Callable[..., Any], *args: Any) -> float:
    started = time.perf_counter()
    run(*args)
    return time.perf_counter() - started


class ObjectStorePeak:
    """Context manager that records the peak memory of the object store, `peak_mb`."""

    def __enter__(self) -> ObjectStorePeak:
        self.peak_mb, self._open = 0.0, True
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()
        return self

    def _poll(self) -> None:
        total = ray.cluster_resources()["object_store_memory"]
        while self._open:
            free = ray.available_resources().get("object_store_memory", total)
            self.peak_mb = max(self.peak_mb, (total - free) / 1e6)
            time.sleep(0.05)

    def __exit__(self, *exc: object) -> None:
        self._open = False
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--items", type=int, default=200)
    options = parser.parse_args()
    ray.init("local", num_cpus=16, include_dashboard=False, logging_level="ERROR")
    print("\n| | per second | / bare | object store, peak MB |\n|---|---:|---:|---:|")

    sources = [ray.remote(num_cpus=0)(Source).remote() for _ in range(SOURCES)]
    figures: dict[str, list[float]] = {"bare": [], "flowrl": []}
    peaks: dict[str, float] = {}
    entries: dict[str, Callable[[], Any]] = {
        "bare": lambda: bare_fragments(sources, options.items),
        "flowrl": lambda: flowrl_fragments(sources, options.items),
    }
    for entry in entries.values():
        entry()  # warm-up: touches the store's memory once
        wait_until_idle(sources)
    for _ in range(options.rounds):
        for name, entry in entries.items():
            with ObjectStorePeak() as store:
                figures[name].append(seconds(entry))
            wait_until_idle(sources)
            peaks[name] = max(peaks.get(name, 0.0), store.peak_mb)
    for source in sources:
        ray.kill(source)
    report("fragments of 16 MB from 4 workers", figures, peaks, options.items)

    config = {"num_cpus_per_worker": 0.1}
    workers = WorkerSet(lambda _: gymnasium.make("CartPole-v1"), Weights, config, READERS)
    readers = [ray.remote(num_cpus=0)(Reader).remote() for _ in range(READERS)]
    array = np.zeros(WEIGHTS, np.float32)
    flowrl_weights(workers)  # waits until all workers have started
    bare_weights(readers, array)
    figures, peaks = {"bare": [], "flowrl": []}, {}
    entries = {
        "bare": lambda: bare_weights(readers, array),
        "flowrl": lambda: flowrl_weights(workers),
    }
    for _ in range(options.rounds):
        for name, entry in entries.items():
            with ObjectStorePeak() as store:
                figures[name].append(seconds(entry))
            peaks[name] = max(peaks.get(name, 0.0), store.peak_mb)
    report("weights of 100 MB to 8 workers", figures, peaks, 1)
    workers.stop()
    ray.shutdown()


def report(
    label: str, figures: dict[str, list[float]], peaks: dict[str, float], items: int
) -> None:
    for name, times in figures.items():
        ratio = statistics.median(a / b for a, b in zip(figures["bare"], times, strict=True))
        rate = items / statistics.median(times)
        print(f"| {label}: {name} | {rate:.1f} | {ratio:.2f} | {peaks[name]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
