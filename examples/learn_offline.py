"""Record the experience of PPO, then learn from the recording alone with MARWIL.

Run: python examples/learn_offline.py (needs the extra `offline`)
"""

import argparse
import tempfile

from flowrl import MARWIL, PPO


def main(timesteps: int, rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with PPO("CartPole-v1", output=folder, num_envs_per_worker=8, lr=1e-3, seed=1) as algo:
            algo.learn(total_timesteps=timesteps, run_dir=None)  # writes Parquet files to `folder`
            recorded = algo.last_result["episode_reward_mean"]

        # the environment provides the spaces and is used for evaluation, not for training
        settings = {"input_": folder, "lr": 1e-3, "evaluation_interval": 10, "seed": 1}
        with MARWIL("CartPole-v1", **settings) as algo:
            algo.learn(total_timesteps=rows, run_dir=None)
            learned = algo.evaluate(episodes=50)["episode_reward_mean"]
    print(f"mean return: {recorded:.0f} in the last recorded episodes, {learned:.0f} of MARWIL")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timesteps", type=int, default=30_000, help="env steps to record")
    parser.add_argument("--rows", type=int, default=400_000, help="recorded rows to train on")
    args = parser.parse_args()
    main(args.timesteps, args.rows)
