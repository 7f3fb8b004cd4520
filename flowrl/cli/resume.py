"""`flowrl resume RUN_DIR`: continue a training run."""

from __future__ import annotations

from flowrl.cli.arguments import Parser, add_checkpoint_option, add_trust_option
from flowrl.cli.saved_runs import open_run
from flowrl.cli.stop_options import add_stop_options, stop_rules_of


def resume_command(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    parser = Parser(prog="flowrl resume", description="Continue a training run.")
    parser.add_argument(
        "run", help="a run directory, or a checkpoint; one outside a run directory starts a new run"
    )
    add_checkpoint_option(parser)
    add_trust_option(parser, "the run")
    parser.add_argument(
        "--plan", help="plan file to continue with; required if the run's plan has changed"
    )
    add_stop_options(parser, default="the run's own stop rules")
    options = parser.parse_args(arguments)
    from flowrl.cli.training_run import resume_run

    run = open_run(options.run, options.checkpoint, options.plan, options.trust)
    command = ["flowrl", "resume", *arguments]
    return resume_run(run, stop_rules_of(options), command, replace_plan=options.plan is not None)
