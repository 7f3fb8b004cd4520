"""Small environments that require memory or image observations."""

import gymnasium as gym
import numpy as np


class HiddenVelocities(gym.ObservationWrapper):
    """CartPole-v1 without velocities: position [m] and angle [rad], float32 [2]."""

    def __init__(self, config=None):
        super().__init__(gym.make("CartPole-v1"))
        space = self.env.observation_space
        self.observation_space = gym.spaces.Box(space.low[[0, 2]], space.high[[0, 2]])

    def observation(self, observation):
        return observation[[0, 2]]


class RepeatPast(gym.Env):
    """Repeat the symbol observed `back` steps ago: reward 1 if correct; episodes have 32 steps.

    A random action is correct with probability 1 / `symbols`.
    """

    def __init__(self, config=None):
        config = config or {}
        self.back, self.symbols = config.get("back", 4), config.get("symbols", 3)
        self.observation_space = gym.spaces.Discrete(self.symbols)
        self.action_space = gym.spaces.Discrete(self.symbols)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.history = [int(self.np_random.integers(self.symbols))]
        return self.history[-1], {}

    def step(self, action):
        can_repeat = len(self.history) > self.back
        reward = float(can_repeat and action == self.history[-1 - self.back])
        self.history.append(int(self.np_random.integers(self.symbols)))
        return self.history[-1], reward, len(self.history) > 32, False, {}


class Catch(gym.Env):
    """Catch a falling ball: an 8 x 8 uint8 image with the ball and a paddle in the last row.

    Actions: left, stay, right. An episode has 7 steps; reward 1 or -1 at its end.
    """

    size = 8

    def __init__(self, config=None):
        self.observation_space = gym.spaces.Box(0, 255, (self.size, self.size, 1), np.uint8)
        self.action_space = gym.spaces.Discrete(3)

    def image(self):
        image = np.zeros(self.observation_space.shape, np.uint8)
        image[self.row, self.column] = 255
        image[-1, self.paddle] = 255
        return image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row = 0
        self.column, self.paddle = (int(i) for i in self.np_random.integers(self.size, size=2))
        return self.image(), {}

    def step(self, action):
        self.row += 1
        self.paddle = int(np.clip(self.paddle + action - 1, 0, self.size - 1))
        terminated = self.row == self.size - 1
        reward = 0.0
        if terminated:
            reward = 1.0 if self.paddle == self.column else -1.0
        return self.image(), reward, terminated, False, {}
