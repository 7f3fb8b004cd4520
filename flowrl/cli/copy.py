"""`flowrl copy PLAN FILE`: copy a shipped plan as a start for your own."""

from __future__ import annotations

import shlex
import shutil

from flowrl.cli.arguments import PLAN_HELP, Parser, file_path
from flowrl.errors import ConfigError
from flowrl.trainer.plan_files import is_shipped, plan_named, plan_path
from flowrl.trainer.tuned_examples import tuned_examples


def copy_command(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    parser = Parser(prog="flowrl copy", description="Copy a shipped plan as a start for your own.")
    parser.add_argument("plan", metavar="PLAN", type=plan_named, help=PLAN_HELP)
    parser.add_argument("file", type=file_path, metavar="FILE", help="the new file; must not exist")
    options = parser.parse_args(arguments)
    source = plan_path(options.plan)
    if options.file.suffix != ".py":
        raise ConfigError(f"{options.file}: the name of a plan file ends in .py")
    if options.file.exists():
        raise ConfigError(f"{options.file} already exists; choose another name")
    try:
        shutil.copyfile(source, options.file)
    except OSError as error:
        raise ConfigError(f"cannot write {options.file}: {error.strerror}") from error
    print(f"{options.file}: train it with `flowrl train {shlex.quote(str(options.file))}`")
    if is_shipped(options.plan) and any(tuned_examples(options.plan)):
        print(f"settings of {options.plan} for single environments: `flowrl tuned {options.plan}`")
    return 0
