"""Operators: the functions and iterators that plans are built from.

A plan chains operators::

    rollouts = ParallelRollouts(workers, mode="bulk_sync")
    train = rollouts.combine(ConcatBatches(4000)).for_each(TrainOneStep(workers))
    return StandardMetricsReporting(train, workers, config)

The docstring of an operator that is chained starts with the method and the items: "for_each, batch
-> (batch, info)" means `stream.for_each(operator)`. Others, such as Replay, return a stream.

By kind:

- rollouts: ParallelRollouts, CountRollouts, ConcatBatches, SelectExperiences, StandardizeFields,
  AggregateBatches;
- recorded experience: ReadParquet, ReadMinari, WriteParquet;
- learning: TrainOneStep, MultiGPUTrainOneStep, TrainOnWorkers, LearnerThread, UpdateTargetNetwork,
  record_training (for your own operators);
- gradients: ComputeGradients, AsyncGradients, AverageGradients, ApplyGradients;
- replay: StoreToReplayBuffer, Replay, MixInReplay, UpdateReplayPriorities, ReplayActors,
  SimpleReplayBuffer, MinibatchBuffer;
- weights: UpdateWorkerWeights, BroadcastUpdateLearnerWeights;
- order and time: Concurrently, Enqueue, Dequeue, StalenessLimit, WaitUntilTimestepsElapsed,
  OncePerTimestepsElapsed, OncePerTimeInterval;
- debugging: Print, Breakpoint, Record;
- results: StandardMetricsReporting, CollectMetrics;
- plans as functions (`training_step`): TrainingSteps, synchronous_parallel_sample, train_one_step,
  multi_gpu_train_one_step, ResultDict;
- items: BatchRef, Gradients.

Importing this package loads neither torch nor Ray.
"""

from flowrl.data import BatchRef
from flowrl.iter import _get_shared_metrics
from flowrl.learners.gradients import Gradients
from flowrl.learners.thread import LearnerThread, MinibatchBuffer
from flowrl.ops.aggregation import AggregateBatches
from flowrl.ops.concurrency import Concurrently, Dequeue, Enqueue
from flowrl.ops.gradients import (
    ApplyGradients,
    AsyncGradients,
    AverageGradients,
    ComputeGradients,
)
from flowrl.ops.inspection import Breakpoint, Print, Record
from flowrl.ops.intervals import (
    OncePerTimeInterval,
    OncePerTimestepsElapsed,
    WaitUntilTimestepsElapsed,
)
from flowrl.ops.offline import ReadMinari, ReadParquet, WriteParquet
from flowrl.ops.replay import (
    MixInReplay,
    Replay,
    SimpleReplayBuffer,
    StoreToReplayBuffer,
    UpdateReplayPriorities,
)
from flowrl.ops.replay_actors import ReplayActors
from flowrl.ops.report import CollectMetrics, StandardMetricsReporting
from flowrl.ops.rollout import (
    ConcatBatches,
    CountRollouts,
    ParallelRollouts,
    SelectExperiences,
    StandardizeFields,
)
from flowrl.ops.staleness import StalenessLimit
from flowrl.ops.train import (
    MultiGPUTrainOneStep,
    TrainOneStep,
    TrainTFMultiGPU,
    UpdateTargetNetwork,
    record_training,
)
from flowrl.ops.train_on_workers import TrainOnWorkers
from flowrl.ops.training_step import (
    ResultDict,
    TrainingSteps,
    multi_gpu_train_one_step,
    synchronous_parallel_sample,
    train_one_step,
)
from flowrl.ops.weights import BroadcastUpdateLearnerWeights, UpdateWorkerWeights

__all__ = [
    "AggregateBatches",
    "ApplyGradients",
    "AsyncGradients",
    "AverageGradients",
    "BatchRef",
    "Breakpoint",
    "BroadcastUpdateLearnerWeights",
    "CollectMetrics",
    "ComputeGradients",
    "ConcatBatches",
    "Concurrently",
    "CountRollouts",
    "Dequeue",
    "Enqueue",
    "Gradients",
    "LearnerThread",
    "MinibatchBuffer",
    "MixInReplay",
    "MultiGPUTrainOneStep",
    "OncePerTimeInterval",
    "OncePerTimestepsElapsed",
    "ParallelRollouts",
    "Print",
    "ReadMinari",
    "ReadParquet",
    "Record",
    "Replay",
    "ReplayActors",
    "ResultDict",
    "SelectExperiences",
    "SimpleReplayBuffer",
    "StalenessLimit",
    "StandardMetricsReporting",
    "StandardizeFields",
    "StoreToReplayBuffer",
    "TrainOnWorkers",
    "TrainOneStep",
    "TrainTFMultiGPU",
    "TrainingSteps",
    "UpdateReplayPriorities",
    "UpdateTargetNetwork",
    "UpdateWorkerWeights",
    "WaitUntilTimestepsElapsed",
    "WriteParquet",
    "_get_shared_metrics",
    "multi_gpu_train_one_step",
    "record_training",
    "synchronous_parallel_sample",
    "train_one_step",
]
