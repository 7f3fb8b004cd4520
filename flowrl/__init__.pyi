# The names that `import flowrl` offers; flowrl/__init__.py imports them on first use.
from .algorithms.a2c import A2C, A2CConfig
from .algorithms.a3c import A3C, A3CConfig
from .algorithms.apex import APEX, APEXConfig
from .algorithms.appo import APPO, APPOConfig
from .algorithms.cql import CQL, CQLConfig
from .algorithms.ddppo import DDPPO, DDPPOConfig
from .algorithms.dqn import DQN, DQNConfig
from .algorithms.impala import IMPALA, IMPALAConfig
from .algorithms.marwil import BC, MARWIL, BCConfig, MARWILConfig
from .algorithms.ppo import PPO, PPOConfig
from .algorithms.r2d2 import R2D2, R2D2Config
from .algorithms.sac import SAC, SACConfig
from .algorithms.simple_q import SimpleQ, SimpleQConfig
from .algorithms.td3 import DDPG, TD3, DDPGConfig, TD3Config
from .envs.registry import register_env
from .errors import ConfigError
from .policies.policy_spec import PolicySpec
from .trainer.algorithm import Algorithm
from .trainer.config import AlgorithmConfig

__version__: str
__all__ = [
    "A2C",
    "A3C",
    "APEX",
    "APPO",
    "BC",
    "CQL",
    "DDPG",
    "DDPPO",
    "DQN",
    "IMPALA",
    "MARWIL",
    "PPO",
    "R2D2",
    "SAC",
    "TD3",
    "A2CConfig",
    "A3CConfig",
    "APEXConfig",
    "APPOConfig",
    "Algorithm",
    "AlgorithmConfig",
    "BCConfig",
    "CQLConfig",
    "ConfigError",
    "DDPGConfig",
    "DDPPOConfig",
    "DQNConfig",
    "IMPALAConfig",
    "MARWILConfig",
    "PPOConfig",
    "PolicySpec",
    "R2D2Config",
    "SACConfig",
    "SimpleQ",
    "SimpleQConfig",
    "TD3Config",
    "register_env",
]
