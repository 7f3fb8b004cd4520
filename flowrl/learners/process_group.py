"""ProcessGroup: processes that average their gradients with torch.distributed.

Import this module inside functions only: it imports torch, which operators do not need.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flowrl.learners.learner import ProcessGroupError

T = TypeVar("T")


class ProcessGroup:
    """This process's membership of a group.

    Args:
        store: torch.distributed store through which the processes find each other.
        rank: index of this process, from 0.
        size: number of processes.
        backend: "gloo", or "nccl" for processes with a GPU each.
        timeout_s: seconds without an answer after which the group counts as broken.
        splits_rows: whether every process gets the same rows and learns from its share of them;
            otherwise, each has rows of its own.

    Raises:
        ProcessGroupError: the other processes did not join in time.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        backend: str = "gloo",
        *,
        timeout_s: float,
        splits_rows: bool = False,
    ):
        self.rank, self.size, self.splits_rows = rank, size, splits_rows
        self._timeout_s = timeout_s
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        if dist.is_initialized():
            dist.destroy_process_group()
        limit = timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        except (RuntimeError, ValueError) as error:
            raise ProcessGroupError(
                f"learning process {rank + 1} of {size} could not join its group: {error}"
            ) from error

    def _lost_connection(self, error: Exception) -> ProcessGroupError:
        return ProcessGroupError(
            f"learning process {self.rank + 1} of {self.size} lost the connection to its group "
            f"(another process died, or did not answer within {self._timeout_s:g} s): {error}"
        )

    def all_reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce a tensor over all processes in place, and return it.

        Raises:
            ProcessGroupError: a process died or did not answer in time.
        """
        try:
            dist.all_reduce(values, op)
        except RuntimeError as error:
            raise self._lost_connection(error) from error
        return values

    def average_gradient(self, gradient: torch.Tensor, rows: int) -> None:
        """Average a gradient [parameters] in place, weighted by each process's rows."""
        weighted = torch.cat([gradient * rows, gradient.new_tensor([float(rows)])]).to(self.device)
        self.all_reduce(weighted)
        gradient.copy_(weighted[:-1] / weighted[-1].clamp(min=1.0))

    def mean(self, value: float | None) -> float | None:
        """Return the mean over the processes that have a value; None if no process has one."""
        sum_and_count = [0.0, 0.0] if value is None else [value, 1.0]
        total, count = self.all_reduce(
            torch.tensor(sum_and_count, dtype=torch.float64, device=self.device)
        ).tolist()
        return total / count if count else None

    def any_of(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether it is True in any process."""
        counts = torch.tensor(flags, dtype=torch.int32, device=self.device)
        return [count > 0 for count in self.all_reduce(counts).tolist()]

    def std_mean(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return standard deviation and mean of all processes' values [n], as torch.std_mean; the
        standard deviation of one value is 0."""
        wide = values.detach().double()
        sums = torch.stack([wide.new_tensor(float(len(wide))), wide.sum(), (wide * wide).sum()])
        count, total, squares = self.all_reduce(sums.to(self.device)).tolist()
        mean = total / count
        variance = max(squares - count * mean * mean, 0.0) / max(count - 1, 1)
        return values.new_tensor(math.sqrt(variance)), values.new_tensor(mean)

    def object_of_last(self, value: T) -> T:
        """Return the value that the last process passes, on all processes."""
        values = [value]
        try:
            dist.broadcast_object_list(values, src=self.size - 1, device=self.device)
        except RuntimeError as error:
            raise self._lost_connection(error) from error
        return values[0]

    def pad_minibatches(self, minibatches: Iterator[T]) -> Iterator[T | None]:
        """Return the minibatches, padded with None to the same number on all processes."""
        local = list(minibatches)
        count = torch.tensor([len(local)], device=self.device)
        max_count = int(self.all_reduce(count, dist.ReduceOp.MAX)[0])
        return iter([*local, *[None] * (max_count - len(local))])

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def learning_state(policies: dict[str, Any]) -> bytes:
    """Return the pickled states of policies, for another process of the same run."""
    return pickle.dumps({policy_id: policy.get_state() for policy_id, policy in policies.items()})


def load_learning_state(policies: dict[str, Any], state: bytes) -> None:
    """Load a state from `learning_state`; see `Policy.load_learned_state`."""
    for policy_id, learned in pickle.loads(state).items():
        policies[policy_id].load_learned_state(learned)
