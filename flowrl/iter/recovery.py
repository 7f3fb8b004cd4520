"""How a shard that dies or hangs is told from one that raises, and replaced."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

STARTING_S = 60.0  # a process that imports torch on a loaded machine took 20 s


@dataclass(frozen=True)
class Recovery:
    """How a shard that died or hangs is replaced.

    Args:
        timeout_s: a shard that answers nothing for so long counts as hanging; None: never. Until
            its first answer it gets STARTING_S more, for its process to start.
        max_restarts: of one shard; after that it has failed for good.
        backoff_s: seconds until a dead shard is made again; doubled at each death in a row.
        max_backoff_s: the most that grows to.
        breaker: identical deaths in a row, without an item in between, after which the shard has
            failed for good.
    """

    timeout_s: float | None = None
    max_restarts: int = 1000
    backoff_s: float = 0.1
    max_backoff_s: float = 30.0
    breaker: int = 3

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"Recovery: timeout_s must be > 0 or None, got {self.timeout_s}")
        if self.max_restarts < 0 or self.breaker < 1 or self.backoff_s < 0:
            raise ValueError(f"Recovery: a number is out of range in {self}")


@dataclass(slots=True)
class ShardState:
    """What a gather knows of one shard."""

    index: int
    recovery: Recovery
    state: Literal["live", "ended", "failed", "left"] = "live"
    accepted: int = 0
    restarts: int = 0
    errors: int = 0  # in a row
    deaths: int = 0  # in a row and identical
    death: str = ""
    broken: int | None = None  # the incarnation that is to be replaced before it is asked again
    not_before: float = 0.0
    heard: float = 0.0
    fresh: bool = True  # has not answered since it was made
    requests: deque[Any] = field(default_factory=deque)  # in flight, oldest first
    stages: list[dict[str, Any]] = field(default_factory=list)  # what its steps said last


class PendingRequest(NamedTuple):
    """A request in flight."""

    shard: ShardState
    incarnation: int
    at: float
    mark: Any = None  # what a limit on the requests notes of it


def is_death(error: BaseException) -> bool:
    """Whether the process of the shard is gone, not its code at fault."""
    from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, WorkerCrashedError

    gone = (RayActorError, WorkerCrashedError, ObjectLostError)
    return isinstance(error, gone) and not isinstance(error, RayTaskError)
