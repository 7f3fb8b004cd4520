"""SAC and TD3 on Pendulum-v1: flowrl and Stable-Baselines3.

Both use the same settings: 1 environment, one update of 256 rows per step after 1,000 random steps,
2x256 ReLU, twin critics, lr 1e-3, gamma .99, tau .005; SAC learns its temperature, starting at 1;
TD3 updates its actor every second update. Each process has one torch thread. The variables
OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE are removed from the environment, so that numpy selects its
kernels for the processor; --keep-kernels keeps them. Measures updates per second after step 1,000,
including env steps. The entries run alternately; prints medians over the rounds.

    python benchmarks/train_sac.py [--rounds 5] [--steps 4000] [--only sac td3] [--keep-kernels]
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
if "--keep-kernels" not in sys.argv:
    for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        os.environ.pop(variable, None)

import numpy as np

STARTS, BATCH, BUFFER, LR, GAMMA, TAU, NOISE = 1_000, 256, 100_000, 1e-3, 0.99, 0.005, 0.1


def flowrl_run(plan: str, steps: int, seed: int) -> dict[str, float]:
    """Run the shipped plan."""
    from flowrl.trainer.plan_settings import plan_config

    config = plan_config(plan)
    config = config.updated(
        env="Pendulum-v1",
        exploration_config=config.exploration_config.updated(random_timesteps=STARTS),
        seed=seed,
        learning_starts=STARTS,
        train_batch_size=BATCH,
        replay_buffer_capacity=BUFFER,
        lr=LR,
        gamma=GAMMA,
        tau=TAU,
        min_sample_timesteps_per_iteration=STARTS,
    )
    with config.build() as algorithm:
        updates = [algorithm.train()["num_env_steps_trained"]]
        started = time.perf_counter()
        while (result := algorithm.train())["timesteps_total"] < STARTS + steps:
            pass
        seconds = time.perf_counter() - started
        updates.append(result["num_env_steps_trained"])
    return {"updates": (updates[1] - updates[0]) / BATCH, "seconds": seconds}


def sb3_run(plan: str, steps: int, seed: int) -> dict[str, float]:
    """Run Stable-Baselines3 with the same settings, in its own virtual environment."""
    import torch
    from stable_baselines3 import SAC, TD3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.noise import NormalActionNoise

    torch.set_num_threads(1)
    extra_arguments: dict[str, Any] = {"ent_coef": "auto"}
    if plan == "td3":
        extra_arguments = {"action_noise": NormalActionNoise(np.zeros(1), np.full(1, 2 * NOISE))}
    model = {"sac": SAC, "td3": TD3}[plan](
        "MlpPolicy",
        "Pendulum-v1",
        learning_rate=LR,
        buffer_size=BUFFER,
        learning_starts=STARTS,
        batch_size=BATCH,
        gamma=GAMMA,
        tau=TAU,
        train_freq=1,
        gradient_steps=1,
        policy_kwargs={"net_arch": [256, 256]},
        seed=seed,
        device="cpu",
        **extra_arguments,
    )

    class StartOfTraining(BaseCallback):
        started, before = 0.0, 0

        def _on_step(self) -> bool:
            if not self.started and self.num_timesteps >= STARTS + 1:
                self.started, self.before = time.perf_counter(), model._n_updates
            return True

    start = StartOfTraining()
    model.learn(STARTS + steps, callback=start)
    seconds = time.perf_counter() - start.started
    return {"updates": model._n_updates - start.before, "seconds": seconds}


RUNS = {"flowrl": flowrl_run, "sb3": sb3_run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4_000)
    parser.add_argument("--only", nargs="+", choices=["sac", "td3"], default=["sac", "td3"])
    parser.add_argument("--keep-kernels", action="store_true", help="keep OPENBLAS_CORETYPE")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, plan, seed = options.one
        print(json.dumps(RUNS[name](plan, options.steps, int(seed))))
        return
    from peer_env import peer_python

    sb3 = str(peer_python("sb3", "stable-baselines3==2.9.2", "gymnasium==1.2.2"))
    print("| | flowrl, updates/s | SB3, updates/s | flowrl is × |\n|---|---:|---:|---:|")
    for plan in options.only:
        rates: dict[str, list[float]] = {name: [] for name in RUNS}
        for seed in range(options.rounds):
            for name, python in (("flowrl", sys.executable), ("sb3", sb3)):
                command = [python, __file__, "--steps", str(options.steps)]
                command += ["--keep-kernels"] if options.keep_kernels else []
                command += ["--one", name, plan, str(seed)]
                process = subprocess.run(command, capture_output=True, text=True, check=True)
                result = json.loads(process.stdout.splitlines()[-1])
                rates[name].append(result["updates"] / result["seconds"])
                print(f"# {plan}, round {seed}, {name}: {rates[name][-1]:.1f}", flush=True)
        ratio = np.median(np.array(rates["flowrl"]) / np.array(rates["sb3"]))
        medians = " | ".join(f"{np.median(rates[name]):,.0f}" for name in RUNS)
        print(f"| {plan.upper()} | {medians} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
