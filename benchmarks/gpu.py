"""Training on a GPU compared with LeanRL and with the machine's CPU, env steps per second.

PPO, SAC and TD3 on HalfCheetah with the settings of LeanRL's scripts (PPO: 1 environment x 2048
steps, 10 passes, minibatches of 64, two layers of 64; SAC and TD3: an update of 256 rows per step,
two layers of 256), and PPO on images (8 environments x 128 steps, 4 passes, minibatches of 256, the
network of Mnih et al. 2015, 84x84x4 bytes of random images on both sides). flowrl runs on the GPU
(`cuda`), there without CUDA graphs (`eager`), and on the CPU of the same machine (`cpu`).

The entries run in turn, each in a process of its own; prints the medians and ranges of the rounds.
LeanRL (https://github.com/meta-pytorch/LeanRL) is run from the folder `--leanrl`, with
`--leanrl-path` as its PYTHONPATH and CUDA graphs, PPO also with torch.compile (which fails on its
SAC and TD3 with PyTorch 2.11 to 2.13); its rate is the one that its script prints. Takes about 8
minutes.

    python benchmarks/gpu.py [--rounds 3] [--seconds 6] [--entries cuda eager cpu]
        [--leanrl DIR [--leanrl-path PATH]]
"""

from __future__ import annotations

import argparse
import os
import re
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from flowrl.algorithms.ppo import PPOConfig
from flowrl.algorithms.sac import SACConfig
from flowrl.algorithms.td3 import TD3Config

LEANRL_LIMIT = 90.0  # seconds for LeanRL to start and to compile


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


HALF_CHEETAH = "HalfCheetah-v5"


def ppo(**settings: Any) -> Any:
    return PPOConfig(
        env=HALF_CHEETAH, train_batch_size=2048, sgd_minibatch_size=64, num_sgd_iter=10,
        vf_clip_param=0.2, normalize_observations=True, normalize_rewards=True, **settings,
    )  # fmt: skip


def ppo_images(**settings: Any) -> Any:
    return PPOConfig(
        env=images, num_envs_per_worker=8, train_batch_size=1024, sgd_minibatch_size=256,
        num_sgd_iter=4, entropy_coeff=0.01, vf_clip_param=0.1, clip_param=0.1, lr=2.5e-4,
        **settings,
    )  # fmt: skip


def sac(**settings: Any) -> Any:
    return SACConfig(
        env=HALF_CHEETAH, learning_starts=1000, replay_buffer_capacity=1_000_000,
        min_sample_timesteps_per_iteration=200, **settings,
    )  # fmt: skip


def td3(**settings: Any) -> Any:
    return TD3Config(
        env=HALF_CHEETAH, learning_starts=1000, replay_buffer_capacity=1_000_000,
        min_sample_timesteps_per_iteration=200, **settings,
    )  # fmt: skip


WORKLOADS: dict[str, tuple[Callable[..., Any], str, list[str]]] = {
    "PPO, HalfCheetah": (ppo, "ppo_continuous_action_torchcompile.py", ["--compile"]),
    "SAC, HalfCheetah": (
        sac, "sac_continuous_action_torchcompile.py", ["--learning-starts", "1000"],
    ),
    "TD3, HalfCheetah": (
        td3, "td3_continuous_action_torchcompile.py", ["--learning-starts", "1000"],
    ),
    "PPO, images": (ppo_images, "ppo_atari_envpool_torchcompile.py", ["--compile"]),
}  # fmt: skip
ENTRIES = {
    "cuda": {"device": "cuda"},
    "eager": {"device": "cuda", "cuda_graphs": False},
    "cpu": {"device": "cpu"},
}
WARM_UP = {"SAC, HalfCheetah": 1300, "TD3, HalfCheetah": 1300}  # env steps; they learn from 1000 on


def rate(algorithm: Any, seconds: float) -> float:
    """Return env steps per second of training for at least a time."""
    before, started = algorithm.env_steps, time.perf_counter()
    while time.perf_counter() - started < seconds:
        algorithm.train()
    return float((algorithm.env_steps - before) / (time.perf_counter() - started))


def measure(workload: str, entry: str, seconds: float) -> float:
    """Return the rate of flowrl."""
    make, _, _ = WORKLOADS[workload]
    algorithm = make(seed=0, **ENTRIES[entry]).build()
    while algorithm.env_steps < WARM_UP.get(workload, 4200):
        algorithm.train()
    result = rate(algorithm, seconds)
    algorithm.stop()
    return result


def run_flowrl(workload: str, entry: str, seconds: float) -> float:
    """Return the rate of flowrl, measured in a process of its own."""
    command = [sys.executable, __file__, "--measure", workload, entry, str(seconds)]
    output = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return float(output.stdout.split()[-1])
    except (IndexError, ValueError):
        raise SystemExit(f"{workload} ({entry}) failed:\n{output.stderr[-3000:]}") from None


def run_leanrl(workload: str, folder: str, path: str, seconds: float) -> float:
    """Return the rate that LeanRL's script prints some seconds after its first one; nan if it
    prints none."""
    _, script, more = WORKLOADS[workload]
    command = [sys.executable, os.path.join(folder, script), "--cudagraphs", *more]
    env = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    output, deadline = b"", time.monotonic() + LEANRL_LIMIT
    while time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 0.1)[0]:
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                break
            had_rates, output = b"sps" in output, output + chunk
            if b"sps" in output and not had_rates:
                deadline = min(deadline, time.monotonic() + seconds)
    process.kill()
    process.wait()
    rates = re.findall(r"([\d.]+)\s+sps", output.decode(errors="replace"))
    if not rates:
        print(output.decode(errors="replace")[-2000:], file=sys.stderr)
    return float(rates[-1]) if rates else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--entries", nargs="+", default=list(ENTRIES), choices=ENTRIES)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--leanrl", default="")
    parser.add_argument("--leanrl-path", default="")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        workload, entry, seconds = options.measure
        print(measure(workload, entry, float(seconds)))
        return
    if set(options.entries) != {"cpu"} and not torch.cuda.is_available():
        print("there is no GPU: nothing was measured (--entries cpu measures the CPU)")
        return
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, flush=True)
    columns = [*options.entries, *(["LeanRL"] if options.leanrl else [])]
    print(f"\n| env steps/s | {' | '.join(columns)} | {columns[0]} / {columns[-1]} |")
    print(f"|---|{'---:|' * (len(columns) + 1)}", flush=True)
    for workload in options.workloads:
        rates: dict[str, list[float]] = {column: [] for column in columns}
        for _ in range(options.rounds):
            for entry in options.entries:
                rates[entry].append(run_flowrl(workload, entry, options.seconds))
            if options.leanrl:
                peer = run_leanrl(workload, options.leanrl, options.leanrl_path, options.seconds)
                rates["LeanRL"].append(peer)
        medians = [statistics.median(values) for values in rates.values()]
        figures = " | ".join(
            f"{median:,.0f} ({min(values):,.0f}-{max(values):,.0f})"
            for median, values in zip(medians, rates.values(), strict=True)
        )
        print(f"| {workload} | {figures} | {medians[0] / medians[-1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
