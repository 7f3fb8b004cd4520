# The names that `import flowrl` offers; flowrl/__init__.py imports them on first use.
# `X as X` makes a name public for type checkers and editors.
from .algorithms.a2c import A2C as A2C
from .algorithms.a2c import A2CConfig as A2CConfig
from .algorithms.a3c import A3C as A3C
from .algorithms.a3c import A3CConfig as A3CConfig
from .algorithms.apex import APEX as APEX
from .algorithms.apex import APEXConfig as APEXConfig
from .algorithms.appo import APPO as APPO
from .algorithms.appo import APPOConfig as APPOConfig
from .algorithms.cql import CQL as CQL
from .algorithms.cql import CQLConfig as CQLConfig
from .algorithms.ddppo import DDPPO as DDPPO
from .algorithms.ddppo import DDPPOConfig as DDPPOConfig
from .algorithms.dqn import DQN as DQN
from .algorithms.dqn import DQNConfig as DQNConfig
from .algorithms.impala import IMPALA as IMPALA
from .algorithms.impala import IMPALAConfig as IMPALAConfig
from .algorithms.marwil import BC as BC
from .algorithms.marwil import MARWIL as MARWIL
from .algorithms.marwil import BCConfig as BCConfig
from .algorithms.marwil import MARWILConfig as MARWILConfig
from .algorithms.ppo import PPO as PPO
from .algorithms.ppo import PPOConfig as PPOConfig
from .algorithms.r2d2 import R2D2 as R2D2
from .algorithms.r2d2 import R2D2Config as R2D2Config
from .algorithms.sac import SAC as SAC
from .algorithms.sac import SACConfig as SACConfig
from .algorithms.simple_q import SimpleQ as SimpleQ
from .algorithms.simple_q import SimpleQConfig as SimpleQConfig
from .algorithms.td3 import DDPG as DDPG
from .algorithms.td3 import TD3 as TD3
from .algorithms.td3 import DDPGConfig as DDPGConfig
from .algorithms.td3 import TD3Config as TD3Config
from .envs.registry import register_env as register_env
from .errors import ConfigError as ConfigError
from .policies.policy import Policy as Policy
from .policies.policy_spec import PolicySpec as PolicySpec
from .sampling.callbacks import DefaultCallbacks as DefaultCallbacks
from .trainer.algorithm import Algorithm as Algorithm
from .trainer.config import AlgorithmConfig as AlgorithmConfig

__version__: str
