"""Env steps per second of RolloutWorker.sample(), compared with a minimal loop.

The loop steps gymnasium's SyncVectorEnv (for 256 environments: gymnasium's vectorized CartPole)
with a network of the same size, one forward pass per step and log-softmax, without distribution
objects, writes into preallocated arrays, and counts transitions without resets. It runs twice: with
torch inference, and with numpy inference like flowrl. flowrl's figure includes advantages and every
column. The entries run alternately; prints medians over the rounds.

The second table compares modes of sampling with plain fragments of the same 8 CartPoles.

The third table is about a view of the last four frames of 84x84 bytes, with 8 cheap environments
and a linear network, compared with a loop that stacks the frames in its arrays.

    python benchmarks/sampling.py [--seconds 1.0] [--rounds 5]
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.policies import Policy, ViewRequirement
from flowrl.sampling import RolloutWorker
from flowrl.sampling.callbacks import DefaultCallbacks

torch.set_num_threads(1)
FRAGMENT = 128


class Network:
    """2x64 tanh network in numpy, the fastest implementation for few rows."""

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
    """2x64 tanh network without modules, about a third faster than nn.Sequential."""

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
    """The minimal loop with numpy inference."""

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
    """The minimal loop with torch inference."""

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
    """Steps the environments alone: an upper bound for the loops."""

    def __init__(self, envs: int):
        self.env, self.envs = make_env(envs), envs
        self.env.reset(seed=1)
        self.actions = np.random.default_rng(0).integers(0, 2, (FRAGMENT, envs))

    def sample(self) -> int:
        for t in range(FRAGMENT):
            self.env.step(self.actions[t])
        return FRAGMENT * self.envs


class Flowrl:
    """One worker in process, with GAE and every column."""

    def __init__(self, envs: int, env: Any = "CartPole-v1", **settings: Any):
        self.worker = RolloutWorker(
            env,
            PPOTorchPolicy,
            {
                "seed": 1,
                "num_envs_per_worker": envs,
                "rollout_fragment_length": FRAGMENT,
                "vectorization_mode": "vector_entry_point" if envs >= 256 else "flowrl",
                **settings,
            },
        )

    def sample(self) -> int:
        count = self.worker.sample().count
        self.worker.get_metrics()  # as a plan does; otherwise, the worker keeps them
        return count


class Parts(gym.ObservationWrapper[dict[str, np.ndarray], int, np.ndarray]):
    """CartPole with observations in a Dict of three arrays."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1", disable_env_checker=True))
        box = gym.spaces.Box
        self.observation_space = gym.spaces.Dict(
            cart=box(-np.inf, np.inf, (2,)),
            angle=box(-1, 1, (1,)),
            speed=box(-np.inf, np.inf, (1,)),
        )

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {"cart": observation[:2], "angle": observation[2:3], "speed": observation[3:]}


class NoteLength(DefaultCallbacks):
    """Has one callback, at the end of each episode."""

    def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
        episode.custom_metrics["length"] = episode.length


def modes(options: argparse.Namespace) -> None:
    entries = {
        "plain fragments": Flowrl(8),
        "whole episodes": Flowrl(8, batch_mode="complete_episodes"),
        "callback at the end of episodes": Flowrl(8, callbacks_class=NoteLength),
        "observations in a Dict of 3 arrays": Flowrl(8, lambda context: Parts()),
        "LSTM with 64 cells": Flowrl(8, model={"use_lstm": True, "lstm_cell_size": 64}),
    }
    rates: dict[str, list[float]] = {name: [] for name in entries}
    for _ in range(options.rounds):
        for name, entry in entries.items():
            rates[name].append(rate(entry, options.seconds))
    plain = np.array(rates["plain fragments"])
    print("\n| 8 CartPoles | env steps/s | / plain |")
    print("|---|---:|---:|")
    for name, values in rates.items():
        ratio = np.median(np.array(values) / plain)
        print(f"| {name} | {np.median(values):,.0f} | {ratio:.2f} |", flush=True)


class Frames(gym.Env[np.ndarray, int]):
    """Returns a constant frame of 84x84 bytes; episodes have 100 steps."""

    observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.frame = np.random.default_rng(0).integers(0, 256, (84, 84), dtype=np.uint8)
        self.steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return self.frame, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.frame, 0.0, self.steps % 100 == 0, False, {}


def act_on_frames(frames: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return actions and values [N] for stacked frames [N, 4, 84, 84]."""
    values = (frames.reshape(len(frames), -1).astype(np.float32) @ weights)[:, 0]
    return (values > 0).astype(np.int64), values


WEIGHTS = np.random.default_rng(0).normal(0, 1e-4, (4 * 84 * 84, 1)).astype(np.float32)


class FramePolicy(Policy):
    """Acts on the view `obs` of four frames."""

    def compute_actions_from_input_dict(self, input_dict: Any, explore: bool = True) -> Any:
        actions, values = act_on_frames(input_dict["obs"], WEIGHTS)
        return actions, [], {"vf_preds": values}

    def compute_values_from_input_dict(self, input_dict: Any) -> np.ndarray:
        return act_on_frames(input_dict["obs"], WEIGHTS)[1]


class FlowrlFrames:
    """One worker whose policy has a view of four frames."""

    def __init__(self, envs: int):
        settings = {"num_envs_per_worker": envs, "rollout_fragment_length": FRAGMENT}
        self.worker = RolloutWorker(lambda context: Frames(), FramePolicy, settings)
        self.worker.policy.view_requirements["obs"] = ViewRequirement("obs", shift="-3:0")
        self.stored = 0.0

    def sample(self) -> int:
        batch = self.worker.sample()
        self.worker.get_metrics()  # as a plan does; otherwise, the worker keeps them
        base = dict(batch.stored())["obs"].base
        self.stored = base.nbytes / batch.count
        return batch.count


class BareFrames:
    """Calls `step` of each environment and stacks frames in its array."""

    def __init__(self, envs: int):
        self.envs = [Frames() for _ in range(envs)]
        self.obs = np.zeros((FRAGMENT + 1, envs, 4, 84, 84), np.uint8)
        self.rewards = np.zeros((FRAGMENT, envs), np.float32)
        self.done = np.zeros((FRAGMENT, envs), bool)
        self.values = np.zeros((FRAGMENT, envs), np.float32)

    def sample(self) -> int:
        obs = self.obs
        obs[0] = obs[-1]
        for t in range(FRAGMENT):
            actions, self.values[t] = act_on_frames(obs[t], WEIGHTS)
            obs[t + 1, :, :3] = obs[t, :, 1:]
            for i, env in enumerate(self.envs):
                frame, self.rewards[t, i], self.done[t, i], _, _ = env.step(int(actions[i]))
                if self.done[t, i]:
                    frame, _ = env.reset()
                    obs[t + 1, i] = frame
                obs[t + 1, i, 3] = frame
        return FRAGMENT * len(self.envs)


def frames(options: argparse.Namespace) -> None:
    flowrl, bare = FlowrlFrames(8), BareFrames(8)
    rates: list[tuple[float, float]] = []
    for _ in range(options.rounds):
        rates.append((rate(bare, options.seconds), rate(flowrl, options.seconds)))
    bare_rate, flowrl_rate = np.median(np.array(rates), 0)
    ratio = np.median([b / a for a, b in rates])
    print("\n| four frames, 8 envs | env steps/s | / loop | bytes of frames per row |")
    print("|---|---:|---:|---:|")
    print(f"| loop | {bare_rate:,.0f} | 1.00 | {4 * 84 * 84:,} |")
    print(f"| flowrl, view | {flowrl_rate:,.0f} | {ratio:.2f} | {flowrl.stored:,.0f} |")


def rate(entry: Any, seconds: float) -> float:
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
        flowrl = np.array(rates["flowrl"])
        ratios = [float(np.median(flowrl / np.array(rates[name]))) for name in ("torch", "numpy")]
        print(f"| {envs} | {figures} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)
    modes(options)
    frames(options)


if __name__ == "__main__":
    main()
