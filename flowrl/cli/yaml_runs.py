"""Train the runs in a YAML file: `flowrl train FILE.yaml`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.cli.arguments import Parser, add_trust_option, import_from_current_folder
from flowrl.cli.run_settings import absolute_plan, algorithm_config, check_trusted
from flowrl.cli.stop_options import add_stop_options, stop_rules_of
from flowrl.cli.training_run import start_run
from flowrl.setting_values import nearest
from flowrl.settings import ConfigError
from flowrl.trainer.plan_files import is_shipped, plan_path
from flowrl.trainer.plan_settings import plan_config
from flowrl.trainer.runs.stop_rules import StopRules, metric_rules

MAX_VALUES = 100_000  # in a file whose aliases are written out
_KEYS = ("run", "plan", "env", "env_config", "stop", "config")


class YamlRun(NamedTuple):
    """A run in a YAML file; the name is "" if the file describes a single run."""

    name: str
    config: Any
    plan: str | None
    stop: StopRules


def train_yaml(arguments: list[str]) -> int:
    """Train the runs in a YAML file one after the other; return the exit code.

    All runs are checked before the first one starts.
    """
    parser = Parser(prog="flowrl train FILE.yaml", description="Train the runs in a YAML file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--run-dir", type=Path, help="output folder (default: runs/…)")
    parser.add_argument("--only", metavar="NAME", help="train only the run with this name")
    parser.add_argument("--seed", type=int, help="override the seed in the file")
    add_trust_option(parser, "the file")
    add_stop_options(parser, default="the stop rules in the file")
    options = parser.parse_args(arguments)
    if options.trust:
        import_from_current_folder()
    entries = _read(options.file)
    if options.only is not None and options.only not in entries:
        raise ConfigError(
            f"{options.file}: there is no run {options.only!r}."
            f"{nearest(options.only, list(entries))}"
        )
    runs = [
        _prepare(name, entry, options)
        for name, entry in entries.items()
        if options.only in (None, name)
    ]
    for run in runs:
        run_dir = options.run_dir
        if run_dir is not None and run.name and len(entries) > 1:
            run_dir = run_dir / run.name
        if len(runs) > 1:
            print(f"== {run.name}", flush=True)
        only = ["--only", run.name] if run.name and options.only is None else []
        command = ["flowrl", "train", *arguments, *only]
        exit_code = start_run(run.config, run.plan, run.stop, run_dir, command)
        if exit_code:
            return exit_code
    return 0


def _prepare(name: str, entry: dict[str, Any], options: argparse.Namespace) -> YamlRun:
    """Return a checked run with the options of the command line applied."""
    try:
        stop_options = stop_rules_of(options)
        config, plan, stop = _parse_run(entry, stop_options, options.trust)
        if options.seed is not None:
            config = config.updated(seed=options.seed)
        config.check()
        stop.check(config)
    except (ConfigError, argparse.ArgumentTypeError) as error:
        where = f"{options.file}{f', {name}' if name else ''}"
        raise ConfigError(f"{where}: {error}") from None
    return YamlRun(name, config, plan, stop)


def _read(file: Path) -> dict[str, Any]:
    """Return name -> entry of every run in a YAML file; the name of a single run is ""."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads 1e5 as a number, too."""

    number = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        entries = yaml.load(file.read_text(), Loader)
        if _size(entries, {}) > MAX_VALUES:
            raise ValueError(f"its aliases stand for more than {MAX_VALUES:,} values")
    except RecursionError:
        raise ConfigError(f"{file}: cannot be read: it is nested too deeply") from None
    except (OSError, ValueError, OverflowError, MemoryError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"{file}: contains no runs")
    if {"run", "plan"} & set(entries):
        return {"": entries}
    if set(entries) & set(_KEYS):
        raise ConfigError(f"{file}: needs either run (an algorithm) or plan")
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            hint = nearest(str(name), list(_KEYS))
            raise ConfigError(
                f"{file}: {name!r}: must be a mapping with run or plan, got {entry!r}.{hint}"
            )
        if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
            raise ConfigError(f"{file}: the name of a run must be a plain word, got {name!r}")
    return entries


def _size(value: Any, known: dict[int, int]) -> int:
    """Return the number of values in a tree in which aliases are written out.

    Args:
        value: the tree.
        known: id of a container -> its size; filled here.

    Raises:
        RecursionError: a container contains itself.
    """
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        parts = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(value)]


def _parse_run(
    entry: dict[str, Any], stop_options: StopRules, trust: bool
) -> tuple[Any, str | None, StopRules]:
    """Return config, plan and stop rules of an entry in a YAML file.

    Args:
        entry: the entry.
        stop_options: rules of the command line, which replace those of the entry.
        trust: import and execute the code that the entry names.
    """
    unknown = sorted(str(key) for key in entry if key not in _KEYS)
    if unknown:
        raise ConfigError(f"unknown {unknown[0]!r}.{nearest(unknown[0], list(_KEYS))}")
    if ("run" in entry) == ("plan" in entry):
        raise ConfigError("needs either run (an algorithm) or plan")
    for key in ("config", "env_config", "stop"):
        if not isinstance(entry.get(key) or {}, dict):
            raise ConfigError(f"{key}: must be a mapping, got {entry[key]!r}")
    settings = dict(entry.get("config") or {})
    for key in ("env", "env_config"):
        if key in entry and key in settings:
            raise ConfigError(f"{key}: is given twice, at the top level and in config")
        if key in entry:
            settings[key] = entry[key]
    stop = StopRules(metrics=metric_rules(entry.get("stop") or {}))
    stop = stop_options if stop_options.is_set() else stop
    if stop.env_steps is not None:
        settings.setdefault("total_timesteps", stop.env_steps)
    if "run" in entry:
        config = algorithm_config(entry["run"], settings)
        check_trusted(config, trust)
        return config, None, stop
    plan = entry["plan"]
    if not isinstance(plan, str):
        raise ConfigError(f"plan: must be a name or a file, got {plan!r}")
    plan_path(plan)
    if not trust and not is_shipped(plan):
        raise ConfigError(f"plan: {plan} is a file: pass --trust to execute it")
    settings = {"plan": absolute_plan(plan), **settings}
    config = plan_config(plan, settings.get("env")).updated(**settings)
    check_trusted(config, trust)
    return config, plan, stop
