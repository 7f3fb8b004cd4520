"""DQN on CartPole-v1: flowrl, a single-file implementation and Stable-Baselines3.

The settings match Stable-Baselines3's DQN: 1 environment, an update of 32 rows every 4 steps after
1,000 steps, buffer 50,000, 2x64 ReLU, lr 1e-3, gamma .99, hard target updates every 500 steps,
epsilon from 1 to .05 in 2,000 steps, no double, dueling or prioritized replay. The second row
samples 32 steps at a time, and then makes 8 updates. Measures env steps per second over 20,000
steps. The entries run alternately; prints medians over the seeds, and the numbers of updates, which
are about equal: flowrl ends after a whole iteration.

    python benchmarks/train_dqn.py [--seeds 5] [--no-sb3]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np
from peer_env import sb3_python, spread

STEPS, EVERY, BATCH, BUFFER, STARTS, TARGET = 20_000, 4, 32, 50_000, 1_000, 500
LONG_FRAGMENT = 32
LR, GAMMA, EPSILON, EPSILON_STEPS = 1e-3, 0.99, 0.05, 2_000


def flowrl_run(seed: int, fragment: int = EVERY) -> dict[str, float]:
    """Run the shipped plan with fragments of that many env steps."""
    from flowrl.algorithms.dqn import DQNConfig

    config = DQNConfig(
        env="CartPole-v1",
        rollout_fragment_length=fragment,
        training_intensity=None if fragment == EVERY else BATCH / EVERY,
        train_batch_size=BATCH,
        replay_buffer_capacity=BUFFER,
        learning_starts=STARTS,
        target_network_update_freq=TARGET,
        double_q=False,
        dueling=False,
        prioritized_replay=False,
        lr=LR,
        gamma=GAMMA,
        grad_clip=10.0,
        model={"fcnet_activation": "relu"},
        exploration_config={
            "type": "EpsilonGreedy",
            "epsilon": [(0, 1.0), (EPSILON_STEPS, EPSILON)],
        },
        seed=seed,
    )
    algorithm = config.build()
    started = time.perf_counter()
    steps = 0
    while steps < STEPS:
        result = algorithm.train()
        steps = result["timesteps_total"]
    updates = result["num_env_steps_trained"] // BATCH
    return {
        "steps": steps,
        "seconds": time.perf_counter() - started,
        "updates": updates,
        "mean": result["episode_reward_mean"],
    }


def single_file_run(seed: int) -> dict[str, float]:
    """Run DQN written as one function, with torch's fused optimizer."""
    import gymnasium as gym
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)

    def network() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        )

    online, target = network(), network()
    target.load_state_dict(online.state_dict())
    weights = list(online.parameters())
    adam = torch.optim.Adam(weights, lr=LR, fused=True)
    env = gym.make("CartPole-v1", disable_env_checker=True)
    obs, next_obs = np.zeros((BUFFER, 4), np.float32), np.zeros((BUFFER, 4), np.float32)
    actions = np.zeros(BUFFER, np.int64)
    rewards, ended = np.zeros(BUFFER, np.float32), np.zeros(BUFFER, np.float32)
    observation, _ = env.reset(seed=seed)
    returns, episode_return, updates = [], 0.0, 0
    started = time.perf_counter()
    for step in range(STEPS):
        epsilon = max(EPSILON, 1 - (1 - EPSILON) * step / EPSILON_STEPS)
        if rng.random() < epsilon:
            action = int(rng.integers(2))
        else:
            with torch.no_grad():
                action = int(online(torch.from_numpy(observation)).argmax())
        next_observation, reward, terminated, truncated, _ = env.step(action)
        at = step % BUFFER
        obs[at], next_obs[at], actions[at] = observation, next_observation, action
        rewards[at], ended[at] = reward, terminated
        episode_return += float(reward)
        observation = next_observation
        if terminated or truncated:
            returns.append(episode_return)
            episode_return = 0.0
            observation, _ = env.reset()
        if step >= STARTS and step % EVERY == 0:
            index = rng.integers(0, min(step + 1, BUFFER), BATCH)
            o, n, a, r, d = (
                torch.from_numpy(x[index]) for x in (obs, next_obs, actions, rewards, ended)
            )
            with torch.no_grad():
                td_target = r + GAMMA * (1 - d) * target(n).max(1).values
            q = online(o).gather(1, a.unsqueeze(1)).squeeze(1)
            loss = nn.functional.smooth_l1_loss(q, td_target)
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 10.0, foreach=True)
            adam.step()
            updates += 1
        if step % TARGET == 0:
            target.load_state_dict(online.state_dict())
    return {
        "steps": STEPS,
        "seconds": time.perf_counter() - started,
        "updates": updates,
        "mean": float(np.mean(returns[-100:])),
    }


def sb3_run(seed: int) -> dict[str, float]:
    """Run Stable-Baselines3 with the same settings, in its own virtual environment."""
    import torch
    from stable_baselines3 import DQN

    torch.set_num_threads(1)
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=LR,
        buffer_size=BUFFER,
        learning_starts=STARTS,
        batch_size=BATCH,
        gamma=GAMMA,
        train_freq=EVERY,
        gradient_steps=1,
        target_update_interval=TARGET,
        exploration_fraction=EPSILON_STEPS / STEPS,
        exploration_final_eps=EPSILON,
        seed=seed,
        device="cpu",
    )
    started = time.perf_counter()
    model.learn(STEPS)
    buffer = model.ep_info_buffer or []
    return {
        "steps": STEPS,
        "seconds": time.perf_counter() - started,
        "updates": model._n_updates,
        "mean": float(np.mean([episode["r"] for episode in buffer])),
    }


LONG = f"flowrl, fragments of {LONG_FRAGMENT}"
RUNS = {
    "flowrl": flowrl_run,
    LONG: partial(flowrl_run, fragment=LONG_FRAGMENT),
    "single file": single_file_run,
    "sb3": sb3_run,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--no-sb3", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(RUNS[options.one](options.seed)))
        return
    pythons = dict.fromkeys(("flowrl", LONG, "single file"), sys.executable)
    if not options.no_sb3:
        pythons["sb3"] = sb3_python()
    results: dict[str, list[Any]] = {name: [] for name in pythons}
    for seed in range(options.seeds):
        for name, python in pythons.items():
            command = [python, __file__, "--one", name, "--seed", str(seed)]
            process = subprocess.run(command, capture_output=True, text=True, check=True)
            results[name].append(json.loads(process.stdout.splitlines()[-1]))
            print(f"# seed {seed}, {name}: {results[name][-1]}", flush=True)
    print(f"| | env steps/s | flowrl / this row | {LONG} / this row | updates |")
    print("|---|---:|---:|---:|---:|")
    speed = {name: [r["steps"] / r["seconds"] for r in runs] for name, runs in results.items()}
    for name, speeds in speed.items():
        ratios = [
            spread([a / b for a, b in zip(speed[ours], speeds, strict=True)])
            for ours in ("flowrl", LONG)
        ]
        updates = np.median([result["updates"] for result in results[name]])
        print(f"| {name} | {np.median(speeds):,.0f} | {' | '.join(ratios)} | {updates:,.0f} |")


if __name__ == "__main__":
    main()
