"""Train PPO at PettingZoo's tic-tac-toe, against a player that moves at random.

Run: python examples/multi_agent.py (needs the extra `marl`)
"""

import argparse

from pettingzoo.classic import tictactoe_v3

from flowrl import PPO, PolicySpec
from flowrl.policies import Policy


class RandomMoves(Policy):
    """Choose random free squares. A policy that does not learn needs only this method."""

    def compute_actions(self, obs_batch, explore=True):
        free = obs_batch["action_mask"]  # [batch, 9]
        return (self.rng.random(free.shape) * free).argmax(axis=1), [], {}


def main(timesteps: int) -> None:
    algo = PPO(
        tictactoe_v3.env,  # turn-based; functions of parallel environments work, too
        policies={"learner": PolicySpec(), "random": PolicySpec(policy_class=RandomMoves)},
        policy_mapping_fn=lambda agent_id: "learner" if agent_id == "player_1" else "random",
        policies_to_train=["learner"],
        num_envs_per_worker=8,
        train_batch_size=2000,
        lr=1e-3,
        seed=1,
    )
    with algo:
        before = algo.evaluate(episodes=200)["policy_reward_mean"]["learner"]
        algo.learn(total_timesteps=timesteps, run_dir=None)
        after = algo.evaluate(episodes=200)["policy_reward_mean"]["learner"]
        # 1 for a win, -1 for a loss
        print(f"mean return of 200 games: {before:.2f} before training, {after:.2f} after")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timesteps", type=int, default=60_000, help="moves of training")
    main(parser.parse_args().timesteps)
