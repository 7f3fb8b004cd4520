"""Ids of episodes and unrolls, unique over all workers of a set."""

from __future__ import annotations

# 2^63 / 2^48 = 32,768 workers with 2^48 / 2^30 = 262,144 restarts; float64 rounds large ids
IDS_PER_WORKER = 1 << 48
IDS_PER_RESTART = 1 << 30


def first_id(worker_index: int, restart_count: int) -> int:
    """Return the first id of a worker's range; each replacement gets a separate range."""
    return worker_index * IDS_PER_WORKER + restart_count * IDS_PER_RESTART


class IdCounter:
    """An endless counter; `next_id` is its next value."""

    __slots__ = ("next_id",)

    def __init__(self, first: int = 0):
        self.next_id = first

    def __next__(self) -> int:
        return self.take(1)

    def take(self, count: int) -> int:
        """Reserve consecutive ids; return the first one."""
        self.next_id += count
        return self.next_id - count
