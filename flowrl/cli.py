"""The command line: flowrl train | evaluate | explain | plans | copy | version.

Exit codes: 0 done, 1 something failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flowrl
from flowrl.policies.config import ConfigError, nearest

# Before numpy loads its own: a policy's matrices are far too small to share between threads.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

_USAGE = """usage: flowrl COMMAND …

  train PLAN [--setting value …]   train a shipped plan or a plan file
  train --resume RUN_DIR           go on with a run
  evaluate RUN_DIR                 play episodes with a trained policy
  explain PLAN                     the plan as a tree; nothing runs
  plans                            the shipped plans
  copy PLAN FILE                   start your own plan from a shipped one
  version

`flowrl train PLAN --help` lists the plan's settings."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0 if given else 2
    command = _COMMANDS.get(given[0])
    if command is None:
        hint = nearest(given[0], list(_COMMANDS))
        print(f"flowrl: unknown command {given[0]!r}.{hint}\n\n{_USAGE}", file=sys.stderr)
        return 2
    try:
        return command(given[1:])
    except ConfigError as error:
        print(f"flowrl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has gone
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 141


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"flowrl {name}", description=about)


def _version(given: list[str]) -> int:
    _parser("version", "print flowrl's version").parse_args(given)
    print(f"flowrl {flowrl.__version__}")
    return 0


def _plans(given: list[str]) -> int:
    from flowrl.algorithms.plans import shipped_plans

    _parser("plans", "list the shipped plans").parse_args(given)
    for name, line in shipped_plans().items():
        print(f"{name:12} {line}")
    return 0


def _copy(given: list[str]) -> int:
    from flowrl.algorithms.plans import plan_path

    parser = _parser("copy", "start your own plan from a shipped one")
    parser.add_argument("plan")
    parser.add_argument("file", type=Path)
    options = parser.parse_args(given)
    source = plan_path(options.plan)
    if options.file.exists():
        raise ConfigError(f"{options.file} exists already: choose another name")
    try:
        shutil.copyfile(source, options.file)
    except OSError as error:
        raise ConfigError(f"cannot write {options.file}: {error.strerror}") from error
    print(f"{options.file}: run it with `flowrl train {options.file}`")
    return 0


def _explain(given: list[str]) -> int:
    parser = _parser("explain", "print a plan as a tree; nothing runs")
    parser.add_argument("plan")
    plan = parser.parse_args(given).plan
    _, config = _load(plan)
    with config.build(plan=plan) as algorithm:
        try:
            print(algorithm.plan.explain())
        except Exception as error:
            return _tell(error)
    return 0


def _tell(error: Exception) -> int:
    from flowrl.training import tell_failure

    tell_failure(error)
    return 1


def _load(plan: str) -> tuple[Any, Any]:
    """A plan's module and its settings."""
    from flowrl.algorithms.config import AlgorithmConfig
    from flowrl.algorithms.plans import load_plan

    module = load_plan(plan)
    config = getattr(module, "config", None)
    if not isinstance(config, AlgorithmConfig):
        raise ConfigError(f"plan: {plan} has no `config`, an AlgorithmConfig")
    return module, config


def _train(given: list[str]) -> int:
    from flowrl.training import train

    if given[:1] == ["--resume"] or (given and given[0].startswith("--resume=")):
        return _resume(given)
    if given[:1] in (["-h"], ["--help"]):
        parser = argparse.ArgumentParser(
            prog="flowrl train",
            usage="flowrl train PLAN [--setting value …] | --resume RUN_DIR",
            epilog="`flowrl train PLAN --help` lists the settings of a plan; plans: `flowrl plans`",
        )
        _run_options(parser)
        parser.parse_args(given)
    if not given or given[0].startswith("-"):
        raise ConfigError("train: name a plan first, e.g. `flowrl train ppo`")
    plan, flags = given[0], given[1:]
    _, defaults = _load(plan)
    options, config = _parse_settings(plan, defaults, flags)
    _refuse_unused(config, defaults)
    command = ["flowrl", "train", *given]
    return train(config, plan, _stop_rules(options), options.run_dir, command)


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


def _run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "run",
        "It ends by the first of these rules that holds; where none is given, at the environment's "
        "own reward threshold or after 500,000 env steps.",
    )
    group.add_argument("--stop-reward", type=_finite, help="mean return of the last 100 episodes")
    group.add_argument("--stop-timesteps", type=_positive(int), help="env steps")
    group.add_argument("--stop-iters", type=_positive(int), help="iterations")
    group.add_argument("--stop-time-s", type=_positive(float), help="seconds")


def _mapping(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is needed, got {text}")
    return value


def _stop_rules(options: argparse.Namespace) -> Any:
    from flowrl.training import Stop

    return Stop(
        options.stop_reward, options.stop_timesteps, options.stop_iters, options.stop_time_s
    )


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {text}")
    return value


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
        return value

    convert.__name__ = kind.__name__
    return convert


def _parse_settings(plan: str, defaults: Any, flags: list[str]) -> tuple[Any, Any]:
    """Run options and the plan's settings with the flags applied.

    Raises:
        ConfigError: unknown flag (the nearest is offered) or wrong value.
    """
    from flowrl.settings_flags import settings_from_flags

    parser = argparse.ArgumentParser(
        prog=f"flowrl train {plan}", add_help=False, allow_abbrev=False
    )
    _run_options(parser)
    parser.add_argument("--run-dir", type=Path, help="where to write (default: runs/…)")
    parser.add_argument("--env", help="environment: an id or a registered name")
    parser.add_argument("--env-config", type=_mapping, help="JSON object given to its creator")
    options, rest = parser.parse_known_args(flags)
    given = {k: v for k in ("env", "env_config") if (v := getattr(options, k)) is not None}
    defaults = defaults.updated(**given) if given else defaults
    if "-h" in rest or "--help" in rest:
        print(parser.format_help())
    return options, settings_from_flags(defaults, rest, f"flowrl train {plan}", vars(options))


def _resume(given: list[str]) -> int:
    from flowrl.training import train

    parser = _parser("train --resume", "go on with a run")
    parser.add_argument("--resume", type=Path, required=True, metavar="RUN_DIR")
    _run_options(parser)
    options = parser.parse_args(given)
    config, plan = _config_of_run(options.resume)
    command = ["flowrl", "train", *given]
    return train(config, plan, _stop_rules(options), options.resume, command, resume=True)


def _config_of_run(run_dir: Path) -> tuple[Any, str]:
    """The settings of a run: those that were saved, over what its plan and its flags say."""
    from flowrl.rundir import read_config, read_goal

    saved = read_config(run_dir)
    plan = saved.get("plan")
    if not isinstance(plan, str):
        raise ConfigError("config.json names no plan")
    _, config = _load(plan)
    command, _ = read_goal(run_dir)
    if any(part.startswith("--policies.") for part in command):  # they change code, not values
        _, config = _parse_settings(plan, config, command[command.index("train") + 2 :])
    return config.updated(**saved), plan


def _evaluate(given: list[str]) -> int:
    parser = _parser("evaluate", "play episodes with a trained policy, greedy and sampled")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--episodes", type=_positive(int), default=100, help="of each (100)")
    options = parser.parse_args(given)

    from flowrl.data.checkpoint import CheckpointError

    config, plan = _config_of_run(options.run_dir)
    with config.updated(num_workers=0).build(plan=plan) as algorithm:
        try:
            algorithm.restore_policies(options.run_dir / "checkpoint")
        except CheckpointError as error:
            print(f"flowrl: {error}", file=sys.stderr)
            return 1
        for name, explore in (("greedy", False), ("sampled", True)):
            try:
                told = algorithm.evaluate(options.episodes, explore, num_envs=16)
            except Exception as error:
                return _tell(error)
            print(
                f"{name:8} mean return {told['episode_reward_mean']:.1f} "
                f"(min {told['episode_reward_min']:.1f}, max {told['episode_reward_max']:.1f}, "
                f"std {told['episode_reward_std']:.1f}), mean length "
                f"{told['episode_len_mean']:.1f}, {told['episodes']} episodes"
            )
            for policy_id, mean in told["policy_reward_mean"].items():
                print(f"         policy {policy_id}: mean return {mean:.1f} of each of its agents")
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "evaluate": _evaluate,
    "explain": _explain,
    "plans": _plans,
    "copy": _copy,
    "version": _version,
}

if __name__ == "__main__":
    sys.exit(main())
