"""AsyncLearnerConfig: the settings of the algorithms whose learner runs asynchronously."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from flowrl.ops import LearnerThread
from flowrl.sampling.worker_set import WorkerSet
from flowrl.settings import Count, NonNegativeInt, check_of_settings
from flowrl.trainer.config import AlgorithmConfig


class AsyncLearnerConfig(AlgorithmConfig):
    """Settings of the algorithms with asynchronous workers and a learner thread."""

    max_requests_in_flight_per_worker: Annotated[Count, Field(le=1000)] = 2
    """Sample requests in flight per worker. With 2, a worker samples while its previous fragment is
    processed; with 1, it waits, and the policy lag is lower."""
    learner_queue_size: Count = 2
    """Maximum number of train batches that wait in the learner's queue."""
    minibatch_buffer_size: Count = 1
    """Number of train batches over which the learner interleaves its passes. Above 1, it needs
    `num_sgd_iter` above 1."""
    num_learners: NonNegativeInt = 0
    """Number of Ray actors that each learn from a part of every train batch; 0 learns in a thread
    of the driver."""
    num_gpus: NonNegativeInt = 0
    """Like `num_learners`, with one GPU per actor. Set only one of the two."""

    @check_of_settings
    def _check_learners(self) -> Self:
        if self.num_learners and self.num_gpus:
            raise ValueError("num_learners and num_gpus: set only one of the two")
        on_actors = self.num_learners or self.num_gpus
        if on_actors and self._uses_microbatches():
            raise ValueError(
                "microbatch_size: learners on actors do not split minibatches: set num_learners=0 "
                "and num_gpus=0, or microbatch_size=0"
            )
        if self.minibatch_buffer_size > 1 and self.num_sgd_iter == 1:
            raise ValueError(
                "minibatch_buffer_size above 1 needs num_sgd_iter of at least 2: each train batch "
                "is used only once"
            )
        return self

    def learner(self, workers: WorkerSet) -> LearnerThread:
        """Create the learner of a plan from these settings."""
        return LearnerThread(
            workers,
            queue_size=self.learner_queue_size,
            minibatch_buffer_size=self.minibatch_buffer_size,
            num_sgd_iter=self.num_sgd_iter,
            sgd_minibatch_size=self.sgd_minibatch_size,
            num_learners=self.num_learners,
            num_gpus=self.num_gpus,
        )
