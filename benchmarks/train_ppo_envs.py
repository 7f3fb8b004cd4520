"""PPO on LunarLander-v3 and HalfCheetah-v5: flowrl and Stable-Baselines3.

LunarLander: 16 environments x 1,024 steps, minibatches of 64, 4 epochs, 2x64. HalfCheetah: 8
environments x 256 steps, minibatches of 128, 10 epochs, 2x64. All environments are in one process,
with one thread. The first train batch is not timed. The entries run alternately; prints medians of
env steps per second over the rounds, and the numbers of updates, which must be equal.

    python benchmarks/train_ppo_envs.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import NamedTuple

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

from peer_env import run_alternately, sb3_python, spread


class Problem(NamedTuple):
    """Settings that both libraries share."""

    num_envs: int
    horizon: int
    minibatch: int
    epochs: int
    batches: int  # that are timed

    @property
    def batch(self) -> int:
        return self.num_envs * self.horizon


PROBLEMS = {
    "LunarLander-v3": Problem(16, 1024, 64, 4, 3),
    "HalfCheetah-v5": Problem(8, 256, 128, 10, 8),
}


def flowrl_run(env: str) -> dict[str, float]:
    """Run the shipped plan."""
    from flowrl.algorithms.ppo import PPOConfig

    problem = PROBLEMS[env]
    config = PPOConfig(
        env=env,
        num_envs_per_worker=problem.num_envs,
        train_batch_size=problem.batch,
        sgd_minibatch_size=problem.minibatch,
        num_sgd_iter=problem.epochs,
        lr=3e-4,
        entropy_coeff=0.01,
        seed=0,
    )
    with config.build() as algorithm:
        learner = algorithm.workers.local_worker().get_policy().learner
        algorithm.train()
        updates, started = learner.num_updates, time.perf_counter()
        for _ in range(problem.batches):
            algorithm.train()
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "updates": learner.num_updates - updates}


def sb3_run(env: str) -> dict[str, float]:
    """Run Stable-Baselines3 in its own virtual environment."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    problem = PROBLEMS[env]
    without_checks = {"disable_env_checker": True}
    envs = make_vec_env(env, problem.num_envs, seed=0, env_kwargs=without_checks)
    model = PPO(
        "MlpPolicy", envs, n_steps=problem.horizon,
        batch_size=problem.minibatch, n_epochs=problem.epochs, learning_rate=3e-4, ent_coef=0.01,
        seed=0, device="cpu",
    )  # fmt: skip
    model.learn(problem.batch)
    epochs, started = model._n_updates, time.perf_counter()
    model.learn(problem.batch * problem.batches, reset_num_timesteps=False)
    seconds = time.perf_counter() - started
    updates = (model._n_updates - epochs) * problem.batch // problem.minibatch
    return {"seconds": seconds, "updates": updates}


RUNS = {"flowrl": flowrl_run, "Stable-Baselines3": sb3_run}


def main() -> None:
    """Run the entries and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--env", choices=tuple(PROBLEMS), help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=tuple(RUNS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(RUNS[options.one](options.env)))
        return
    pythons = {"flowrl": sys.executable, "Stable-Baselines3": sb3_python()}
    lines = []
    for env, problem in PROBLEMS.items():
        results = run_alternately(__file__, pythons, options.rounds, "--env", env)
        steps = problem.batch * problem.batches
        ours, theirs = ([steps / run["seconds"] for run in runs] for runs in results.values())
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        updates = "; ".join(f"{runs[0]['updates']:,.0f}" for runs in results.values())
        cells = [env, spread(ours, 0), spread(theirs, 0), spread(ratios), updates]
        lines.append(f"| {' | '.join(cells)} |")
    print("\n| env steps/s | flowrl | Stable-Baselines3 | ratio | updates |")
    print("|---|---:|---:|---:|---:|", *lines, sep="\n")


if __name__ == "__main__":
    main()
