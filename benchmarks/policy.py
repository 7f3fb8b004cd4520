"""Actions per second of a policy, compared with plain functions with the same network.

Computes actions for 1, 8, 32 and 256 observations of CartPole with 2x64 tanh networks for policy
and value: with flowrl's compute_actions; with torch modules and torch.distributions (plain); with
torch modules alone (lean); and with numpy. Then samples with policies with memory, compared with
loops that step the same environments: an LSTM with torch.nn.LSTM, and a GTrXL with the same torch
network, whose memory stays in tensors. One torch thread. The entries run alternately; prints
medians over the rounds.

    python benchmarks/policy.py [--seconds 0.5] [--rounds 7]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.sampling import RolloutWorker

torch.set_num_threads(1)
CELL, ENVS, FRAGMENT = 64, 8, 64


def plain(count: int) -> Callable[[], Any]:
    """Return a function that acts with torch modules and torch.distributions."""

    def net(outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
        )

    actor, critic = net(2), net(1)
    observations = np.random.default_rng(0).standard_normal((count, 4)).astype(np.float32)

    def act() -> Any:
        with torch.no_grad():
            obs = torch.as_tensor(observations)
            dist = torch.distributions.Categorical(logits=actor(obs))
            actions = dist.sample()
            return actions.numpy(), dist.log_prob(actions).numpy(), critic(obs).squeeze(1).numpy()

    return act


def lean(count: int) -> Callable[[], Any]:
    """Return a function that acts with torch modules, without torch.distributions."""

    def net(outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
        )

    actor, critic = net(2), net(1)
    observations = np.random.default_rng(0).standard_normal((count, 4)).astype(np.float32)

    @torch.inference_mode()
    def act() -> Any:
        obs = torch.from_numpy(observations)
        logits = torch.log_softmax(actor(obs), 1)
        actions = torch.multinomial(logits.exp(), 1)
        logp = logits.gather(1, actions)
        return actions.numpy()[:, 0], logp.numpy()[:, 0], critic(obs).numpy()[:, 0]

    return act


def bare(count: int) -> Callable[[], Any]:
    """Return a function that acts with the same arithmetic in numpy."""
    rng = np.random.default_rng(0)
    observations = rng.standard_normal((count, 4)).astype(np.float32)

    def net(outputs: int) -> list[tuple[np.ndarray, np.ndarray]]:
        sizes = [4, 64, 64, outputs]
        return [
            (rng.standard_normal((i, o)).astype(np.float32) * 0.1, np.zeros(o, np.float32))
            for i, o in itertools.pairwise(sizes)
        ]

    actor, critic = net(2), net(1)

    def run(layers: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        hidden = observations
        for weight, bias in layers[:-1]:
            hidden = np.tanh(hidden @ weight + bias)
        return hidden @ layers[-1][0] + layers[-1][1]

    def act() -> Any:
        logits = run(actor)
        logits = logits - logits.max(1, keepdims=True)
        cumulative = np.exp(logits).cumsum(1)
        draws = rng.random((count, 1), dtype=np.float32) * cumulative[:, -1:]
        actions = np.minimum((cumulative <= draws).sum(1), 1)
        logp = logits[np.arange(count), actions] - np.log(cumulative[:, -1])
        return actions, logp, run(critic)[:, 0]

    return act


def flowrl(count: int) -> Callable[[], Any]:
    """Return a function that acts with a PPO policy."""
    space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    policy = PPOTorchPolicy(space, gym.spaces.Discrete(2), {"seed": 0})
    observations = np.random.default_rng(0).standard_normal((count, 4)).astype(np.float32)
    return lambda: policy.compute_actions(observations)


class LstmLoop:
    """Steps environments with torch.nn.LSTM, a policy and a value head; stores the columns."""

    def __init__(self) -> None:
        make = lambda: gym.make("CartPole-v1", disable_env_checker=True)  # noqa: E731
        self.envs = gym.vector.SyncVectorEnv(
            [make] * ENVS, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
        )
        self.obs, _ = self.envs.reset(seed=0)
        self.torso = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.lstm = nn.LSTM(64, CELL)
        self.actor, self.critic = nn.Linear(CELL, 2), nn.Linear(CELL, 1)
        self.state = (torch.zeros(1, ENVS, CELL), torch.zeros(1, ENVS, CELL))

    def sample(self) -> int:
        shape = (FRAGMENT, ENVS)
        columns = {
            "obs": np.empty((*shape, 4), np.float32),
            "actions": np.empty(shape, np.int64),
            "logp": np.empty(shape, np.float32),
            "values": np.empty(shape, np.float32),
            "rewards": np.empty(shape, np.float32),
            "dones": np.empty(shape, bool),
            "h": np.empty((*shape, CELL), np.float32),
            "c": np.empty((*shape, CELL), np.float32),
        }
        for t in range(FRAGMENT):
            columns["obs"][t] = self.obs
            columns["h"][t], columns["c"][t] = self.state[0][0], self.state[1][0]
            with torch.no_grad():
                hidden = self.torso(torch.from_numpy(self.obs)).unsqueeze(0)
                hidden, self.state = self.lstm(hidden, self.state)
                logits = torch.log_softmax(self.actor(hidden[0]), 1)
                actions = torch.multinomial(logits.exp(), 1)
                columns["logp"][t] = logits.gather(1, actions)[:, 0]
                columns["values"][t] = self.critic(hidden[0])[:, 0]
            columns["actions"][t] = actions[:, 0]
            self.obs, rewards, ends, cuts, _ = self.envs.step(columns["actions"][t])
            columns["rewards"][t] = rewards
            columns["dones"][t] = dones = ends | cuts
            if dones.any():
                for state in self.state:
                    state[:, torch.from_numpy(dones)] = 0
        return FRAGMENT * ENVS


class GtrxlLoop:
    """Steps environments with the torch network of a GTrXL policy, whose memory stays in tensors;
    stores the columns."""

    def __init__(self, network: Any, memory: int) -> None:
        make = lambda: gym.make("CartPole-v1", disable_env_checker=True)  # noqa: E731
        self.envs = gym.vector.SyncVectorEnv(
            [make] * ENVS, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
        )
        self.obs, _ = self.envs.reset(seed=0)
        self.network = network
        sizes = [len(state) for state in network.get_initial_state()]
        self.memory = [torch.zeros(ENVS, memory, size) for size in sizes]

    def sample(self) -> int:
        shape = (FRAGMENT, ENVS)
        columns = {
            "obs": np.empty((*shape, 4), np.float32),
            "actions": np.empty(shape, np.int64),
            "logp": np.empty(shape, np.float32),
            "values": np.empty(shape, np.float32),
            "rewards": np.empty(shape, np.float32),
            "dones": np.empty(shape, bool),
        }
        states = [np.empty((*shape, part.shape[-1]), np.float32) for part in self.memory]
        for t in range(FRAGMENT):
            columns["obs"][t] = self.obs
            with torch.no_grad():
                inputs = {"obs": torch.from_numpy(self.obs)}
                outputs, new = self.network.forward(inputs, self.memory, None)
                logits = torch.log_softmax(outputs, 1)
                actions = torch.multinomial(logits.exp(), 1)
                columns["logp"][t] = logits.gather(1, actions)[:, 0]
                columns["values"][t] = self.network.value_function()
                for i, part in enumerate(new):
                    part = part.reshape(ENVS, -1)
                    states[i][t] = part
                    self.memory[i] = torch.cat([self.memory[i][:, 1:], part[:, None]], 1)
            columns["actions"][t] = actions[:, 0]
            self.obs, rewards, ends, cuts, _ = self.envs.step(columns["actions"][t])
            columns["rewards"][t] = rewards
            columns["dones"][t] = dones = ends | cuts
            if dones.any():
                for part in self.memory:
                    part[torch.from_numpy(dones)] = 0
        return FRAGMENT * ENVS


class Worker:
    """One worker with 8 CartPoles.

    Args:
        model: settings of the network.
    """

    def __init__(self, **model: Any) -> None:
        settings = {
            "model": model, "seed": 0, "num_envs_per_worker": ENVS,
            "rollout_fragment_length": FRAGMENT,
        }  # fmt: skip
        self.worker = RolloutWorker("CartPole-v1", PPOTorchPolicy, settings)

    def sample(self) -> int:
        count = self.worker.sample().count
        self.worker.get_metrics()  # as a plan does; otherwise, the worker keeps them
        return count


def rate(act: Callable[[], Any], seconds: float) -> float:
    calls, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        act()
        calls += 1
    return calls / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    print("| observations | plain | lean torch | numpy | flowrl | / plain | / lean | / numpy |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for count in (1, 8, 32, 256):
        entries = [plain(count), lean(count), bare(count), flowrl(count)]
        rates_by_entry: list[list[float]] = [[] for _ in entries]
        for _ in range(options.rounds):
            for entry, rates in zip(entries, rates_by_entry, strict=True):
                rates.append(rate(entry, options.seconds))
        *peers, own = map(statistics.median, rates_by_entry)
        cells = [f"{value:,.0f}" for value in (*peers, own)]
        cells += [f"{own / peer:.2f}" for peer in peers]
        print(f"| {count} | {' | '.join(cells)} |")

    gtrxl = Worker(use_attention=True, attention_memory=20, vf_share_layers=True)
    pairs: dict[str, tuple[Any, Any]] = {
        "LSTM with 64 cells": (
            LstmLoop(),
            Worker(use_lstm=True, lstm_cell_size=CELL, vf_share_layers=True),
        ),
        "GTrXL with a memory of 20": (GtrxlLoop(gtrxl.worker.policy.model, 20), gtrxl),
    }
    print(f"\n| {ENVS} environments | loop, env steps/s | flowrl | / loop | smallest | largest |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, (loop, worker) in pairs.items():
        rounds = []
        for _ in range(options.rounds + 1):  # the first one warms up
            rounds.append(
                [
                    rate(entry.sample, 2 * options.seconds) * FRAGMENT * ENVS
                    for entry in (loop, worker)
                ]
            )
        loop_rate, worker_rate = (
            statistics.median(rates) for rates in zip(*rounds[1:], strict=True)
        )
        ratios = sorted(own / peer for peer, own in rounds[1:])
        cells = [f"{value:.2f}" for value in (statistics.median(ratios), ratios[0], ratios[-1])]
        print(f"| {name} | {loop_rate:,.0f} | {worker_rate:,.0f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
