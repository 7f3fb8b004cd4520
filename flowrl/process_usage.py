"""ProcessUsage: what this process uses of its machine: processors, memory, garbage collection."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import time
from pathlib import Path
from typing import Any

READ_INTERVAL_S = 0.5  # a reading is used again for this time
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# files with the processor time of a container per period, and the period [us]: cgroups 2 and 1
_CPU_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


class ProcessUsage:
    """Measures this process from its creation on; see `process_usage`."""

    def __init__(self) -> None:
        self._collecting_s = 0.0
        self._collection_started = 0.0
        self._reading: dict[str, float] = {}
        self._read_at = -READ_INTERVAL_S
        self._cpu_s, self._cpu_wait_s = time.process_time(), _cpu_wait_s()
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._collection_started = now
        else:
            self._collecting_s += now - self._collection_started

    def read(self) -> dict[str, float]:
        """Return the newest measurements, at most READ_INTERVAL_S old.

        `gc_s`: seconds of garbage collection. `cpu_s`: seconds on a processor. `cpu_wait_s`:
        seconds in which its threads were ready to run but waited for a processor (0 if the
        operating system is not Linux). `rss_bytes`: see `resident_bytes`.
        """
        now = time.monotonic()
        if now - self._read_at >= READ_INTERVAL_S:
            self._reading = {
                "gc_s": self._collecting_s,
                "cpu_s": time.process_time() - self._cpu_s,
                "cpu_wait_s": max(_cpu_wait_s() - self._cpu_wait_s, 0.0),
                "rss_bytes": resident_bytes(),
            }
            self._read_at = now
        return self._reading


@functools.cache
def process_usage() -> ProcessUsage:
    """Return the ProcessUsage of this process; the first call starts the measurement."""
    return ProcessUsage()


def _cpu_wait_s() -> float:
    """Return the seconds that the threads of this process have waited for a processor."""
    waited_ns = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            waited_ns += int(task.read_text().split()[1])
    return waited_ns / 1e9


def resident_bytes() -> int:
    """Return the resident memory of this process [bytes], without memory that it shares with
    others, such as Ray's object store; 0 if the system is not Linux."""
    try:
        _, resident, shared, *_ = _own_memory().split()
        return (int(resident) - int(shared)) * _PAGE_BYTES
    except (OSError, ValueError):
        return 0


def _own_memory() -> bytes:
    try:
        return os.pread(_own_memory_file(os.getpid()), 128, 0)
    except OSError:  # something has closed the file
        _own_memory_file.cache_clear()
        return os.pread(_own_memory_file(os.getpid()), 128, 0)


@functools.cache
def _own_memory_file(pid: int) -> int:
    """Return an open file descriptor of this process: opening it takes longer than reading it.

    Args:
        pid: id of this process, which changes with a fork.
    """
    return os.open("/proc/self/statm", os.O_RDONLY)


def num_cores() -> int:
    """Return the number of processors that this process may use, with the limit of a container
    rounded up."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = (os.cpu_count() or 1) if affinity is None else len(affinity(0))
    return math.ceil(min(cores, _cpu_quota()))


@functools.cache
def _cpu_quota() -> float:
    """Return the number of processors that the container may use; infinity without a limit."""
    for files in _CPU_QUOTAS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            quota, period = map(float, " ".join(Path(file).read_text() for file in files).split())
            if quota > 0:  # -1: no limit
                return quota / period
    return math.inf
