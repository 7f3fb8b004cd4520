"""Search for PPO's learning rate and batch size with Ray Tune.

Run: python examples/tune_learning_rate.py (needs the extra `tune`)
"""

import argparse
from pathlib import Path

from ray import tune

import flowrl.tune
from flowrl import PPO, PPOConfig


def main(timesteps: int) -> None:
    config = PPOConfig(
        env="CartPole-v1",
        num_envs_per_worker=8,
        lr=tune.grid_search([3e-5, 3e-4, 3e-3]),
        train_batch_size=tune.grid_search([1000, 4000]),
        seed=1,
    )
    results = tune.Tuner(
        flowrl.tune.PPO,
        param_space=config,
        tune_config=tune.TuneConfig(metric="episode_reward_mean", mode="max"),
        run_config=tune.RunConfig(
            storage_path=Path("tune_results").absolute(),
            stop={"timesteps_total": timesteps},
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            verbose=0,
        ),
    ).fit()

    columns = ["config/lr", "config/train_batch_size", "episode_reward_mean"]
    print(
        results.get_dataframe()[columns].sort_values("episode_reward_mean").to_string(index=False)
    )
    best = results.get_best_result()
    print(f"best: lr={best.config['lr']}, train_batch_size={best.config['train_batch_size']}")
    with PPO.from_checkpoint(best.checkpoint.path) as algo:
        print("mean return of 20 episodes:", algo.evaluate(episodes=20)["episode_reward_mean"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timesteps", type=int, default=40_000, help="env steps of each trial")
    main(parser.parse_args().timesteps)
