"""What does the measurement of a running plan cost? Env steps per second with and without it.

Algorithms train in turn, for a few seconds each: without measurement (monitor=False), with it (the
default), and with a trace in addition. Prints the median of the ratios of their speeds to that
without measurement over the rounds, and the quartiles.

    python benchmarks/monitoring.py [--seconds 3] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from flowrl import DQN, IMPALA, PPO
from flowrl.monitoring.trace import Tracer

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "PPO, in process": (PPO, {"num_envs_per_worker": 8, "train_batch_size": 1024}),
    "PPO, 2 workers": (
        PPO,
        {"num_envs_per_worker": 8, "train_batch_size": 1024, "num_workers": 2},
    ),
    "DQN, in process": (DQN, {}),
    "IMPALA, 2 workers": (IMPALA, {"num_envs_per_worker": 4, "num_workers": 2}),
}


def speed(algorithm: Any, seconds: float) -> float:
    """Return env steps per second of a training for some seconds."""
    before, started = algorithm.env_steps, time.perf_counter()
    while time.perf_counter() - started < seconds:
        algorithm.train()
    return float((algorithm.env_steps - before) / (time.perf_counter() - started))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    for name, (algorithm_class, settings) in CASES.items():
        ratios: dict[str, list[float]] = {"measured": [], "traced": []}
        for round_number in range(args.rounds):
            speeds = {}
            # one at a time, because idle workers use processors, too; the first one alternates
            order = ("off", "measured", "traced")[:: 1 if round_number % 2 else -1]
            for mode in order:
                with algorithm_class(
                    "CartPole-v1", seed=1, monitor=mode != "off", **settings
                ) as algorithm:
                    speed(algorithm, 1.0)
                    if mode == "traced":
                        Tracer(algorithm.plan, 60.0)
                    speeds[mode] = speed(algorithm, args.seconds)
            for mode in ratios:
                ratios[mode].append(speeds[mode] / speeds["off"])
        for mode, values in ratios.items():
            low, median, high = statistics.quantiles(values, n=4)
            print(f"{name}, {mode}: {median:.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
