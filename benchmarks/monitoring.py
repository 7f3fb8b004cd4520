"""What does the measurement of a running plan cost? Env steps per second with and without it.

Two algorithms that differ only in the setting `monitor` train in turn, for a few seconds each;
prints the ratio of their speeds per round, the median, and the spread.

    python benchmarks/monitoring.py [--seconds 3] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from flowrl import IMPALA, PPO

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "PPO, in process": (PPO, {"num_envs_per_worker": 8, "train_batch_size": 1024}),
    "PPO, 2 workers": (
        PPO,
        {"num_envs_per_worker": 8, "train_batch_size": 1024, "num_workers": 2},
    ),
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
        ratios = []
        for round_number in range(args.rounds):
            speeds = {}
            # one at a time, because idle workers use processors, too; the first one alternates
            for monitor in (True, False) if round_number % 2 else (False, True):
                with algorithm_class(
                    "CartPole-v1", seed=1, monitor=monitor, **settings
                ) as algorithm:
                    speed(algorithm, 1.0)
                    speeds[monitor] = speed(algorithm, args.seconds)
            ratios.append(speeds[True] / speeds[False])
        low, *_, high = statistics.quantiles(ratios, n=4)
        print(f"{name}: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
