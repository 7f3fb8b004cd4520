"""`flowrl explain PLAN`: print a plan as a tree."""

from __future__ import annotations

from flowrl.cli.arguments import (
    ENV_HELP,
    PLAN_HELP,
    Parser,
    import_from_current_folder,
)
from flowrl.cli.display import print_failure
from flowrl.errors import ConfigError
from flowrl.trainer.plan_files import plan_named
from flowrl.trainer.plan_settings import plan_config


def explain_command(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    parser = Parser(prog="flowrl explain", description="Print a plan as a tree without running it.")
    parser.add_argument("plan", metavar="PLAN", type=plan_named, help=PLAN_HELP)
    parser.add_argument("--env", metavar="ENV", help=ENV_HELP)
    options = parser.parse_args(arguments)
    plan = options.plan
    if ":" in (options.env or ""):
        import_from_current_folder()
    with plan_config(plan, options.env).build(plan=plan) as algorithm:
        try:
            explanation = algorithm.plan.explain()
        except ConfigError:
            raise
        except Exception as error:
            print_failure(error)
            return 1
    print(explanation)
    return 0
