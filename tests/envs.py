"""Small environments that ask for memory or eyes."""

import gymnasium as gym
import numpy as np


class HiddenVelocities(gym.ObservationWrapper):
    """CartPole-v1 without its velocities: position [m] and angle [rad], float32 [2]."""

    def __init__(self, config=None):
        super().__init__(gym.make("CartPole-v1"))
        space = self.env.observation_space
        self.observation_space = gym.spaces.Box(space.low[[0, 2]], space.high[[0, 2]])

    def observation(self, observation):
        return observation[[0, 2]]


class RepeatPast(gym.Env):
    """Name the symbol that was shown `back` steps ago: reward 1 if it is right; 32 steps.

    Without a memory one in `symbols` answers is right.
    """

    def __init__(self, config=None):
        config = config or {}
        self.back, self.symbols = config.get("back", 4), config.get("symbols", 3)
        self.observation_space = gym.spaces.Discrete(self.symbols)
        self.action_space = gym.spaces.Discrete(self.symbols)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown = [int(self.np_random.integers(self.symbols))]
        return self.shown[-1], {}

    def step(self, action):
        known = len(self.shown) > self.back
        reward = float(known and action == self.shown[-1 - self.back])
        self.shown.append(int(self.np_random.integers(self.symbols)))
        return self.shown[-1], reward, len(self.shown) > 32, False, {}


class Catch(gym.Env):
    """Catch what falls: an 8 x 8 uint8 image with a stone and a paddle in the last row.

    Actions: left, stay, right. An episode is 7 steps; reward 1 or -1 at its end.
    """

    size = 8

    def __init__(self, config=None):
        self.observation_space = gym.spaces.Box(0, 255, (self.size, self.size, 1), np.uint8)
        self.action_space = gym.spaces.Discrete(3)

    def _image(self):
        image = np.zeros(self.observation_space.shape, np.uint8)
        image[self.row, self.column] = 255
        image[-1, self.paddle] = 255
        return image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row = 0
        self.column, self.paddle = (int(i) for i in self.np_random.integers(self.size, size=2))
        return self._image(), {}

    def step(self, action):
        self.row += 1
        self.paddle = int(np.clip(self.paddle + action - 1, 0, self.size - 1))
        over = self.row == self.size - 1
        reward = 0.0
        if over:
            reward = 1.0 if self.paddle == self.column else -1.0
        return self._image(), reward, over, False, {}
