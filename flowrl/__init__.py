"""flowrl: reinforcement-learning algorithms as dataflow.

    from flowrl import PPO
    algorithm = PPO("CartPole-v1", seed=1).learn(total_timesteps=100_000)

Packages: `iter` (dataflow engine), `data` (batches, checkpoints), `envs`, `policies`, `learners`,
`sampling` (rollout workers), `replay` (replay buffers), `offline` (recorded data), `ops` (operators
of plans), `trainer` (Algorithm and its config), `algorithms`, `cli`.
"""

import lazy_loader

__version__ = "0.1.0"

# imports the names in __init__.pyi on first use, so that importing flowrl stays fast
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
