"""CartPoleNoVel-v1: CartPole-v1 with its velocities set to zero, a test of policies with memory."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

ENV_ID = "CartPoleNoVel-v1"


class HiddenVelocities(gym.ObservationWrapper):
    """Set the velocities of CartPole to zero; observations are float32 [4]."""

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation * np.array([1, 0, 1, 0], np.float32)


def make(**arguments: Any) -> gym.Env:
    """Return the environment without its time limit, which the registry adds."""
    return HiddenVelocities(gym.make("CartPole-v1", max_episode_steps=-1, **arguments))


def register() -> None:
    """Add the environment to gymnasium's registry, with the time limit of CartPole-v1."""
    if ENV_ID not in gym.registry:
        gym.register(ENV_ID, entry_point=f"{__name__}:make", max_episode_steps=500)
