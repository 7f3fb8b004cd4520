"""`flowrl plans`: list the shipped plans."""

from __future__ import annotations

from flowrl.cli.arguments import Parser
from flowrl.trainer.plan_files import shipped_plans


def plans_command(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    parser = Parser(prog="flowrl plans", description="List the shipped plans.")
    parser.parse_args(arguments)
    plans = shipped_plans()
    width = max(map(len, plans))
    for name, summary in plans.items():
        print(f"{name:{width}} {summary}")
    return 0
