"""Train PPO in your own environment: a class that implements gymnasium.Env.

Run: python examples/own_environment.py
"""

import argparse

import gymnasium as gym
import numpy as np

from flowrl import PPO

MOVES = np.array([(0, 1), (0, -1), (1, 0), (-1, 0)])


class GridWorld(gym.Env):
    """Walk to a goal on a square grid: each step costs 1, after 100 steps the episode ends."""

    def __init__(self, size: int = 5):
        self.size = size
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(len(MOVES))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # seeds self.np_random
        self.position, self.goal = self.np_random.integers(self.size, size=(2, 2))
        self.num_steps = 0
        return self.observation(), {}

    def step(self, action):
        self.position = np.clip(self.position + MOVES[action], 0, self.size - 1)
        self.num_steps += 1
        terminated = bool((self.position == self.goal).all())
        truncated = self.num_steps == 100
        return self.observation(), -1.0, terminated, truncated, {}

    def observation(self):
        return ((self.goal - self.position) / self.size).astype(np.float32)


def main(timesteps: int) -> None:
    with PPO(GridWorld, env_config={"size": 10}, num_envs_per_worker=8, seed=1) as algo:
        before = algo.evaluate(episodes=100)["episode_reward_mean"]
        algo.learn(total_timesteps=timesteps, run_dir=None)
        after = algo.evaluate(episodes=100)["episode_reward_mean"]
        print(f"mean return of 100 episodes: {before:.1f} before training, {after:.1f} after")

        env, done = GridWorld(size=10), False
        obs, _ = env.reset(seed=1)
        while not done:
            action, _ = algo.predict(obs)
            obs, _, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
        print(f"one more episode: {env.num_steps} steps, at {env.position}, goal {env.goal}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timesteps", type=int, default=100_000, help="env steps of training")
    main(parser.parse_args().timesteps)
