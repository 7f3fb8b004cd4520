"""Checks that the processes and rows that settings ask for fit into memory, before training."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from flowrl.data.spaces import is_image, leaf_spaces
from flowrl.iter.ray_runtime import cluster_address, live_nodes
from flowrl.memory_limit import check_memory
from flowrl.sampling.rollout_worker import RolloutWorker

PROCESS_BYTES = 100 << 20  # of a Ray actor, at least
ROW_BYTES = 16  # of a row without observations, at least
PROCESSES = (
    "num_workers",
    "num_spare_workers",
    "evaluation_num_workers",
    "num_replay_shards",
    "num_learners",
)


def check_processes(config: Any) -> None:
    """Check the memory of Ray actors, unless nodes of a cluster may run them.

    Raises:
        ConfigError: this machine has not enough memory.
    """
    if cluster_address(config.address) is not None or len(live_nodes()) > 1:
        return
    numbers = {name: config.get(name, 0) for name in PROCESSES}
    for name, number in numbers.items():
        check_memory(number * PROCESS_BYTES, f"{name}={number}: processes")
    together = ", ".join(f"{name}={number}" for name, number in numbers.items() if number)
    check_memory(sum(numbers.values()) * PROCESS_BYTES, f"{together}: processes")


def check_rows(config: Any, worker: RolloutWorker | None = None) -> None:
    """Check the memory of train batches, fragments and the replay buffer.

    Args:
        config: the algorithm's settings.
        worker: the algorithm's local worker, whose policies determine the size of observations;
            None counts rows without observations.

    Raises:
        ConfigError: this machine has not enough memory.
    """
    row, num_envs = ROW_BYTES, config.num_envs_per_worker
    if worker is not None:
        sizes = [_observation_bytes(p.observation_space) for p in worker.policy_map.values()]
        row, num_envs = row + max(sizes), worker.num_envs
    size, length = config.train_batch_size, config.rollout_fragment_length
    check_memory(config.rows_per_train_batch() * row, f"train_batch_size={size}: rows")
    if config.samples and length != "auto":
        what = f"rollout_fragment_length={length} with {num_envs} environments: rows"
        check_memory(length * num_envs * row, what)
    capacity = config.get("replay_buffer_capacity", 0)
    if config.get("replay_buffer_dir") is None:
        remedy = "" if worker is None else " (replay_buffer_dir keeps them in files)"
        check_memory(capacity * row, f"replay_buffer_capacity={capacity}: rows{remedy}")


def _observation_bytes(space: spaces.Space) -> int:
    """Return the minimum bytes per row of an observation.

    An image counts as one frame, because rows share the frames of a stack.
    """
    total = 0
    for leaf in leaf_spaces(space):
        num = 1
        for side in leaf.shape or ():
            num *= side
        if is_image(leaf):
            num //= min(leaf.shape or (1,))
        total += num * getattr(leaf.dtype, "itemsize", 1)
    return total
