"""Train your own network: a torch.nn.Module that returns action logits and values.

Run: python examples/custom_network.py
"""

import argparse

import torch
from torch import nn

from flowrl import PPO


class ResidualNetwork(nn.Module):
    """Layers with skip connections, and two heads.

    flowrl passes the spaces, the number of outputs that the action distribution needs, and the
    entries of `custom_model_config`.
    """

    def __init__(self, obs_space, action_space, num_outputs, width=64, num_blocks=2):
        super().__init__()
        self.first = nn.Linear(obs_space.shape[0], width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh())
            for _ in range(num_blocks)
        )
        self.logits, self.value = nn.Linear(width, num_outputs), nn.Linear(width, 1)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.tanh(self.first(obs))
        for block in self.blocks:
            features = features + block(features)
        return self.logits(features), self.value(features)  # [batch, num_outputs], [batch, 1]


def main(timesteps: int) -> None:
    model = {"custom_model": ResidualNetwork, "custom_model_config": {"width": 32}}
    with PPO("CartPole-v1", model=model, num_envs_per_worker=8, lr=1e-3, seed=1) as algo:
        algo.learn(total_timesteps=timesteps)  # writes results and checkpoints to runs/
        run_dir = algo.run_dir

    # a checkpoint has the weights; the code of the network is passed again
    with PPO.from_checkpoint(run_dir, config={"model": model}) as algo:
        print("mean return of 20 episodes:", algo.evaluate(episodes=20)["episode_reward_mean"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timesteps", type=int, default=60_000, help="env steps of training")
    main(parser.parse_args().timesteps)
