"""Train with Stable-Baselines3, evaluate, and write the outcome; imports nothing of flowrl.

python sb3_script.py SPEC.json OUTCOME.json
"""

from __future__ import annotations

import json
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import sb3_contrib
import stable_baselines3
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

MAX_POINTS = 1000  # of the recorded curve
PACKAGES = ("gymnasium", "numpy", "torch", "stable-baselines3", "sb3-contrib")
ALGORITHMS = {
    "ppo": stable_baselines3.PPO,
    "dqn": stable_baselines3.DQN,
    "sac": stable_baselines3.SAC,
    "td3": stable_baselines3.TD3,
    "ppo_lstm": sb3_contrib.RecurrentPPO,
}


class SmallCnn(BaseFeaturesExtractor):
    """The network of the MinAtar paper: 16 filters of 3x3, then 128 units."""

    def __init__(self, observation_space: gym.spaces.Box):
        super().__init__(observation_space, features_dim=128)
        height, width, channels = observation_space.shape
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(channels, 16, 3),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * (height - 2) * (width - 2), 128),
            torch.nn.ReLU(),
        )

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layers(observations.permute(0, 3, 1, 2))


class HiddenVelocities(gym.ObservationWrapper):
    """Set the velocities of CartPole to zero."""

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation * np.array([1, 0, 1, 0], np.float32)


class Curve(BaseCallback):
    """Record (env steps, mean return of the last 100 episodes, seconds of training, number of these
    episodes)."""

    def __init__(self, env_steps: int):
        super().__init__()
        self.points: list[tuple[int, float, float, int]] = []
        self._every, self._next, self._started = env_steps // MAX_POINTS, 0, 0.0

    def _on_training_start(self) -> None:
        self._started = time.time()

    def _on_step(self) -> bool:
        if self.num_timesteps >= self._next:
            self._next = self.num_timesteps + self._every
            self.record()
        return True

    def record(self) -> None:
        """Record the present point, if an episode has ended."""
        if returns := [episode["r"] for episode in self.model.ep_info_buffer]:
            seconds = time.time() - self._started
            point = self.num_timesteps, float(np.mean(returns)), seconds, len(returns)
            self.points.append(point)


def make_env(env: str, num_envs: int, seed: int, *, training: bool, frame_stack: int | None) -> Any:
    """Return a vector environment; Atari games have SB3's preprocessing."""
    if env.startswith("ALE/"):
        import ale_py

        gym.register_envs(ale_py)
        wrappers = {"terminal_on_life_loss": training, "clip_reward": training}
        games = make_atari_env(
            env, num_envs, seed, wrapper_kwargs=wrappers, env_kwargs={"frameskip": 1}
        )
        return VecFrameStack(games, frame_stack or 4)
    if env.startswith("MinAtar/"):
        from minatar.gym import register_envs

        register_envs()
    if env == "CartPoleNoVel-v1":
        return make_vec_env("CartPole-v1", num_envs, seed, wrapper_class=HiddenVelocities)
    return make_vec_env(env, num_envs, seed)


def arguments_of(settings: dict[str, Any], action_space: gym.Space) -> dict[str, Any]:
    """Return the arguments of the algorithm for settings as the zoo writes them."""
    arguments = dict(settings)
    for name, value in arguments.items():
        if isinstance(value, str) and (match := re.fullmatch(r"lin_(.+)", value)):
            arguments[name] = LinearSchedule(float(match[1]), 0.0, 1.0)
    noise = arguments.pop("noise_std", None)
    if noise is not None:
        mean = np.zeros(action_space.shape or ())
        arguments["action_noise"] = NormalActionNoise(mean, np.full_like(mean, noise))
    policy = dict(arguments.pop("policy_kwargs", {}))
    if "activation_fn" in policy:
        policy["activation_fn"] = getattr(torch.nn, policy["activation_fn"])
    if policy.get("features_extractor_class") == "SmallCnn":
        policy |= {"features_extractor_class": SmallCnn, "normalize_images": False}
    return {"policy": "MlpPolicy", **arguments, "policy_kwargs": policy}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    settings = dict(spec["settings"])
    num_envs, normalize = settings.pop("n_envs", 1), settings.pop("normalize", False)
    frame_stack = settings.pop("frame_stack", None)
    torch.set_num_threads(settings.pop("num_threads", 1))
    env = make_env(spec["env"], num_envs, spec["seed"], training=True, frame_stack=frame_stack)
    if normalize:
        env = VecNormalize(env, gamma=settings.get("gamma", 0.99))
    algorithm = ALGORITHMS[settings.pop("algorithm", spec["algorithm"])]
    model = algorithm(
        env=env, seed=spec["seed"], device="cpu", **arguments_of(settings, env.action_space)
    )
    curve = Curve(spec["env_steps"])
    model.learn(spec["env_steps"], callback=curve)
    curve.record()
    seconds = time.time() - spec["started"]
    # SB3 seeds environment i with `seed + i`; no two seeds of a row share an environment's seed
    evaluated = make_env(
        spec["env"], 10, 10_000 + 10 * spec["seed"], training=False, frame_stack=frame_stack
    )
    if normalize:
        evaluated = VecNormalize(evaluated, training=False, norm_reward=False)
        evaluated.obs_rms = env.obs_rms
    returns, _ = evaluate_policy(
        model,
        evaluated,
        spec["episodes"],
        deterministic=not spec["explore"],
        return_episode_rewards=True,
    )
    outcome = {
        "curve": curve.points,
        "score": float(np.mean(returns)),
        "score_std": float(np.std(returns)),
        "seconds": seconds,
        "versions": {name: version(name) for name in PACKAGES},
    }
    Path(sys.argv[2]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
