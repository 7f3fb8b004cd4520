"""SAC and TD3 on Pendulum-v1 and HalfCheetah-v5: flowrl, Stable-Baselines3 and SBX (JAX).

All use the same settings: 1 environment, one update of 256 rows per step after 1,000 random steps,
2x256 ReLU, twin critics, lr 1e-3, gamma .99, tau .005; SAC learns its temperature, starting at 1;
TD3 updates its actor every second update. The libraries have their default numbers of threads, or
with --one-thread each process has one. Measures updates per second after step 1,500, including env
steps. The entries run alternately; prints medians over the rounds.

    python benchmarks/train_sac.py [--rounds 5] [--steps 3000] [--only sac td3] [--one-thread]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

ONE_THREAD = "--one-thread" in sys.argv
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.pop(variable, None)
    if ONE_THREAD:
        os.environ[variable] = "1"
if ONE_THREAD:
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import gymnasium as gym
import numpy as np
from peer_env import peer_python, run_alternately, sb3_python, spread

ENVS = ("Pendulum-v1", "HalfCheetah-v5")
STARTS, WARM_UP, BATCH, BUFFER = 1_000, 500, 256, 100_000
LR, GAMMA, TAU, NOISE = 1e-3, 0.99, 0.005, 0.1


def flowrl_run(plan: str, env: str, steps: int) -> dict[str, Any]:
    """Run the shipped plan."""
    from flowrl.policies.models.matrix_products import faster_library
    from flowrl.trainer.plan_settings import plan_config

    config = plan_config(plan)
    config = config.updated(
        env=env,
        exploration_config=config.exploration_config.updated(random_timesteps=STARTS),
        seed=0,
        learning_starts=STARTS,
        train_batch_size=BATCH,
        replay_buffer_capacity=BUFFER,
        lr=LR,
        gamma=GAMMA,
        tau=TAU,
        min_sample_timesteps_per_iteration=500,
    )
    with config.build() as algorithm:
        while (before := algorithm.train())["timesteps_total"] < STARTS + WARM_UP:
            pass
        started = time.perf_counter()
        while (after := algorithm.train())["timesteps_total"] < STARTS + WARM_UP + steps:
            pass
        seconds = time.perf_counter() - started
    trained = after["num_env_steps_trained"] - before["num_env_steps_trained"]
    return {"updates": trained / BATCH, "seconds": seconds, "library": faster_library()}


def peer_run(library: str, plan: str, env: str, steps: int) -> dict[str, Any]:
    """Run Stable-Baselines3 or SBX with the same settings, in its own virtual environment."""
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.noise import NormalActionNoise

    if library == "SBX":
        from sbx import SAC, TD3

        extra_arguments: dict[str, Any] = {"ent_coef": "auto"}
    else:
        import torch
        from stable_baselines3 import SAC, TD3

        if ONE_THREAD:
            torch.set_num_threads(1)
        extra_arguments = {"ent_coef": "auto", "device": "cpu"}
    made = gym.make(env, disable_env_checker=True)
    if plan == "td3":
        del extra_arguments["ent_coef"]
        assert isinstance(made.action_space, gym.spaces.Box)
        scale = np.full(made.action_space.shape, NOISE)  # of actions in [-1, 1]
        extra_arguments["action_noise"] = NormalActionNoise(np.zeros_like(scale), scale)
    model = {"sac": SAC, "td3": TD3}[plan](
        "MlpPolicy",
        made,
        learning_rate=LR,
        buffer_size=BUFFER,
        learning_starts=STARTS,
        batch_size=BATCH,
        gamma=GAMMA,
        tau=TAU,
        train_freq=1,
        gradient_steps=1,
        policy_kwargs={"net_arch": [256, 256]},
        seed=0,
        **extra_arguments,
    )

    class StartOfTraining(BaseCallback):
        started, before = 0.0, 0

        def _on_step(self) -> bool:
            if not self.started and self.num_timesteps >= STARTS + WARM_UP:
                self.started, self.before = time.perf_counter(), model._n_updates
            return True

    start = StartOfTraining()
    model.learn(STARTS + WARM_UP + steps, callback=start)
    seconds = time.perf_counter() - start.started
    return {"updates": model._n_updates - start.before, "seconds": seconds}


LIBRARIES = ("flowrl", "Stable-Baselines3", "SBX")
COLUMNS = (
    "algorithm", "environment", "matrix products", "threads", *LIBRARIES, "/ Stable-Baselines3",
    "/ SBX",
)  # fmt: skip


def main() -> None:
    """Run the entries and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--only", nargs="+", choices=["sac", "td3"], default=["sac", "td3"])
    parser.add_argument("--one-thread", action="store_true")
    parser.add_argument("--env", choices=ENVS, help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=LIBRARIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        (plan,) = options.only
        if options.one == "flowrl":
            result = flowrl_run(plan, options.env, options.steps)
        else:
            result = peer_run(options.one, plan, options.env, options.steps)
        print(json.dumps(result))
        return
    # these import flowrl, which the peers' environments lack
    from figures import Figures, measured_here

    from flowrl.benchmark.provenance import processor

    packages = "stable-baselines3==2.9.2", f"gymnasium[mujoco]=={gym.__version__}"
    pythons = {
        "flowrl": sys.executable,
        "Stable-Baselines3": sb3_python(),
        "SBX": str(peer_python("sbx", *packages, "sbx-rl==0.27.0")),
    }
    figures = Figures("train_sac", COLUMNS, cells)
    for plan in options.only:
        for env in ENVS:
            arguments = ("--only", plan, "--env", env, "--steps", str(options.steps))
            arguments += ("--one-thread",) * ONE_THREAD
            results = run_alternately(__file__, pythons, options.rounds, *arguments)
            rates = {
                library: [run["updates"] / run["seconds"] for run in runs]
                for library, runs in results.items()
            }
            (products,) = {str(run["library"]) for run in results["flowrl"]}
            row = {"plan": plan.upper(), "env": env, "rates": rates, "products": products}
            row["threads"] = "one" if ONE_THREAD else "default"
            row["measured"] = [measured_here(f"{options.rounds} rounds")]
            figures.add(f"{plan} {env} {processor()} {row['threads']}", row)


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the table."""
    ours, *peers = row["rates"].values()
    ratios = [[a / b for a, b in zip(ours, theirs, strict=True)] for theirs in peers]
    rates = [spread(rates, 0) for rates in (ours, *peers)]
    first = [row[name] for name in ("plan", "env", "products", "threads")]
    return [*first, *rates, *map(spread, ratios)]


if __name__ == "__main__":
    main()
