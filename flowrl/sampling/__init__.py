"""Where experience is made: environments, collectors, rollout workers."""

from flowrl.data.multi_agent_batch import AgentID, EpisodeID, PolicyID, TensorType
from flowrl.sampling.callbacks import DefaultCallbacks, override
from flowrl.sampling.envs import EnvContext, register_env
from flowrl.sampling.episode import EpisodeMetrics, MultiAgentEpisode
from flowrl.sampling.list_collector import SimpleListCollector
from flowrl.sampling.multi_agent_env import MultiAgentEnv, make_multi_agent
from flowrl.sampling.pettingzoo import ParallelPettingZooEnv, PettingZooEnv
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.sample_collector import SampleCollector
from flowrl.sampling.sampler import AsyncSampler, SamplerInput, SyncSampler
from flowrl.sampling.worker_set import WorkerSet

__all__ = [
    "AgentID",
    "AsyncSampler",
    "DefaultCallbacks",
    "EnvContext",
    "EpisodeID",
    "EpisodeMetrics",
    "MultiAgentEnv",
    "MultiAgentEpisode",
    "ParallelPettingZooEnv",
    "PettingZooEnv",
    "PolicyID",
    "RolloutWorker",
    "SampleCollector",
    "SamplerInput",
    "SimpleListCollector",
    "SyncSampler",
    "TensorType",
    "WorkerSet",
    "make_multi_agent",
    "override",
    "register_env",
]
