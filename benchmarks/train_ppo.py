"""PPO on CartPole-v1: flowrl, a single-file implementation and Stable-Baselines3.

All use the same settings: 8 environments x 500 steps, minibatch 128, 10 epochs, 2x64 tanh, lr 3e-4,
gamma .99, lambda .95, clip .2. Measures env steps per second over 10 batches, and seconds from the
first training call until the mean return of the last 100 episodes is 475. The entries run
alternately; prints medians over the seeds, with the lowest and the highest value.

    python benchmarks/train_ppo.py [--seeds 3] [--no-sb3]

The single file uses SyncVectorEnv, torch.distributions, Adam, and one forward pass of both networks
per update. Stable-Baselines3 runs in a separate virtual environment (.peers/).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import deque
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np
from peer_env import sb3_python, spread

BATCH, ENVS, MINIBATCH, EPOCHS = 4000, 8, 128, 10
LR, GAMMA, LAMBDA, CLIP, GOAL, LIMIT = 3e-4, 0.99, 0.95, 0.2, 475.0, 300_000


def flowrl_run(seed: int, batches: int | None) -> dict[str, float]:
    """Run the shipped plan for `batches` train batches; None runs until the goal."""
    from flowrl.algorithms.ppo import PPOConfig

    config = PPOConfig(
        env="CartPole-v1",
        num_envs_per_worker=ENVS,
        train_batch_size=BATCH,
        sgd_minibatch_size=MINIBATCH,
        num_sgd_iter=EPOCHS,
        lr=LR,
        gamma=GAMMA,
        lambda_=LAMBDA,
        clip_param=CLIP,
        seed=seed,
    )
    algorithm = config.build()
    started = time.perf_counter()
    while True:
        result = algorithm.train()
        steps, mean = result["timesteps_total"], result["episode_reward_mean"]
        full = result["episodes_in_window"] >= 100
        if is_finished(steps, mean if full else 0.0, batches):
            return {"seconds": time.perf_counter() - started, "steps": steps, "mean": mean}


def is_finished(steps: int, mean: float, batches: int | None) -> bool:
    if batches is not None:
        return steps >= batches * BATCH
    return mean >= GOAL or steps >= LIMIT


def single_file_run(seed: int, batches: int | None) -> dict[str, float]:
    """Run PPO written as one function."""
    import gymnasium as gym
    import torch
    from torch import nn
    from torch.distributions import Categorical

    torch.set_num_threads(1)
    torch.manual_seed(seed)

    def layer(i: int, o: int, gain: float) -> nn.Linear:
        linear = nn.Linear(i, o)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        return linear

    def network(outputs: int, gain: float) -> nn.Sequential:
        root = 2**0.5
        return nn.Sequential(
            layer(4, 64, root), nn.Tanh(), layer(64, 64, root), nn.Tanh(), layer(64, outputs, gain)
        )

    actor, critic = network(2, 0.01), network(1, 1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    adam = torch.optim.Adam(parameters, lr=LR, eps=1e-5, fused=True)
    make = lambda: gym.make("CartPole-v1", disable_env_checker=True)  # noqa: E731
    mode = gym.vector.AutoresetMode.SAME_STEP
    env = gym.vector.SyncVectorEnv([make] * ENVS, autoreset_mode=mode)
    horizon = BATCH // ENVS
    obs = torch.zeros(horizon, ENVS, 4)
    actions, logps, rewards, values, dones = (torch.zeros(horizon, ENVS) for _ in range(5))
    observation, _ = env.reset(seed=seed)
    episode_returns, returns, steps = np.zeros(ENVS), deque(maxlen=100), 0
    started = time.perf_counter()
    while True:
        for t in range(horizon):
            obs[t] = torch.from_numpy(observation)
            with torch.no_grad():
                dist = Categorical(logits=actor(obs[t]))
                action = dist.sample()
                actions[t], logps[t] = action, dist.log_prob(action)
                values[t] = critic(obs[t])[:, 0]
            observation, reward, terminated, truncated, info = env.step(action.numpy())
            episode_returns += reward
            done = terminated | truncated
            rewards[t] = torch.from_numpy(reward)
            if done.any():
                for i in np.flatnonzero(done):
                    returns.append(episode_returns[i])
                    episode_returns[i] = 0.0
                    if truncated[i] and not terminated[i]:
                        with torch.no_grad():
                            final = torch.from_numpy(info["final_obs"][i])
                            rewards[t, i] += GAMMA * critic(final[None])[0, 0]
            dones[t] = torch.from_numpy(done.astype(np.float32))
        steps += BATCH
        with torch.no_grad():
            next_value = critic(torch.from_numpy(observation))[:, 0]
        advantages = torch.zeros_like(rewards)
        last = torch.zeros(ENVS)
        for t in reversed(range(horizon)):
            delta = rewards[t] + GAMMA * next_value * (1 - dones[t]) - values[t]
            last = delta + GAMMA * LAMBDA * (1 - dones[t]) * last
            advantages[t], next_value = last, values[t]
        flat = (
            obs.reshape(-1, 4),
            actions.reshape(-1),
            logps.reshape(-1),
            advantages.reshape(-1),
            (advantages + values).reshape(-1),
        )
        for _ in range(EPOCHS):
            order = torch.randperm(BATCH)
            for start in range(0, BATCH, MINIBATCH):
                o, a, old, adv, target = (x[order[start : start + MINIBATCH]] for x in flat)
                dist = Categorical(logits=actor(o))
                ratio = (dist.log_prob(a) - old).exp()
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                policy_loss = -torch.min(adv * ratio, adv * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                value_loss = ((critic(o)[:, 0] - target) ** 2).mean()
                loss = policy_loss + 0.5 * value_loss
                adam.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                adam.step()
        mean = float(np.mean(returns)) if len(returns) == 100 else 0.0
        if is_finished(steps, mean, batches):
            return {"seconds": time.perf_counter() - started, "steps": steps, "mean": mean}


def sb3_run(seed: int, batches: int | None) -> dict[str, float]:
    """Run Stable-Baselines3 with the same settings, in its own virtual environment."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)

    class MeanReturn(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            buffer = self.model.ep_info_buffer or []
            self.mean = float(np.mean([e["r"] for e in buffer])) if len(buffer) == 100 else 0.0

    mean_return = MeanReturn()
    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", ENVS, seed=seed),
        learning_rate=LR,
        n_steps=BATCH // ENVS,
        batch_size=MINIBATCH,
        n_epochs=EPOCHS,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        clip_range=CLIP,
        ent_coef=0.0,
        vf_coef=0.5,
        seed=seed,
        device="cpu",
    )
    started = time.perf_counter()
    steps = 0
    while True:
        model.learn(BATCH, callback=mean_return, reset_num_timesteps=steps == 0)
        steps += BATCH
        buffer = model.ep_info_buffer
        mean = float(np.mean([e["r"] for e in buffer])) if len(buffer) == 100 else 0.0
        if is_finished(steps, mean, batches):
            return {"seconds": time.perf_counter() - started, "steps": steps, "mean": mean}


RUNS = {"flowrl": flowrl_run, "single file": single_file_run, "sb3": sb3_run}


def run_in_new_process(python: str, name: str, seed: int, batches: int | None) -> Any:
    """Run an entry in a new process, so that no entry benefits from warm caches."""
    command = [python, __file__, "--one", name, "--seed", str(seed), "--batches", str(batches or 0)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no-sb3", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(RUNS[options.one](options.seed, options.batches or None)))
        return
    pythons = {"flowrl": sys.executable, "single file": sys.executable}
    if not options.no_sb3:
        pythons["sb3"] = sb3_python()
    speed: dict[str, list[float]] = {name: [] for name in pythons}
    seconds: dict[str, list[float]] = {name: [] for name in pythons}
    steps: dict[str, list[float]] = {name: [] for name in pythons}
    for seed in range(options.seeds):
        for name, python in pythons.items():
            result = run_in_new_process(python, name, seed, 10)
            speed[name].append(result["steps"] / result["seconds"])
            print(f"# seed {seed}, {name}: {speed[name][-1]:,.0f} env steps/s", flush=True)
        for name, python in pythons.items():
            result = run_in_new_process(python, name, seed, None)
            reached = result["mean"] >= GOAL
            seconds[name].append(result["seconds"] if reached else float("inf"))
            steps[name].append(result["steps"])
            print(f"# seed {seed}, {name}: {result}", flush=True)
    columns = "env steps/s", "flowrl / this row", "seconds to return 475", "flowrl takes ×"
    print(f"| | {' | '.join(columns)} | env steps to return 475 |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in pythons:
        rates = [a / b for a, b in zip(speed["flowrl"], speed[name], strict=True)]
        # of the rounds in which both have reached the goal
        pairs = zip(seconds["flowrl"], seconds[name], strict=True)
        times = [a / b for a, b in pairs if np.isfinite(a + b)]
        cell = (
            f"{spread(times)}, {len(times)} of {options.seeds}" if times else "not both reached it"
        )
        print(
            f"| {name} | {spread(speed[name], 0)} | {spread(rates)} | {spread(seconds[name], 1)} "
            f"| {cell} | {np.median(steps[name]):,.0f} |"
        )


if __name__ == "__main__":
    main()
