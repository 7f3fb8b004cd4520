"""Env steps per second of RolloutWorker.sample() over those of a bare loop, in one run.

The bare loop steps gymnasium's SyncVectorEnv (256 environments: gymnasium's own vectorised
CartPole) with a network of the same size, one forward a step, log-softmax, no distribution object,
into preallocated arrays, and counts real transitions; it is run twice, with torch's inference and
with numpy's (as flowrl infers). flowrl's figure includes advantages and every column. Medians of
several rounds, the entries in turn.

    python benchmarks/sampling.py [--seconds 1.0] [--rounds 5]
"""

from __future__ import annotations

import argparse
import itertools
import os
import time

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.sampling import RolloutWorker

torch.set_num_threads(1)
FRAGMENT = 128


class Network:
    """2x64 tanh in numpy, the fastest way here to run it on few rows."""

    def __init__(self, outputs: int):
        rng = np.random.default_rng(outputs)
        sizes = itertools.pairwise((4, 64, 64, outputs))
        self.layers = [
            (rng.normal(0, i**-0.5, (i, o)).astype(np.float32), np.zeros(o, np.float32))
            for i, o in sizes
        ]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        for weight, bias in self.layers[:-1]:
            x = x @ weight
            x += bias
            np.tanh(x, out=x)
        weight, bias = self.layers[-1]
        return x @ weight + bias


class TorchNetwork:
    """2x64 tanh, called without modules: about a third faster than nn.Sequential."""

    def __init__(self, outputs: int):
        sizes = (4, 64, 64, outputs)
        linears = [nn.Linear(i, o) for i, o in itertools.pairwise(sizes)]
        self.layers = [(linear.weight, linear.bias) for linear in linears]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for weight, bias in self.layers[:-1]:
            x = torch.tanh(F.linear(x, weight, bias))
        return F.linear(x, *self.layers[-1])


def make_env(envs: int) -> gym.vector.VectorEnv:
    if envs >= 256:
        return gym.make_vec("CartPole-v1", envs, vectorization_mode="vector_entry_point")
    make = lambda: gym.make("CartPole-v1", disable_env_checker=True)  # noqa: E731
    return gym.vector.SyncVectorEnv([make] * envs)


class Bare:
    """The lean loop."""

    def __init__(self, envs: int):
        self.env, self.envs = make_env(envs), envs
        self.policy, self.value = Network(2), Network(1)
        self.obs, _ = self.env.reset(seed=1)
        self.done = np.zeros(envs, bool)
        self.rng = np.random.default_rng(0)
        shape = (FRAGMENT, envs)
        self.columns = {
            "obs": np.empty((*shape, 4), np.float32),
            "actions": np.empty(shape, np.int64),
            "logp": np.empty(shape, np.float32),
            "values": np.empty(shape, np.float32),
            "rewards": np.empty(shape, np.float32),
            "terminated": np.empty(shape, bool),
            "truncated": np.empty(shape, bool),
        }

    def sample(self) -> int:
        steps, c, rows = 0, self.columns, np.arange(self.envs)
        for t in range(FRAGMENT):
            logits = self.policy(self.obs)
            logits -= logits.max(1, keepdims=True)
            sums = np.exp(logits).cumsum(1)
            draws = self.rng.random((self.envs, 1), dtype=np.float32) * sums[:, -1:]
            actions = (sums <= draws).sum(1)
            c["obs"][t] = self.obs
            c["actions"][t] = actions
            c["logp"][t] = logits[rows, actions] - np.log(sums[:, -1])
            c["values"][t] = self.value(self.obs)[:, 0]
            self.obs, reward, terminated, truncated, _ = self.env.step(actions)
            c["rewards"][t], c["terminated"][t], c["truncated"][t] = reward, terminated, truncated
            steps += self.envs - int(self.done.sum())
            self.done = terminated | truncated
        return steps


class BareTorch(Bare):
    """The same with torch's inference."""

    def __init__(self, envs: int):
        super().__init__(envs)
        self.policy, self.value = TorchNetwork(2), TorchNetwork(1)

    @torch.inference_mode()
    def sample(self) -> int:
        steps, c = 0, self.columns
        for t in range(FRAGMENT):
            obs = torch.from_numpy(self.obs)
            logp = torch.log_softmax(self.policy(obs), -1)
            actions = torch.multinomial(logp.exp(), 1)
            c["obs"][t] = self.obs
            c["actions"][t] = actions[:, 0].numpy()
            c["logp"][t] = logp.gather(1, actions)[:, 0].numpy()
            c["values"][t] = self.value(obs)[:, 0].numpy()
            self.obs, reward, terminated, truncated, _ = self.env.step(c["actions"][t])
            c["rewards"][t], c["terminated"][t], c["truncated"][t] = reward, terminated, truncated
            steps += self.envs - int(self.done.sum())
            self.done = terminated | truncated
        return steps


class Random:
    """The environments alone, for the bare loop's honesty."""

    def __init__(self, envs: int):
        self.env, self.envs = make_env(envs), envs
        self.env.reset(seed=1)
        self.actions = np.random.default_rng(0).integers(0, 2, (FRAGMENT, envs))

    def sample(self) -> int:
        for t in range(FRAGMENT):
            self.env.step(self.actions[t])
        return FRAGMENT * self.envs


class Flowrl:
    """One worker in process, GAE and every column."""

    def __init__(self, envs: int):
        self.worker = RolloutWorker(
            "CartPole-v1",
            PPOTorchPolicy,
            {
                "seed": 1,
                "num_envs_per_worker": envs,
                "rollout_fragment_length": FRAGMENT,
                "vectorization_mode": "vector_entry_point" if envs >= 256 else "flowrl",
            },
        )

    def sample(self) -> int:
        return self.worker.sample().count


def rate(entry: Bare | Random | Flowrl, seconds: float) -> float:
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        steps += entry.sample()
    return steps / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("| envs | random actions | torch loop | numpy loop | flowrl | / torch | / numpy |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for envs in (1, 8, 32, 256):
        entries = {
            "random": Random(envs),
            "torch": BareTorch(envs),
            "numpy": Bare(envs),
            "flowrl": Flowrl(envs),
        }
        rates: dict[str, list[float]] = {name: [] for name in entries}
        for _ in range(options.rounds):
            for name, entry in entries.items():
                rates[name].append(rate(entry, options.seconds))
        figures = " | ".join(f"{np.median(values):,.0f}" for values in rates.values())
        ours = np.array(rates["flowrl"])
        ratios = [float(np.median(ours / np.array(rates[name]))) for name in ("torch", "numpy")]
        print(f"| {envs} | {figures} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
