"""Numbers, counts, durations and paths as text."""

import math

import pytest

from flowrl.trainer.runs.formatting import format_count, format_number, format_path, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"), (1.0, "1.00"), (-0.0123, "-0.0123"), (23.456, "23.5"), (475.0, "475"),
        (-1234.5, "-1,234"), (1.5e-5, "1.5e-05"), (3.2e8, "3.20e+08"), (math.nan, "nan"),
        (99.94, "99.9"),        (99.97, "100"), (-99.97, "-100"),
    ],
)  # fmt: skip
def test_numbers_have_three_significant_digits(value, text):
    assert format_number(value) == text


def test_durations_have_minutes_and_hours():
    assert [format_seconds(s) for s in (5, 65, 3_725)] == ["0:05", "1:05", "1:02:05"]


def test_counts_have_a_singular():
    counts = [format_count(n, "worker") for n in (0, 1, 2, 1000)]
    assert counts == ["0 workers", "1 worker", "2 workers", "1,000 workers"]


def test_paths_in_the_current_folder_are_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert format_path(tmp_path / "runs" / "a") == "runs/a"
    assert format_path(tmp_path.parent / "b") == str(tmp_path.parent / "b")
