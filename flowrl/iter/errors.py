"""Errors in operators: the policies `Skip` and `Retry`, and the notes added to an error."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from flowrl.errors import add_note
from flowrl.iter.stage import Stage, describe
from flowrl.setting_values import check_int

log = logging.getLogger("flowrl")

MANY_DROPPED = 1000  # items in a row, after which a stage that drops them warns
ENGINE_DIR = os.path.dirname(__file__) + os.sep
"""Folder of this package: its frames say little in the traceback of an operator's error."""


def missing_attribute_error(owner: type, name: str) -> AttributeError:
    """Return the error for an attribute that an iterator does not have."""
    hint = f": use {_OTHER_NAMES[name]}" if name in _OTHER_NAMES else ""
    return AttributeError(f"{owner.__name__!r} object has no attribute {name!r}{hint}")


_PERMANENT = "flowrl_permanent"  # attribute of errors; see mark_permanent
_OTHER_NAMES = {"map": "for_each(fn)", "foreach": "for_each(fn)", "flat_map": "combine(fn)"}


@dataclass(frozen=True)
class Skip:
    """Skip the item on which an operator fails, at most `max` times (None: no limit).

    `stats()` reports the number of these items as `skipped`.
    """

    max: int | None = None

    def __post_init__(self) -> None:
        if self.max is not None:
            check_int("Skip(max)", self.max)


@dataclass(frozen=True)
class Retry:
    """Call the operator again with the same item, up to `times` times, then raise.

    A gather requests the shard again instead: the item that failed is lost, unless the shard
    returns it again.
    """

    times: int

    def __post_init__(self) -> None:
        check_int("Retry(times)", self.times)


OnError = Literal["raise"] | Skip | Retry


class ShardFailedError(RuntimeError):
    """A shard has failed permanently: it died or stopped responding and cannot be replaced."""


def check_on_error(on_error: Any) -> OnError:
    """Return a valid setting `on_error` unchanged.

    Raises:
        TypeError: it is not "raise", Skip or Retry.
    """
    if on_error != "raise" and not isinstance(on_error, (Skip, Retry)):
        raise TypeError(
            f'on_error must be "raise", Skip(max) or Retry(times), got {describe(on_error)}'
        )
    return on_error


def note_origin(error: BaseException, stage: Stage, item: Any) -> None:
    """Record on an error the stage and the item it came from, unless already recorded.

    The item itself is its attribute `item`, to look at in a debugger.

    Args:
        item: None if no item was being processed.
    """
    if not hasattr(error, "_flowrl_stage"):
        attributes = vars(error)  # a frozen dataclass does not allow setting attributes
        attributes["_flowrl_stage"] = stage
        attributes["_flowrl_item"] = describe(item) if item is not None else None
        if item is not None and not hasattr(error, "item"):
            attributes["item"] = item
            attributes["_flowrl_has_item"] = True


@contextmanager
def noting_origin(stage: Stage) -> Iterator[None]:
    """Record a stage on errors that are raised in the context."""
    try:
        yield
    except Exception as error:
        note_origin(error, stage, None)
        raise


def warn_of_skipped(stage: Stage, skipped: int, in_a_row: int, error: Exception) -> None:
    """Log the first item that Skip has dropped, and the last one of MANY_DROPPED in a row.

    Args:
        stage: the stage that has dropped it.
        skipped: number of items that the stage has dropped.
        in_a_row: number of these items since the stage, or the shard of a gather, returned an item.
        error: the error of the newest one.
    """
    if skipped == 1:
        log.warning(
            "%s (chained at %s): Skip drops an item after %s; later ones are only counted, "
            "as `skipped` in stats()", stage, stage.line, describe(error),
        )  # fmt: skip
    if in_a_row == MANY_DROPPED:
        log.warning(
            "%s (chained at %s): Skip has dropped %d items without a result in between, the newest "
            "after %s", stage, stage.line, in_a_row, describe(error),
        )  # fmt: skip


def without_stop_iteration(error: BaseException) -> BaseException:
    """Return the error to raise for an error from user code: RuntimeError for StopIteration,
    which would end the stream, else the error itself."""
    if not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(
        "the operator raised StopIteration, which would end the stream: to end a run, use a stop "
        "rule on a number that the operator sets (metrics.info)"
    )
    wrapped.__dict__.update(error.__dict__)
    wrapped.__cause__ = error
    return wrapped


def call_in_stage(stage: Stage, function: Callable[[], Any]) -> Any:
    """Call a function for a stage, and record the stage on its errors; StopIteration becomes a
    RuntimeError."""
    try:
        return function()
    except BaseException as error:
        note_origin(error, stage, None)
        error = without_stop_iteration(error)
        raise error


def mark_permanent(error: BaseException) -> None:
    """Record on an error that its stage raises it again at each pull, so that no error policy can
    skip it."""
    vars(error)[_PERMANENT] = True


def is_permanent(error: BaseException) -> bool:
    """Return whether `mark_permanent` was called with an error."""
    return bool(getattr(error, _PERMANENT, False))


def annotate(error: BaseException, root: Stage) -> None:
    """Add a note with the path from the end of the plan to the stage that raised the error."""
    stage = getattr(error, "_flowrl_stage", None)
    if stage is None or getattr(error, "_flowrl_noted", False):
        return
    if stage is root and stage.name == "from_iterable":
        return  # the traceback of a plan with one stage is enough
    vars(error)["_flowrl_noted"] = True
    path = " › ".join(_path(root, stage) or [stage.name])
    item = getattr(error, "_flowrl_item", None)
    note = f"in the plan at {path}, chained at {stage.line}"
    add_note(error, note + (f", on {item}" if item else ""))
    if isinstance(error, TypeError) and len(stage.parents) == 1:
        parent = stage.parents[0]
        add_note(error, f"the items of this stage come from {parent}, chained at {parent.line}")
    if isinstance(error, ValueError) and "read-only" in str(error):
        add_note(
            error,
            "other operators may share the arrays of an item: return a changed copy instead, such "
            "as batch.with_columns(name=new_values)",
        )


def without_engine_frames(error: BaseException) -> TracebackType | None:
    """Return the error's traceback without the frames of this package; the note of `annotate` says
    more. An error of the engine itself, which has no origin recorded, keeps its frames."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    if hasattr(error, "_flowrl_stage"):
        frames = [t for t in frames if not t.tb_frame.f_code.co_filename.startswith(ENGINE_DIR)]
    shortened = None
    for frame in reversed(frames):
        line = frame.tb_lineno or 0  # None if a signal interrupted code without a line
        shortened = TracebackType(shortened, frame.tb_frame, frame.tb_lasti, line)
    return shortened


def _path(node: Stage, target: Stage) -> list[str] | None:
    """Return the names of the stages from `node` to `target`, with the index of the branch taken
    at each union; None if `node` does not pull from `target`."""
    if node is target:
        return [node.name]
    for index, parent in enumerate(node.parents):
        rest = _path(parent, target)
        if rest is not None:
            name = f"{node.name}[{index}]" if len(node.parents) > 1 else node.name
            return [name, *rest]
    return None


def strip_origin(error: BaseException) -> None:
    """Remove the recorded origin and item before an error is sent to another process."""
    attributes = vars(error)
    if "_flowrl_has_item" in attributes:
        del attributes["item"]
    for name in [name for name in attributes if name.startswith("_flowrl")]:
        del attributes[name]


@contextmanager
def collecting(errors: list[Exception]) -> Iterator[None]:
    """Append an error of the block to a list instead of raising it."""
    try:
        yield
    except Exception as error:
        errors.append(error)


def raise_first(errors: Sequence[Exception], note: str) -> None:
    """Raise the first of some errors, if there is one, with a note for each other one.

    Args:
        errors: the errors.
        note: text of a note; `{!r}` stands for the error.
    """
    for other in errors[1:]:
        add_note(errors[0], note.format(other))
    if errors:
        raise errors[0]
