"""`flowrl train PLAN | FILE.py | FILE.yaml | --run=NAME`: start a training run."""

from __future__ import annotations

import argparse
import re

from flowrl.cli.arguments import (
    Parser,
    file_path,
    import_from_current_folder,
    json_object,
    with_flags,
)
from flowrl.cli.run_settings import (
    add_training_options,
    add_tuned_option,
    is_algorithm_run,
    parse_algorithm_run,
    parse_plan_run,
)
from flowrl.cli.stop_options import add_stop_options, stop_rules_of
from flowrl.errors import ConfigError, with_message
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.plan_files import plan_named
from flowrl.trainer.tuned_examples import tuned_example


def train_command(arguments: list[str]) -> int:
    """Run the command; return the exit code.

    `flowrl train --resume RUN_DIR` is another form of `flowrl resume RUN_DIR`.

    Raises:
        ConfigError: wrong usage; nothing was started.
    """
    first = arguments[0] if arguments else ""
    if first == "--resume" or first.startswith("--resume="):
        from flowrl.cli.resume import resume_command

        run_dir = [first.removeprefix("--resume=")] if "=" in first else []
        return resume_command([*run_dir, *arguments[1:]])
    if first in ("-h", "--help"):
        _help_parser().parse_args(arguments)
    if not first.endswith((".yaml", ".yml")) and any(map(_names_code, arguments)):
        import_from_current_folder()
    if first.endswith((".yaml", ".yml")):
        from flowrl.cli.yaml_runs import train_yaml

        return train_yaml(arguments)
    config: AlgorithmConfig | None = None
    try:
        if is_algorithm_run(arguments):
            if not first.startswith("-"):
                raise ConfigError(f"train: give either a plan ({first}) or --run, not both")
            plan = None
            options, config = parse_algorithm_run(arguments)
        elif not first or first.startswith("-"):
            raise ConfigError("train: name a plan first, for example `flowrl train ppo`")
        else:
            plan = plan_named(first)
            options, config = parse_plan_run(plan, arguments[1:])
        from flowrl.cli.training_run import start_run

        stop = stop_rules_of(options)
        example = tuned_example(plan, config.env) if plan is not None and options.tuned else None
        note = ""
        if example is not None:
            note = f"settings tuned for {example.env}: {example} (--no-tuned: without them)"
        command = ["flowrl", "train", *arguments]
        show = options.display, options.report, note
        return start_run(config, plan, stop, options.run_dir, command, *show)
    except ConfigError as error:
        names = [] if config is None else config.keys()
        raise with_message(error, with_flags(str(error), arguments, names)) from error


def _names_code(word: str) -> bool:
    """Return whether an argument contains an import path, such as `module:Id`."""
    return re.search(r"""(^|[="'])[^\W\d][\w.]*:[^\W\d]""", word) is not None


def _help_parser() -> argparse.ArgumentParser:
    """Return a parser that only prints the help of `flowrl train` without a plan."""
    parser = Parser(
        prog="flowrl train",
        usage="flowrl train PLAN [--setting value …] | FILE.py | FILE.yaml | --run=NAME …",
        description="Train an algorithm.",
        epilog="`flowrl plans` lists the plans, `flowrl train PLAN --help` the settings of one.",
    )
    add_stop_options(parser)
    add_tuned_option(parser)
    add_training_options(parser)
    group = parser.add_argument_group(
        "an algorithm by name", "Train an algorithm with its default settings instead of a plan's."
    )
    group.add_argument("--run", metavar="NAME", help="PPO, A2C, DQN, …")
    group.add_argument(
        "--env", help="id of a Gymnasium environment, a registered name, or module:Class"
    )
    group.add_argument("--config", type=json_object, default={}, help="settings as a JSON object")
    group.add_argument("--run-dir", type=file_path, help="output folder (default: runs/…)")
    return parser
