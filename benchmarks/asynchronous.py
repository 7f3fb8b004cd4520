"""Asynchronous plans: env steps per second with 2 workers of 4 CartPole environments each.

Compares flowrl's plans `impala` and `a3c` with RLlib 2.60's IMPALA with a local learner, which runs
in a separate virtual environment. Settings: fragments of 50 steps, train batches of 500 rows (A3C
trains on fragments), separate 2x64 tanh actor and critic, one torch thread per process. The entries
run alternately, each in a new process with a new Ray instance. A rate is the minimum of the env
steps sampled and trained per second after a warm-up. Also prints the idle time of flowrl's workers
and learner, and the rates of a slow learner that uses each batch 20 times. Prints medians over the
rounds.

    python benchmarks/asynchronous.py [--seconds 10] [--rounds 3] [--only flowrl-impala …]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np

WORKERS, ENVS, FRAGMENT, BATCH, WARM_UP_S = 2, 4, 50, 500, 5.0


def flowrl_plan(plan: str, seconds: float, **changes: Any) -> dict[str, float]:
    """Return the rates and idle times of a shipped plan."""
    from flowrl.trainer.plan_settings import plan_config

    if plan != "a3c":
        changes["train_batch_size"] = BATCH
    config = plan_config(plan).updated(
        num_workers=WORKERS,
        num_envs_per_worker=ENVS,
        rollout_fragment_length=FRAGMENT,
        seed=1,
        model={"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh"},
        **changes,
    )
    with config.build() as algorithm:
        started = time.perf_counter()
        while time.perf_counter() - started < WARM_UP_S:
            before = algorithm.train()
        started = time.perf_counter()
        # the workers and the learner continue while they are asked, so idle times have their own
        # start
        workers, learner = [busy_s(algorithm)], idle_s_of_learner(algorithm)
        busy_since = time.perf_counter()
        while time.perf_counter() - started < seconds:
            after = algorithm.train()
        ended = time.perf_counter()
        workers.append(busy_s(algorithm))
        rates = {
            name: (after[f"num_env_steps_{name}"] - before[f"num_env_steps_{name}"])
            / (ended - started)
            for name in ("sampled", "trained")
        }
        elapsed = time.perf_counter() - busy_since
        rates["workers_idle"] = 1 - (workers[1] - workers[0]) / (WORKERS * elapsed)
        for before_s, after_s in zip(learner, idle_s_of_learner(algorithm), strict=True):
            rates["learner_idle"] = (after_s - before_s) / elapsed
        return rates


def idle_s_of_learner(algorithm: Any) -> list[float]:
    """Return the seconds that the learner thread has waited for batches; [] without a thread."""
    return [s["learner_idle_s"] for s in algorithm.plan.stats() if "learner_idle_s" in s]


def busy_s(algorithm: Any) -> float:
    """Return the seconds that all workers have run or waited for a processor."""

    def run_and_wait_s(worker: Any) -> float:
        with open("/proc/thread-self/schedstat") as file:
            return sum(int(number) for number in file.read().split()[:2]) / 1e9

    return sum(algorithm.workers.foreach_worker(run_and_wait_s)[1:])


def rllib_impala(seconds: float) -> dict[str, float]:
    """Return the rates of RLlib's IMPALA."""
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    model = DefaultModelConfig(
        fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False
    )
    config = (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=WORKERS,
            num_envs_per_env_runner=ENVS,
            rollout_fragment_length=FRAGMENT,
        )
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=BATCH)
        .rl_module(model_config=model)
        .debugging(seed=1)
    )
    algorithm = config.build_algo()

    def counts(result: Any) -> tuple[int, int]:
        trained = result["learners"]["__all_modules__"]["num_env_steps_trained_lifetime"]
        return result["env_runners"]["num_env_steps_sampled_lifetime"], trained

    started = time.perf_counter()
    while time.perf_counter() - started < WARM_UP_S:
        before = counts(algorithm.train())
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        after = counts(algorithm.train())
    elapsed = time.perf_counter() - started
    algorithm.stop()
    return {name: (after[i] - before[i]) / elapsed for i, name in enumerate(("sampled", "trained"))}


ENTRIES = {
    "flowrl-impala": lambda seconds: flowrl_plan("impala", seconds),
    "flowrl-impala-slow-learner": lambda seconds: flowrl_plan("impala", seconds, num_sgd_iter=20),
    "flowrl-a3c": lambda seconds: flowrl_plan("a3c", seconds),
    "rllib-impala": rllib_impala,
}


def measure(entry: str, seconds: float) -> dict[str, float]:
    """Run one entry in a new process."""
    python = sys.executable
    if entry.startswith("rllib"):
        from peer_env import rllib_python

        python = rllib_python()
    process = subprocess.run(
        [python, __file__, "--serve", entry, "--seconds", str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    rates: dict[str, float] = json.loads(process.stdout.strip().splitlines()[-1])
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument("--serve", choices=list(ENTRIES))
    options = parser.parse_args()
    if options.serve:
        print(json.dumps(ENTRIES[options.serve](options.seconds)))
        return
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(options.rounds):
        rounds.append({entry: measure(entry, options.seconds) for entry in options.only})
        print({entry: {k: round(v, 3) for k, v in r.items()} for entry, r in rounds[-1].items()})

    def rates(entry: str) -> np.ndarray:
        return np.array([min(r[entry]["sampled"], r[entry]["trained"]) for r in rounds])

    print(f"\nmedians of {options.rounds} rounds\n")
    print("| | env steps/s | / RLlib | workers idle | learner idle |\n|---|---:|---:|---:|---:|")
    for entry in options.only:
        idle = [
            f"{np.median([r[entry][name] for r in rounds]):.2f}" if name in rounds[0][entry] else ""
            for name in ("workers_idle", "learner_idle")
        ]
        ratio = ""
        if "rllib-impala" in options.only:
            ratio = f"{np.median(rates(entry) / rates('rllib-impala')):.2f}"
        print(f"| {entry} | {np.median(rates(entry)):,.0f} | {ratio} | {' | '.join(idle)} |")


if __name__ == "__main__":
    main()
