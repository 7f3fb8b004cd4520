"""Tuned examples still reach nine tenths of their recorded scores."""

from pathlib import Path

import numpy as np
import pytest

from flowrl.benchmark.rows import benchmark_rows, shipped_tables
from flowrl.benchmark.run import result_of, train_flowrl
from flowrl.benchmark.summary import LIBRARIES, interquartile_mean, read_result

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MAX_SECONDS = 300  # of a training that is repeated here


def recorded():
    """Yield the rows that train in minutes, with their recorded scores."""
    for row in benchmark_rows(shipped_tables()):
        results = [read_result(path) for path in row.result_files(RESULTS)]
        if results and np.median([result["seconds"] for result in results]) <= MAX_SECONDS:
            yield pytest.param(row, [result["score"] for result in results], id=row.name)


def test_there_are_recorded_scores():
    assert len(list(recorded())) >= 1


def test_recorded_scores_are_of_the_present_settings():
    """A changed tuned example needs new results."""
    rows = {}
    for row in benchmark_rows(shipped_tables()):
        for library in LIBRARIES:
            rows |= dict.fromkeys(row.result_files(RESULTS, library), (row, library))
    assert rows.keys() == set(RESULTS.glob("*-seed*.json"))
    for path, (row, library) in rows.items():
        assert row.has_current_settings(read_result(path), library), path


@pytest.mark.seeds
@pytest.mark.timeout(4 * MAX_SECONDS)
@pytest.mark.parametrize(("row", "scores"), list(recorded()))
def test_score_is_near_the_recorded_one(row, scores, tmp_path):
    result = result_of(row, 7, train_flowrl(row, 7, tmp_path / "run"))
    expected = interquartile_mean(scores)
    assert result["score"] >= expected - 0.1 * abs(expected)


def test_files_with_other_names_are_not_results(tmp_path):
    row = benchmark_rows(shipped_tables())[0]
    for name in (row.file_name(0), row.file_name(10), row.file_name(0).replace("0", "0-old")):
        (tmp_path / name).write_text("{}")
    found = row.result_files(tmp_path)
    assert [path.name for path in found] == [row.file_name(0), row.file_name(10)]
