"""Read a run directory: its settings, command, stop rules and checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.data.checkpoint import CheckpointError, is_checkpoint, list_checkpoints, read_manifest
from flowrl.data.json_text import json_lines, parse_json
from flowrl.errors import ConfigError
from flowrl.setting_values import expanded_path
from flowrl.trainer.plan_files import is_plan_file

EVENTS = "events.jsonl"
SETUP = "setup.json"  # the manifest at the start of the run
_CODE = "__code__"  # key that marks a setting that is code, which the plan file contains


def read_command(run_dir: Path) -> list[str]:
    """Return the command that started a run.

    Raises:
        ConfigError: command.txt is missing or damaged.
    """
    try:
        return shlex.split((run_dir / "command.txt").read_text("utf-8", "surrogateescape"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run_dir}: cannot read command.txt: {error}") from None


def read_setup(run_dir: Path) -> dict[str, Any]:
    """Return the manifest at the start of a run.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    try:
        setup = parse_json((run_dir / SETUP).read_text(encoding="utf-8"))
        if not isinstance(setup, dict) or not {"algorithm", "config"} <= set(setup):
            raise ValueError("it is not a manifest")
        return setup
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run_dir}: cannot read {SETUP}: {error}") from None


def read_stop_rules(run_dir: Path) -> dict[str, Any]:
    """Return the contents of stop.json.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    try:
        return dict(parse_json((run_dir / "stop.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{run_dir}: cannot read stop.json: {error}") from None


def _other_run(folder: Path) -> str:
    """Return a hint at the run that contains a folder, or at the newest run in it; or ""."""
    parent = folder.resolve().parent
    if (parent / "config.json").is_file():
        return f". Did you mean {parent}?"
    files = itertools.chain(folder.glob("*/stop.json"), folder.glob("*/*/stop.json"))
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    return "" if newest is None else f". The newest run in it is {newest.parent}"


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the settings of a run, with the import path of code in place of the code.

    Raises:
        ConfigError: config.json is missing or damaged.
    """
    file = run_dir / "config.json"
    if not file.is_file():
        reason = "it has no config.json" if run_dir.exists() else "there is no such folder"
        raise ConfigError(f"{run_dir} is not a run directory: {reason}{_other_run(run_dir)}")
    try:
        settings = parse_json(file.read_text(encoding="utf-8"))
        return {name: _with_names_of_code(value) for name, value in settings.items()}
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file}: damaged: {error}") from error


def read_results(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete results in result.json; a crash can leave an incomplete line."""
    return [r for r in json_lines(run_dir / "result.json") if isinstance(r, dict)]


def read_events(run_dir: Path, in_use: bool) -> list[dict[str, Any]]:
    """Return the events of a run: `time` [s since 1970], `kind`, `text` and `stage`.

    If the run has started or was resumed, but has not ended and is not in use, an event of the kind
    "killed" follows, at the time of its last result or checkpoint.

    Args:
        run_dir: the run directory.
        in_use: result of `is_in_use`, called before: a run that ends at this moment was not killed.
    """
    events: list[dict[str, Any]] = []
    for event in json_lines(run_dir / EVENTS):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            events.append({"time": float(event["time"]), "kind": str(event["kind"]),
                           "text": str(event["text"]), "stage": event.get("stage")})  # fmt: skip
    if events and events[-1]["kind"] in ("started", "resumed") and not in_use:
        files = [run_dir / "result.json", *list_checkpoints(run_dir)]
        times = [path.stat().st_mtime for path in files if path.exists()]
        text = "the process was killed or crashed, or runs on another machine"
        time = max([events[-1]["time"], *times])
        events.append({"time": time, "kind": "killed", "text": text, "stage": None})
    return events


def results_until(run_dir: Path, iteration: int) -> list[dict[str, Any]]:
    """Return the results up to an iteration."""
    return [r for r in read_results(run_dir) if r.get("training_iteration", 0) <= iteration]


def result_at(run_dir: Path, iteration: int) -> dict[str, Any] | None:
    """Return the last result up to an iteration; None if none was written."""
    return next(reversed(results_until(run_dir, iteration)), None)


def settings_to_json(value: Any) -> Any:
    """Return settings as JSON values; code is replaced by {"__code__": "module:name"}, and keys
    that JSON does not have, such as tuples, by text."""
    if hasattr(value, "items"):
        return {
            key if isinstance(key, (str, int, float)) else str(key): settings_to_json(inner)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [settings_to_json(inner) for inner in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    place = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', repr(value))}"
    return {_CODE: place}


def _with_names_of_code(value: Any) -> Any:
    """Return a saved setting with the import path of code, without addresses in memory, in place
    of the code."""
    if isinstance(value, dict):
        if set(value) == {_CODE}:
            return re.sub(r" at 0x[0-9a-f]+", "", str(value[_CODE]))
        return {key: _with_names_of_code(inner) for key, inner in value.items()}
    return [_with_names_of_code(inner) for inner in value] if isinstance(value, list) else value


def own_code(manifest: dict[str, Any]) -> dict[str, str]:
    """Return the code of a checkpoint that only the program itself has: setting -> import path.

    Those are classes and functions of `__main__`, and settings that the checkpoint does not
    contain, such as lambdas and objects. The name of the algorithm's class is "algorithm".
    """
    found = {}
    algorithm = str(manifest.get("algorithm"))
    if algorithm.startswith("__main__:") or "<locals>" in algorithm:
        found["algorithm"] = algorithm
    plan = manifest.get("plan")
    if not is_plan_file(plan):  # loading executes the plan file, which defines its code
        found |= {str(name): "not in the checkpoint" for name in manifest.get("left_out", ())}
    values = manifest.get("config", {}).get("values", {})
    for name, value in values.items():
        if code := _code_of_main(value):
            found[name] = code
    return found


def _code_of_main(value: Any) -> str | None:
    """Return the first import path "__main__:name" in a setting of a manifest, or None."""
    if isinstance(value, dict):
        code = value.get(_CODE)
        if isinstance(code, str) and code.startswith("__main__:"):
            return code
        value = list(value.values())
    return next(filter(None, map(_code_of_main, value)), None) if isinstance(value, list) else None


def best_checkpoint(checkpoints: list[Path], order: str = "max") -> Path | None:
    """Return the checkpoint with the best score, or None if none has a score.

    Args:
        checkpoints: paths of checkpoints.
        order: "max" or "min", as `checkpoint_score_order`.
    """
    scores = {}
    for path in checkpoints:
        with contextlib.suppress(CheckpointError):
            score = read_manifest(path).get("score")
            if isinstance(score, (int, float)) and math.isfinite(score):
                scores[path] = score if order == "max" else -score
    return max(scores, key=scores.__getitem__, default=None)


def is_in_use(run_dir: Path) -> bool:
    """Return whether a `RunDirectory` has locked a run directory; False if it was deleted."""
    try:
        folder = os.open(run_dir, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(folder)
    return False


def newest_checkpoint(run_dir: Path) -> Path:
    """Return the newest checkpoint of a run.

    Raises:
        ConfigError: the run has no checkpoint.
    """
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints and is_in_use(run_dir):
        raise ConfigError(
            f"{run_dir} is in use by another process and has no checkpoint yet; wait for the first "
            "one"
        )
    if not checkpoints:
        raise ConfigError(
            f"{run_dir}: this run has no checkpoint; start it again with the same run directory"
        )
    return checkpoints[-1]


def find_checkpoint(run_dir: Path | str, name: str | int | None = None) -> Path:
    """Return the folder of a checkpoint of a run.

    Args:
        run_dir: the run directory.
        name: number of the checkpoint; "best" for the best one by the run's
            `checkpoint_score_attribute`; None for the newest one.

    Raises:
        ConfigError: the folder is no run directory, or has no such checkpoint.
    """
    run_dir = expanded_path(run_dir)
    order = read_config(run_dir).get("checkpoint_score_order", "max")
    checkpoints = list_checkpoints(run_dir)
    if name is None or not checkpoints:
        return newest_checkpoint(run_dir)
    if name == "best":
        best = best_checkpoint(checkpoints, order)
        if best is None:
            raise ConfigError(
                f"{run_dir}: no checkpoint has a score; train with checkpoint_score_attribute set "
                "to a metric that the results have, such as episode_reward_mean"
            )
        return best
    for path in checkpoints:
        if path.name == name or (str(name).isdecimal() and int(path.name) == int(name)):
            return path
    raise ConfigError(
        f"{run_dir}: there is no checkpoint {name!r}, only "
        f"{', '.join(path.name for path in checkpoints)}"
    )


def last_intact_checkpoint(run_dir: Path, before: Path) -> Path | None:
    """Return the newest undamaged checkpoint of a run that is older than a damaged one."""
    older = [path for path in list_checkpoints(run_dir) if int(path.name) < int(before.name)]
    return next((path for path in reversed(older) if is_checkpoint(path)), None)
