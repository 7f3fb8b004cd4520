"""Batches of experience and their storage; imports neither torch nor Ray."""

from flowrl.data.batch_ref import BatchRef
from flowrl.data.sample_batch import (
    DEFAULT_POLICY_ID,
    AgentID,
    Batch,
    EpisodeID,
    MultiAgentBatch,
    PolicyID,
    SampleBatch,
    TensorType,
)
from flowrl.data.sequences import (
    add_time_dimension,
    chop_into_sequences,
    pad_batch_to_sequences_of_same_size,
)

concat_samples = SampleBatch.concat_samples

__all__ = [
    "DEFAULT_POLICY_ID",
    "AgentID",
    "Batch",
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
