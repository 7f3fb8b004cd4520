"""Agent steps per second in process: CartPole with 4 agents and 2 policies, 8 environments.

Compares flowrl's RolloutWorker.sample() (with GAE and every column) with RLlib 2.60's
MultiAgentEnvRunner.sample(), which runs as a subprocess in a separate virtual environment. Both
have newly initialized 2x64 tanh actors and critics per policy and one torch thread. They run
alternately; prints medians over the rounds.

    python benchmarks/multi_agent.py [--seconds 2.0] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import gymnasium as gym
import numpy as np

AGENTS, ENVS, FRAGMENT = 4, 8, 100


class Cartpoles:
    """One CartPole per agent; the episode ends when all have ended."""

    def __init__(self, config: Any = None):
        make = lambda: gym.make("CartPole-v1", disable_env_checker=True)  # noqa: E731
        self.envs = [make() for _ in range(AGENTS)]
        self.possible_agents = self.agents = list(range(AGENTS))
        space, actions = self.envs[0].observation_space, self.envs[0].action_space
        self.observation_spaces = dict.fromkeys(self.agents, space)
        self.action_spaces = dict.fromkeys(self.agents, actions)
        super().__init__()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.ended: set[int] = set()
        self.agents = list(self.possible_agents)
        return {i: env.reset(seed=seed)[0] for i, env in enumerate(self.envs)}, {}

    def step(self, action_dict: Any) -> Any:
        results = {i: self.envs[i].step(action) for i, action in action_dict.items()}
        obs, rewards, terminateds, truncateds, infos = (
            {i: values[k] for i, values in results.items()} for k in range(5)
        )
        self.ended |= {i for i in results if terminateds[i] or truncateds[i]}
        terminateds["__all__"] = len(self.ended) == AGENTS
        truncateds["__all__"] = False
        return obs, rewards, terminateds, truncateds, infos


def policy_for(agent_id: int, *args: Any, **kwargs: Any) -> str:
    return ("even", "odd")[agent_id % 2]


class Flowrl:
    def __init__(self) -> None:
        from flowrl.algorithms.ppo import PPOTorchPolicy
        from flowrl.envs import MultiAgentEnv
        from flowrl.policies import PolicySpec
        from flowrl.sampling import RolloutWorker

        env = type("Env", (Cartpoles, MultiAgentEnv), {})
        self.worker = RolloutWorker(
            lambda context: env(),
            {"even": PolicySpec(PPOTorchPolicy), "odd": PolicySpec(PPOTorchPolicy)},
            {
                "seed": 1,
                "policy_mapping_fn": policy_for,
                "num_envs_per_worker": ENVS,
                "rollout_fragment_length": FRAGMENT,
            },
        )

    def sample(self) -> int:
        return self.worker.sample().agent_steps()


class Rllib:
    def __init__(self) -> None:
        import torch
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
        from ray.rllib.env.multi_agent_env import MultiAgentEnv
        from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner

        torch.set_num_threads(1)
        model = DefaultModelConfig(
            fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False
        )
        env = type("Env", (Cartpoles, MultiAgentEnv), {})
        config = (
            PPOConfig()
            .environment(env)
            .env_runners(
                num_env_runners=0,
                num_envs_per_env_runner=ENVS,
                rollout_fragment_length=FRAGMENT,
            )
            .multi_agent(policies={"even", "odd"}, policy_mapping_fn=policy_for)
            .rl_module(model_config=model)
            .debugging(seed=1)
        )
        self.runner = MultiAgentEnvRunner(config=config)

    def sample(self) -> int:
        return sum(episode.agent_steps() for episode in self.runner.sample())


def rate(entry: Any, seconds: float) -> float:
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        steps += entry.sample()
    return steps / (time.perf_counter() - started)


def serve(entry: Any) -> None:
    """Print a rate for every line on stdin, which is a duration [s]."""
    entry.sample()
    for line in sys.stdin:
        print(rate(entry, float(line)), file=sys.stderr, flush=True)


class Subprocess:
    def __init__(self, python: Path):
        self.process = subprocess.Popen(
            [str(python), __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def rate(self, seconds: float) -> float:
        assert self.process.stdin is not None and self.process.stderr is not None
        print(seconds, file=self.process.stdin, flush=True)
        log = []
        for line in self.process.stderr:
            try:
                return float(line)
            except ValueError:
                log.append(line)  # log output of the peer
        raise RuntimeError("the peer ended: " + "".join(log[-20:]))

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Rllib())
        return
    from peer_env import peer_python

    peer = Subprocess(peer_python("rllib", "ray[rllib]==2.60.0", "gymnasium==1.2.2"))
    flowrl = Flowrl()
    flowrl.sample()
    rates = []
    for _ in range(options.rounds):
        rates.append((peer.rate(options.seconds), rate(flowrl, options.seconds)))
    peer.stop()
    rllib_rate, flowrl_rate = np.median(np.array(rates), 0)
    ratio = np.median([b / a for a, b in rates])
    print(f"| {AGENTS} agents, 2 policies, {ENVS} environments | agent steps/s | / RLlib |")
    print("|---|---:|---:|")
    print(f"| RLlib 2.60 | {rllib_rate:,.0f} | 1.00 |")
    print(f"| flowrl | {flowrl_rate:,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
