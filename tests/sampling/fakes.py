"""Small deterministic environments and policies for tests."""

import gymnasium as gym
import numpy as np

from flowrl.policies import Policy


class CountEnv(gym.Env):
    """Observes (episode, step); the reward is the step number; ends after `length` steps.

    Odd episodes are truncated, even ones terminate. With `reuse`, all observations share one
    buffer. The step `fail_at` (episode, step) raises `fail_with` once.
    """

    observation_space = gym.spaces.Box(-1.0, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=3, fail_at=None, fail_with=ValueError, reuse=True):
        self.length, self.fail_at, self.fail_with = length, fail_at, fail_with
        self.episode, self.steps = -1, 0
        self.buffer, self.reuse = np.zeros(2, np.float32), reuse

    def observe(self):
        self.buffer[:] = self.episode, self.steps
        return self.buffer if self.reuse else self.buffer.copy()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        if self.fail_at == (self.episode, self.steps):
            self.fail_at = None
            raise self.fail_with("the environment broke")
        end = self.steps >= self.length
        truncated = end and self.episode % 2 == 1
        return (
            self.observe(),
            float(self.steps),
            end and not truncated,
            truncated,
            {"n": self.steps},
        )


class DrawEnv(CountEnv):
    """Observes (random number of the episode, step)."""

    number = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = self.np_random.integers(10**6)
        return self.observe(), {}

    def observe(self):
        return np.array([self.number, self.steps], np.float32)


class WrongEnv(CountEnv):
    """Returns `wrong` as observation, reward or flag of its step number `at`."""

    def __init__(self, at=4, **wrong):
        super().__init__(reuse=False)
        self.at, self.wrong, self.count = at, wrong, 0

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        self.count += 1
        if self.count == self.at:
            obs = self.wrong.get("obs", obs)
            reward = self.wrong.get("reward", reward)
            terminated = self.wrong.get("terminated", terminated)
            truncated = self.wrong.get("truncated", truncated)
        return obs, reward, terminated, truncated, info


class Idle(Policy):
    """Always acts 0; has no weights."""

    def compute_actions(self, obs_batch, explore=True):
        return np.zeros(len(obs_batch), np.int64), [], {}

    def get_weights(self):
        return {}

    def set_weights(self, weights):
        self.version += 1


class ObservedValue(Policy):
    """Always acts 0; the value of an observation is 100 * episode + step."""

    def compute_actions(self, obs_batch, explore=True):
        zeros = np.zeros(len(obs_batch), np.int64)
        return zeros, [], {"vf_preds": self.compute_values(obs_batch)}

    def compute_values(self, obs_batch):
        return (100 * obs_batch[:, 0] + obs_batch[:, 1]).astype(np.float32)

    def postprocess_fragment(self, fragment):
        return {"next_values": fragment["next_values"]}

    def get_weights(self):
        return {"w": np.zeros(1)}

    def set_weights(self, weights):
        self.version += 1

    def learn_on_batch(self, batch):
        self.version += 1
        return {"rows": float(batch.count)}
