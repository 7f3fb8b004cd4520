"""`flowrl tuned`: list the environments for which plans have tuned settings."""

from __future__ import annotations

from flowrl.cli.arguments import Parser
from flowrl.errors import ConfigError
from flowrl.setting_values import nearest
from flowrl.trainer.plan_files import is_shipped, plan_named, shipped_plans
from flowrl.trainer.tuned_examples import tuned_example, tuned_examples, tuned_folder


def tuned_command(arguments: list[str]) -> int:
    """Run the command; return the exit code.

    Raises:
        ConfigError: the name is neither a plan nor an environment with tuned settings.
    """
    parser = Parser(
        prog="flowrl tuned",
        description="List the environments for which plans have tuned settings. `flowrl train "
        "PLAN --env ENV` uses them, unless --no-tuned is given.",
    )
    parser.add_argument(
        "name", nargs="?", metavar="PLAN|ENV", type=plan_named,
        help="only those of this plan or environment",
    )  # fmt: skip
    name = parser.parse_args(arguments).name
    examples = list(tuned_examples())
    if name is not None and not is_shipped(name):
        found = [tuned_example(plan, name) for plan in shipped_plans()]
        examples = [example for example in found if example is not None]
        if not examples:
            known = [*shipped_plans(), *(example.env for example in tuned_examples())]
            raise ConfigError(
                f"tuned: {name!r} is no plan, and no plan has tuned settings for this environment."
                f"{nearest(name, known)}"
            )
    elif name is not None:
        examples = list(tuned_examples(name))
    rows = [("plan", "environment", "env steps", "file")]
    for example in examples:
        steps = example.settings.get("total_timesteps")
        rows.append((example.plan, example.env, f"{steps:,}" if steps else "", str(example)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for plan, env, steps, file in rows:
        print(f"{plan:{widths[0]}}  {env:{widths[1]}}  {steps:>{widths[2]}}  {file}")
    print(f"in {tuned_folder()}")
    return 0
