"""The operators: what can be done to experience, one file per kind. No torch, no Ray."""

from flowrl.iter import _get_shared_metrics
from flowrl.ops.concurrency import Concurrently, Dequeue, Enqueue
from flowrl.ops.replay import Replay, StoreToReplayBuffer, UpdateReplayPriorities
from flowrl.ops.report import StandardMetricsReporting
from flowrl.ops.rollout import (
    ConcatBatches,
    ParallelRollouts,
    SelectExperiences,
    StandardizeFields,
)
from flowrl.ops.train import TrainOneStep, UpdateTargetNetwork, train_one_step

__all__ = [
    "ConcatBatches",
    "Concurrently",
    "Dequeue",
    "Enqueue",
    "ParallelRollouts",
    "Replay",
    "SelectExperiences",
    "StandardMetricsReporting",
    "StandardizeFields",
    "StoreToReplayBuffer",
    "TrainOneStep",
    "UpdateReplayPriorities",
    "UpdateTargetNetwork",
    "_get_shared_metrics",
    "train_one_step",
]
