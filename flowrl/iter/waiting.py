"""The one place where a plan waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def wait_for_any(refs: Sequence[Any], timeout: float | None = None) -> None:
    """Block until one of the Ray object refs is ready, fetching nothing; timeout in seconds."""
    import ray

    ray.wait(list(refs), num_returns=1, timeout=timeout, fetch_local=False)


def ready_refs(refs: Sequence[Any]) -> list[Any]:
    """The refs that are ready now, in the order given."""
    import ray

    return ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)[0]
