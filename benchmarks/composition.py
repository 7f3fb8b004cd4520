"""Overhead of training two algorithms in one plan.

One environment has four CartPole agents, two of PPO and two of DQN, and runs in process. The script
alternately runs the plan `ppo_dqn`, its PPO branch alone, its DQN branch alone, and rollouts alone,
with equal numbers of env steps and updates. Without overhead, the time of the plan is PPO + DQN -
rollouts. Prints medians over the rounds.

    python benchmarks/composition.py [--rounds 5] [--steps 6000]
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

from flowrl.ops import (
    ConcatBatches,
    Concurrently,
    ParallelRollouts,
    Replay,
    SelectExperiences,
    StandardMetricsReporting,
    StoreToReplayBuffer,
    TrainOneStep,
    UpdateReplayPriorities,
    UpdateTargetNetwork,
)
from flowrl.trainer.algorithm import Algorithm
from flowrl.trainer.plan_files import load_plan
from flowrl.trainer.plan_settings import plan_config


def ppo_alone(workers: Any, config: Any) -> Any:
    """Build the plan without its DQN branch."""
    ppo = config.for_policy("ppo")
    train = (
        ParallelRollouts(workers, mode="bulk_sync")
        .for_each(SelectExperiences(["ppo"]))
        .combine(ConcatBatches(ppo.train_batch_size, count_steps_by="agent_steps"))
        .for_each(TrainOneStep(workers, policies=["ppo"]))
    )
    return StandardMetricsReporting(train, workers, config)


def dqn_alone(workers: Any, config: Any) -> Any:
    """Build the plan without its PPO branch."""
    dqn = config.for_policy("dqn")
    buffer = dqn.replay_buffer(["dqn"])
    store = (
        ParallelRollouts(workers, mode="bulk_sync")
        .for_each(SelectExperiences(["dqn"]))
        .for_each(StoreToReplayBuffer(local_buffer=buffer))
    )
    train = (
        Replay(local_buffer=buffer)
        .for_each(TrainOneStep(workers, policies=["dqn"]))
        .for_each(UpdateReplayPriorities(local_buffer=buffer))
        .for_each(UpdateTargetNetwork(workers, dqn.target_network_update_freq, policies=["dqn"]))
    )
    trained = Concurrently([store, train], mode="round_robin", output_indexes=[1])
    return StandardMetricsReporting(trained, workers, config)


def rollouts_alone(workers: Any, config: Any) -> Any:
    """Build a plan that samples without training."""
    return StandardMetricsReporting(ParallelRollouts(workers), workers, config)


ROWS_TRAINED = "num_agent_steps_trained_lifetime"
PLANS = {
    "both": load_plan("ppo_dqn").execution_plan,
    "PPO alone": ppo_alone,
    "DQN alone": dqn_alone,
    "rollouts alone": rollouts_alone,
}


def measure(name: str, steps: int, seed: int) -> dict[str, float]:
    """Return the seconds for `steps` env steps after a warm-up, and the rows trained on."""

    class BenchmarkAlgorithm(Algorithm):
        execution_plan = staticmethod(PLANS[name])

    # one result per round of rollouts, so that all plans stop after the same round
    config = plan_config("ppo_dqn").updated(seed=seed, min_sample_timesteps_per_iteration=512)
    with BenchmarkAlgorithm(config) as algorithm:
        result: dict[str, Any] = {"timesteps_total": 0}
        while result["timesteps_total"] < steps // 10:
            result = algorithm.train()
        first, started = result, time.perf_counter()
        while result["timesteps_total"] < first["timesteps_total"] + steps:
            result = algorithm.train()
        seconds = time.perf_counter() - started
    rows = {
        pid: stats[ROWS_TRAINED] - first["learners"].get(pid, {ROWS_TRAINED: 0})[ROWS_TRAINED]
        for pid, stats in result["learners"].items()
    }
    return {
        "seconds": seconds,
        "env_steps": result["timesteps_total"] - first["timesteps_total"],
        **{f"{pid} rows": count for pid, count in rows.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.steps, options.seed)))
        return
    per_step: dict[str, list[float]] = {name: [] for name in PLANS}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in PLANS}
    for number in range(options.rounds):
        for name in PLANS:
            command = [sys.executable, __file__, "--one", name, "--seed", str(number)]
            command += ["--steps", str(options.steps)]
            process = subprocess.run(command, capture_output=True, text=True, check=True)
            figure = json.loads(process.stdout.splitlines()[-1])
            per_step[name].append(1e6 * figure["seconds"] / figure["env_steps"])
            figures[name].append(figure)
            print(f"# round {number}, {name}: {figure}", flush=True)
    print("| | us per env step | PPO rows per env step | DQN rows per env step |")
    print("|---|---:|---:|---:|")
    for name, times in per_step.items():
        trained = [
            np.median([f.get(f"{pid} rows", 0) / f["env_steps"] for f in figures[name]])
            for pid in ("ppo", "dqn")
        ]
        print(f"| {name} | {np.median(times):,.0f} | {trained[0]:.2f} | {trained[1]:.2f} |")
    parts = zip(*per_step.values(), strict=True)
    ratios = [both / (ppo + dqn - rollouts) for both, ppo, dqn, rollouts in parts]
    print(f"\nboth / (PPO + DQN - rollouts): {np.median(ratios):.2f}")


if __name__ == "__main__":
    main()
