"""Export a trained policy to ONNX, and run it in a program that needs neither flowrl nor torch.

Run: python examples/deploy_onnx.py (needs the extra `onnx`)
"""

import argparse
import subprocess
import sys

import gymnasium as gym
import numpy as np


def train_and_export(path: str, timesteps: int) -> None:
    from flowrl import PPO

    with PPO("CartPole-v1", num_envs_per_worker=8, lr=1e-3, seed=1) as algo:
        algo.learn(total_timesteps=timesteps, run_dir=None)
        algo.get_policy().export(path)


def serve(path: str, episodes: int = 20) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    env = gym.make("CartPole-v1")
    returns = np.zeros(episodes)
    for episode in range(episodes):
        (obs, _), done = env.reset(seed=episode), False
        while not done:
            (actions,) = session.run(["actions"], {"obs": obs[np.newaxis]})  # [1, 4] -> [1]
            obs, reward, terminated, truncated, _ = env.step(actions[0])
            returns[episode] += reward
            done = terminated or truncated
    print(f"mean return of {episodes} episodes: {returns.mean():.1f}")
    print("imported:", sorted({"flowrl", "numpy", "onnxruntime", "torch"} & set(sys.modules)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timesteps", type=int, default=60_000, help="env steps of training")
    parser.add_argument("--serve", metavar="FILE", help="only run this ONNX file")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
    else:
        train_and_export("policy.onnx", args.timesteps)
        subprocess.run([sys.executable, __file__, "--serve", "policy.onnx"], check=True)
