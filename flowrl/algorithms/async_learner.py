"""Settings of the algorithms whose learner works beside the plan, at a pace of its own."""

from __future__ import annotations

from pydantic import Field

from flowrl.ops import LearnerThread
from flowrl.sampling.worker_set import WorkerSet
from flowrl.settings import Count
from flowrl.trainer.config import AlgorithmConfig


class AsyncLearnerConfig(AlgorithmConfig):
    """Settings of workers that nobody waits for, and of the learner."""

    max_requests_in_flight_per_worker: Count = 2
    """Fragments that a worker is asked for at a time."""
    learner_queue_size: Count = 2
    """Train batches that may wait for the learner."""
    minibatch_buffer_size: Count = 1
    """Train batches that the learner has in turn, where it uses each `num_sgd_iter` times."""
    num_learners: int = Field(default=0, ge=0)
    """Learners on Ray actors of their own, which take shares of each batch; 0 learns in a thread of
    this process."""
    num_gpus: int = Field(default=0, ge=0)
    """The same, each with a GPU."""

    def learner(self, workers: WorkerSet) -> LearnerThread:
        """The learner of a plan, as these settings say."""
        return LearnerThread(
            workers,
            queue_size=self.learner_queue_size,
            minibatch_buffer_size=self.minibatch_buffer_size,
            num_sgd_iter=self.num_sgd_iter,
            sgd_minibatch_size=self.sgd_minibatch_size,
            num_learners=self.num_learners,
            num_gpus=self.num_gpus,
        )
