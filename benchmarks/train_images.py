"""PPO and DQN on Atari frames: flowrl, Stable-Baselines3 and the arithmetic alone.

ALE/Breakout-v5 as 4 x 84x84 pixels, Nature CNN, shared by policy and value. PPO: 8 environments,
train batches of 1,024, minibatches of 256, 4 epochs. DQN: 1 environment, an update of 32 rows every
4 steps. "Arithmetic" runs the network alone, as plain torch code: forward passes for acting, and
forward and backward passes and Adam steps for training, as many as the others. Threads are those
of each library's default. The first train batch is not timed. The entries run alternately; prints
medians over the rounds, and the numbers of updates, which must be equal.

    python benchmarks/train_images.py [--rounds 3] [--only ppo|dqn] [--no-sb3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
from peer_env import sb3_python

ENV, GAMMA = "ALE/Breakout-v5", 0.99
ENVS, BATCH, MINIBATCH, EPOCHS, PPO_BATCHES, PPO_LR = 8, 1024, 256, 4, 3, 2.5e-4
DQN_STEPS, EVERY, DQN_BATCH, BUFFER, STARTS, DQN_LR = 1_500, 4, 32, 10_000, 500, 1e-4
WARM_UP = STARTS + 100
EPSILON, EPSILON_STEPS = 0.05, (WARM_UP + DQN_STEPS) // 2  # as exploration_fraction=0.5


def flowrl_ppo() -> dict[str, float]:
    """Run the shipped plan."""
    from flowrl.algorithms.ppo import PPOConfig

    config = PPOConfig(
        env=ENV, num_envs_per_worker=ENVS, train_batch_size=BATCH, sgd_minibatch_size=MINIBATCH,
        num_sgd_iter=EPOCHS, lr=PPO_LR, clip_param=0.1, entropy_coeff=0.01, gamma=GAMMA,
        atari={"repeat_action_probability": 0.0}, seed=0,
    )  # fmt: skip
    algorithm = config.build()
    algorithm.train()
    started = time.perf_counter()
    for _ in range(PPO_BATCHES):
        algorithm.train()
    seconds = time.perf_counter() - started
    return {"steps": BATCH * PPO_BATCHES, "seconds": seconds, "updates": ppo_updates()}


def ppo_updates() -> int:
    """Return the number of minibatches that are timed."""
    return PPO_BATCHES * EPOCHS * BATCH // MINIBATCH


def flowrl_dqn() -> dict[str, float]:
    """Run the shipped plan."""
    from flowrl.algorithms.dqn import DQNConfig

    config = DQNConfig(
        env=ENV, rollout_fragment_length=EVERY, train_batch_size=DQN_BATCH,
        replay_buffer_capacity=BUFFER, learning_starts=STARTS, target_network_update_freq=1000,
        double_q=False, dueling=False, prioritized_replay=False, lr=DQN_LR, gamma=GAMMA,
        exploration_config={"epsilon": [(0, 1.0), (EPSILON_STEPS, EPSILON)]},
        atari={"repeat_action_probability": 0.0}, min_sample_timesteps_per_iteration=100, seed=0,
    )  # fmt: skip
    algorithm = config.build()
    result = algorithm.train()
    while result["timesteps_total"] < WARM_UP:  # epsilon falls: the same steps are timed
        result = algorithm.train()
    begin, trained = result["timesteps_total"], result["num_env_steps_trained"]
    started = time.perf_counter()
    while result["timesteps_total"] < begin + DQN_STEPS:
        result = algorithm.train()
    seconds = time.perf_counter() - started
    return {
        "steps": result["timesteps_total"] - begin,
        "seconds": seconds,
        "updates": (result["num_env_steps_trained"] - trained) // DQN_BATCH,
    }


def sb3_environments(count: int) -> Any:
    """Return games with the preprocessing of Stable-Baselines3."""
    import ale_py
    import gymnasium as gym
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gym.register_envs(ale_py)
    arguments = {"frameskip": 1, "repeat_action_probability": 0.0}
    return VecFrameStack(make_atari_env(ENV, count, 0, env_kwargs=arguments), 4)


def timed(model: Any, warm_up: int, steps: int) -> dict[str, float]:
    """Train a model of Stable-Baselines3; time it from the step `warm_up` on."""
    model.learn(warm_up)
    updates = model._n_updates
    started = time.perf_counter()
    model.learn(steps, reset_num_timesteps=False)
    seconds = time.perf_counter() - started
    return {"steps": steps, "seconds": seconds, "updates": model._n_updates - updates}


def sb3_ppo() -> dict[str, float]:
    """Run Stable-Baselines3 in its own virtual environment."""
    from stable_baselines3 import PPO

    model = PPO(
        "CnnPolicy", sb3_environments(ENVS), n_steps=BATCH // ENVS, batch_size=MINIBATCH,
        n_epochs=EPOCHS, learning_rate=PPO_LR, clip_range=0.1, ent_coef=0.01, gamma=GAMMA, seed=0,
        device="cpu",
    )  # fmt: skip
    found = timed(model, BATCH, BATCH * PPO_BATCHES)
    return {**found, "updates": found["updates"] * (BATCH // MINIBATCH)}  # it counts epochs


def sb3_dqn() -> dict[str, float]:
    """Run Stable-Baselines3 in its own virtual environment."""
    from stable_baselines3 import DQN

    model = DQN(
        "CnnPolicy", sb3_environments(1), learning_rate=DQN_LR, buffer_size=BUFFER,
        learning_starts=STARTS, batch_size=DQN_BATCH, train_freq=EVERY, gradient_steps=1,
        target_update_interval=1000, exploration_fraction=0.5, exploration_final_eps=EPSILON,
        gamma=GAMMA, seed=0, device="cpu",
    )  # fmt: skip
    return timed(model, WARM_UP, DQN_STEPS)


def nature_cnn(outputs: int) -> Any:
    """Return the network of Mnih et al. 2015."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        nn.Linear(512, outputs),
    )  # fmt: skip


def arithmetic(acting: tuple[int, int], training: tuple[int, int], targets: int) -> float:
    """Return the seconds of (number, rows) of forward passes and of updates, each with the forward
    passes of `targets` rows without gradients."""
    import torch

    network, target = nature_cnn(5), nature_cnn(5)
    adam = torch.optim.Adam(network.parameters(), fused=True)

    def frames(rows: int) -> Any:
        return torch.randint(0, 256, (rows, 4, 84, 84), dtype=torch.uint8)

    seen, batch = frames(acting[1]), frames(training[1])

    def run(num_acts: int, num_updates: int) -> None:
        with torch.inference_mode():
            for _ in range(num_acts):
                network(seen.float() / 255)
        for _ in range(num_updates):
            if targets:
                with torch.no_grad():
                    target(batch[:targets].float() / 255)
            adam.zero_grad()
            network(batch.float() / 255).square().mean().backward()
            adam.step()

    run(1, 1)  # the first calls prepare the kernels
    started = time.perf_counter()
    run(acting[0], training[0])
    return time.perf_counter() - started


def arithmetic_ppo() -> dict[str, float]:
    """Run the network of PPO alone."""
    steps = BATCH * PPO_BATCHES
    seconds = arithmetic((steps // ENVS, ENVS), (ppo_updates(), MINIBATCH), 0)
    return {"steps": steps, "seconds": seconds, "updates": ppo_updates()}


def arithmetic_dqn() -> dict[str, float]:
    """Run the networks of DQN alone."""
    updates = DQN_STEPS // EVERY
    # random actions need no network
    steps = range(WARM_UP, WARM_UP + DQN_STEPS)
    random = [max(EPSILON, 1 - (1 - EPSILON) * step / EPSILON_STEPS) for step in steps]
    acts = round(sum(1 - epsilon for epsilon in random))
    seconds = arithmetic((acts, 1), (updates, DQN_BATCH), DQN_BATCH)
    return {"steps": DQN_STEPS, "seconds": seconds, "updates": updates}


RUNS = {
    "ppo": {"flowrl": flowrl_ppo, "sb3": sb3_ppo, "arithmetic": arithmetic_ppo},
    "dqn": {"flowrl": flowrl_dqn, "sb3": sb3_dqn, "arithmetic": arithmetic_dqn},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=tuple(RUNS))
    parser.add_argument("--no-sb3", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(RUNS[options.only][options.one]()))
        return
    pythons = {"flowrl": sys.executable, "arithmetic": sys.executable}
    if not options.no_sb3:
        pythons["sb3"] = sb3_python()
    for algorithm in [options.only] if options.only else RUNS:
        results: dict[str, list[Any]] = {name: [] for name in pythons}
        for round_number in range(options.rounds):
            for name, python in pythons.items():
                command = [python, __file__, "--only", algorithm, "--one", name]
                process = subprocess.run(command, capture_output=True, text=True, check=True)
                results[name].append(json.loads(process.stdout.splitlines()[-1]))
                print(f"# {algorithm}, {round_number}, {name}: {results[name][-1]}", flush=True)
        print(f"\n| {algorithm} | env steps/s | flowrl / this row | updates |")
        print("|---|---:|---:|---:|")
        speed = {name: [r["steps"] / r["seconds"] for r in runs] for name, runs in results.items()}
        for name, speeds in speed.items():
            ratios = sorted(a / b for a, b in zip(speed["flowrl"], speeds, strict=True))
            spread = f"{np.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            updates = np.median([result["updates"] for result in results[name]])
            print(f"| {name} | {np.median(speeds):,.0f} | {spread} | {updates:,.0f} |")


if __name__ == "__main__":
    main()
