"""`flowrl check PLAN`: find mistakes in a plan without running it."""

from __future__ import annotations

from flowrl.cli.arguments import (
    ENV_HELP,
    PLAN_HELP,
    Parser,
    import_from_current_folder,
)
from flowrl.cli.display import print_failure, printable
from flowrl.errors import ConfigError
from flowrl.monitoring.plan_check import check_plan
from flowrl.trainer.plan_files import plan_named
from flowrl.trainer.plan_settings import plan_config


def check_command(arguments: list[str]) -> int:
    """Run the command; return the exit code, 1 if there are findings."""
    parser = Parser(
        prog="flowrl check",
        description="Find mistakes in a plan without running it: branches that nothing uses, "
        "operators that are missing, asynchronous rollouts of an on-policy algorithm.",
    )
    parser.add_argument("plan", metavar="PLAN", type=plan_named, help=PLAN_HELP)
    parser.add_argument("--env", metavar="ENV", help=ENV_HELP)
    options = parser.parse_args(arguments)
    plan = options.plan
    if ":" in (options.env or ""):
        import_from_current_folder()
    with plan_config(plan, options.env).build(plan=plan) as algorithm:
        try:
            problems = check_plan(algorithm.plan.stage, algorithm.workers)
        except ConfigError:
            raise
        except Exception as error:
            print_failure(error)
            return 1
    for problem in problems:
        print(printable(problem))
    print(f"{len(problems) or 'no'} problem{'' if len(problems) == 1 else 's'} in {plan}")
    return 1 if problems else 0
