"""Groups of processes that learn as one: gradients are averaged over torch.distributed.

Imported by those processes alone: it needs torch, which operators do not."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class ProcessGroupError(RuntimeError):
    """A process of the group has died, or did not answer in time."""


class ProcessGroup:
    """One process' part of a group.

    Args:
        store: where the processes find each other, a torch.distributed store.
        rank: of this process, from 0.
        size: processes.
        backend: "gloo", or "nccl" for processes with a GPU each.
        timeout_s: seconds without an answer after which the group counts as broken.
        shares: every process is given the same rows, of which it learns from its share; if not,
            each learns from rows of its own.

    Raises:
        ProcessGroupError: the others did not come in time.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        backend: str = "gloo",
        timeout_s: float = 60.0,
        shares: bool = False,
    ):
        self.rank, self.size, self.shares = rank, size, shares
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        if dist.is_initialized():
            dist.destroy_process_group()
        limit = timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        except (RuntimeError, ValueError) as error:
            raise ProcessGroupError(f"process {rank} of {size} found no group: {error}") from error

    def sum(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """The sums of all processes' values, in their place.

        Raises:
            ProcessGroupError
        """
        try:
            dist.all_reduce(values, op)
        except RuntimeError as error:
            raise ProcessGroupError(f"process {self.rank} of {self.size}: {error}") from error
        return values

    def average(self, gradient: torch.Tensor, rows: int) -> int:
        """Make a gradient, the mean over so many rows, that over all processes' rows; how many."""
        whole = torch.cat([gradient * rows, gradient.new_tensor([float(rows)])]).to(self.device)
        self.sum(whole)
        total = int(whole[-1])
        gradient.copy_(whole[:-1] / max(total, 1))
        return total

    def mean(self, value: float | None) -> float | None:
        """The mean of the processes' numbers; None where none of them has any."""
        told = [0.0, 0.0] if value is None else [value, 1.0]
        total, count = self.sum(
            torch.tensor(told, dtype=torch.float64, device=self.device)
        ).tolist()
        return total / count if count else None

    def std_mean(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Standard deviation and mean of all processes' values [n] together, as torch.std_mean."""
        wide = values.detach().double()
        told = torch.stack([wide.new_tensor(float(len(wide))), wide.sum(), (wide * wide).sum()])
        count, total, squares = self.sum(told.to(self.device)).tolist()
        mean = total / count
        variance = max(squares - count * mean * mean, 0.0) / max(count - 1, 1)
        return values.new_tensor(math.sqrt(variance)), values.new_tensor(mean)

    def padded(self, parts: Iterator[T]) -> Iterator[T | None]:
        """The parts, with as many None after them as others have more."""
        own = list(parts)
        most = self.sum(
            torch.tensor([len(own)], device=self.device), dist.ReduceOp.MAX
        )  # all make as many updates
        return iter([*own, *[None] * (int(most[0]) - len(own))])

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def learning_state(policies: dict[str, Any]) -> bytes:
    """All that learning depends on, of policies in this or another process of ours."""
    return pickle.dumps({pid: policy.get_state() for pid, policy in policies.items()})


def take_learning_state(policies: dict[str, Any], state: bytes) -> None:
    """Learn on from `learning_state`; how each acts, its random stream, stays its own."""
    for policy_id, own in pickle.loads(state).items():
        policy = policies[policy_id]
        acting = policy.get_acting_state()
        policy.set_state(own)
        learned = {name: own[name] for name in ("version", "timestep", "shuffle_rng")}
        policy.set_acting_state({**acting, **learned})
