"""Write an execution plan, see what flows through it with a print operator, and train it.

Run: python examples/own_plan.py, or flowrl train examples/own_plan.py
"""

import argparse

from flowrl import PPOConfig, ops

config = PPOConfig(
    env="CartPole-v1",
    num_envs_per_worker=8,
    lr=1e-3,
    standardize_advantages=False,  # not in minibatches: the plan standardizes train batches
    seed=1,
)


def print_batch(batch):
    """Print a batch and pass it on: any function from item to item is an operator."""
    advantages = batch["advantages"]
    print(
        f"{batch.count} steps, {batch['dones'].sum()} episodes ended, advantages "
        f"{advantages.mean():.2f} ± {advantages.std():.2f}"
    )
    return batch


def execution_plan(workers, config):
    rollouts = ops.ParallelRollouts(workers, mode="bulk_sync")
    train = (
        rollouts.combine(ops.ConcatBatches(config.train_batch_size))
        .for_each(print_batch)
        .for_each(ops.StandardizeFields(["advantages"]))
        .for_each(ops.TrainOneStep(workers))
    )
    return ops.StandardMetricsReporting(train, workers, config)


def main(timesteps: int) -> None:
    with config.build(plan=execution_plan) as algo:
        print(algo.plan.explain())  # the stages as a tree; nothing has run
        algo.learn(total_timesteps=timesteps, run_dir=None, progress=False)
        print(algo.plan.explain())  # now with the items and the time of each stage
        print("mean return of 20 episodes:", algo.evaluate(episodes=20)["episode_reward_mean"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timesteps", type=int, default=60_000, help="env steps of training")
    main(parser.parse_args().timesteps)
