"""PPO with one policy for three agents: flowrl and RLlib 2.60 on simple_spread of PettingZoo's MPE.

Three agents have to cover three landmarks without colliding; an episode has 25 steps. Both train a
2x64 tanh actor and critic for all agents, with 32 environments x 100 steps per train batch, 10
epochs, minibatches of 2,400 rows, lr 7e-4 and entropy coefficient 0.01, in one process with one
thread. RLlib has no tuned settings for this environment. The entries run alternately, each with
every seed. Prints medians over the seeds: the mean return of the last 100 training episodes (the
sum of the rewards of all agents), and env steps per second, with the start.

    python benchmarks/train_multi_agent.py [--steps 300000] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

from peer_env import rllib_python, run_alternately, spread

ENVS, ROWS, MINIBATCH, EPOCHS, LR, ENTROPY = 32, 100, 2400, 10, 7e-4, 0.01
PEER = "RLlib 2.60"


def make_env(config: Any = None) -> Any:
    """Return the environment."""
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env()


def flowrl_run(seed: int, steps: int) -> dict[str, float]:
    """Run the shipped plan."""
    from flowrl import PPO

    started = time.perf_counter()
    with PPO(
        make_env,
        num_envs_per_worker=ENVS,
        train_batch_size=ENVS * ROWS,
        sgd_minibatch_size=MINIBATCH,
        num_sgd_iter=EPOCHS,
        lr=LR,
        entropy_coeff=ENTROPY,
        seed=seed,
    ) as algorithm:
        while True:
            result = algorithm.train()
            if result["timesteps_total"] >= steps:
                break
    seconds = time.perf_counter() - started
    return {
        "steps": result["timesteps_total"],
        "mean": result["episode_reward_mean"],
        "seconds": seconds,
    }


def rllib_run(seed: int, steps: int) -> dict[str, float]:
    """Run RLlib in its own virtual environment, with flowrl's settings."""
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
    from ray.tune.registry import register_env

    torch.set_num_threads(1)
    register_env("simple_spread", lambda config: ParallelPettingZooEnv(make_env()))
    model = DefaultModelConfig(
        fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False
    )
    started = time.perf_counter()
    algorithm = (
        PPOConfig()
        .environment("simple_spread")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=ENVS, rollout_fragment_length=ROWS)
        .learners(num_learners=0)
        .multi_agent(policies={"shared"}, policy_mapping_fn=lambda *args, **kwargs: "shared")
        .rl_module(model_config=model)
        .training(
            train_batch_size_per_learner=ENVS * ROWS,
            minibatch_size=MINIBATCH,
            num_epochs=EPOCHS,
            lr=LR,
            entropy_coeff=ENTROPY,
            gamma=0.99,
            lambda_=0.95,
            clip_param=0.2,
            vf_clip_param=1e9,
            vf_loss_coeff=0.5,
            use_kl_loss=False,
            grad_clip=0.5,
            grad_clip_by="global_norm",
        )
        .debugging(seed=seed)
        .build_algo()
    )
    sampled = 0
    while sampled < steps:
        runners = algorithm.train()["env_runners"]
        sampled = int(runners["num_env_steps_sampled_lifetime"])
    seconds = time.perf_counter() - started
    algorithm.stop()
    return {"steps": sampled, "mean": runners["episode_return_mean"], "seconds": seconds}


RUNS = {"flowrl": flowrl_run, PEER: rllib_run}


def main() -> None:
    """Run the entries and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=tuple(RUNS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(RUNS[options.one](options.seed, options.steps)))
        return
    pythons = {"flowrl": sys.executable, PEER: rllib_python()}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in RUNS}
    for seed in range(options.seeds):
        arguments = "--steps", str(options.steps), "--seed", str(seed)
        for name, runs in run_alternately(__file__, pythons, 1, *arguments).items():
            results[name] += runs
    # this imports flowrl, which the peer's environment lacks
    from figures import Figures, measured_here

    figures = Figures("train_multi_agent", ("library", "mean return", "env steps/s"), cells)
    how = f"simple_spread, {options.steps:,} env steps, {options.seeds} seeds"
    for name, runs in results.items():
        figures.add(name, {"library": name, "runs": runs, "measured": [measured_here(how)]})


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the table."""
    returns = spread((run["mean"] for run in row["runs"]), 1)
    return [row["library"], returns, spread((r["steps"] / r["seconds"] for r in row["runs"]), 0)]


if __name__ == "__main__":
    main()
