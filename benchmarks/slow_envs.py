"""Slow environments in processes: flowrl, Stable-Baselines3 and the limit of the machine.

8 environments whose step takes 5 ms. "waits" sleeps, so that 8 steps overlap; "computes" keeps a
core busy, so that 2 cores share the steps. Each library samples with its PPO policy (2x64) and its
environments in processes: `vectorization_mode="async"` of flowrl, `SubprocVecEnv` of
Stable-Baselines3. "limit" is the number of steps that the waits, or the cores, allow. The entries
run alternately; prints medians over the rounds.

    python benchmarks/slow_envs.py [--rounds 5]
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

import gymnasium as gym
import numpy as np
from peer_env import run_alternately, sb3_python, spread

ENVS, STEP_S, FRAGMENT, FRAGMENTS = 8, 0.005, 100, 4
STEPS = ENVS * FRAGMENT * FRAGMENTS


class SlowEnv(gym.Env):
    """An environment with four observed numbers and two actions whose steps take 5 ms.

    Args:
        computes: keep a core busy instead of waiting.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, computes: bool):
        self._computes, self._steps = computes, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        if self._computes:
            until = time.thread_time() + STEP_S  # time of the processor
            while time.thread_time() < until:
                pass
        else:
            time.sleep(STEP_S)
        self._steps += 1
        return np.full(4, 0.1, np.float32), 1.0, False, self._steps >= 200, {}


def flowrl_run(computes: bool) -> dict[str, float]:
    """Sample fragments with a worker."""
    from flowrl.algorithms.ppo import PPOConfig

    config = PPOConfig(
        env=lambda context: SlowEnv(computes),
        num_envs_per_worker=ENVS,
        vectorization_mode="async",
        rollout_fragment_length=FRAGMENT,
        seed=0,
    )
    with config.build() as algorithm:
        worker = algorithm.workers.local_worker()
        worker.sample()
        started = time.perf_counter()
        steps = sum(worker.sample().count for _ in range(FRAGMENTS))
        seconds = time.perf_counter() - started
    return {"steps": steps, "seconds": seconds}


def sb3_run(computes: bool) -> dict[str, float]:
    """Collect rollouts with Stable-Baselines3 in its own virtual environment."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import CallbackList
    from stable_baselines3.common.vec_env import SubprocVecEnv

    torch.set_num_threads(1)
    env = SubprocVecEnv([lambda: SlowEnv(computes)] * ENVS, start_method="fork")
    model = PPO("MlpPolicy", env, n_steps=FRAGMENT, seed=0, device="cpu")
    _, callback = model._setup_learn(STEPS, CallbackList([]))
    model.collect_rollouts(env, callback, model.rollout_buffer, FRAGMENT)
    started = time.perf_counter()
    for _ in range(FRAGMENTS):
        model.collect_rollouts(env, callback, model.rollout_buffer, FRAGMENT)
    seconds = time.perf_counter() - started
    env.close()
    return {"steps": STEPS, "seconds": seconds}


RUNS = {"flowrl": flowrl_run, "Stable-Baselines3": sb3_run}


def main() -> None:
    """Run the entries and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--computes", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=tuple(RUNS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(RUNS[options.one](options.computes)))
        return
    from flowrl.process_usage import num_cores  # not in the environment of the peer

    python = sb3_python()
    pythons = {"flowrl": sys.executable, "Stable-Baselines3": python}
    lines = []
    for kind, limit in (("waits", ENVS / STEP_S), ("computes", num_cores() / STEP_S)):
        flags = ["--computes"] if kind == "computes" else []
        results = run_alternately(__file__, pythons, options.rounds, *flags)
        ours, theirs = ([r["steps"] / r["seconds"] for r in runs] for runs in results.values())
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        shares = [speed / limit for speed in ours]
        cells = [
            spread(ours, 0),
            spread(theirs, 0),
            f"{limit:,.0f}",
            spread(ratios),
            spread(shares),
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    print("\n| step | flowrl | Stable-Baselines3 | limit | / Stable-Baselines3 | / limit |")
    print("|---|---:|---:|---:|---:|---:|", *lines, sep="\n")


if __name__ == "__main__":
    main()
