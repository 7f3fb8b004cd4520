"""Types and options of command-line arguments that several commands share."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def finite_float(text: str) -> float:
    """Parse a finite number."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text}") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    return value


def positive_number(number_type: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser of positive finite numbers of a type, such as `int`."""

    def parse(text: str) -> Any:
        value = number_type(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
        return value

    parse.__name__ = number_type.__name__  # argparse names the type in its messages
    return parse


def add_checkpoint_option(parser: argparse.ArgumentParser) -> None:
    """Add `--checkpoint`, see `flowrl.trainer.runs.run_directory.find_checkpoint`."""
    parser.add_argument(
        "--checkpoint",
        metavar="NUMBER",
        help="number of a checkpoint, or 'best' by checkpoint_score_attribute (default: newest)",
    )


def import_from_current_folder() -> None:
    """Let import paths such as `--env module:Id` name modules of the current folder.

    Call it only for code that the user named or trusts: a module there could otherwise take the
    place of an optional package.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def add_trust_option(parser: argparse.ArgumentParser, source: str) -> None:
    """Add `--trust`, see `flowrl.trainer.trust`.

    Args:
        parser: the parser.
        source: what names the code, for the help.
    """
    parser.add_argument(
        "--trust",
        action="store_true",
        help=f"import and execute the code that {source} names: a plan file, an environment "
        "module:Id or module:Class, a model module:Class",
    )
