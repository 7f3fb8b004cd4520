"""`flowrl replay RUN_DIR`: run an asynchronous training again, in one process."""

from __future__ import annotations

import argparse
import sys
from bdb import BdbQuit
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.cli.arguments import Parser, add_trust_option, file_path, import_from_current_folder
from flowrl.cli.display import print_failure, printable
from flowrl.cli.saved_runs import settings_of
from flowrl.errors import ConfigError
from flowrl.iter.journal import ReplayError
from flowrl.trainer.runs.formatting import format_number
from flowrl.trainer.runs.replaying import NOT_REPLAYED, ItemBreakpoint, ReplayedResult, RunReplayer
from flowrl.trainer.runs.saved_run import read_config, read_setup

if TYPE_CHECKING:
    from flowrl.trainer.algorithm import Algorithm


def replay_command(arguments: list[str]) -> int:
    """Run the command; return the exit code.

    Raises:
        ConfigError: wrong usage, or the run has no journal.
    """
    parser = Parser(
        prog="flowrl replay",
        description="Run an asynchronous training again in this process, in the order in which its "
        "items arrived, and compare the results. Ends where the recording ends: at a resume, when "
        "a worker died, joined or left, or at the last result.",
    )
    parser.add_argument("run_dir", type=file_path, metavar="RUN_DIR", help="a run directory")
    parser.add_argument(
        "--until",
        type=_until,
        metavar="OPERATOR:N",
        help="stop in the debugger with the N-th item of an operator in the variable `item`; "
        "`flowrl diagnose RUN_DIR` lists the operators; if several have this name, an error lists "
        "their full names",
    )
    add_trust_option(parser, "the run")
    parser.add_argument("--plan", help="file of the run's plan, if it has moved")
    options = parser.parse_args(arguments)
    run_dir = options.run_dir
    with _build(run_dir, options.plan, options.trust) as algorithm:
        try:
            replay = RunReplayer(algorithm, run_dir, options.until)
            is_equal = _print_results(replay)
            if options.until is not None and replay.num_items < options.until.number:
                name, number = options.until
                print(f"{name} has returned {replay.num_items:,} items, fewer than {number:,}")
        except BdbQuit:
            print("stopped in the debugger")
            return 1
        except ReplayError as error:
            print(f"flowrl: {printable(error)}", file=sys.stderr)
            return 1
        except ConfigError:
            raise
        except Exception as error:
            print_failure(error)
            return 1
    return 0 if is_equal else 1


def _until(text: str) -> ItemBreakpoint:
    name, _, number = text.rpartition(":")
    if not name or not (number.isascii() and number.isdigit()) or int(number) < 1:
        raise argparse.ArgumentTypeError(
            f"must be an operator and a number from 1, such as Dequeue:10, got {text!r}"
        )
    return ItemBreakpoint(name, int(number))


def _build(run_dir: Path, plan: str | None, trust: bool) -> Algorithm:
    """Return the algorithm of a run as it started; the run may have no checkpoint."""
    read_config(run_dir)  # a clear error if this is not a run directory
    setup = read_setup(run_dir)
    if trust:
        import_from_current_folder()
    config, algorithm = settings_of(str(run_dir), setup, plan, trust)
    return config.updated(**NOT_REPLAYED).build_as(algorithm)


def _print_results(replay: RunReplayer) -> bool:
    """Print a line per result; return whether there are results, and all are equal to the run's."""
    print(f"{'iteration':>9}  {'env steps':>11}  {'mean return':>11}")
    num_compared = num_equal = 0
    for replayed in replay.results():
        num_compared += replayed.is_compared
        num_equal += replayed.is_compared and replayed.difference is None
        print(_line(replayed), flush=True)
    print(
        f"{num_equal} of {num_compared} results are equal to those of the run; "
        f"end: {printable(replay.end)}"
    )
    return num_equal == num_compared > 0


def _line(replayed: ReplayedResult) -> str:
    result, is_compared, difference = replayed
    line = (
        f"{result['training_iteration']:>9}  {result['timesteps_total']:>11,}  "
        f"{format_number(result['episode_reward_mean']):>11}  "
    )
    if not is_compared:
        return line + "(the run wrote no result)"
    return line + ("equal" if difference is None else f"differs in {difference}")
