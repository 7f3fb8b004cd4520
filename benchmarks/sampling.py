"""Env steps per second of RolloutWorker.sample() over those of a bare loop, in one run.

The bare loop steps gymnasium's SyncVectorEnv (256 environments: gymnasium's own vectorised
CartPole) with the same network, one forward a step, log-softmax, no distribution object, into
preallocated arrays, and counts real transitions. flowrl's figure includes advantages and every
column. Medians of several rounds, the entries in turn.

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
    print("| envs | random actions | bare loop | flowrl | flowrl / bare | bare / random |")
    print("|---:|---:|---:|---:|---:|---:|")
    for envs in (1, 8, 32, 256):
        entries = {"random": Random(envs), "bare": Bare(envs), "flowrl": Flowrl(envs)}
        rates: dict[str, list[float]] = {name: [] for name in entries}
        for _ in range(options.rounds):
            for name, entry in entries.items():
                rates[name].append(rate(entry, options.seconds))
        r = {name: float(np.median(values)) for name, values in rates.items()}
        ratio = np.median(np.array(rates["flowrl"]) / np.array(rates["bare"]))
        print(
            f"| {envs} | {r['random']:,.0f} | {r['bare']:,.0f} | {r['flowrl']:,.0f} "
            f"| {ratio:.2f} | {r['bare'] / r['random']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
