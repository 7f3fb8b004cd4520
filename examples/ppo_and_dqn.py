"""Train PPO and DQN in one plan: two agents in one environment, one stream of experience.

Run: python examples/ppo_and_dqn.py, or flowrl train examples/ppo_and_dqn.py
"""

import argparse

from flowrl import Algorithm, AlgorithmConfig, DQNConfig, PolicySpec, PPOConfig, ops
from flowrl.envs import make_multi_agent

ppo = PPOConfig(train_batch_size=1024, lr=[("0%", 1e-3), ("100%", 0.0)], gamma=0.98)
dqn = DQNConfig(train_batch_size=64, training_intensity=16, n_step=10)
config = AlgorithmConfig(
    env=make_multi_agent("CartPole-v1"),
    env_config={"num_agents": 2, "episode_steps": 500},  # an agent whose pole falls is replaced
    policies={"ppo": PolicySpec(config=ppo), "dqn": PolicySpec(config=dqn)},
    policy_mapping_fn=lambda agent_id: "ppo" if agent_id % 2 else "dqn",
    num_envs_per_worker=4,
    rollout_fragment_length=8,
    min_sample_timesteps_per_iteration=2000,
    metrics_num_episodes_for_smoothing=10,
    seed=1,
)


def execution_plan(workers, config):
    ppo, dqn = config.for_policy("ppo"), config.for_policy("dqn")
    rows_of_ppo, rows_of_dqn = ops.ParallelRollouts(workers, mode="bulk_sync").duplicate(2)
    train_ppo = (
        rows_of_ppo.for_each(ops.SelectExperiences(["ppo"]))
        .combine(ops.ConcatBatches(ppo.train_batch_size, count_steps_by="agent_steps"))
        .for_each(ops.TrainOneStep(workers, policies=["ppo"]))
    )
    buffer = dqn.replay_buffer(["dqn"])
    rows_of_dqn = rows_of_dqn.for_each(ops.SelectExperiences(["dqn"]))
    store = rows_of_dqn.for_each(ops.StoreToReplayBuffer(local_buffer=buffer))
    train_dqn = (
        ops.Replay(local_buffer=buffer)
        .for_each(ops.TrainOneStep(workers, policies=["dqn"]))
        .for_each(ops.UpdateReplayPriorities(local_buffer=buffer))
        .for_each(
            ops.UpdateTargetNetwork(workers, dqn.target_network_update_freq, policies=["dqn"])
        )
    )
    train = ops.Concurrently([train_ppo, store, train_dqn], output_indexes=[0, 2])
    return ops.StandardMetricsReporting(train, workers, config)


def main(timesteps: int) -> None:
    with Algorithm.from_plan(execution_plan, config) as algo:
        algo.learn(total_timesteps=timesteps, run_dir=None)
        returns = algo.evaluate(episodes=10)["policy_reward_mean"]
        print(f"mean return per agent: PPO {returns['ppo']:.0f}, DQN {returns['dqn']:.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timesteps", type=int, default=80_000, help="env steps of training")
    main(parser.parse_args().timesteps)
