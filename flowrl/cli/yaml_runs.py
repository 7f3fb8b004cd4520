"""Train the runs in a YAML file: `flowrl train FILE.yaml`."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from flowrl.cli.arguments import Parser, add_trust_option, file_path, import_from_current_folder
from flowrl.cli.run_settings import (
    add_training_options,
    algorithm_config,
    check_trusted,
    with_training_options,
)
from flowrl.cli.stop_options import add_stop_options, stop_rules_of
from flowrl.cli.training_run import start_run
from flowrl.errors import ConfigError, with_message
from flowrl.setting_values import nearest
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.plan_files import absolute_plan, is_shipped, plan_path
from flowrl.trainer.plan_settings import plan_config
from flowrl.trainer.run_files import RUN_KEYS, read_run_file
from flowrl.trainer.runs.stop_rules import StopRules, metric_rules


class YamlRun(NamedTuple):
    """A run in a YAML file; the name is "" if the file describes a single run."""

    name: str
    config: AlgorithmConfig
    plan: str | None
    stop: StopRules


def train_yaml(arguments: list[str]) -> int:
    """Train the runs in a YAML file one after the other; return the exit code.

    The settings of all runs are checked before the first one starts; whether they fit the
    environment is checked when a run starts.
    """
    parser = Parser(prog="flowrl train FILE.yaml", description="Train the runs in a YAML file.")
    parser.add_argument("file", type=file_path)
    parser.add_argument("--run-dir", type=file_path, help="output folder (default: runs/…)")
    parser.add_argument("--only", metavar="NAME", help="train only the run with this name")
    parser.add_argument("--seed", type=int, help="override the seed in the file")
    add_trust_option(parser, "the file")
    add_stop_options(parser, default="the stop rules in the file")
    add_training_options(parser)
    options = parser.parse_args(arguments)
    if options.trust:
        import_from_current_folder()
    entries = read_run_file(options.file)
    if options.only is not None and options.only not in entries:
        raise ConfigError(
            f"{options.file}: there is no run {options.only!r}."
            f"{nearest(options.only, list(entries))}"
        )
    _check_seed(entries, options)
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
        try:
            show = options.display, options.report
            exit_code = start_run(run.config, run.plan, run.stop, run_dir, command, *show)
        except ConfigError as error:
            raise with_message(error, f"{_place(options, run.name)}: {error}") from error
        if exit_code:
            return exit_code
    return 0


def _check_seed(entries: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Raise ConfigError if --seed would make runs equal that differ in their seeds."""
    if options.seed is None or options.only is not None:
        return
    known: list[tuple[dict[str, Any], Any]] = []
    for entry in entries.values():
        config = entry.get("config") or {}
        if not isinstance(config, dict):
            continue  # an error when the run is prepared
        others = {name: value for name, value in config.items() if name != "seed"}
        run, seed = {**entry, "config": others}, config.get("seed")
        if any(run == other and seed != other_seed for other, other_seed in known):
            raise ConfigError(
                f"--seed: runs of {options.file} differ only in their seeds: choose one with "
                "--only, or change the seeds in the file"
            )
        known.append((run, seed))


def _prepare(name: str, entry: dict[str, Any], options: argparse.Namespace) -> YamlRun:
    """Return a checked run with the options of the command line applied."""
    try:
        stop_options = stop_rules_of(options)
        config, plan, stop = _parse_run(entry, stop_options, options.trust)
        if options.seed is not None:
            config = config.updated(seed=options.seed)
        config = with_training_options(config, options)
        config.check()
        stop.check(config)
    except ConfigError as error:
        raise with_message(error, f"{_place(options, name)}: {error}") from None
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{_place(options, name)}: {error}") from None
    return YamlRun(name, config, plan, stop)


def _place(options: argparse.Namespace, name: str) -> str:
    """Return the file and the name of a run, for messages."""
    return f"{options.file}, {name}" if name else str(options.file)


def _parse_run(
    entry: dict[str, Any], stop_options: StopRules, trust: bool
) -> tuple[AlgorithmConfig, str | None, StopRules]:
    """Return config, plan and stop rules of an entry in a YAML file.

    Args:
        entry: the entry.
        stop_options: rules of the command line, which replace those of the entry. If they do not
            limit the env steps, a run with schedules in percent still ends at the entry's limit.
        trust: import and execute the code that the entry names.
    """
    unknown = sorted(str(key) for key in entry if key not in RUN_KEYS)
    if unknown:
        hint = nearest(unknown[0], list(RUN_KEYS)) or " Settings belong below config."
        if unknown[0].replace("-", "_") == "run_dir":
            hint = " The folder is an option, --run-dir."
        raise ConfigError(
            f"unknown key {unknown[0]!r}: the keys of a run are {', '.join(RUN_KEYS)}.{hint}"
        )
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
    env_steps = stop.env_steps if stop_options.env_steps is None else stop_options.env_steps
    if env_steps is not None:
        settings.setdefault("total_timesteps", env_steps)
    stop = stop_options if stop_options.is_set() else stop
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
    config = plan_config(plan, settings.get("env"), tuned=False).updated(**settings)
    check_trusted(config, trust)
    return config, plan, stop
