"""Recovery of shards that die or hang: the settings, and the state a gather keeps per shard."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from flowrl.iter.ray_runtime import death_errors
from flowrl.source import Source

STARTING_S = 60.0  # added to the first timeout: importing torch took 20 s on a loaded machine


@dataclass(frozen=True)
class Recovery:
    """How a shard that dies or hangs is replaced.

    Args:
        timeout_s: seconds without a reply after which a shard counts as hanging; None disables the
            timeout. The first reply may take STARTING_S longer, for the process to start.
        max_restarts: restarts of one shard before it fails permanently.
        backoff_s: seconds before a dead shard is recreated; doubled after each consecutive death.
        max_backoff_s: upper limit of the back-off.
        max_identical_deaths: consecutive identical deaths, without an item in between, after which
            the shard fails permanently.
        rounds_wait_for_replacement: whether a round of GatherSync waits until a shard is replaced.
            If not, the round leaves that shard out, unless it is the only one.
    """

    timeout_s: float | None = None
    max_restarts: int = 1000
    backoff_s: float = 0.1
    max_backoff_s: float = 30.0
    max_identical_deaths: int = 3
    rounds_wait_for_replacement: bool = True

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"Recovery: timeout_s must be > 0 or None, got {self.timeout_s}")
        at_least_0 = (self.max_restarts, self.backoff_s, self.max_backoff_s)
        if not all(value >= 0 for value in at_least_0) or not self.max_identical_deaths >= 1:
            raise ValueError(
                "Recovery: max_restarts, backoff_s and max_backoff_s must be >= 0 and "
                f"max_identical_deaths >= 1, one is out of range in {self}"
            )


@dataclass(slots=True)
class ShardState:
    """The state of one shard in a gather."""

    index: int
    recovery: Recovery
    status: Literal["live", "ended", "failed", "left"] = "live"
    num_received: int = 0  # items
    restarts: int = 0
    errors: int = 0  # consecutive
    deaths: int = 0  # consecutive
    identical_deaths: int = 0  # of these, the last ones with the same error
    last_death: str = ""
    dead_incarnation: int | None = None  # to be replaced before the next request
    restart_at: float = 0.0
    startup: Any = None  # ref that becomes ready when the replacement has started; None after that
    startup_deadline: float | None = None  # time.monotonic() until which it must be ready
    last_reply_at: float = 0.0
    waited_at: float = 0.0  # when it was last found to wait for other shards
    starting: bool = True  # no reply yet from this incarnation
    requests: deque[Any] = field(default_factory=deque)  # refs in flight, oldest first
    step_stats: list[dict[str, Any]] = field(default_factory=list)  # as last reported
    newest: Source | None = None  # of the item received last

    @property
    def is_ready(self) -> bool:
        """Whether its process has started and is not known to be dead."""
        return self.dead_incarnation is None and self.startup is None


class ConstructorError(Exception):
    """The object of an actor could not be created after the actor had started.

    The plan handles this error like the death of an actor whose constructor raised.
    """

    actor_init_failed = True  # as in Ray's ActorDiedError


REMOTE_TRACEBACK = "Traceback in the worker:"
"""Begins the note of an exception that has its traceback in another process."""


class PendingRequest(NamedTuple):
    """A request in flight; `progress` is RequestLimit.progress() when it was sent, None without a
    limit."""

    shard: ShardState
    incarnation: int
    sent_at: float
    progress: Any = None


def original_error(error: Any) -> BaseException:
    """Return the exception of a remote call, with its own type, for a RayTaskError.

    A note of the exception has the traceback in the other process. The RayTaskError itself is
    returned if the exception could not be pickled, or if it reports the death of another actor,
    which the code of the call used.
    """
    from ray.exceptions import RayTaskError

    cause = error.cause
    another_died = is_death(cause) and not isinstance(cause, ConstructorError)
    if type(cause) in (RayTaskError, str) or another_died:
        return error
    notes = getattr(cause, "__notes__", [])
    if not any(note.startswith(REMOTE_TRACEBACK) for note in notes):
        text = f"{REMOTE_TRACEBACK}\n{str(error).rstrip()}"
        vars(cause)["__notes__"] = [text, *notes]  # the first note, as of `serve_remote`
    return cause


def is_death(error: BaseException) -> bool:
    """Return whether the process of a shard died, was interrupted or could not create the shard, as
    opposed to an exception in its code."""
    from ray.exceptions import RayTaskError, TaskCancelledError

    if isinstance(error, TaskCancelledError):  # a RayTaskError, too
        return True
    died = isinstance(error, (*death_errors(), ConstructorError))
    return died and not isinstance(error, RayTaskError)
