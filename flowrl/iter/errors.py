"""What happens when an operator raises: the notes on its error, and the policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flowrl.iter.stage import Stage, describe


@dataclass(frozen=True)
class Skip:
    """Drop the item that an operator failed on, and go on; at most `max` times (None: always).

    The number is reported by `stats()` as `skipped`.
    """

    max: int | None = None

    def __post_init__(self) -> None:
        if self.max is not None and (not isinstance(self.max, int) or self.max < 1):
            raise ValueError(f"Skip(max): an int of at least 1, or None for no limit: {self.max!r}")


@dataclass(frozen=True)
class Retry:
    """Call the operator again with the same item, up to `times` times, then raise."""

    times: int

    def __post_init__(self) -> None:
        if not isinstance(self.times, int) or self.times < 1:
            raise ValueError(f"Retry(times): an int of at least 1, got {self.times!r}")


OnError = Literal["raise"] | Skip | Retry


class ShardFailedError(RuntimeError):
    """A shard is gone for good: it died, or hung, and could not be replaced."""


def check_policy(policy: Any) -> OnError:
    """The policy itself.

    Raises:
        TypeError: it is none.
    """
    if policy != "raise" and not isinstance(policy, (Skip, Retry)):
        raise TypeError(f'on_error is "raise", Skip(max) or Retry(times), got {describe(policy)}')
    return policy


def note_origin(error: BaseException, stage: Stage, item: Any) -> None:
    """Note on an error where it happened, once: the stage and the item, if there was one."""
    if not hasattr(error, "_flowrl_stage"):
        error._flowrl_stage = stage  # type: ignore[attr-defined]
        told = describe(item) if item is not None else None
        error._flowrl_item = told  # type: ignore[attr-defined]


def operator_error(error: BaseException) -> BaseException:
    """The error to raise for one from user code: a StopIteration must not end the stream."""
    if not isinstance(error, StopIteration):
        return error
    raised = RuntimeError("the operator raised StopIteration, which would end the stream")
    raised.__dict__.update(error.__dict__)
    raised.__cause__ = error
    return raised


def annotate(error: BaseException, root: Stage) -> None:
    """Add the path from the end of the plan to the stage that an error came from."""
    from flowrl.iter.explain import path_to

    stage = getattr(error, "_flowrl_stage", None)
    if stage is None or getattr(error, "_flowrl_noted", False):
        return
    if stage is root and stage.kind == "from_iterable":
        return  # a bare source: the error's own traceback says it all
    error._flowrl_noted = True  # type: ignore[attr-defined]
    note = f"in the plan at {path_to(root, stage)}, chained at {stage.line}"
    item = getattr(error, "_flowrl_item", None)
    error.add_note(note + (f", on {item}" if item else ""))


def strip(error: BaseException) -> None:
    """Take off what only this process understands, before an error travels to another one."""
    for name in [name for name in vars(error) if name.startswith("_flowrl")]:
        delattr(error, name)
