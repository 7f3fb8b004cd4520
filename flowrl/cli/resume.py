"""`flowrl resume RUN_DIR`: continue a training run."""

from __future__ import annotations

import sys

from flowrl.cli.arguments import (
    Parser,
    add_checkpoint_option,
    add_trust_option,
    file_path,
    reject_settings,
)
from flowrl.cli.saved_runs import open_run, unused_settings_message
from flowrl.cli.stop_options import (
    add_display_option,
    add_report_option,
    add_stop_options,
    stop_rules_of,
)
from flowrl.errors import ConfigError


def resume_command(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    parser = Parser(prog="flowrl resume", description="Continue a training run.")
    parser.add_argument(
        "run",
        metavar="RUN_DIR",
        help="a run directory, or a checkpoint; one outside a run directory starts a new run",
    )
    add_checkpoint_option(parser)
    add_trust_option(parser, "the run")
    parser.add_argument(
        "--plan", help="plan file to continue with; required if the run's plan has changed"
    )
    parser.add_argument(
        "--run-dir",
        type=file_path,
        help="folder of the new run, if a checkpoint outside a run directory starts one",
    )
    add_stop_options(parser, default="the run's own stop rules")
    add_display_option(parser)
    add_report_option(parser)
    options, rest = parser.parse_known_args(arguments)
    if rest:
        reject_settings("resume", options.run, rest)
        parser.parse_args(arguments)  # raises: an unknown option
    from flowrl.cli.training_run import resume_run
    from flowrl.policies.devices import missing_reason

    run = open_run(options.run, options.checkpoint, options.plan, options.trust)
    if options.run_dir is not None and run.run_dir is not None:
        raise ConfigError(
            f"--run-dir: the run continues in {run.run_dir}; to start a new run from a checkpoint, "
            "copy the checkpoint's folder to a place outside the run directory"
        )
    if (reason := missing_reason(run.config.device)) is not None:
        remedy = f"Algorithm.from_checkpoint({str(options.run)!r}, config={{'device': 'cpu'}})"
        raise ConfigError(
            f"the run uses device={run.config.device!r}, which is not available: {reason}. In "
            f"Python, {remedy}.learn() continues it on the CPU"
        )
    stop = stop_rules_of(options)
    if options.plan is not None and (message := unused_settings_message(run, options.plan, stop)):
        print(f"flowrl: {message}", file=sys.stderr)
    command, replace_plan = ["flowrl", "resume", *arguments], options.plan is not None
    show = options.display, options.report
    return resume_run(run, stop, command, replace_plan, options.run_dir, *show)
