"""`flowrl benchmark`: train tuned examples with several seeds, and compare their scores."""

from __future__ import annotations

import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from flowrl.benchmark import sb3
from flowrl.benchmark.processes import Processes
from flowrl.benchmark.rows import (
    BenchmarkRow,
    benchmark_rows,
    check_settings,
    rows_named,
    shipped_tables,
)
from flowrl.benchmark.summary import (
    COLUMNS,
    LIBRARIES,
    cells,
    read_result,
    read_results,
    write_tables,
)
from flowrl.cli.arguments import Parser, count, file_path
from flowrl.errors import ConfigError, check_installed
from flowrl.trainer.runs.formatting import format_count
from flowrl.trainer.runs.signal_handler import ENDED_BY_SIGNAL, INTERRUPTED


def benchmark_command(arguments: list[str]) -> int:
    """Run the command; return the exit code, 1 if a training failed.

    Raises:
        ConfigError: a name is unknown, or the folder cannot be written.
    """
    options = _parser().parse_args(arguments)
    tables: Path = options.tables.resolve()
    rows = rows_named(options.names, tables)
    if options.list:
        for row in rows:
            steps = f"{row.env_steps:>12,} env steps"
            print(f"{row.table:8} {row.name:30} {steps}   {row.scores_text}")
        return 0
    check_installed("matplotlib", "flowrl benchmark", extra="plot")
    results: Path = options.results or options.runs / "results"
    try:
        for folder in (results, options.runs):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"benchmark: cannot create {error.filename}: {error.strerror}") from error
    libraries = ["flowrl"]
    if options.against:
        check_settings(rows, options.against)
        sb3.install(options.runs / sb3.VENV_FOLDER)
        libraries.append(options.against)
    for row in benchmark_rows(tables):  # which the tables at the end contain
        for library in LIBRARIES:
            read_results(row, results, library)
    missing = [run for row in rows for run in _missing_runs(row, options.seeds, libraries, results)]
    processes = Processes()
    train = partial(_train, tables=tables, runs=options.runs, results=results, processes=processes)
    with processes.ended_by_signals(), ThreadPoolExecutor(options.jobs) as pool:
        try:
            ended = list(pool.map(train, missing))
        except KeyboardInterrupt:
            processes.exit_code = INTERRUPTED
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if processes.exit_code:
        print("interrupted: run the same command again to continue", flush=True)
        return processes.exit_code
    write_tables(tables, results)
    print(f"results, tables and learning curves: {results}")
    for row in rows:
        for library in filter(row.can_train_with, libraries):
            texts = cells(row, read_results(row, results, library), library)
            named = zip(COLUMNS, texts, strict=True)
            print("  ".join(f"{column}: {text}" for column, text in named if text))
    return 0 if all(ended) else 1


def _parser() -> Parser:
    parser = Parser(
        prog="flowrl benchmark",
        description="Train tuned examples with several seeds and evaluate each. A run that was "
        "interrupted continues; one whose result exists is not repeated. Writes one JSON file per "
        "run, and a table and learning curves per table.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="tables or rows; default: all")
    parser.add_argument("--list", action="store_true", help="list the rows; train nothing")
    parser.add_argument(
        "--seeds",
        type=count,
        default=5,
        help="trains the seeds 0 to N - 1 of each row (default: 5)",
        metavar="N",
    )
    parser.add_argument("--jobs", type=count, default=1, help="runs at the same time (default: 1)")
    parser.add_argument(
        "--against", choices=("sb3",),
        help="train Stable-Baselines3 with the settings of its zoo, too, after each run of flowrl; "
        "installs it into RUNS/sb3-environment; its runs start again if they are interrupted",
    )  # fmt: skip
    parser.add_argument(
        "--results", type=file_path, help="folder of the results (default: RUNS/results)"
    )  # fmt: skip
    parser.add_argument(
        "--runs", type=file_path, default=Path("runs/benchmark"),
        help="folder of the run directories (default: runs/benchmark)",
    )  # fmt: skip
    parser.add_argument(
        "--tables", type=file_path, default=shipped_tables(), metavar="FILE",
        help="YAML file with the tables (default: the shipped ones)",
    )  # fmt: skip
    return parser


def _missing_runs(
    row: BenchmarkRow, seeds: int, libraries: list[str], results: Path
) -> list[tuple[BenchmarkRow, int, str]]:
    """Return row, seed and library of each run of a row that has no result.

    Raises:
        ConfigError: a result of any seed is of another length, or of other settings.
    """
    libraries = [library for library in libraries if row.can_train_with(library)]
    for library in libraries:
        for file in row.result_files(results, library):
            _check_result(row, file, library)
    missing = [
        (row, seed, library)
        for seed in range(seeds)
        for library in libraries
        if not (results / row.file_name(seed, library)).exists()
    ]
    existing = seeds * len(libraries) - len(missing)
    if existing:
        print(f"{row.name}: {format_count(existing, 'result')} in {results}, not repeated")
    return missing


def _check_result(row: BenchmarkRow, file: Path, library: str) -> None:
    """Check that a result is of the present settings of its row.

    Raises:
        ConfigError: the result is of another length, or of other settings.
    """
    result = read_result(file)
    if not row.has_current_settings(result, library) or result["env_steps"] < row.env_steps:
        raise ConfigError(
            f"benchmark: {file} is of a training with other settings or fewer env steps: remove it "
            "and the folder of its run to train again, or choose other folders (--results, --runs)"
        )


def _train(
    run: tuple[BenchmarkRow, int, str],
    *,
    tables: Path,
    runs: Path,
    results: Path,
    processes: Processes,
) -> bool:
    """Train a row with a seed and a library in a process; return whether its result was written."""
    if processes.exit_code:
        return False
    row, seed, library = run
    run_dir = runs / row.file_stem(library) / f"seed-{seed}"
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    path = results / row.file_name(seed, library)
    command = [sys.executable, "-m", "flowrl.benchmark.run", library, str(tables), row.name]
    command += [str(seed), str(run_dir), str(path)]
    name = f"{row.name}{'' if library == 'flowrl' else f' with {library}'}, seed {seed}"
    log = run_dir.with_suffix(".log")
    print(f"{name}: training for {row.env_steps:,} env steps, log: {log}", flush=True)
    with open(log, "a") as output:
        code = processes.run(command, output)
    if code in ENDED_BY_SIGNAL:
        processes.exit_code = code
        return False
    if code:
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        if code < 0:
            last = f"killed by signal {-code}"
        print(f"{name}: failed, see {log}: {last}\n  {shlex.join(command)}", flush=True)
        return False
    (result,) = [one for one in read_results(row, results, library) if one["seed"] == seed]
    print(
        f"{name}: score {result['score']:.1f} after {result['env_steps']:,} env steps in "
        f"{result['seconds']:.0f} s",
        flush=True,
    )
    return True
