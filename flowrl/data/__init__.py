"""What flows: batches of experience. numpy only."""

from flowrl.data.multi_agent_batch import (
    AgentID,
    EpisodeID,
    MultiAgentBatch,
    PolicyID,
    TensorType,
)
from flowrl.data.sample_batch import DEFAULT_POLICY_ID, SampleBatch

concat_samples = SampleBatch.concat_samples

__all__ = [
    "DEFAULT_POLICY_ID",
    "AgentID",
    "EpisodeID",
    "MultiAgentBatch",
    "PolicyID",
    "SampleBatch",
    "TensorType",
    "concat_samples",
]
