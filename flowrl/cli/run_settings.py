"""The settings of a run: from a plan, an algorithm's name, flags, or a run directory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from flowrl.cli.arguments import Parser, file_path, json_object, positive_float, with_flags
from flowrl.cli.stop_options import (
    add_display_option,
    add_report_option,
    add_stop_options,
    stop_rules_of,
)
from flowrl.errors import ConfigError, with_message
from flowrl.policies.config import PolicyConfig
from flowrl.setting_aliases import canonical_names
from flowrl.settings import unchecked_combinations
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.plan_settings import plan_config
from flowrl.trainer.registry import algorithm_class
from flowrl.trainer.runs.stop_rules import describe_defaults
from flowrl.trainer.trust import untrusted_code

DEFAULT_TRACE_S = 60.0
HELP_FLAGS = ("-h", "--help", "--help-all")


def algorithm_config(name: str, settings: dict[str, Any]) -> AlgorithmConfig:
    """Return the config of a registered algorithm: its defaults, changed by settings.

    Raises:
        ConfigError: the algorithm or a setting is unknown, or a value is invalid.
    """
    return algorithm_class(name).config_class.from_dict(settings)


def parse_plan_run(plan: str, arguments: list[str]) -> tuple[argparse.Namespace, AlgorithmConfig]:
    """Parse the arguments after `flowrl train PLAN`.

    Returns:
        the run's options and its config.

    Raises:
        ConfigError: unknown flag or invalid value.
        SystemExit: after `--help`.
    """
    return parse_run(plan, partial(plan_config, plan), arguments)


def parse_algorithm_run(arguments: list[str]) -> tuple[argparse.Namespace, AlgorithmConfig]:
    """Parse the arguments after `flowrl train` if they include `--run=NAME`.

    Returns and raises: see `parse_plan_run`.
    """
    parser = Parser(prog="flowrl train", add_help=False)
    parser.add_argument("--run")
    options, flags = parser.parse_known_args(arguments)
    if "--no-tuned" in flags:
        raise ConfigError("--no-tuned is for `flowrl train PLAN`: --run uses no tuned settings")
    defaults = algorithm_config(options.run, {})
    return parse_run(f"--run={options.run}", lambda env, tuned: defaults, flags)


def parse_run(
    plan: str,
    default_config: Callable[..., AlgorithmConfig],
    arguments: list[str],
) -> tuple[argparse.Namespace, AlgorithmConfig]:
    """Parse the options of a run; apply them and all flags to its default config.

    Args:
        plan: as on the command line.
        default_config: (env, tuned) -> config; see `plan_config`.
        arguments: options and flags.
    """
    from flowrl.cli.flags import settings_from_flags
    from flowrl.cli.help import format_help

    program = f"flowrl train {plan}"
    options, flags = _run_options(program).parse_known_args(arguments)
    env = options.config.get("env") if options.env is None else options.env
    changes = {**options.config, **({} if env is None else {"env": env})}
    env_steps = stop_rules_of(options).env_steps
    if env_steps is not None:
        changes.setdefault("total_timesteps", env_steps)
    before = default_config(env, tuned=options.tuned)
    settings_flags = [flag for flag in flags if flag not in HELP_FLAGS]
    names = [flag[2:].partition("=")[0].replace("-", "_") for flag in flags if flag[:2] == "--"]
    changes = {n: value for n, value in canonical_names(changes).items() if n not in names}
    with unchecked_combinations():  # --config may fit only together with the flags
        defaults = before.updated(**changes)
        config = settings_from_flags(defaults, settings_flags, vars(options))
    try:
        config = with_training_options(config.updated(), options)
    except ConfigError as error:
        names = [name for name in config if name not in changes]  # not of --config
        raise with_message(error, with_flags(str(error), arguments, names)) from None
    if settings_flags != flags:
        parser = _run_options(program, describe_defaults(config))
        print(format_help(parser, config, show_all="--help-all" in flags))
        raise SystemExit(0)
    _reject_flags_without_effect(config, before)
    return options, config


def _run_options(program: str, *default_stop: str) -> argparse.ArgumentParser:
    """Return the parser of the options of a run that are not settings."""
    parser = Parser(prog=program, add_help=False)
    add_stop_options(parser, *default_stop)
    parser.add_argument("--run-dir", type=file_path, help="output folder (default: runs/…)")
    add_training_options(parser)
    parser.add_argument(
        "--env",
        help="id of a Gymnasium environment, a registered name, or module:Id or module:Class of a "
        "module, for example in the current folder",
    )
    add_tuned_option(parser)
    parser.add_argument(
        "--config",
        type=json_object,
        default={},
        help="settings as a JSON object; flags override them",
    )
    return parser


def add_tuned_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that leaves tuned settings out."""
    parser.add_argument(
        "--no-tuned",
        dest="tuned",
        action="store_false",
        help="use the plan's settings for any environment, not those that are tuned for this one "
        "(list: flowrl tuned)",
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a run is shown, traced and debugged."""
    add_display_option(parser)
    parser.add_argument(
        "--trace",
        nargs="?",
        type=positive_float,
        const=DEFAULT_TRACE_S,
        metavar="SECONDS",
        help=f"write the last seconds of the run to trace.json (default: {DEFAULT_TRACE_S:g})",
    )
    add_report_option(parser)
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="sample, learn and evaluate in this process, for debugging (num_workers=0, …)",
    )


def with_training_options(config: AlgorithmConfig, options: argparse.Namespace) -> AlgorithmConfig:
    """Apply the options of `add_training_options` that change settings."""
    if options.trace is not None:
        config = config.updated(trace_s=options.trace)
    return without_actors(config) if options.in_process else config


def without_actors(config: AlgorithmConfig) -> AlgorithmConfig:
    """Return settings of the same run in one process."""
    numbers = (
        "num_workers", "num_spare_workers", "num_learners", "num_gpus", "num_aggregation_workers",
        "num_replay_shards",
    )  # fmt: skip
    changes: dict[str, Any] = {name: 0 for name in numbers if config.get(name)}
    if config.evaluation_num_workers:
        changes |= {
            "evaluation_num_workers": 0,
            "evaluation_parallel_to_training": False,
            "evaluation_timeout_s": None,
        }
    return config.updated(**changes) if changes else config


def _reject_flags_without_effect(config: AlgorithmConfig, defaults: AlgorithmConfig) -> None:
    """Reject changes of policy settings if every policy has its own config."""
    fields = PolicyConfig.model_fields
    name = config.first_ineffective(n for n in fields if config[n] != defaults[n])
    if name is not None:
        flag = name.rstrip("_").replace("_", "-")
        own = ", ".join(f"--policies.{policy_id}.config.{flag}" for policy_id in config.policies)
        raise ConfigError(f"--{flag}: every policy of this plan has its own settings: {own}")


def is_algorithm_run(arguments: list[str]) -> bool:
    """Return whether the arguments include `--run`."""
    return any(flag == "--run" or flag.startswith("--run=") for flag in arguments)


def check_trusted(config: AlgorithmConfig, trust: bool) -> None:
    """Check that settings from a file name no code, unless they are trusted.

    Raises:
        ConfigError: they name code, see `untrusted_code`.
    """
    code = None if trust else untrusted_code(config)
    if code is not None:
        raise ConfigError(
            f"the settings contain {code}, which is not trusted: pass --trust to allow it"
        )
