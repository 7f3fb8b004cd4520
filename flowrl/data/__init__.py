"""What flows: batches of experience. numpy only."""

from flowrl.data.multi_agent_batch import MultiAgentBatch
from flowrl.data.sample_batch import DEFAULT_POLICY_ID, SampleBatch

concat_samples = SampleBatch.concat_samples

__all__ = ["DEFAULT_POLICY_ID", "MultiAgentBatch", "SampleBatch", "concat_samples"]
