"""Training on a GPU compared with the CPU of the same machine, env steps per second.

PPO on vectors (CartPole-v1, two layers of 64), PPO and DQN on images (84x84x4 bytes, the network of
Mnih et al. 2015, an environment that returns random images), and SAC on Pendulum-v1 (two layers of
256, an update of 256 rows per step). The process uses one thread for vectors and all cores for
images. The entries run alternately; prints medians over the rounds and the GPU's name. Needs no
extra of flowrl. With the defaults, the timed rounds take under 5 minutes.

    python benchmarks/gpu.py [--seconds 12] [--rounds 3] [--devices cpu cuda]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from flowrl.algorithms.dqn import DQNConfig
from flowrl.algorithms.ppo import PPOConfig
from flowrl.algorithms.sac import SACConfig


class RandomImages(gym.Env[np.ndarray, int]):
    """Returns one of 16 random images; episodes have 500 steps."""

    observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.images = rng.integers(0, 256, (16, 84, 84, 4), dtype=np.uint8)
        self.steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return self.images[0], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.images[self.steps % 16], float(action == 0), self.steps % 500 == 0, False, {}


def images(context: Any) -> RandomImages:
    return RandomImages()


def ppo_vectors(device: str) -> Any:
    return PPOConfig(
        env="CartPole-v1", num_envs_per_worker=8, train_batch_size=4000, sgd_minibatch_size=128,
        device=device, seed=0,
    ).build()  # fmt: skip


def ppo_images(device: str) -> Any:
    return PPOConfig(
        env=images, num_envs_per_worker=8, train_batch_size=1024, sgd_minibatch_size=256,
        num_sgd_iter=4, device=device, seed=0,
    ).build()  # fmt: skip


def dqn_images(device: str) -> Any:
    return DQNConfig(
        env=images, replay_buffer_capacity=10_000, learning_starts=500, device=device, seed=0,
        min_sample_timesteps_per_iteration=100,
    ).build()  # fmt: skip


def sac_vectors(device: str) -> Any:
    return SACConfig(
        env="Pendulum-v1", learning_starts=500, device=device, seed=0,
        min_sample_timesteps_per_iteration=100,
    ).build()  # fmt: skip


WORKLOADS: dict[str, Callable[[str], Any]] = {
    "PPO, vectors": ppo_vectors,
    "PPO, images": ppo_images,
    "DQN, images": dqn_images,
    "SAC, vectors": sac_vectors,
}
WARM_UP = 600  # env steps, so that DQN and SAC learn


def rate(algorithm: Any, seconds: float) -> float:
    """Return env steps per second of training for at least a time."""
    before, started = algorithm.env_steps, time.perf_counter()
    while time.perf_counter() - started < seconds:
        algorithm.train()
    return (algorithm.env_steps - before) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"])
    options = parser.parse_args()
    needs_gpu = any(device.startswith("cuda") for device in options.devices)
    if needs_gpu and not torch.cuda.is_available():
        print("there is no GPU: nothing was measured (--devices cpu measures the CPU)")
        return
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), flush=True)
    devices = options.devices
    print(f"\n| env steps/s | {' | '.join(devices)} | {devices[-1]} / {devices[0]} |")
    print(f"|---|{'---:|' * (len(devices) + 1)}")
    for name, make in WORKLOADS.items():
        rates: dict[str, list[float]] = {device: [] for device in devices}
        algorithms = {device: make(device) for device in devices}
        for algorithm in algorithms.values():
            while algorithm.env_steps < WARM_UP:
                algorithm.train()
        for _ in range(options.rounds):
            for device, algorithm in algorithms.items():
                rates[device].append(rate(algorithm, options.seconds))
        for algorithm in algorithms.values():
            algorithm.stop()
        medians = [statistics.median(values) for values in rates.values()]
        figures = " | ".join(f"{median:,.0f}" for median in medians)
        print(f"| {name} | {figures} | {medians[-1] / medians[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
