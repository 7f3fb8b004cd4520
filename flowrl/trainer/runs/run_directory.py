"""The run directory: everything that a training run writes.

- config.json, stop.json, command.txt, versions.json, plan.txt (the plan as a tree), plan.py (its
  source), setup.json (the manifest of a checkpoint at the start)
- result.json and progress.csv: one line per result; progress.csv is rewritten when a result has new
  columns. TensorBoard events have the same values.
- events.jsonl: start, resumption and end of the run; activity.jsonl: measurements of the plan;
  writers.jsonl: the operators that wrote experience, with `output`
- journal.msgpack: the order of an asynchronous run, for `flowrl replay`
- trace.json: with `trace_s`; report.html: with `flowrl train --report`
- checkpoints/NUMBER, where NUMBER is the iteration; replaced-N: checkpoints and results that a
  resumed run has replaced
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import platform
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from flowrl.data.checkpoint import (
    CHECKPOINTS,
    CheckpointError,
    list_checkpoints,
    read_manifest,
    remove_checkpoint,
    remove_partial_checkpoints,
)
from flowrl.data.json_text import json_lines
from flowrl.errors import ConfigError
from flowrl.setting_values import expanded_path
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.metric_names import metric_value
from flowrl.trainer.plan_files import plan_source
from flowrl.trainer.runs.activity_log import FILE as ACTIVITIES
from flowrl.trainer.runs.formatting import FailureWarnings
from flowrl.trainer.runs.recording import JOURNAL
from flowrl.trainer.runs.result_files import ResultFiles, event_files
from flowrl.trainer.runs.saved_run import (
    EVENTS,
    SETUP,
    best_checkpoint,
    read_results,
    results_until,
    settings_to_json,
)
from flowrl.whole_files import append_whole, write_whole

LOCK_WAIT_S = 0.5  # for the lock of a run directory
WRITERS = "writers.jsonl"
TRACE = "trace.json"
REPORT = "report.html"
PLAN_SOURCE = "plan.py"
# files that a run removes from the run that it overwrites, because not all runs write them
_REMOVED_FILES = (JOURNAL, EVENTS, WRITERS, ACTIVITIES, TRACE, REPORT, PLAN_SOURCE)
_FIRST_FILES = {"result.json", "progress.csv", ".result.json", ".progress.csv", EVENTS}


class RunDirectory:
    """Write the files of a run. One process can use a run directory at a time.

    Args:
        path: created if it does not exist.
        naming: how metrics are named in progress.csv and TensorBoard: the setting `logged_names`.
        resume: continue the run in `path`; an incomplete last line of result.json is dropped.
        unique: add a number to `path` if it exists, for example because another process has chosen
            the same name.

    Raises:
        ConfigError: the directory cannot be written, is in use, or has other contents.
    """

    def __init__(
        self, path: Path, naming: str = "classic", resume: bool = False, unique: bool = False
    ):
        # absolute: the program may change its folder
        self.path = path = Path(os.path.abspath(expanded_path(path)))
        self._is_new = False
        with ExitStack() as on_error:
            try:
                self._is_new = self._create(unique)
                path = self.path
                self._lock = os.open(path, os.O_RDONLY)
                on_error.callback(os.close, self._lock)
                _lock(self._lock)
                on_error.callback(self._remove_if_new)
                if not resume and not self._is_new:
                    self._check_unused()
                for name in (CHECKPOINTS, EVENTS, WRITERS, JOURNAL, ACTIVITIES):
                    self._check_no_link(name)
                if not resume:
                    remove_partial_checkpoints(path)
                    for file in filter(Path.is_file, (path / name for name in _REMOVED_FILES)):
                        file.unlink()
                self._results = ResultFiles(path, naming)
                results = read_results(path) if resume else []
                self._results.rewrite(results, with_events=not resume)
            except BlockingIOError as error:
                advice = "which must end first" if resume else "choose another folder"
                raise ConfigError(
                    f"run_dir: {path} is in use by another process, {advice}"
                ) from error
            except OSError as error:
                raise ConfigError(f"run_dir: cannot write {path}: {error.strerror}") from error
            except ConfigError:
                raise
            except ValueError as error:  # a null character
                raise ConfigError(f"run_dir: {str(path)!r}: {error}") from error
            on_error.pop_all()
        if not resume:
            self.note("started", "")
        self._warnings = FailureWarnings()

    def _create(self, unique: bool) -> bool:
        """Create the folder; return False if it exists."""
        wanted = self.path
        wanted.parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            try:
                self.path.mkdir()
                return True
            except FileExistsError:
                if not unique:
                    if self.path.is_dir():
                        return False
                    raise
            number += 1
            self.path = wanted.with_name(f"{wanted.name}-{number}")

    def _remove_if_new(self) -> None:
        """Remove the folder, while it is locked, if this object created it."""
        if self._is_new:
            shutil.rmtree(self.path, ignore_errors=True)

    def _check_unused(self) -> None:
        """Accept an empty folder, and a run without checkpoints, which is overwritten."""
        if (self.path / "config.json").exists():
            if list_checkpoints(self.path):
                raise ConfigError(
                    f"run_dir: {self.path} contains a run: choose another folder, or continue the "
                    f"run with `flowrl resume {shlex.quote(str(self.path))}` (with --trust, if it "
                    "uses code of your own), in Python with "
                    f"Algorithm.from_checkpoint({str(self.path)!r}).learn(…)"
                )
        elif not self._contains_only_a_start():
            raise ConfigError(
                f"run_dir: {self.path} is not empty and contains no run; choose another folder"
            )

    def _contains_only_a_start(self) -> bool:
        """Return whether the folder is empty, or was left by a process that ended before it wrote
        config.json."""
        files = {file.name: file for file in self.path.iterdir()}
        if not files:
            return True
        results = files.get("result.json") or files.get(".result.json")
        is_start = results is not None and not results.stat().st_size
        return is_start and files.keys() <= _FIRST_FILES

    def _check_no_link(self, name: str) -> None:
        """Check that a file of the run is not a link: writing it would change another file."""
        if (self.path / name).is_symlink():
            raise ConfigError(f"run_dir: {self.path / name} is a symbolic link: remove it")

    def save(self, algorithm: Any, result: dict[str, Any] | None = None) -> Path | None:
        """Write a checkpoint and remove old ones.

        Args:
            algorithm: the algorithm to save.
            result: newest result, which contains the checkpoint's score; None keeps the score of
                the checkpoint that is replaced.

        Returns:
            the checkpoint, or None if it could not be written; this is reported once.
        """
        config = algorithm.config
        path = self.path / CHECKPOINTS / f"{algorithm.iteration:06d}"
        score, attribute = None, config.checkpoint_score_attribute
        if attribute is not None and result is not None:
            score = metric_value(result, attribute)
        elif attribute is not None:
            with suppress(CheckpointError):  # there is none
                score = read_manifest(path).get("score")
        try:
            algorithm.save(path, metadata={"score": score})
        except OSError as error:
            is_first = not list_checkpoints(self.path)
            kept = "the run has none yet" if is_first else "the previous one is kept"
            self._warnings.failed(
                "save",
                f"NO CHECKPOINT: cannot write {path}: {error}. Training continues; {kept}",
            )
            return None
        self._warnings.succeeded("save", f"checkpoints can be written again: {path}")
        self._remove_old_checkpoints(config)
        return path

    def note(self, kind: str, text: str, stage: str | None = None) -> None:
        """Append an event to events.jsonl; an error of the file system is ignored.

        Args:
            kind: "started", "resumed", "ended" or "failed".
            text: more about it.
            stage: `file:line` of the operator that raised an error.
        """
        event = {"time": time.time(), "kind": kind, "text": text, "stage": stage}
        with suppress(OSError):
            append_whole(self.path / EVENTS, json.dumps(event).encode() + b"\n")

    def add_writer_tags(self, tags: Sequence[str]) -> None:
        """Append the tags of the operators that write experience in this run; see WriteParquet."""
        if tags:
            entry = {"run_dir": str(self.path.resolve()), "tags": tags}
            append_whole(self.path / WRITERS, json.dumps(entry).encode() + b"\n")

    def writer_tags(self) -> set[str]:
        """Return the tags of the operators that wrote experience in this folder, also before it was
        moved; if it is a copy, without those of the original."""
        here, tags = str(self.path.resolve()), set[str]()
        for entry in json_lines(self.path / WRITERS):
            with suppress(TypeError, KeyError):  # a damaged line
                if entry["run_dir"] == here or not Path(entry["run_dir"]).exists():
                    tags |= set(entry["tags"])
        return tags

    def _remove_old_checkpoints(self, config: AlgorithmConfig) -> None:
        checkpoints = list_checkpoints(self.path)
        newest = checkpoints[-config.checkpoint_num_to_keep :]
        best = best_checkpoint(checkpoints, config.checkpoint_score_order)
        for path in checkpoints:
            if path not in newest and path != best:
                try:
                    remove_checkpoint(path)
                except OSError as error:
                    self._warnings.failed(
                        "remove", f"cannot remove the old checkpoint {path}: {error}"
                    )

    def write_setup(
        self, algorithm: Any, total: int | None, command: list[str], stop: dict[str, Any]
    ) -> None:
        """Write everything that is needed to repeat the run.

        Args:
            algorithm: the run's algorithm, before it trains.
            total: the run's `total_timesteps`.
            command: the command line.
            stop: the stop rules as a dict.

        Raises:
            ConfigError: a file cannot be written.
        """
        try:
            for name, text in _setup_files(algorithm, total, command, stop).items():
                write_whole(self.path / name, text.encode("utf-8", "surrogateescape"))
        except BaseException as error:
            self._remove_if_new()
            if not isinstance(error, OSError):
                raise
            raise ConfigError(f"run_dir: cannot write {self.path}: {error.strerror}") from error

    def replace_plan(self, algorithm: Any) -> None:
        """Write the plan that a resumed run continues with."""
        write_whole(self.path / PLAN_SOURCE, plan_source(algorithm.config.plan) or "")
        write_whole(self.path / "plan.txt", algorithm.plan.explain() + "\n")

    def note_resumption(self, config: AlgorithmConfig, stop: dict[str, Any]) -> None:
        """Note that the run is resumed, and write its settings and limits.

        Args:
            config: the settings.
            stop: the stop rules as a dict.
        """
        settings = settings_to_json(config)
        for name, content in (("config.json", settings), ("stop.json", stop)):
            write_whole(self.path / name, json.dumps(content, indent=1))
        self.note("resumed", "")

    def truncate(self, iteration: int) -> tuple[Path | None, int]:
        """Remove results after an iteration: the resumed run writes them again.

        Returns:
            the folder that keeps newer checkpoints with the results, None if there are none; the
            number of removed results.
        """
        newer = [path for path in list_checkpoints(self.path) if int(path.name) > iteration]
        kept = self._move_aside(newer) if newer else None
        results = results_until(self.path, iteration)
        num_removed = len(read_results(self.path)) - len(results)
        self._results.rewrite(results, with_events=num_removed > 0)
        return kept, num_removed

    def _move_aside(self, checkpoints: list[Path]) -> Path:
        """Move checkpoints, and copy the results, to a new folder of the run directory."""
        numbers = (path.name.removeprefix("replaced-") for path in self.path.glob("replaced-*"))
        number = 1 + max((int(text) for text in numbers if text.isdecimal()), default=0)
        folder = self.path / f"replaced-{number}"
        (folder / CHECKPOINTS).mkdir(parents=True)
        for file in (
            self.path / "result.json",
            self.path / "progress.csv",
            *event_files(self.path),
        ):
            shutil.copy(file, folder)
        for path in checkpoints:
            path.rename(folder / CHECKPOINTS / path.name)
        return folder

    def write(self, result: dict[str, Any]) -> None:
        """Append a result to result.json, progress.csv and the TensorBoard events."""
        self._results.append(result)

    def close(self) -> None:
        """Release the lock, also for processes that were forked meanwhile."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)


def _setup_files(
    algorithm: Any, total: int | None, command: list[str], stop: dict[str, Any]
) -> dict[str, str]:
    """Return file name -> text of the files of `RunDirectory.write_setup`."""
    import flowrl

    versions = {"flowrl": flowrl.__version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "gymnasium"):
        versions[name] = str(__import__(name).__version__)
    config = algorithm.config.updated(total_timesteps=total)
    source = None if config.plan is None else plan_source(config.plan)
    return {
        "config.json": json.dumps(settings_to_json(config), indent=1),
        SETUP: json.dumps(algorithm.manifest(), indent=1),
        "command.txt": shlex.join(command) + "\n",
        "stop.json": json.dumps(stop, indent=1),
        "plan.txt": algorithm.plan.explain() + "\n",
        **({} if source is None else {PLAN_SOURCE: source}),
        "versions.json": json.dumps(versions, indent=1),
    }


def _lock(folder: int) -> None:
    """Lock an open folder; `is_in_use` of another process may hold its lock for a moment.

    Raises:
        BlockingIOError: a run has locked it.
    """
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def name_of_env_setting(env: Any) -> str:
    """Return the name of a value of the setting `env`: its id, or that of its class or function."""
    if isinstance(env, str):
        return env
    while isinstance(env, functools.partial):
        env = env.func
    name = getattr(env, "__name__", None) or type(env).__name__
    return "a lambda" if name == "<lambda>" else str(name)


def default_run_dir(plan: str, env: Any) -> Path:
    """Return the path runs/<plan>-<env>-<time>; see `unique` of RunDirectory."""
    name = re.sub(r"[^\w.-]+", "-", name_of_env_setting(env)).strip("-")
    return Path("runs") / f"{Path(plan).stem}-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
