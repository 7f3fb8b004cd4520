"""What does the measurement of a running plan cost, and what does a trace cost?

One algorithm trains without measurement, with it, and with a trace in addition, in turn for a short
time each, so that slow changes of the machine's speed affect all three. Prints env steps per second
and processor seconds of all processes per env step, each over that without measurement: the median
over the rounds, and its 95 % interval (bootstrap). Then the processor time of the thread that
measures, over the time of the training.

    python benchmarks/monitoring.py [--seconds 1] [--rounds 30]
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from flowrl import DQN, IMPALA, PPO
from flowrl.iter.profiler import Profiler
from flowrl.monitoring.monitor import Monitor
from flowrl.monitoring.trace import Tracer

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "PPO, in process": (PPO, {"num_envs_per_worker": 8, "train_batch_size": 1024}),
    "PPO, 2 workers": (
        PPO,
        {"num_envs_per_worker": 8, "train_batch_size": 1024, "num_workers": 2},
    ),
    "DQN, in process": (DQN, {"min_sample_timesteps_per_iteration": 200}),
    "IMPALA, 2 workers": (IMPALA, {"num_envs_per_worker": 4, "num_workers": 2}),
}
MODES = ("off", "measured", "traced")


def cpu_seconds(pids: set[int]) -> float:
    """Return the processor seconds that processes have used."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def train(algorithm: Any, mode: str, seconds: float, pids: set[int]) -> tuple[float, float, float]:
    """Train for some seconds.

    Returns:
        Env steps per second, processor seconds per env step, and the share of the time in which
        the thread that measures used a processor.
    """
    # the plan times some of its pulls even if nothing reads the times
    profiler = algorithm.plan._profiler = Profiler(algorithm.plan.stage)
    if mode == "off":
        profiler.pulls_until_timed, profiler._next_interval = 10**9, lambda: 10**9
    monitor = Monitor(algorithm.plan, algorithm.workers, ()) if mode != "off" else None
    tracer = Tracer(algorithm.plan, 60.0) if mode == "traced" else None
    if monitor is not None:
        monitor.start()
    before, cpu, started = algorithm.env_steps, cpu_seconds(pids), time.perf_counter()
    while time.perf_counter() - started < seconds:
        algorithm.train()
    env_steps, elapsed = algorithm.env_steps - before, time.perf_counter() - started
    cpu = cpu_seconds(pids) - cpu
    thread_s = sum(
        int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
        for thread in threading.enumerate()
        if thread.name == "flowrl-monitor"
    )
    if monitor is not None:
        monitor.stop()
    if tracer is not None:
        tracer.stop()
    return env_steps / elapsed, cpu / env_steps, thread_s / elapsed


def interval(ratios: list[float]) -> str:
    """Return the median of ratios, with its 95 % interval."""
    samples = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(samples, axis=1), [0.025, 0.975])
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    for name, (algorithm_class, settings) in CASES.items():
        speeds: dict[str, list[float]] = {"measured": [], "traced": []}
        costs: dict[str, list[float]] = {"measured": [], "traced": []}
        own: list[float] = []
        with algorithm_class("CartPole-v1", seed=1, monitor=False, **settings) as algorithm:
            algorithm.train()
            pids = {os.getpid(), *algorithm.workers.foreach_worker(lambda worker: os.getpid())}
            train(algorithm, "traced", 2.0, pids)
            for round_number in range(args.rounds):
                order = MODES[round_number % 3 :] + MODES[: round_number % 3]
                figures = {mode: train(algorithm, mode, args.seconds, pids) for mode in order}
                own.append(figures["measured"][2])
                for mode in speeds:
                    speeds[mode].append(figures[mode][0] / figures["off"][0])
                    costs[mode].append(figures[mode][1] / figures["off"][1])
        for mode in speeds:
            print(
                f"{name}, {mode}: env steps/s {interval(speeds[mode])}, "
                f"processor time per env step {interval(costs[mode])}",
                flush=True,
            )
        print(f"{name}: the thread that measures uses {statistics.mean(own):.2%}", flush=True)


if __name__ == "__main__":
    main()
