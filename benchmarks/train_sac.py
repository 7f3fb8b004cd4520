"""SAC and TD3 on Pendulum-v1: flowrl beside Stable-Baselines3, in turn, matched settings.

1 environment, after 1,000 random steps an update of 256 rows for each step, 2x256 ReLU, twin
critics, lr 1e-3, gamma .99, tau .005; SAC's temperature is learned from 1, TD3's actor moves at
every second update. One torch thread in every process; numpy picks its kernels for the processor
itself: variables of the environment that name others are left out, for both, unless they are to be
kept. The figure: updates per second from step 1,000 on, the environment's steps included. Medians
over the rounds.

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
    """The shipped plan."""
    from flowrl.trainer.plan_files import load_plan

    config = load_plan(plan).config
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
    """Stable-Baselines3 with the same settings; runs inside its own environment."""
    import torch
    from stable_baselines3 import SAC, TD3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.noise import NormalActionNoise

    torch.set_num_threads(1)
    more: dict[str, Any] = {"ent_coef": "auto"}
    if plan == "td3":
        more = {"action_noise": NormalActionNoise(np.zeros(1), np.full(1, 2 * NOISE))}
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
        **more,
    )

    class Watch(BaseCallback):
        started, before = 0.0, 0

        def _on_step(self) -> bool:
            if not self.started and self.num_timesteps >= STARTS + 1:
                self.started, self.before = time.perf_counter(), model._n_updates
            return True

    watch = Watch()
    model.learn(STARTS + steps, callback=watch)
    seconds = time.perf_counter() - watch.started
    return {"updates": model._n_updates - watch.before, "seconds": seconds}


RUNS = {"flowrl": flowrl_run, "sb3": sb3_run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4_000)
    parser.add_argument("--only", nargs="+", choices=["sac", "td3"], default=["sac", "td3"])
    parser.add_argument("--keep-kernels", action="store_true", help="as OPENBLAS_CORETYPE says")
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
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                told = json.loads(done.stdout.splitlines()[-1])
                rates[name].append(told["updates"] / told["seconds"])
                print(f"# {plan}, round {seed}, {name}: {rates[name][-1]:.1f}", flush=True)
        ratio = np.median(np.array(rates["flowrl"]) / np.array(rates["sb3"]))
        ours, theirs = (np.median(rates[name]) for name in RUNS)
        print(f"| {plan.upper()} | {ours:,.0f} | {theirs:,.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
