"""`flowrl tuned`: list the environments for which plans have tuned settings."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from flowrl.cli.arguments import Parser
from flowrl.trainer.plan_files import plan_path
from flowrl.trainer.tuned_examples import tuned_examples, tuned_folder


def tuned_command(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    parser = Parser(
        prog="flowrl tuned",
        description="List the environments for which plans have tuned settings. `flowrl train "
        "PLAN --env ENV` uses them, unless --no-tuned is given.",
    )
    parser.add_argument("plan", nargs="?", default="*", help="only those of this plan")
    plan = parser.parse_args(arguments).plan
    if plan != "*":
        plan_path(plan)
    table = Table("plan", "environment", "env steps", "file", box=None, pad_edge=False)
    for example in tuned_examples(plan):
        steps = example.settings.get("total_timesteps")
        table.add_row(example.plan, example.env, f"{steps:,}" if steps else "", str(example))
    Console(soft_wrap=True).print(table)
    print(f"in {tuned_folder()}")
    return 0
