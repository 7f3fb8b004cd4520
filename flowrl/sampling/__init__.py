"""Sampling: rollout workers and what they consist of.

Workers: worker_set, rollout_worker, rollout_pool, weight_sync, placement. Samplers, of which
fragment_sampler chooses one: column_sampler (one agent per environment), multi_agent_sampler
(several), collector_sampler (a user's SampleCollector). Rows: lane_rows, policy_lanes, segments,
running_episodes. Batches: fragment_builder, agent_batches, views, column_shipping. Callbacks:
callbacks, episode, episode_callbacks, agent_records. Checks: step_checks, agent_checks,
output_checks.
"""

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
