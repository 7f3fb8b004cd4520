"""What it costs to train two algorithms in one plan: nothing.

Four CartPole agents in one environment, two of PPO, two of DQN, in process. In turn: the plan
`ppo_dqn`; its PPO branch alone; its DQN branch alone; rollouts alone. Each for as many env steps
with as many updates, so PPO + DQN - rollouts is what one could hope for. Medians of the rounds.

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


def ppo_alone(workers: Any, config: Any) -> Any:
    """The plan without its DQN branch."""
    ppo = config.for_policy("ppo")
    train = (
        ParallelRollouts(workers, mode="bulk_sync")
        .for_each(SelectExperiences(["ppo"]))
        .combine(ConcatBatches(ppo.train_batch_size, count_steps_by="agent_steps"))
        .for_each(TrainOneStep(workers, policies=["ppo"]))
    )
    return StandardMetricsReporting(train, workers, config)


def dqn_alone(workers: Any, config: Any) -> Any:
    """The plan without its PPO branch."""
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
    both = Concurrently([store, train], mode="round_robin", output_indexes=[1])
    return StandardMetricsReporting(both, workers, config)


def rollouts_alone(workers: Any, config: Any) -> Any:
    """Nothing is learned."""
    return StandardMetricsReporting(ParallelRollouts(workers), workers, config)


PLANS = {
    "both": load_plan("ppo_dqn").execution_plan,
    "PPO alone": ppo_alone,
    "DQN alone": dqn_alone,
    "rollouts alone": rollouts_alone,
}


def measure(name: str, steps: int, seed: int) -> dict[str, float]:
    """Seconds for so many env steps, after a tenth of them to warm up; rows trained on."""

    class Own(Algorithm):
        execution_plan = staticmethod(PLANS[name])

    # a report for each of the rounds of rollouts, so that all stop at the same one
    config = load_plan("ppo_dqn").config.updated(seed=seed, min_sample_timesteps_per_iteration=512)
    with Own(config) as algorithm:
        result: dict[str, Any] = {"timesteps_total": 0}
        while result["timesteps_total"] < steps // 10:
            result = algorithm.train()
        first, started = result, time.perf_counter()
        while result["timesteps_total"] < first["timesteps_total"] + steps:
            result = algorithm.train()
        seconds = time.perf_counter() - started
    rows = {
        pid: told["num_agent_steps_trained_lifetime"]
        - first["learners"].get(pid, told_nothing)[KEY]
        for pid, told in result["learners"].items()
    }
    return {
        "seconds": seconds,
        "env_steps": result["timesteps_total"] - first["timesteps_total"],
        **{f"{pid} rows": count for pid, count in rows.items()},
    }


KEY = "num_agent_steps_trained_lifetime"
told_nothing = {KEY: 0}


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
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in PLANS}
    for number in range(options.rounds):
        for name in PLANS:
            command = [sys.executable, __file__, "--one", name, "--seed", str(number)]
            command += ["--steps", str(options.steps)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            told = json.loads(done.stdout.splitlines()[-1])
            per_step[name].append(1e6 * told["seconds"] / told["env_steps"])
            rows[name].append(told)
            print(f"# round {number}, {name}: {told}", flush=True)
    print("| | us per env step | PPO rows per env step | DQN rows per env step |")
    print("|---|---:|---:|---:|")
    for name, own in per_step.items():
        trained = [
            np.median([one.get(f"{pid} rows", 0) / one["env_steps"] for one in rows[name]])
            for pid in ("ppo", "dqn")
        ]
        print(f"| {name} | {np.median(own):,.0f} | {trained[0]:.2f} | {trained[1]:.2f} |")
    parts = zip(*per_step.values(), strict=True)
    ratios = [both / (ppo + dqn - rollouts) for both, ppo, dqn, rollouts in parts]
    print(f"\nboth / (PPO + DQN - rollouts): {np.median(ratios):.2f}")


if __name__ == "__main__":
    main()
