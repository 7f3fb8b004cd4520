"""`flowrl resume RUN_DIR`: continue a training run."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowrl.cli.arguments import add_checkpoint_option, add_trust_option
from flowrl.cli.run_settings import config_of_run
from flowrl.cli.stop_options import add_stop_options, stop_rules_of
from flowrl.trainer.runs.saved_run import find_checkpoint


def resume_command(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(prog="flowrl resume", description="Continue a training run.")
    parser.add_argument("run_dir", type=Path)
    add_checkpoint_option(parser)
    add_trust_option(parser, "the run")
    parser.add_argument(
        "--plan", help="plan file to continue with; required if the run's plan has changed"
    )
    add_stop_options(parser, default="the run's own stop rules")
    options = parser.parse_args(arguments)
    from flowrl.cli.training_run import resume_run

    config, plan = config_of_run(options.run_dir, options.plan, options.trust)
    checkpoint = None
    if options.checkpoint is not None:
        checkpoint = find_checkpoint(options.run_dir, options.checkpoint)
    return resume_run(
        config,
        plan,
        stop_rules_of(options),
        options.run_dir,
        checkpoint,
        replace_plan=options.plan is not None,
    )
