"""Protocols: the parts of a policy and of a process group that a learner uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from flowrl.data import SampleBatch
from flowrl.policies.learning.flat_parameters import FlatParameters
from flowrl.policies.models.base import ModelV2
from flowrl.policies.models.tensor_batch import TensorBatch

Stats = dict[str, float]


class ProcessGroup(Protocol):
    """Processes that learn together; see flowrl.learners.process_group."""

    rank: int
    size: int
    splits_rows: bool

    def average_gradient(self, gradient: torch.Tensor, rows: int) -> None: ...
    def mean(self, value: float | None) -> float | None: ...
    def std_mean(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
    def object_of_last(self, value: Any) -> Any: ...
    def pad_minibatches(self, minibatches: Iterator[Any]) -> Iterator[Any]: ...
    def close(self) -> None: ...


class TrainablePolicy(Protocol):
    """The part of a TorchPolicy that a learner uses: network, loss and hooks."""

    config: Any
    model: ModelV2
    flat: FlatParameters
    device: torch.device
    shuffle_rng: np.random.Generator
    stats: dict[str, torch.Tensor | float]
    row_stats: dict[str, np.ndarray]
    timestep: int
    version: int

    @property
    def is_recurrent(self) -> bool: ...
    def tensors(self, batch: SampleBatch) -> TensorBatch: ...
    def loss(self, batch: TensorBatch) -> torch.Tensor | Sequence[torch.Tensor]: ...
    def loss_without_rows(self) -> None: ...
    def make_optimizer(self) -> Any: ...
    def scheduled(self, setting: Any) -> float: ...
    def loss_numbers(self) -> tuple[float, ...]: ...
    def extra_grad_process(self) -> dict[str, torch.Tensor]: ...
    def learn_on_batch(self, batch: SampleBatch) -> Stats: ...
    def end_epoch(self, batch: SampleBatch | None, stats: Stats) -> bool: ...
    def end_learning(self, batch: SampleBatch | None, stats: Stats) -> Stats: ...
