"""Sampling: collectors, samplers, rollout workers, worker sets."""

from flowrl.data.types import AgentID, EpisodeID, PolicyID, TensorType
from flowrl.sampling.callbacks import DefaultCallbacks, override
from flowrl.sampling.episode import EpisodeMetrics, MultiAgentEpisode
from flowrl.sampling.list_collector import SimpleListCollector
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.sample_collector import SampleCollector
from flowrl.sampling.sampler import AsyncSampler, SamplerInput, SyncSampler
from flowrl.sampling.worker_set import WorkerSet

__all__ = [
    "AgentID",
    "AsyncSampler",
    "DefaultCallbacks",
    "EpisodeID",
    "EpisodeMetrics",
    "MultiAgentEpisode",
    "PolicyID",
    "RolloutWorker",
    "SampleCollector",
    "SamplerInput",
    "SimpleListCollector",
    "SyncSampler",
    "TensorType",
    "WorkerSet",
    "override",
]
