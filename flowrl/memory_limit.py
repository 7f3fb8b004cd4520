"""Compare what settings ask for with the memory of this machine, before it is allocated."""

from __future__ import annotations

import math
import os
from pathlib import Path

from flowrl.errors import ConfigError

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
GIB = 1 << 30


def machine_memory() -> int:
    """Return the memory that processes of this machine or container may use [bytes]."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _CGROUP_LIMITS:
        try:
            memory = min(memory, int(Path(file).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return memory


def check_memory(num_bytes: float, what: str) -> None:
    """Check that this machine has the memory that settings require.

    Args:
        num_bytes: estimate of the memory [bytes].
        what: the settings and what they are for, such as `train_batch_size=1000: rows`.

    Raises:
        ConfigError: it needs more than the machine has.
    """
    memory = machine_memory()
    if num_bytes > memory:
        raise ConfigError(
            f"{what}: this needs {math.ceil(num_bytes / GIB * 10) / 10:,.1f} GiB of memory, and "
            f"this machine has {memory / GIB:,.1f} GiB"
        )
