"""The settings of a run: from a plan, an algorithm's name, flags, or a run directory."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.cli.arguments import import_from_current_folder, json_object
from flowrl.cli.stop_options import add_stop_options, stop_rules_of
from flowrl.data.checkpoint import read_manifest
from flowrl.settings import ConfigError
from flowrl.trainer.plan_files import is_shipped
from flowrl.trainer.plan_settings import plan_config
from flowrl.trainer.registry import algorithm_names, algorithm_path
from flowrl.trainer.runs.saved_run import newest_checkpoint, read_command, read_config
from flowrl.trainer.runs.stop_rules import describe_defaults
from flowrl.trainer.trust import untrusted_code

CODE_SETTINGS = ("callbacks_class", "policy_mapping_fn", "sample_collector")
"""Settings whose flags take the import path of code."""
_HELP_FLAGS = ("-h", "--help", "--help-all")


def algorithm_config(name: str, settings: dict[str, Any]) -> Any:
    """Return the config of a registered algorithm: its defaults, changed by settings.

    Raises:
        ConfigError: the algorithm or a setting is unknown, or a value is invalid.
    """
    from flowrl.trainer.registry import algorithm_class

    return algorithm_class(name).config_class.from_dict(settings)


def parse_plan_run(plan: str, arguments: list[str]) -> tuple[argparse.Namespace, Any]:
    """Parse the arguments after `flowrl train PLAN`.

    Returns:
        The run's options and its config.

    Raises:
        ConfigError: unknown flag or invalid value.
        SystemExit: after `--help`.
    """
    return _parse(plan, partial(plan_config, plan), arguments)


def parse_algorithm_run(
    arguments: list[str], import_code: bool = True
) -> tuple[argparse.Namespace, Any]:
    """Parse the arguments after `flowrl train` if they include `--run=NAME`.

    Returns and raises: see `parse_plan_run`.
    """
    parser = argparse.ArgumentParser(prog="flowrl train", add_help=False, allow_abbrev=False)
    parser.add_argument("--run")
    options, flags = parser.parse_known_args(arguments)
    defaults = algorithm_config(options.run, {})
    return _parse(f"--run={options.run}", lambda env: defaults, flags, import_code)


def _parse(
    plan: str,
    default_config: Callable[[Any], Any],
    arguments: list[str],
    import_code: bool = True,
) -> tuple[argparse.Namespace, Any]:
    """Parse the options of a run; apply them and all flags to its default config.

    Args:
        plan: as on the command line.
        default_config: returns the config for an environment, which may be None.
        arguments: options and flags.
        import_code: see `settings_from_flags`.
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
    before = default_config(env)
    defaults = before.updated(**changes)
    settings_flags = [flag for flag in flags if flag not in _HELP_FLAGS]
    config = settings_from_flags(defaults, settings_flags, program, vars(options), import_code)
    if settings_flags != flags:
        parser = _run_options(program, describe_defaults(config))
        print(format_help(parser, config, show_all="--help-all" in flags))
        raise SystemExit(0)
    _reject_flags_without_effect(config, before)
    return options, config


def _run_options(program: str, *default_stop: str) -> argparse.ArgumentParser:
    """Return the parser of the options of a run that are not settings."""
    parser = argparse.ArgumentParser(prog=program, add_help=False, allow_abbrev=False)
    add_stop_options(parser, *default_stop)
    parser.add_argument("--run-dir", type=Path, help="output folder (default: runs/…)")
    parser.add_argument(
        "--env",
        help="id of a Gymnasium environment (module:Id imports a module), or a registered name",
    )
    parser.add_argument(
        "--config",
        type=json_object,
        default={},
        help="settings as a JSON object; flags override them",
    )
    return parser


def _reject_flags_without_effect(config: Any, defaults: Any) -> None:
    """Reject changes of policy settings if every policy has its own config."""
    from flowrl.policies.config import PolicyConfig
    from flowrl.policies.policy_spec import specs_of

    if config.policies is None:
        return
    specs = specs_of(config.policies)
    if not all(isinstance(spec.config, PolicyConfig) for spec in specs.values()):
        return
    for name in [n for n in PolicyConfig.model_fields if n not in ("seed", "total_timesteps")]:
        if getattr(config, name) != getattr(defaults, name):
            flag = name.rstrip("_").replace("_", "-")
            raise ConfigError(
                f"--{flag}: every policy of this plan has its own settings: "
                f"--policies.{next(iter(specs))}.config.{flag}"
            )


def is_algorithm_run(arguments: list[str]) -> bool:
    """Return whether the arguments include `--run`."""
    return any(flag == "--run" or flag.startswith("--run=") for flag in arguments)


def config_of_run(
    run_dir: Path, plan: str | None = None, trust: bool = False
) -> tuple[Any, str | None]:
    """Return the config and the plan of an existing run.

    Settings that are code come from the plan or the algorithm, all others from config.json.

    Args:
        run_dir: the run directory.
        plan: plan to use instead of the run's.
        trust: import and execute the code that the files of the run name.

    Raises:
        ConfigError: a file is damaged, the plan cannot be loaded, or the run names code that is not
            trusted.
    """
    if trust:
        import_from_current_folder()
    config, plan_of_run = _config_of_run(run_dir, plan, trust)
    try:
        check_trusted(config, trust, [] if plan is None else ["plan"])
    except ConfigError as error:
        raise ConfigError(f"{run_dir}: {error}") from None
    return config, plan_of_run


def check_trusted(config: Any, trust: bool, passed: Collection[str] = ()) -> None:
    """Check that settings from a file name no code, unless they are trusted.

    Raises:
        ConfigError: they name code, see `untrusted_code`.
    """
    code = None if trust else untrusted_code(config, passed)
    if code is not None:
        raise ConfigError(f"it names {code}: pass --trust to allow that")


def _config_of_run(run_dir: Path, plan: str | None, trust: bool) -> tuple[Any, str | None]:
    settings, code = read_config(run_dir)
    command = read_command(run_dir)
    if command[:1] != ["flowrl"] and plan is None:
        return _config_of_python_run(run_dir, settings, code), None
    if plan is not None:
        settings["plan"] = absolute_plan(plan)
    if is_algorithm_run(command):
        _, config = parse_algorithm_run(_after_train(run_dir, command), import_code=trust)
        return config.updated(**settings), None
    name = settings.get("plan") if plan is None else plan
    algorithm = _saved_algorithm(run_dir) if plan is None else None
    if not isinstance(name, str):
        if algorithm is None:
            raise ConfigError(f"{run_dir}: the run has neither a plan nor a registered algorithm")
        return algorithm_config(algorithm, settings), None
    if plan is None and not trust and not is_shipped(name):
        raise ConfigError(
            f"{run_dir}: its plan is the file {name}: pass --trust to execute it, or --plan FILE"
        )
    config = plan_config(name, settings.get("env"))
    # a YAML file may run a registered algorithm with the plan of another one
    if algorithm is not None and algorithm_path(algorithm) != config.algorithm:
        return algorithm_config(algorithm, settings), None
    from_flags = [setting for setting in code if not _is_code(config[setting])]
    if from_flags and not trust:
        flag = from_flags[0].replace("_", "-")
        raise ConfigError(f"{run_dir}: its flag --{flag} names code: pass --trust to import it")
    # config.json has neither PolicySpecs nor code
    if from_flags or any(flag.startswith("--policies.") for flag in command):
        flags = _after_train(run_dir, command)[1:]
        _, config = _parse(name, partial(plan_config, name), flags, import_code=trust)
    return config.updated(**settings), name


def _after_train(run_dir: Path, command: list[str]) -> list[str]:
    """Return the arguments after `flowrl train` in the command of a run."""
    if "train" not in command:
        raise ConfigError(f"{run_dir}: command.txt contains no training command")
    return [word for word in command[command.index("train") + 1 :] if word not in _HELP_FLAGS]


def _is_code(value: Any) -> bool:
    """Return whether a setting's value contains code."""
    if hasattr(value, "items"):
        return any(_is_code(part) for _, part in value.items())
    if isinstance(value, (list, tuple)):
        return any(map(_is_code, value))
    return not isinstance(value, (str, int, float, bool, type(None)))


def _config_of_python_run(run_dir: Path, settings: dict[str, Any], code: list[str]) -> Any:
    """Return the config of a run that `Algorithm.learn` started."""
    algorithm = _saved_algorithm(run_dir)
    if algorithm is None or code:
        own = "an algorithm of your own" if algorithm is None else f"code as {code[0]}"
        raise ConfigError(
            f"{run_dir}: this run was started from Python with {own}: continue it there, "
            f"from_checkpoint({str(run_dir)!r}, trust=True)"
        )
    return algorithm_config(algorithm, settings)


def _saved_algorithm(run_dir: Path) -> str | None:
    """Return the name of the registered algorithm that wrote the newest checkpoint of a run."""
    from flowrl.data.checkpoint import CheckpointError

    try:
        path = read_manifest(newest_checkpoint(run_dir))["algorithm"]
    except (CheckpointError, ConfigError, KeyError):
        return None
    return next((name for name in algorithm_names() if algorithm_path(name) == path), None)


def absolute_plan(plan: str) -> str:
    """Return the absolute path of a plan file, or the name of a shipped plan."""
    return str(Path(plan).resolve()) if plan.endswith(".py") else plan
