"""The commands `flowrl train` and `flowrl resume`: what to train, with which settings, how long."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from flowrl.cli.arguments import finite, mapping, positive, rules, rules_of
from flowrl.settings import ConfigError, nearest

CHECKPOINT_HELP = "its number; or best, by checkpoint_score_attribute (default: the newest one)"
_EPILOG = "`flowrl train PLAN --help` lists the settings of a plan; plans: `flowrl plans`"


def train_command(given: list[str]) -> int:
    """`flowrl train PLAN | FILE.py | FILE.yaml | --run=NAME | --resume RUN_DIR [flags]`.

    Raises:
        ConfigError: wrong usage; nothing was started.
    """
    if given[:1] == ["--resume"]:
        return resume_command(given[1:])
    if given and given[0].startswith("--resume="):
        return resume_command([given[0].removeprefix("--resume="), *given[1:]])
    if given[:1] in (["-h"], ["--help"]):
        parser = argparse.ArgumentParser(
            prog="flowrl train",
            usage="flowrl train PLAN [--setting value …] | FILE.py | FILE.yaml | --run=NAME …",
            epilog=_EPILOG,
        )
        _run_options(parser)
        _rllib_options(parser)
        parser.parse_args(given)
    from flowrl.cli.training_run import train

    if any(flag == "--run" or flag.startswith("--run=") for flag in given):
        if given and not given[0].startswith("-"):
            raise ConfigError(f"train: give a plan ({given[0]}) or --run, not both")
        config, options = _by_name(given)
        plan = None
    elif not given or given[0].startswith("-"):
        raise ConfigError("train: name a plan first, e.g. `flowrl train ppo`")
    elif given[0].endswith((".yaml", ".yml")):
        return _of_yaml(given)
    else:
        plan, flags = given[0], given[1:]
        _, defaults = load(plan)
        options, config = _parse_settings(plan, defaults, flags)
        _refuse_unused(config, defaults)
    return train(config, plan, stop_rules(options), options.run_dir, ["flowrl", "train", *given])


def resume_command(given: list[str]) -> int:
    """`flowrl resume RUN_DIR [--checkpoint NAME] [--plan FILE] [--stop-…]`."""
    parser = argparse.ArgumentParser(prog="flowrl resume", description="go on with a run")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--checkpoint", help=CHECKPOINT_HELP)
    parser.add_argument("--plan", help="another plan file, or the same one though it was changed")
    _run_options(parser)
    options = parser.parse_args(given)
    from flowrl.cli.training_run import train

    config, plan = config_of_run(options.run_dir, options.plan)
    path = None
    if options.checkpoint is not None:
        path = checkpoint_named(options.run_dir, options.checkpoint)
    return train(
        config,
        plan,
        stop_rules(options),
        options.run_dir,
        ["flowrl", "resume", *given],
        resume=True,
        checkpoint=path,
        other_plan=options.plan is not None,
    )


def checkpoint_named(run_dir: Path, name: str | None) -> Path:
    """A run's checkpoint by its number, the best one, or the newest if it is not named.

    Raises:
        ConfigError: there is none.
    """
    from flowrl.cli.run_directory import best_of, checkpoints_of, newest_checkpoint, read_config

    if name is None:
        return newest_checkpoint(run_dir)
    there = checkpoints_of(run_dir)
    if name == "best":
        found = best_of(there, read_config(run_dir).get("checkpoint_score_order", "max"))
        if found is None:
            raise ConfigError(
                f"{run_dir}: no checkpoint has a score: train with --checkpoint-score-attribute "
                "episode_reward_mean"
            )
        return found
    for path in there:
        if path.name == name or (name.isdecimal() and int(path.name) == int(name)):
            return path
    raise ConfigError(
        f"{run_dir}: there is no checkpoint {name!r}, only {', '.join(p.name for p in there)}"
    )


def load(plan: str) -> tuple[Any, Any]:
    """A plan's module and its settings.

    Raises:
        ConfigError: it cannot be loaded, or has none.
    """
    from flowrl.trainer.config import AlgorithmConfig
    from flowrl.trainer.plan_files import load_plan

    module = load_plan(plan)
    config = getattr(module, "config", None)
    if not isinstance(config, AlgorithmConfig):
        raise ConfigError(f"plan: {plan} has no `config`, an AlgorithmConfig")
    return module, config


def _run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "run",
        "It ends by the first of these rules that holds; where none is given, at the environment's "
        "own reward threshold or after 500,000 env steps.",
    )
    group.add_argument("--stop-reward", type=finite, help="mean return of the last 100 episodes")
    group.add_argument("--stop-timesteps", type=positive(int), help="env steps")
    group.add_argument("--stop-iters", type=positive(int), help="iterations")
    group.add_argument("--stop-time-s", type=positive(float), help="seconds")
    group.add_argument(
        "--stop",
        type=rules,
        action="append",
        default=[],
        metavar="METRIC=VALUE",
        help="any metric of the results, by its path a/b/c, at least (or METRIC<=VALUE, at most)",
    )


def _rllib_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("by the algorithm's name, with its general defaults")
    group.add_argument("--run", metavar="NAME", help="PPO, A2C, DQN, …")
    group.add_argument("--env", help="environment: an id or a registered name")
    group.add_argument("--config", type=mapping, default={}, help="settings, a JSON object")
    group.add_argument("--run-dir", type=Path, help="where to write (default: runs/…)")


def stop_rules(options: argparse.Namespace) -> Any:
    """The stop rules of a command."""
    from flowrl.cli.training_run import Stop

    metrics = [rule for one in options.stop for rule in one]
    return Stop(
        options.stop_reward,
        options.stop_timesteps,
        options.stop_iters,
        options.stop_time_s,
        metrics,
    )


def _by_name(given: list[str]) -> tuple[Any, argparse.Namespace]:
    """The settings of `--run=NAME --env=ENV --config='{…}' [--setting value …]`, and the options of
    the run."""
    parser = argparse.ArgumentParser(prog="flowrl train", add_help=False, allow_abbrev=False)
    parser.add_argument("--run")
    options, flags = parser.parse_known_args(given)
    told, config = _parse_settings(f"--run={options.run}", config_by_name(options.run, {}), flags)
    return config, told


def config_by_name(name: str, settings: dict[str, Any]) -> Any:
    """An algorithm's config by its name, with its general defaults and these settings.

    Raises:
        ConfigError: there is no such algorithm, or a setting is wrong.
    """
    from flowrl.trainer.registry import algorithm_class

    return algorithm_class(name).config_class.from_dict(settings)


def _of_yaml(given: list[str]) -> int:
    """Train what a YAML file says: one run, or several by name, one after the other."""
    from flowrl.cli.training_run import train

    parser = argparse.ArgumentParser(prog="flowrl train FILE.yaml")
    parser.add_argument("file", type=Path)
    parser.add_argument("--run-dir", type=Path, help="where to write (default: runs/…)")
    parser.add_argument("--only", help="of several runs this one")
    parser.add_argument("--seed", type=int, help="instead of the file's")
    _run_options(parser)
    options = parser.parse_args(given)
    runs = _runs_of(options.file)
    if options.only is not None and options.only not in runs:
        raise ConfigError(
            f"{options.file}: there is no run {options.only!r}.{nearest(options.only, list(runs))}"
        )
    prepared = []
    for name, one in runs.items():
        if options.only in (None, name):
            where = f"{options.file}{f', {name}' if name else ''}"
            try:
                config, plan, stop = _run_of(one)
                if options.seed is not None:
                    config = config.updated(seed=options.seed)
                config.check()
                own = stop_rules(options)
                stop = own if own.is_set() else stop
                stop.check(config)
            except (ConfigError, argparse.ArgumentTypeError) as error:
                raise ConfigError(f"{where}: {error}") from None
            prepared.append((name, config, plan, stop))
    for name, config, plan, stop in prepared:
        run_dir = options.run_dir
        if run_dir is not None and name and len(runs) > 1:
            run_dir = run_dir / name
        if len(prepared) > 1:
            print(f"== {name}", flush=True)
        only = ["--only", name] if name and options.only is None else []
        code = train(config, plan, stop, run_dir, ["flowrl", "train", *given, *only])
        if code:
            return code
    return 0


_YAML = ("run", "plan", "env", "env_config", "stop", "config")


def _runs_of(file: Path) -> dict[str, Any]:
    """The runs of a YAML file by name; "" where there is one without."""
    import yaml

    try:
        told = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: it cannot be read: {error}") from None
    if not isinstance(told, dict) or not told:
        raise ConfigError(f"{file}: it has no runs")
    if {"run", "plan"} & set(told):
        return {"": told}
    if set(told) & set(_YAML):
        raise ConfigError(f"{file}: either run (an algorithm) or plan is needed")
    for name, one in told.items():
        if not isinstance(one, dict):
            hint = nearest(str(name), list(_YAML))
            raise ConfigError(
                f"{file}: {name!r}: a mapping with run or plan is needed, got {one!r}.{hint}"
            )
        if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
            raise ConfigError(f"{file}: the name of a run is a plain word, got {name!r}")
    return told


def _run_of(one: dict[str, Any]) -> tuple[Any, str | None, Any]:
    """Settings, plan and stop rules of a run in a YAML file."""
    from flowrl.cli.training_run import Stop

    unknown = sorted(str(key) for key in one if key not in _YAML)
    if unknown:
        raise ConfigError(f"unknown {unknown[0]!r}.{nearest(unknown[0], list(_YAML))}")
    if ("run" in one) == ("plan" in one):
        raise ConfigError("either run (an algorithm) or plan is needed")
    for key in ("config", "env_config", "stop"):
        if not isinstance(one.get(key) or {}, dict):
            raise ConfigError(f"{key}: a mapping is needed, got {one[key]!r}")
    settings = dict(one.get("config") or {})
    for key in ("env", "env_config"):
        if key in one and key in settings:
            raise ConfigError(f"{key}: it is given twice, besides and in config")
        if key in one:
            settings[key] = one[key]
    stop = Stop(metrics=rules_of(one.get("stop") or {}))
    if "run" in one:
        return config_by_name(one["run"], settings), None, stop
    if not isinstance(one["plan"], str):
        raise ConfigError(f"plan: a name or a file is needed, got {one['plan']!r}")
    return load(one["plan"])[1].updated(**settings), one["plan"], stop


def _refuse_unused(config: Any, defaults: Any) -> None:
    """Refuse flags that no policy would see, as each has settings of its own."""
    from flowrl.policies.config import PolicyConfig
    from flowrl.policies.policy_spec import specs_of

    if config.policies is None:
        return
    specs = specs_of(config.policies)
    if not all(isinstance(spec.config, PolicyConfig) for spec in specs.values()):
        return
    for name in PolicyConfig.model_fields:
        if name != "seed" and getattr(config, name) != getattr(defaults, name):
            flag = name.rstrip("_").replace("_", "-")
            raise ConfigError(
                f"--{flag}: every policy of this plan has settings of its own: "
                f"--policies.{next(iter(specs))}.config.{flag}"
            )


def _parse_settings(plan: str, defaults: Any, flags: list[str]) -> tuple[Any, Any]:
    """Run options and the plan's settings with the flags applied.

    Raises:
        ConfigError: unknown flag (the nearest is offered) or wrong value.
    """
    from flowrl.cli.flags import settings_from_flags

    parser = argparse.ArgumentParser(
        prog=f"flowrl train {plan}", add_help=False, allow_abbrev=False
    )
    _run_options(parser)
    parser.add_argument("--run-dir", type=Path, help="where to write (default: runs/…)")
    parser.add_argument("--env", help="environment: an id or a registered name")
    parser.add_argument(
        "--config", type=mapping, default={}, help="settings, a JSON object, under the flags"
    )
    options, rest = parser.parse_known_args(flags)
    given = {**options.config, **({} if options.env is None else {"env": options.env})}
    defaults = defaults.updated(**given) if given else defaults
    if "-h" in rest or "--help" in rest:
        print(parser.format_help())
        sys.stdout.flush()
    return options, settings_from_flags(defaults, rest, f"flowrl train {plan}", vars(options))


def config_of_run(run_dir: Path, plan: str | None = None) -> tuple[Any, str | None]:
    """The settings of a run: those that were saved, over what its plan and its flags say.

    Args:
        plan: another one than the run had.

    Raises:
        ConfigError: its files cannot be read, or name nothing that is there.
    """
    from flowrl.cli.run_directory import read_config, read_goal

    saved = read_config(run_dir)
    command, _ = read_goal(run_dir)
    if any(part == "--run" or part.startswith("--run=") for part in command):
        config, _ = _by_name(command[command.index("train") + 1 :])
        if plan is not None:
            saved["plan"] = str(Path(plan).resolve()) if plan.endswith(".py") else plan
        return config.updated(**saved), None
    named = saved.get("plan") if plan is None else plan
    if not isinstance(named, str):
        raise ConfigError("config.json names no plan")
    _, config = load(named)
    if any(part.startswith("--policies.") for part in command):  # they change code, not values
        _, config = _parse_settings(named, config, command[command.index("train") + 2 :])
    if plan is not None:
        saved["plan"] = str(Path(plan).resolve()) if plan.endswith(".py") else plan
    return config.updated(**saved), named
