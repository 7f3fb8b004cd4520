"""Types of command-line arguments."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from typing import Any


def mapping(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is needed, got {text}")
    return value


def finite(text: str) -> float:
    """A number that is neither NaN nor infinite."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text}") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {text}")
    return value


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A number above 0, made by `kind`."""

    def convert(text: str) -> Any:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
        return value

    convert.__name__ = kind.__name__
    return convert


Rule = tuple[str, str, float]


def rules(text: str) -> list[Rule]:
    """`METRIC=VALUE`, `METRIC>=VALUE`, `METRIC<=VALUE`, or a JSON object of metrics and values."""
    if text.lstrip().startswith("{"):
        return rules_of(mapping(text))
    found = re.fullmatch(r"\s*([^<>=\s]+)\s*(>=|<=|=)\s*([^=\s]+)\s*", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"a metric and the value that ends the run are needed, METRIC=VALUE, got {text!r}"
        )
    name, relation, value = found.groups()
    return [(name, "<=" if relation == "<=" else ">=", finite(value))]


def rules_of(told: Any) -> list[Rule]:
    """Rules from a mapping of metrics (`a/b`, or `a/b<=`) to values."""
    if not isinstance(told, dict):
        raise argparse.ArgumentTypeError(f"stop: metrics and their values are needed, got {told!r}")
    made: list[Rule] = []
    for name, value in told.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise argparse.ArgumentTypeError(f"stop: {name}: a number is needed, got {value!r}")
        if not isinstance(name, str):
            raise argparse.ArgumentTypeError(f"stop: the name of a metric is needed, got {name!r}")
        made += rules(f"{name}{'' if name.rstrip().endswith('=') else '='}{value}")
    return made
