"""Memory, open files, threads and object store of long runs.

Each training runs for 20 minutes. Every few seconds, the script reads what its process, its workers
and Ray's object store hold. Writes the figures to results/soak.json and this table, with a row per
training, to results/soak.md:

- memory: of this process, and of a worker, after a quarter of the time and at the end;
- slope: growth of the memory per hour after that quarter (least squares);
- files, threads: open file descriptors and threads of this process, then and at the end;
- store: the most that Ray's object store held in the last quarter.

    python benchmarks/soak.py [--trainings impala dqn] [--minutes 20]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
from figures import Figures, measured_here

from flowrl.envs import make_multi_agent
from flowrl.process_usage import resident_bytes
from flowrl.trainer.plan_settings import plan_config

COLUMNS = ("training", "env steps", "memory", "slope", "worker", "slope", "files", "threads",
           "store")  # fmt: skip
TRAININGS: dict[str, dict[str, Any]] = {
    "ppo": {"num_workers": 2},
    "impala": {"num_workers": 2},
    "dqn": {"num_workers": 0},
    "ppo, recurrent, 2 agents": {
        "num_workers": 2,
        "env": make_multi_agent("CartPole-v1"),
        "env_config": {"num_agents": 2},
        "model": {"use_lstm": True, "lstm_cell_size": 32, "fcnet_hiddens": [32]},
        "num_envs_per_worker": 4,
    },
}
QUANTITIES = ("seconds", "memory_mb", "worker_mb", "files", "threads", "store_mb")


def store_mb() -> float:
    """Return what Ray's object store holds; 0 without Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return 0.0
    total = ray.cluster_resources()["object_store_memory"]
    return (total - ray.available_resources().get("object_store_memory", 0.0)) / 1e6


def watch(
    worker_pids: list[int], every_s: float, stop: threading.Event, readings: list[list[float]]
) -> None:
    """Append a reading of all QUANTITIES at regular intervals."""
    started, own = time.monotonic(), os.getpid()
    while not stop.wait(every_s):
        readings.append(
            [
                time.monotonic() - started,
                resident_bytes() / 1e6,
                float(np.mean([resident_bytes(pid) for pid in worker_pids] or [0.0])) / 1e6,
                len(os.listdir(f"/proc/{own}/fd")),
                len(os.listdir(f"/proc/{own}/task")),
                store_mb(),
            ]
        )


def measure(training: str, minutes: float) -> dict[str, Any]:
    """Train for a time; return the figures."""
    plan = training.split(",")[0]
    settings = {"env": "CartPole-v1", **TRAININGS[training]}
    env = settings.pop("env")
    config = plan_config(plan, env, tuned=False)
    config = config.updated(total_timesteps=10**9, seed=0, **settings)
    readings: list[list[float]] = []
    stop = threading.Event()
    with config.build(plan=plan) as algorithm:
        algorithm.train()
        _, *pids = algorithm.workers.foreach_worker(lambda _: os.getpid())
        watcher = threading.Thread(target=watch, args=(pids, 5.0, stop, readings), daemon=True)
        watcher.start()
        deadline = time.monotonic() + 60 * minutes
        while time.monotonic() < deadline:
            algorithm.train()
        stop.set()
        watcher.join()
        assert all(map(resident_bytes, pids)), "a worker was replaced"
        env_steps = algorithm.env_steps
    values = dict(zip(QUANTITIES, np.array(readings).T, strict=True))
    warm = len(readings) // 4
    hours = values["seconds"][warm:] / 3600
    at = [warm - 1, 2 * warm - 1, 3 * warm - 1, -1]
    quarters = {name: [float(of[index]) for index in at] for name, of in values.items()}
    return {
        "training": training,
        "measured": [measured_here(f"{minutes:g} minutes")],
        "env_steps": env_steps,
        **quarters,
        "slopes_mb_per_h": [
            float(np.polyfit(hours, values[name][warm:], 1)[0])
            for name in ("memory_mb", "worker_mb")
        ],
        "store_peak_mb": float(values["store_mb"][-warm:].max()),
    }


def cells(figures: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the table."""
    own, worker = figures["slopes_mb_per_h"]
    has_workers = figures["worker_mb"][0] > 0
    between = {name: f"{figures[name][0]:.0f}, {figures[name][-1]:.0f}" for name in QUANTITIES}
    return [
        figures["training"],
        f"{figures['env_steps'] / 1e6:.1f} M",
        f"{between['memory_mb']} MB",
        f"{own:+.1f} MB/h",
        f"{between['worker_mb']} MB" if has_workers else "-",
        f"{worker:+.1f} MB/h" if has_workers else "-",
        between["files"],
        between["threads"],
        f"{figures['store_peak_mb']:.1f} MB",
    ]


def main() -> None:
    """Run the trainings one after another, each in a process of its own; print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--trainings", nargs="+", choices=tuple(TRAININGS), default=tuple(TRAININGS)
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of each training")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.minutes)))
        return
    table = Figures("soak", COLUMNS, cells)
    for training in options.trainings:
        command = [sys.executable, __file__, "--measure", training]
        command += ["--minutes", str(options.minutes)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        table.add(training, json.loads(output.splitlines()[-1]))


if __name__ == "__main__":
    main()
