"""Text for the terminal: numbers, counts, durations, paths, and warnings."""

from __future__ import annotations

import math
import sys
from pathlib import Path


def format_number(value: float) -> str:
    """Return a number with three significant digits, or more for large integers."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e7:
        return f"{value:.2e}"
    if abs(value) >= 99.95:  # three digits would be 100
        return f"{value:,.0f}"
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:#.3g}"


def format_seconds(seconds: float) -> str:
    """Return a duration as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> format_count(1, "worker"), format_count(2000, "episode")
    ('1 worker', '2,000 episodes')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_path(path: Path) -> str:
    """Return a path; one in the current folder without that folder."""
    current = Path.cwd()
    return str(path.relative_to(current) if path.is_relative_to(current) else path)


def print_warning(message: str) -> None:
    """Print a message to stderr."""
    print(f"flowrl: {message}", file=sys.stderr, flush=True)


class FailureWarnings:
    """Prints the first failure of each kind, and the first success after it; see `print_warning`.

    For failures that repeat, such as those of a full disk.
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._recovered: set[str] = set()

    def failed(self, kind: str, message: str) -> None:
        """Print the message if this is the first failure of its kind."""
        if kind not in self._failed:
            print_warning(f"{message}; further failures are not reported")
        self._failed.add(kind)

    def succeeded(self, kind: str, message: str) -> None:
        """Print the message if this is the first success of its kind after a failure."""
        if kind in self._failed - self._recovered:
            print_warning(message)
            self._recovered.add(kind)
