"""Sampling: rollout workers and what they consist of.

From an environment to a fragment (of single agents):

    RolloutWorker.sample            the callback on_sample_end, counters
    └ FragmentSampler.sample        one item of the sampler, or several whole episodes
      └ SyncSampler, AsyncSampler   now, or ahead of time in a thread
        └ ColumnSampler.collect     of EnvSampler, its base class
          ├ _roll                   per step: the policy acts, DirectVectorEnv.step, env.step
          └ _finish                 StepChecks, SegmentTracker, FragmentBuilder
    ColumnShipping                  which columns of the fragment leave the worker

Workers: worker_set, rollout_worker, worker_config, environments, policy_map, ids, rollout_pool,
replayed_pool, spare_worker, weight_sync, worker_calls, worker_states, placement.
Samplers: sampler (on request or ahead). fragment_sampler chooses a subclass of EnvSampler
(env_sampler): column_sampler (one agent per environment), multi_agent_sampler (several agents or
policies, views of other agents, or the callback on_postprocess_trajectory; with agent_episodes,
agent_state) or collector_sampler (a user's collector).
Collectors: sample_collector (the abstract class), list_collector, collected_trajectory.
Rows: lane_rows, policy_lanes, policy_outputs, segments, running_episodes, agent_views, lost_lives,
episode_returns, raw_observations.
Batches: fragment_builder, agent_batches, segment_postprocessing, views, column_shipping.
Callbacks: callbacks, episode, episode_callbacks, agent_records.
Checks: step_checks, agent_checks, output_checks.
Protocols: sampler_worker, callback_worker.
"""

from flowrl.data.sample_batch import AgentID, EpisodeID, PolicyID, TensorType
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
