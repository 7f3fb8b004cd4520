"""flowrl: reinforcement-learning algorithms as dataflow.

    from flowrl import PPO
    algorithm = PPO("CartPole-v1", seed=1).learn(total_timesteps=100_000)

Packages: `iter` (dataflow engine), `data` (batches, checkpoints), `envs`, `policies`, `learners`,
`sampling` (rollout workers), `replay` (replay buffers), `offline` (recorded data), `ops` (operators
of plans), `trainer` (Algorithm and its config), `algorithms`, `cli`.
"""

from importlib.util import find_spec
from typing import Any

import lazy_loader

__version__ = "0.1.0"

NAMES = {
    "algorithms.a2c": ["A2C", "A2CConfig"],
    "algorithms.a3c": ["A3C", "A3CConfig"],
    "algorithms.apex": ["APEX", "APEXConfig"],
    "algorithms.appo": ["APPO", "APPOConfig"],
    "algorithms.cql": ["CQL", "CQLConfig"],
    "algorithms.ddppo": ["DDPPO", "DDPPOConfig"],
    "algorithms.dqn": ["DQN", "DQNConfig"],
    "algorithms.impala": ["IMPALA", "IMPALAConfig"],
    "algorithms.marwil": ["BC", "BCConfig", "MARWIL", "MARWILConfig"],
    "algorithms.ppo": ["PPO", "PPOConfig"],
    "algorithms.r2d2": ["R2D2", "R2D2Config"],
    "algorithms.sac": ["SAC", "SACConfig"],
    "algorithms.simple_q": ["SimpleQ", "SimpleQConfig"],
    "algorithms.td3": ["DDPG", "DDPGConfig", "TD3", "TD3Config"],
    "envs.registry": ["register_env"],
    "errors": ["ConfigError"],
    "policies.policy": ["Policy"],
    "policies.policy_spec": ["PolicySpec"],
    "sampling.callbacks": ["DefaultCallbacks"],
    "trainer.algorithm": ["Algorithm"],
    "trainer.config": ["AlgorithmConfig"],
}
"""Module -> its names that `import flowrl` offers; `python docs/stub.py` declares their types."""

# imported on first use, so that importing flowrl stays fast
_load, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs=NAMES)


def __getattr__(name: str) -> Any:
    if name in __all__ or name.startswith("_"):
        return _load(name)
    if find_spec(f"flowrl.{name}") is not None:
        hint = f" It is a module: import flowrl.{name}."
    else:  # imported here, because they import numpy
        from flowrl.setting_aliases import CLASS_HINTS
        from flowrl.setting_values import nearest

        hint = nearest(name.removesuffix("Trainer"), __all__)
        if name in CLASS_HINTS:
            hint = f" {CLASS_HINTS[name]}."
    raise AttributeError(f"module 'flowrl' has no attribute {name!r}.{hint}")
