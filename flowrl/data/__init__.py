"""What flows: batches of experience, and buffers that keep it. numpy only."""

from flowrl.data.batch_ref import BatchRef
from flowrl.data.mix_in import MixInReplayBuffer
from flowrl.data.multi_agent_batch import (
    AgentID,
    EpisodeID,
    MultiAgentBatch,
    PolicyID,
    TensorType,
)
from flowrl.data.multi_agent_replay import MultiAgentReplayBuffer
from flowrl.data.replay_buffer import PrioritizedReplayBuffer, ReplayBuffer
from flowrl.data.reservoir import ReservoirReplayBuffer
from flowrl.data.sample_batch import DEFAULT_POLICY_ID, SampleBatch
from flowrl.data.sequences import (
    add_time_dimension,
    chop_into_sequences,
    pad_batch_to_sequences_of_same_size,
)

concat_samples = SampleBatch.concat_samples

__all__ = [
    "DEFAULT_POLICY_ID",
    "AgentID",
    "BatchRef",
    "EpisodeID",
    "MixInReplayBuffer",
    "MultiAgentBatch",
    "MultiAgentReplayBuffer",
    "PolicyID",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReservoirReplayBuffer",
    "SampleBatch",
    "TensorType",
    "add_time_dimension",
    "chop_into_sequences",
    "concat_samples",
    "pad_batch_to_sequences_of_same_size",
]
