"""Spaces, environments, modules and batches for the tests of policies."""

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from flowrl.data import SampleBatch
from flowrl.policies import ModelConfig
from flowrl.policies.models import make_model

BOX = spaces.Box(-1, 1, (3,), np.float32)
TWO = spaces.Discrete(2)


class RandomEnv(gym.Env):
    """Random observations of any space, rewards 1, 2, …, episodes of 7 steps."""

    def __init__(self, observation_space=BOX, action_space=TWO):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        return self.observation_space.sample(), float(self.t), self.t == 7, False, {}


class PlainModule(nn.Module):
    """A torch module without any import from flowrl, for observations of size 3."""

    def __init__(self, obs_space, action_space, num_outputs, hidden=4):
        super().__init__()
        self.out, self.value = nn.Linear(3, num_outputs), nn.Linear(3, 1)

    def forward(self, obs):
        return self.out(obs), self.value(obs)


def rows(n=12, seed=0):
    """A batch of random observations, actions and rewards."""
    rng = np.random.default_rng(seed)
    return SampleBatch(
        obs=rng.standard_normal((n, 3)).astype(np.float32),
        actions=rng.integers(0, 2, n),
        rewards=rng.standard_normal(n).astype(np.float32),
    )


def model_for(obs_space, num_outputs=2, action_space=TWO, seed=0, **config):
    """The catalog's model for these settings."""
    rng = np.random.default_rng(seed)
    return make_model(obs_space, action_space, num_outputs, ModelConfig(**config), rng=rng)


class DrawingNetwork(nn.Module):
    """A network whose forward pass draws random numbers, also while it acts."""

    def __init__(self, observation_space, action_space, num_outputs):
        super().__init__()
        self.policy = nn.Linear(4, num_outputs)
        self.value = nn.Linear(4, 1)

    def forward(self, obs):
        obs = obs + 0.1 * torch.randn_like(obs)
        return self.policy(obs), self.value(obs)
