"""The command `flowrl`: dispatch to the module of each command.

Exit codes: 0 success, 1 failure, 2 wrong usage, 129 terminal closed, 130 interrupted,
141 output pipe closed, 143 terminated.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence

import flowrl
from flowrl.cli.arguments import Parser
from flowrl.cli.display import print_failure
from flowrl.errors import ConfigError
from flowrl.setting_values import nearest
from flowrl.settings import import_object
from flowrl.trainer.plan_files import is_shipped
from flowrl.trainer.runs.signal_handler import (
    INTERRUPTED,
    OUTPUT_CLOSED,
    discard_closed_output,
)

_USAGE = """usage: flowrl COMMAND …

  train PLAN [--setting value …]          Train a shipped plan or a plan file.
  train --run=PPO --env=… --config='{…}'  Train an algorithm with its default settings.
  train FILE.yaml                         Train the runs in a YAML file.
  resume RUN_DIR                          Continue a training run.
  evaluate RUN_DIR                        Play episodes with a trained policy.
  replay RUN_DIR                          Run an asynchronous training again, in one process.
  explain PLAN                            Print a plan as a tree without running it.
  check PLAN                              Find mistakes in a plan without running it.
  diagnose RUN_DIR                        Say what limits a running or finished run.
  plans                                   List the shipped plans.
  tuned [PLAN|ENV]                        List the environments with tuned settings.
  benchmark [NAME …]                      Train tuned examples with several seeds; compare scores.
  checkpoint inspect PATH                 Verify a checkpoint and show its contents.
  watch RUN_DIR …                         Show runs on a local web page.
  report RUN_DIR …                        Write runs as one HTML file.
  plot RUN_DIR …                          Draw learning curves, as SVG, PNG or PDF.
  tensorboard [FOLDER]                    Show the curves of runs in TensorBoard.
  copy PLAN FILE                          Copy a shipped plan as a start for your own.
  version, --version                      Print flowrl's version.

`flowrl COMMAND --help` shows the options of a command, `flowrl train PLAN --help` the settings of
a plan."""

# command -> import path of its function, which takes the arguments and returns the exit code
_COMMANDS = {
    "train": "flowrl.cli.train:train_command",
    "resume": "flowrl.cli.resume:resume_command",
    "evaluate": "flowrl.cli.evaluate:evaluate_command",
    "replay": "flowrl.cli.replay:replay_command",
    "explain": "flowrl.cli.explain:explain_command",
    "check": "flowrl.cli.check:check_command",
    "diagnose": "flowrl.cli.diagnose:diagnose_command",
    "plans": "flowrl.cli.plans:plans_command",
    "tuned": "flowrl.cli.tuned:tuned_command",
    "benchmark": "flowrl.cli.benchmark:benchmark_command",
    "checkpoint": "flowrl.cli.checkpoint:checkpoint_command",
    "watch": "flowrl.cli.watch:watch_command",
    "report": "flowrl.cli.report:report_command",
    "plot": "flowrl.cli.plot:plot_command",
    "tensorboard": "flowrl.cli.tensorboard:tensorboard_command",
    "copy": "flowrl.cli.copy:copy_command",
    "version": "flowrl.cli.main:version_command",
}

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# command of another library -> command of flowrl
_RENAMED = {"enjoy": "evaluate", "play": "evaluate", "rollout": "evaluate", "list": "plans"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code.

    Args:
        arguments: the command and its arguments; None uses those of the process.
    """
    runs_alone = arguments is None  # the process runs only this command
    if runs_alone:
        gc.disable()  # importing torch creates many objects that stay
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # the caller has closed it
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr):  # characters that the terminal does not have
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0 if arguments else 2
    name = "version" if arguments[0] == "--version" else arguments[0]
    if name not in _COMMANDS:
        print(f"flowrl: {_unknown_command(name, arguments[1:])}", file=sys.stderr)
        return 2
    try:
        command = import_object(_COMMANDS[name])
        if runs_alone:
            gc.freeze()  # the collections at the exit would visit the imported objects for 0.4 s
            gc.set_threshold(50_000, 20, 100)
            gc.enable()
        return _call(command, arguments[1:])
    except ConfigError as error:
        print_failure(error)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it
        discard_closed_output()
        return OUTPUT_CLOSED
    except PermissionError as error:
        if error.filename is None or getattr(error, "__notes__", None):
            raise  # by code of the user
        print_failure(ConfigError(f"cannot access {error.filename}: {error.strerror}"))
        return 2
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        print_failure(error)
        return 1


def _call(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Return the exit code of a command; raise BrokenPipeError here, not at the exit of the
    interpreter, if the reader of the output has closed it."""
    try:
        exit_code = command(arguments)
    except SystemExit:  # after --help
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return exit_code


def _unknown_command(name: str, rest: list[str]) -> str:
    """Return the message for an unknown command with the arguments after it."""
    if name == "export":
        return (
            "unknown command 'export'. Export a policy in Python: "
            "Policy.from_checkpoint(RUN_DIR).export(FILE)"
        )
    replacement = _RENAMED.get(name, "").split()
    if not replacement and (is_shipped(name) or name.endswith((".py", ".yaml", ".yml"))):
        replacement = ["train", name]
    if replacement:
        command = shlex.join(["flowrl", *replacement, *rest])
        return f"unknown command {name!r}. Use {command}"
    hint = nearest(name, list(_COMMANDS))
    return f"unknown command {name!r}{hint and '.'}{hint} (see flowrl --help)"


def version_command(arguments: list[str]) -> int:
    """Print flowrl's version."""

    parser = Parser(prog="flowrl version", description="Print flowrl's version.")
    parser.parse_args(arguments)
    print(f"flowrl {flowrl.__version__}")
    return 0
