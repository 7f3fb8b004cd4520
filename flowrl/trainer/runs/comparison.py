"""Compare the results of two runs that should be equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# groups and metrics that depend on time or on the machine, and what a replay leaves out
NOT_REPEATED = {
    "time_this_iter_s",
    "time_total_s",
    "timers",
    "diagnosis",
    "evaluation",
    "num_bytes_between_nodes",
}


def repeatable_metrics(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the metrics of a result that do not depend on time or machine."""
    for key, value in result.items():
        path = f"{prefix}{key}"
        if key in NOT_REPEATED:
            continue
        if isinstance(value, Mapping):
            yield from repeatable_metrics(value, f"{path}/")
        else:
            yield path, value


def first_difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> str | None:
    """Return the first metric that differs between two results of result.json, with its values, or
    None."""
    left, right = dict(repeatable_metrics(one)), dict(repeatable_metrics(two))
    for path in [*left, *(path for path in right if path not in left)]:
        if left.get(path) != right.get(path):
            return f"{path}: {left.get(path)!r} instead of {right.get(path)!r}"
    return None
