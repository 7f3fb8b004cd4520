"""Journal: the timing-dependent observations of a plan, recorded by a run and used by its replay.

The items of a seeded plan depend on its seed and on timing: when replies arrive, when queues have
room, when a learner publishes weights. Each stage that observes one of these passes the value to
`ThreadLog.observe`. A JournalWriter records the value. A JournalReader returns the recorded value
instead, so that a replay does the same in the same order.

Most observations are the expected ones. An entry therefore holds the number of expected
observations before it, the name of the observation, and its value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import msgpack

from flowrl.whole_files import write_whole

VERSION = 1


class ReplayEnded(BaseException):
    """The end of a journal was reached: what followed was not recorded.

    No `on_error` policy handles it.
    """


class ReplayError(RuntimeError):
    """A replay differs from the recorded run, or its journal is damaged."""


class ThreadLog(Protocol):
    """The observations of one thread."""

    def observe(self, name: str, value: int, expected: int = 0) -> int:
        """Record an observation; in a replay, return the recorded one instead.

        Args:
            name: name of the observation; a replay checks it.
            value: the observed value, at least 0; ignored in a replay.
            expected: the most frequent value; the journal only counts it.
        """


class Journal(Protocol):
    """A journal that is written or read.

    Attributes:
        replays: whether it repeats a recorded run (a JournalReader).
        plan_log: observations of the thread that pulls the plan.
        learner_log: observations of the thread of a LearnerThread.
    """

    replays: bool
    plan_log: ThreadLog
    learner_log: ThreadLog

    def end(self, reason: str) -> None:
        """Note that the run cannot be replayed from here on, and why."""


class _WrittenLog:
    def __init__(self) -> None:
        self._entries: deque[tuple[int, str, int]] = deque()
        self._num_expected = 0
        self._numbers: dict[str, int] = {}  # name of an observation -> its number in the file
        self.is_closed = False

    def observe(self, name: str, value: int, expected: int = 0) -> int:
        if self.is_closed:
            return value
        if value == expected:
            self._num_expected += 1
        else:
            self._entries.append((self._num_expected, name, value))
            self._num_expected = 0
        return value

    def take(self) -> dict[str, Any]:
        """Return the entries since the last call, and remove them."""
        known = len(self._numbers)
        entries: list[int] = []
        for _ in range(len(self._entries)):
            num_expected, name, value = self._entries.popleft()
            entries += num_expected, self._numbers.setdefault(name, len(self._numbers)), value
        return {"names": list(self._numbers)[known:], "entries": entries}

    def take_expected(self) -> int:
        """Return the number of expected observations since the last entry, and reset it."""
        number, self._num_expected = self._num_expected, 0
        return number


class JournalWriter:
    """Record a run to a file.

    The file contains msgpack objects: its version, then one object per `flush`.

    Args:
        path: the file; created by the first `flush`.
        about: facts about the run for its replay: names and simple values.
    """

    replays = False

    def __init__(self, path: Path, about: dict[str, Any] | None = None):
        self.path = path
        self._about = about or {}
        self.plan_log = _WrittenLog()
        self.learner_log = _WrittenLog()
        self._ended: str | None = None
        self._is_end_written = False
        self._file: IO[bytes] | None = None

    def end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
            self.plan_log.is_closed = self.learner_log.is_closed = True

    def flush(self, iteration: int = 0) -> None:
        """Write the entries since the last call to the file; call it between two pulls of the plan.

        Args:
            iteration: number of results so far.

        Raises:
            OSError: the file cannot be written.
        """
        if self._is_end_written:
            return
        # take the plan's entries first: the learner runs on meanwhile, so its log has at least the
        # steps that these entries refer to
        plan = self.plan_log.take()
        chunk = {
            "iteration": iteration,
            "plan": plan,
            "then_expected": self.plan_log.take_expected(),
            "learner": self.learner_log.take(),
            "ended": self._ended,
        }
        if self._file is None:
            self._file = open(self.path, "wb")  # noqa: SIM115 - close() closes it
            self._file.write(msgpack.packb({"version": VERSION, **self._about}))
        self._file.write(msgpack.packb(chunk))
        self._file.flush()
        self._is_end_written = self._ended is not None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class _ReadLog:
    """The recorded observations of one thread.

    Args:
        ends: whether observations after the last recorded one are unknown; if False, they were the
            expected ones.
    """

    def __init__(self, ends: bool):
        self._names: list[str] = []
        self._entries: deque[tuple[int, str, int]] = deque()
        self._ends = ends
        self._num_expected = 0  # before the next entry
        self._num_after = 0  # expected observations after the last entry
        self.reason = ""
        self.num_observed = 0

    def extend(self, part: dict[str, Any], then_expected: int) -> None:
        """Add what one `flush` has written."""
        self._names += part["names"]
        flat = part["entries"]
        for first in range(0, len(flat), 3):
            num_expected, number, value = flat[first : first + 3]
            self._entries.append((num_expected + self._num_after, self._names[number], value))
            self._num_after = 0
        self._num_after += then_expected

    def advance(self) -> None:
        """Read how many expected observations precede the next entry."""
        self._num_expected = self._entries[0][0] if self._entries else self._num_after

    def observe(self, name: str, value: int, expected: int = 0) -> int:
        self.num_observed += 1
        if self._num_expected:
            self._num_expected -= 1
            return expected
        if not self._entries:
            if self._ends:
                raise ReplayEnded(self.reason)
            return expected
        _, recorded_name, recorded = self._entries.popleft()
        self.advance()
        if recorded_name != name:
            raise ReplayError(
                f"the replay differs from the run: observation {self.num_observed:,} is {name!r}, "
                f"but the run had {recorded_name!r}. Causes: another version of flowrl or of the "
                "environment, changed code, or code that uses random numbers without a seed"
            )
        return recorded


class JournalReader:
    """Replay a recorded run.

    Args:
        path: the file of a JournalWriter. An incomplete end, which a crash leaves, is dropped.

    Attributes:
        about: that of the JournalWriter.

    Raises:
        ReplayError: the file is damaged, or of another version.
        OSError: the file cannot be read.
    """

    replays = True

    def __init__(self, path: Path):
        self.plan_log = _ReadLog(ends=True)
        self.learner_log = _ReadLog(ends=False)
        self.plan_log.reason = "nothing was recorded after this"
        try:
            with open(path, "rb") as file:
                self.about, chunks = _read(file)
                for chunk in chunks:
                    self.plan_log.extend(chunk["plan"], chunk["then_expected"])
                    self.learner_log.extend(chunk["learner"], 0)
                    self.plan_log.reason = chunk["ended"] or self.plan_log.reason
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ReplayError(f"{path}: damaged: {error!r}") from None
        self.plan_log.advance()
        self.learner_log.advance()

    def end(self, reason: str) -> None:
        """Do nothing: only a recording ends."""


def _read(file: IO[bytes]) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """Return `about`, and what each `flush` of a JournalWriter has written; an incomplete end is
    dropped."""
    objects = iter(msgpack.Unpacker(file, strict_map_key=True))
    about: dict[str, Any] = next(objects, {})
    version = about.pop("version", None)
    if version != VERSION:
        raise ValueError(f"its version is {version!r}, this flowrl reads {VERSION}")
    return about, objects


def truncate_journal(path: Path, iteration: int) -> None:
    """Remove what a JournalWriter has recorded after an iteration, before the run resumes there.

    Args:
        path: the file.
        iteration: the last iteration to keep.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: it is damaged.
    """
    try:
        with open(path, "rb") as file:
            about, chunks = _read(file)
            kept = [chunk for chunk in chunks if chunk["iteration"] <= iteration]
        for chunk in kept[-1:]:
            chunk["ended"] = chunk["ended"] or "the run was resumed here"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"damaged: {error!r}") from None
    write_whole(path, b"".join(map(msgpack.packb, [{"version": VERSION, **about}, *kept])))
