"""Batches of experience and how they are stored: numpy only."""

from flowrl.data.batch_ref import BatchRef
from flowrl.data.multi_agent_batch import (
    AgentID,
    EpisodeID,
    MultiAgentBatch,
    PolicyID,
    TensorType,
)
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
    "MultiAgentBatch",
    "PolicyID",
    "SampleBatch",
    "TensorType",
    "add_time_dimension",
    "chop_into_sequences",
    "concat_samples",
    "pad_batch_to_sequences_of_same_size",
]
