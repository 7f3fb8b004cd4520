"""Environments: registry, vectorization, multi-agent environments, adapters, validation."""

from flowrl.envs.atari import AtariSettings, make_atari
from flowrl.envs.multi_agent import MultiAgentEnv, make_multi_agent
from flowrl.envs.pettingzoo import ParallelPettingZooEnv, PettingZooEnv
from flowrl.envs.registry import EnvContext, register_env

__all__ = [
    "AtariSettings",
    "EnvContext",
    "MultiAgentEnv",
    "ParallelPettingZooEnv",
    "PettingZooEnv",
    "make_atari",
    "make_multi_agent",
    "register_env",
]
