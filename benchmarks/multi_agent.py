"""Agent steps per second in process: CartPole with 4 agents and 2 policies, 8 environments.

Compares flowrl's RolloutWorker.sample() (with GAE and every column) with

- a bare numpy loop: it steps the same environments, lets the same policies act, and writes
  observations, actions, outputs, rewards and flags into arrays; no GAE, ids, episodes or checks
- RLlib 2.60's MultiAgentEnvRunner.sample(), which runs as a subprocess in a separate virtual
  environment

All have newly initialized 2x64 tanh actors and critics per policy and one torch thread. They run
alternately; prints medians over the rounds, and the smallest and largest ratio.

    python benchmarks/multi_agent.py [--seconds 2.0] [--rounds 5] [--no-rllib]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
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
        steps = self.worker.sample().agent_steps()
        self.worker.get_metrics()  # as a plan does; otherwise, the worker keeps them
        return steps


class Bare:
    """A loop over the environments of Flowrl with its policies."""

    def __init__(self, worker: Any) -> None:
        self.policies = [worker.policy_map["even"], worker.policy_map["odd"]]
        self.envs = [Cartpoles() for _ in range(ENVS)]
        self.latest = [env.reset()[0] for env in self.envs]
        shape = (FRAGMENT + 1, ENVS, AGENTS)
        self.obs = np.zeros((*shape, 4), np.float32)
        self.outputs: dict[str, np.ndarray] = {}
        self.rewards = np.zeros(shape, np.float32)
        self.actions = np.zeros(shape, np.int64)
        self.ends = np.zeros((2, *shape), bool)

    def sample(self) -> int:
        steps = 0
        self.ends[:] = False
        for t in range(FRAGMENT):
            chosen: list[dict[int, int]] = [{} for _ in self.envs]
            for parity, policy in enumerate(self.policies):
                pairs = [
                    (e, a) for e, obs in enumerate(self.latest) for a in obs if a % 2 == parity
                ]
                if not pairs:
                    continue
                envs, agents = np.array(pairs).T
                obs = np.array([self.latest[e][a] for e, a in pairs])
                actions, _, extra = policy.compute_actions(obs)
                self.obs[t, envs, agents] = obs
                self.actions[t, envs, agents] = actions
                for name, value in extra.items():
                    if name not in self.outputs:
                        shape = (FRAGMENT + 1, ENVS, AGENTS, *value.shape[1:])
                        self.outputs[name] = np.zeros(shape, value.dtype)
                    self.outputs[name][t, envs, agents] = value
                for (e, a), action in zip(pairs, actions.tolist(), strict=True):
                    chosen[e][a] = action
                steps += len(pairs)
            for e, (env, sent) in enumerate(zip(self.envs, chosen, strict=True)):
                obs_of, rewards, terminateds, truncateds, _ = env.step(sent)
                for a, reward in rewards.items():
                    self.rewards[t, e, a] = reward
                    if terminateds[a] or truncateds[a]:
                        self.ends[:, t, e, a] = terminateds[a], truncateds[a]
                if terminateds["__all__"]:
                    self.latest[e] = env.reset()[0]
                else:
                    self.latest[e] = {a: o for a, o in obs_of.items() if a not in env.ended}
        return steps


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
    def __init__(self, python: str):
        self.process = subprocess.Popen(
            [python, __file__, "--serve"],
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
    parser.add_argument("--no-rllib", action="store_true", help="without the peer")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Rllib())
        return
    flowrl = Flowrl()
    entries = {"bare numpy loop": Bare(flowrl.worker), "flowrl": flowrl}
    for entry in entries.values():
        entry.sample()
    measure = {
        name: lambda entry=entry: rate(entry, options.seconds) for name, entry in entries.items()
    }
    if not options.no_rllib:
        from peer_env import rllib_python

        peer = Subprocess(rllib_python())
        measure = {"RLlib 2.60": lambda: peer.rate(options.seconds), **measure}
    rounds = [{name: one() for name, one in measure.items()} for _ in range(options.rounds)]
    if not options.no_rllib:
        peer.stop()
    print(f"{AGENTS} agents, 2 policies, {ENVS} environments:\n")
    print("| | agent steps/s | flowrl / it | smallest | largest |")
    print("|---|---:|---:|---:|---:|")
    for name in measure:
        ratios = sorted(rates["flowrl"] / rates[name] for rates in rounds)
        median = np.median([rates[name] for rates in rounds])
        print(
            f"| {name} | {median:,.0f} | {np.median(ratios):.2f} | {ratios[0]:.2f} | "
            f"{ratios[-1]:.2f} |"
        )


if __name__ == "__main__":
    main()
