"""Throughput and recovery of training while workers are killed.

Each plan trains CartPole with 3 workers: first undisturbed, then with a SIGKILL to the process of a
random worker at regular intervals. Writes the figures to results/chaos.json and this table, with a
row per plan, to results/chaos.md:

- kept: env steps per second with kills, over those without in the same run;
- gap: the longest time between two results with kills, over the median time without;
- recovery: seconds from a kill to the first env step of the replacement (median, 95th percentile);
- lost: env steps that the environments have taken but the plan has not received, per kill;
- twice: env steps that the plan counts beyond those that the environments have taken (must be 0).

    python benchmarks/chaos.py [--plans ppo impala] [--seconds 60] [--every 6] [--spares 1]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figures, measured_here
from gymnasium.envs.classic_control import CartPoleEnv

from flowrl.trainer.plan_settings import plan_config

PLANS = ("ppo", "a2c", "ddppo", "a3c", "impala", "appo", "apex", "dqn_distributed")
NUM_WORKERS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"train_batch_size": 4800, "rollout_fragment_length": 200},
    "ddppo": {"rollout_fragment_length": 200},
}
WARM_UP_S = 5.0
COLUMNS = ("plan", "env steps/s", "kept", "gap", "recovery", "kills", "lost", "twice")


class CountedCartPole(CartPoleEnv):
    """CartPole that writes its number of steps and the time of the first one to a file.

    Args:
        folder: for the files, named worker-process-environment.
        worker_index: number of the worker, from 1.
    """

    _numbers = itertools.count()  # of the environments of this process

    def __init__(self, folder: str, worker_index: int):
        super().__init__()
        path = Path(folder) / f"{worker_index}-{os.getpid()}-{next(self._numbers)}"
        self._record = np.memmap(path, np.float64, "w+", shape=2)

    def step(self, action: Any) -> Any:
        if not self._record[0]:
            self._record[1] = time.time()
        self._record[0] += 1
        return super().step(action)


class Processes:
    """The processes of workers, by the files of their environments."""

    def __init__(self, folder: str):
        self._folder = Path(folder)

    def records(self) -> list[tuple[int, int, float, float]]:
        """Return (worker index, process id, steps, time of the first step) per environment."""
        found = []
        for path in self._folder.iterdir():
            values = np.fromfile(path, np.float64)
            if len(values) == 2 and values[0]:
                worker, pid, _ = path.name.split("-")
                found.append((int(worker), int(pid), *map(float, values)))
        return found

    def live(self) -> list[tuple[int, int]]:
        """Return (worker index, process id) of the workers that sample."""
        pids = {(worker, pid) for worker, pid, *_ in self.records() if worker}
        return sorted(one for one in pids if Path(f"/proc/{one[1]}").exists())


def kill_workers(
    processes: Processes, every_s: float, stop: threading.Event, kills: list[tuple[int, float]]
) -> None:
    """Kill a random worker at regular intervals; note (worker index, time) of each kill."""
    rng = random.Random(0)
    while not stop.wait(every_s):
        live = processes.live()
        if live:
            worker, pid = rng.choice(live)
            killed_at = time.time()
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
                kills.append((worker, killed_at))


def train_for(algorithm: Any, seconds: float) -> tuple[float, list[float]]:
    """Train for a time; return env steps per second, and the seconds between results."""
    steps = algorithm.env_steps
    started = last = time.perf_counter()
    gaps = []
    while last - started < seconds:
        algorithm.train()
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    return (algorithm.env_steps - steps) / (last - started), gaps


def measure(plan: str, seconds: float, every_s: float, num_spares: int) -> dict[str, Any]:
    """Train a plan with and without kills; return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(folder)
        config = plan_config(plan, "CartPole-v1", tuned=False).updated(
            env=lambda context: CountedCartPole(folder, context.worker_index),
            num_workers=NUM_WORKERS,
            num_spare_workers=num_spares,
            total_timesteps=10**9,
            monitor=False,
            seed=0,
            **SETTINGS.get(plan, {}),
        )
        kills: list[tuple[int, float]] = []
        with config.build(plan=plan) as algorithm:
            train_for(algorithm, WARM_UP_S)
            rate, gaps = train_for(algorithm, seconds)
            stop = threading.Event()
            killer = threading.Thread(
                target=kill_workers, args=(processes, every_s, stop, kills), daemon=True
            )
            killer.start()
            disturbed_rate, disturbed_gaps = train_for(algorithm, seconds)
            stop.set()
            killer.join()
            result = algorithm.train()
            counters = algorithm.plan.metrics.counters
        records = processes.records()
    recoveries, unrecovered = [], 0
    for worker, moment in kills:
        first = min((t for w, _, _, t in records if w == worker and t > moment), default=None)
        if first is None:
            unrecovered += 1
        else:
            recoveries.append(first - moment)
    taken = sum(steps for worker, _, steps, _ in records if worker)
    sampled = counters["num_env_steps_sampled"]
    dropped = counters["num_env_steps_dropped"]
    return {
        "plan": plan,
        "measured": [
            measured_here(
                f"{seconds:g} s without kills and as long with one every {every_s:g} s",
                f"{num_spares} spare processes",
            )
        ],
        "spares": num_spares,
        "rate": rate,
        "kept": disturbed_rate / rate,
        "gap": max(disturbed_gaps) / float(np.median(gaps)),
        "normal_gap_s": float(np.median(gaps)),
        "largest_gap_s": max(disturbed_gaps),
        "largest_normal_gap_s": max(gaps),
        "recoveries_s": recoveries,
        "unrecovered": unrecovered,
        "kills": len(kills),
        "restarts": result["num_remote_worker_restarts"],
        "lost": (taken - sampled) / max(1, len(kills)),
        "twice": max(0, sampled - taken),
        "sampled": sampled,
        "dropped": dropped,
        "trained": counters["num_env_steps_trained"],
    }


def cells(figures: dict[str, Any]) -> list[str]:
    """Return the cells of a plan's row in the table."""
    times = figures["recoveries_s"] or [float("nan")]
    median, high = np.percentile(times, [50, 95])
    return [
        figures["plan"] + (f", {figures['spares']} spare" if figures["spares"] else ""),
        f"{figures['rate']:,.0f}",
        f"{figures['kept']:.0%}",
        f"{figures['gap']:.1f}",
        f"{median:.1f} s, {high:.1f} s",
        f"{figures['kills']}",
        f"{figures['lost']:,.0f}",
        f"{figures['twice']:.0f}",
    ]


def main() -> None:
    """Measure the plans, each in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=PLANS)
    parser.add_argument("--seconds", type=float, default=60.0, help="with and without kills, each")
    parser.add_argument("--every", type=float, default=6.0, help="seconds between two kills")
    parser.add_argument("--spares", type=int, default=0, help="setting num_spare_workers")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        figures = measure(options.measure, options.seconds, options.every, options.spares)
        print(json.dumps(figures))
        return
    table = Figures("chaos", COLUMNS, cells)
    for plan in options.plans:
        command = [sys.executable, __file__, "--measure", plan]
        command += ["--seconds", str(options.seconds), "--every", str(options.every)]
        command += ["--spares", str(options.spares)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        figures = json.loads(output.splitlines()[-1])
        table.add(plan if not options.spares else f"{plan}, {options.spares} spare", figures)


if __name__ == "__main__":
    main()
