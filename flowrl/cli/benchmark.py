"""`flowrl benchmark`: train tuned examples with several seeds, and compare their scores."""

from __future__ import annotations

import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from flowrl.benchmark.rows import BenchmarkRow, benchmark_rows, rows_named, shipped_tables
from flowrl.benchmark.summary import COLUMNS, cells, markdown, read_results
from flowrl.cli.arguments import Parser, count
from flowrl.cli.plot import draw
from flowrl.errors import check_installed
from flowrl.settings import ConfigError
from flowrl.trainer.runs.learning_curves import mean_curve


def benchmark_command(arguments: list[str]) -> int:
    """Run the command; return the exit code, 1 if a training failed.

    Raises:
        ConfigError: a name is unknown, or the folder cannot be written.
    """
    parser = Parser(
        prog="flowrl benchmark",
        description="Train tuned examples with several seeds and evaluate each. A run that was "
        "interrupted continues; one whose result exists is not repeated. Writes one JSON file per "
        "run, and a table and learning curves per table.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="tables or rows; default: all")
    parser.add_argument("--list", action="store_true", help="list the rows; train nothing")
    parser.add_argument("--seeds", type=count, default=5, help="runs per row (default: 5)")
    parser.add_argument("--jobs", type=count, default=1, help="runs at the same time (default: 1)")
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results"),
        help="folder of the results (default: benchmarks/results)",
    )  # fmt: skip
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/benchmark"),
        help="folder of the run directories (default: runs/benchmark)",
    )  # fmt: skip
    parser.add_argument(
        "--tables", type=Path, default=shipped_tables(), metavar="FILE",
        help="YAML file with the tables (default: the shipped ones)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    tables: Path = options.tables.resolve()
    rows = rows_named(options.names, tables)
    if options.list:
        for row in rows:
            known = ", ".join(f"{source} {value:g}" for source, value in row.anchors.items())
            print(f"{row.table:8} {row.name:30} {row.env_steps:>12,} env steps   {known}")
        return 0
    check_installed("matplotlib", "flowrl benchmark", extra="plot")
    results: Path = options.results
    try:
        for folder in (results, options.runs):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"benchmark: cannot create {error.filename}: {error.strerror}") from error
    missing = [
        (row, seed)
        for row in rows
        for seed in range(options.seeds)
        if not (results / row.file_name(seed)).exists()
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        ended = list(
            pool.map(lambda run: _train(tables, run[0], run[1], options.runs, results), missing)
        )
    _write_tables(tables, results)
    for row in rows:
        texts = zip(COLUMNS, cells(row, read_results(row, results)), strict=True)
        print("  ".join(f"{column}: {text}" for column, text in texts if text))
    return 0 if all(ended) else 1


def _train(tables: Path, row: BenchmarkRow, seed: int, runs: Path, results: Path) -> bool:
    """Train a row with one seed in a process; return whether its result was written."""
    run_dir = runs / row.file_stem / f"seed-{seed}"
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    path = results / row.file_name(seed)
    command = [sys.executable, "-m", "flowrl.benchmark.run", str(tables), row.name, str(seed)]
    command += [str(run_dir), str(path)]
    log = run_dir.with_suffix(".log")
    with open(log, "a") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        print(f"{row.name}, seed {seed}: failed, see {log}: {shlex.join(command)}", flush=True)
        return False
    (result,) = [one for one in read_results(row, results) if one["seed"] == seed]
    print(
        f"{row.name}, seed {seed}: score {result['score']:.1f} after {result['env_steps']:,} env "
        f"steps in {result['seconds']:.0f} s",
        flush=True,
    )
    return True


def _write_tables(tables: Path, results: Path) -> None:
    """Write a table and learning curves of each table that has results."""
    all_rows = benchmark_rows(tables)
    for table in dict.fromkeys(row.table for row in all_rows):
        rows = [row for row in all_rows if row.table == table and read_results(row, results)]
        if not rows:
            continue
        (results / f"{table}.md").write_text(markdown(rows, results))
        for row in rows:
            curves = [np.array(r["curve"], float)[:, :2].T for r in read_results(row, results)]
            curve = mean_curve(f"{row.plan} on {row.env}", [(c[0], c[1]) for c in curves])
            draw([curve], "mean return", results / f"{row.file_stem}.svg")
