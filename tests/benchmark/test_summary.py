"""Scores over seeds and the tables that show them."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flowrl.benchmark.rows import BenchmarkRow, benchmark_rows, rows_named, shipped_tables
from flowrl.benchmark.summary import (
    NUM_RESAMPLES,
    cells,
    interquartile_mean,
    interval,
    markdown,
    read_results,
)
from flowrl.errors import ConfigError
from flowrl.trainer.tuned_examples import tuned_example

ROW = BenchmarkRow("t", "ppo", "A/b-v0", 1000, {"paper": 12.5}, threshold=20.0)


def write(folder, seed, score, reached, **more):
    values = {
        "seed": seed, "env_steps": 1000, "settings": ROW.checksum(), "curve": [[1000, 8.0, 10.0]],
        "score": score, "steps_to_threshold": reached, "seconds": 10.0 + seed, **more,
    }  # fmt: skip
    (folder / ROW.file_name(seed)).write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([3.0], 3.0),
        ([1.0, 2.0, 6.0], 3.0),
        ([100.0, 1.0, 2.0, 3.0], 2.5),
        ([9.0, 1.0, 2.0, 3.0, -50.0], 2.0),
        ([1, 2, 3, 4, 5, 6, 7, 80], 4.5),
    ],
)
def test_interquartile_mean_of_known_scores(scores, expected):
    assert interquartile_mean(scores) == expected


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_interquartile_mean_equals_the_trimmed_mean_of_scipy(scores):
    expected = stats.trim_mean(scores, 0.25)
    assert np.isclose(interquartile_mean(scores), expected, atol=1e-9 * np.abs(scores).max())


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8))
def test_interval_contains_what_its_resamples_can_be(scores):
    low, high = interval(scores)
    assert min(scores) - 1e-9 <= low <= high <= max(scores) + 1e-9


def test_interval_equals_the_percentile_bootstrap_of_scipy():
    scores = np.random.default_rng(1).normal(100, 20, 10)
    expected = stats.bootstrap(
        (scores,), interquartile_mean, n_resamples=20_000, vectorized=False, method="percentile",
        random_state=0,
    ).confidence_interval  # fmt: skip
    assert np.allclose(interval(scores), expected, atol=1.0)  # of two random resamplings


def test_interval_equals_that_of_scipys_trimmed_means_of_the_same_samples():
    scores = np.random.default_rng(1).normal(100, 20, 10)
    samples = np.random.default_rng(0).choice(scores, (NUM_RESAMPLES, 10))
    means = stats.trim_mean(samples, 0.25, axis=1)
    np.testing.assert_allclose(interval(scores), np.quantile(means, [0.025, 0.975]), rtol=1e-12)


def test_results_of_other_settings_are_left_out(tmp_path):
    for seed, checksum in enumerate((ROW.checksum(), "other", ROW.checksum())):
        write(tmp_path, seed, 1.0, None, settings=checksum)
    assert [result["seconds"] - 10 for result in read_results(ROW, tmp_path)] == [0, 2]


def test_interval_narrows_with_more_runs():
    rng = np.random.default_rng(0)
    few, many = (interval(rng.normal(size=n)) for n in (5, 200))
    assert many[1] - many[0] < few[1] - few[0]


def test_cells_of_a_row(tmp_path):
    for seed, (score, reached) in enumerate([(10.0, 400), (11.0, None), (90.0, 600)]):
        write(tmp_path, seed, score, reached)
    table = markdown([ROW], tmp_path).splitlines()
    assert len(table) == 3
    assert table[2].split(" | ") == [
        "| A/b-v0", "ppo", "1,000", "paper 12.5", "37.0 (10.0 to 90.0)", "10.0, 90.0",
        "20: 500 (2 of 3)", "11", "3 |",
    ]  # fmt: skip


def test_steps_to_another_threshold_are_not_shown(tmp_path):
    for seed, threshold in enumerate((5.0, ROW.threshold)):
        write(tmp_path, seed, 10.0, 100 + 300 * seed, threshold=threshold)
    assert cells(ROW, read_results(ROW, tmp_path))[6] == "20: 400"
    assert cells(ROW, read_results(ROW, tmp_path)[:1])[6] == ""


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"plan": ', r"seed0\.json contains no result: remove it to train again"),
        ("[1]", "contains no result"),
        ('{"score": 1.0}', r"contains no result: .* \(seed: field required\)"),
    ],
)
def test_files_without_a_result_are_named(tmp_path, text, match):
    (tmp_path / ROW.file_name(0)).write_text(text)
    with pytest.raises(ConfigError, match=match):
        read_results(ROW, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("curve", []),
        ("curve", [[1]]),
        ("score", "x"),
        ("score", None),
        ("score", float("nan")),
        ("seconds", -1.0),
        ("env_steps", "a"),
        ("settings", None),
    ],
)
def test_fields_of_a_result_are_checked(tmp_path, name, value):
    write(tmp_path, 0, **{"score": 1.0, "reached": None, name: value})
    with pytest.raises(ConfigError, match=rf"seed0\.json contains no result: .*\({name}"):
        read_results(ROW, tmp_path)


def test_checksum_contains_the_plan_file(tmp_path):
    file = tmp_path / "plan.py"
    file.write_text("a = 1")
    row = BenchmarkRow("t", str(file), "CartPole-v1", 100, {})
    before = row.checksum()
    file.write_text("a = 2")
    assert row.checksum() != before


def test_row_without_results_is_not_run():
    assert cells(ROW, [])[4:] == ["not run", "", "", "", "0"]


def test_every_row_has_a_tuned_example():
    rows = benchmark_rows(shipped_tables())
    assert len({row.name for row in rows}) == len(rows) > 20
    for row in rows:
        example = tuned_example(row.plan, row.env)
        assert example is not None
        assert example.settings["total_timesteps"] == row.env_steps


def test_names_of_tables_and_rows():
    assert {row.table for row in rows_named(["classic"], shipped_tables())} == {"classic"}
    assert [row.name for row in rows_named(["sac/Pendulum-v1"], shipped_tables())] == [
        "sac/Pendulum-v1"
    ]
    assert rows_named([], shipped_tables()) == benchmark_rows(shipped_tables())
    with pytest.raises(ConfigError, match="Did you mean 'classic'"):
        rows_named(["clasic"], shipped_tables())


def test_row_that_is_in_two_tables_is_rejected(tmp_path):
    row = "- {plan: ppo, env: CartPole-v1, env_steps: 10, published_scores: {}}"
    (tmp_path / "rows.yaml").write_text(f"a:\n  {row}\nb:\n  {row}\n")
    with pytest.raises(ConfigError, match="several rows ppo/CartPole-v1"):
        benchmark_rows(tmp_path / "rows.yaml")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "must contain tables: name -> list of rows"),
        ("a: {plan: ppo}", "must contain tables"),
        ("a/b: []", "the name of a table must be a plain word, got 'a/b'"),
        ("2024: []", "must be a plain word, got 2024"),
        ("a: [5]", "row 1 of 'a' must be a mapping, got 5"),
        ("a: [{plan: ppo, treshold: 5}]", "unknown field 'treshold'. Did you mean 'threshold'"),
        ("a: [{plan: ppo, env_steps: 5}]", "row 1 of 'a' lacks env, published_scores"),
        ("a: [{ROW, env_steps: 0}]", "env_steps must be an int of at least 1, got 0"),
        ("a: [{ROW, env_steps: .inf}]", "env_steps must be an int of at least 1, got inf"),
        ("a: [{ROW, env_steps: 5, threshold: .nan}]", "threshold must be a number, got nan"),
        ("a: [{ROW, env_steps: 5, threshold: high}]", "threshold must be a number, got 'high'"),
        ("a: [{ROW, env_steps: 5, explore: 'no'}]", "explore must be true or false, got 'no'"),
        (
            "a: [{env: A, plan: ppo, env_steps: 5, published_scores: null}]",
            "published_scores must be a mapping",
        ),
        (
            "a: [{env: A, plan: ppo, env_steps: 5, published_scores: {x: y}}]",
            "published_scores must be a mapping",
        ),
        ("a: [{env: A, plan: pp0, env_steps: 5, published_scores: {}}]", "Did you mean 'ppo'"),
        ("a: []\na: []", "the key 'a' occurs twice"),
    ],
)
def test_invalid_tables_are_rejected(tmp_path, text, match):
    file = tmp_path / "rows.yaml"
    file.write_text(text.replace("ROW", "plan: ppo, env: A, published_scores: {}"))
    with pytest.raises(ConfigError, match=match):
        benchmark_rows(file)


def test_env_steps_may_have_an_exponent(tmp_path):
    (tmp_path / "rows.yaml").write_text(
        "a: [{plan: ppo, env: A, published_scores: {}, env_steps: 1e5}]"
    )
    (row,) = benchmark_rows(tmp_path / "rows.yaml")
    assert (row.env_steps, type(row.env_steps)) == (100_000, int)
    with pytest.raises(ConfigError, match=r"`flowrl benchmark --list --tables .*rows\.yaml` shows"):
        rows_named(["b"], tmp_path / "rows.yaml")
