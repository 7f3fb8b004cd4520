"""Types and options of command-line arguments that several commands share."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flowrl.data.json_text import parse_json
from flowrl.errors import ConfigError
from flowrl.setting_values import nearest, whole_number
from flowrl.trainer.registry import algorithms_with

_STOP = ("--stop", "--stop-reward", "--stop-timesteps", "--stop-iters", "--stop-time-s")
_SAVED = ("--checkpoint", "--plan", "--trust")
_TRAIN = ("--run-dir", "--display", "--trace", "--report", "--in-process", *_STOP)
OPTIONS = {
    "train": ("--run", "--env", "--config", "--no-tuned", *_TRAIN),
    "train FILE.yaml": ("--only", "--seed", "--trust", *_TRAIN),
    "resume": ("--run-dir", "--display", "--report", *_SAVED, *_STOP),
    "evaluate": ("--episodes", "--seed", "--render", "--video", *_SAVED),
    "checkpoint": ("--json",),
    "plot": ("--metric", "--output"),
    "report": ("--output",),
    "watch": ("--port",),
    "replay": ("--until", "--plan", "--trust"),
    "explain": ("--env",),
    "check": ("--env",),
    "benchmark": ("--list", "--seeds", "--jobs", "--against", "--results", "--runs", "--tables"),
}
"""Command -> its options that are not settings, for errors of other commands."""


ENV_HELP = "the environment (default: that of the plan's config)"
PLAN_HELP = "a shipped plan (`flowrl plans` lists them), or a plan file"


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"""not JSON ({error}), such as '{{"size": 5}}': {text}"""
        ) from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def file_path(text: str) -> Path:
    """Parse the path of a file or folder."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path, got ''")
    return Path(os.path.expanduser(text))  # "./~" and the home of an unknown user stay


def finite_float(text: str) -> float:
    """Parse a finite number."""
    try:
        if not text.isascii():
            raise ValueError("digits of another script")
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text}") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    return value


def positive_float(text: str) -> float:
    """Parse a positive finite number."""
    value = finite_float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def count(text: str) -> int:
    """Parse a whole number from 1, such as 100000, 100_000 or 1e5."""
    value = whole_number(text)
    if value is None:
        raise argparse.ArgumentTypeError(
            f"must be a whole number such as 100000 or 1e5, got {text}"
        )
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def commands_with(option: str) -> str:
    """Return a clause about the commands that have an option, such as `--run is an option of
    flowrl train`, or ""."""
    *others, last = [name for name, options in OPTIONS.items() if option in options] or [""]
    commands = f"{', '.join(others)} and {last}" if others else last
    return f"{option} is an option of flowrl {commands}" if last else ""


def reject_settings(command: str, run: str, arguments: Sequence[str]) -> None:
    """Raise ConfigError if an argument is a flag for settings, which a saved run has already.

    Args:
        command: "resume" or "evaluate".
        run: path of the run.
        arguments: those that are no options of the command.
    """
    from flowrl.trainer.checkpoint_saving import FIXED_SETTINGS

    method = {"resume": "learn(total_timesteps=…)", "evaluate": "evaluate()"}[command]
    for word in arguments:
        flag, _, value = word.partition("=")
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        if command == "resume" and name == "total_timesteps":
            value = value or next(iter(arguments[arguments.index(word) + 1 :]), "")
            raise ConfigError(f"{flag}: use --stop-timesteps {value}".rstrip())
        if name == "run":
            raise ConfigError(
                f"{commands_with(flag)}; flowrl {command} uses the algorithm of the run"
            )
        if name == "env":
            change = "env=…"
            if command == "evaluate":  # also if the run has no env, only spaces
                change = 'config={"evaluation_config": {"env": …}}'
            raise ConfigError(
                f"{commands_with(flag)}; flowrl {command} uses the environment of the run. For "
                "another one with the same spaces, use Python: "
                f"Algorithm.from_checkpoint({run!r}, {change}).{method}"
            )
        if name in FIXED_SETTINGS and command == "evaluate":
            raise ConfigError(
                f"{flag}: flowrl evaluate plays all episodes in this process; the setting does not "
                "apply"
            )
        if name in FIXED_SETTINGS:
            raise ConfigError(
                f"{flag}: flowrl resume keeps this setting, because each worker and environment "
                "continues from its own state. To train the policies of the run with another "
                "value, use Python: build a new algorithm, and call its "
                f"restore_policies({run!r})"
            )
        if name == "config" or algorithms_with(name.split(".")[0]):
            from flowrl.policies.json_codec import text_of_changes

            change = "{…}" if name == "config" else text_of_changes([name])
            raise ConfigError(
                f"{flag}: flowrl {command} uses the settings of the run; to change them, use "
                f"Python: Algorithm.from_checkpoint({run!r}, config={change}).{method}; with "
                "trust=True if the run needs --trust"
            )


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ConfigErrors in one line; options are not abbreviated."""

    def __init__(self, **kwargs: Any):
        super().__init__(**{"allow_abbrev": False, **kwargs})
        # argparse takes -1e3 for an option
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; options may be spelled with underscores, as settings may."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._spelled(word) for word in words], namespace)

    def _spelled(self, word: str) -> str:
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        return f"{dashed}{equals}{value}" if dashed in self._option_string_actions else word

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the option, its value and what is expected."""
        text = message
        if match := re.match(r"unrecognized arguments: (\S+)", message):
            name = match[1].partition("=")[0]
            text = f"unexpected argument {name!r}"
            if name.startswith("-"):
                text = self._unknown_option(name)
        elif match := re.match(r"the following arguments are required: (.*)", message):
            text = f"{match[1]} is missing"
        elif match := re.match(r"argument ([^:]+): (.*)", message, re.DOTALL):
            text = f"{match[1]}: {_PROBLEMS.get(match[2], match[2])}"
            if choice := re.search(r"invalid choice: (.*) \(choose from (.*)\)", text):
                text = f"{match[1]}: must be {choice[2]}, got {choice[1]}"
                text = text.replace("'", "")
            elif value := re.search(r"invalid \w+ value: (.*)", text):
                text = f"{match[1]}: must be a whole number, got {value[1]}"
        raise ConfigError(f"{text} (see {self.prog} --help)")

    def _unknown_option(self, name: str) -> str:
        own = [o for o in self._option_string_actions if o.startswith("--") and o != "--help"]
        elsewhere = commands_with(name)
        if not elsewhere and algorithms_with(name.lstrip("-").replace("-", "_").split(".")[0]):
            elsewhere = f"{name} is a setting, for flowrl train"
        if elsewhere:
            return f"{elsewhere}; {self.prog} has {', '.join(own) or 'no options'}"
        hint = nearest(name, own).replace("'", "")
        return f"unknown option {name}.{hint}".rstrip(".")


# message of argparse -> message of flowrl
_PROBLEMS = {
    "expected one argument": "needs a value",
    "expected at least one argument": "needs a value",
}


def with_flags(message: str, arguments: Sequence[str], settings: Collection[str]) -> str:
    """Return the message of a ConfigError with flags in place of names of settings.

    >>> with_flags("lr: must be positive: set num_workers=2", ["--lr", "-1"], ["num_workers"])
    '--lr: must be positive: set --num-workers 2'

    Calls of functions stay as they are:

    >>> with_flags("chain combine(ConcatBatches(64, num_workers=2))", [], ["num_workers"])
    'chain combine(ConcatBatches(64, num_workers=2))'

    Args:
        message: the message.
        arguments: of the command; only what they set is named as a flag at the start of a message.
        settings: names that may be followed by `=value`.
    """
    given = {word[2:].split("=")[0].replace("-", "_") for word in arguments if word[:2] == "--"}

    def at_start(match: re.Match[str]) -> str:
        path = match[2].rstrip("_")
        return f"{match[1]}--{path.replace('_', '-')}: " if path in given else match[0]

    def with_value(match: re.Match[str]) -> str:
        if match[1] not in settings:
            return match[0]
        flag = match[1].rstrip("_").replace("_", "-")
        return {"True": f"--{flag}", "False": f"--no-{flag}"}.get(match[2], f"--{flag} {match[2]}")

    message = re.sub(r"(^|; )([a-z][\w.]*): ", at_start, message)
    value = r"(?<![\w(])([a-z]\w*)=(True|False|[\w.\[{\"'-]+)"
    return re.sub(rf"\w\([^()]*\)|{value}", with_value, message)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments RUN_DIR …, see `find_runs`."""
    parser.add_argument(
        "runs",
        type=file_path,
        nargs="+",
        metavar="RUN_DIR",
        help="run directories, or folders of them",
    )


def add_checkpoint_option(parser: argparse.ArgumentParser) -> None:
    """Add `--checkpoint`, see `flowrl.trainer.runs.saved_run.find_checkpoint`."""
    parser.add_argument(
        "--checkpoint",
        metavar="NUMBER",
        help="number of a checkpoint, or 'best' by checkpoint_score_attribute (default: newest)",
    )


def import_from_current_folder() -> None:
    """Let import paths such as `--env module:Id` name modules of the current folder.

    Call it only for code that the user named or trusts: a module there could otherwise take the
    place of an optional package.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def add_trust_option(parser: argparse.ArgumentParser, source: str) -> None:
    """Add `--trust`, see `flowrl.trainer.trust`.

    Args:
        parser: the parser.
        source: what names the code, for the help.
    """
    parser.add_argument(
        "--trust",
        action="store_true",
        help=f"import and execute the code that {source} names: a plan file, an environment "
        "module:Id or module:Class, a model module:Class",
    )
