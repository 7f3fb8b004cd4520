"""Runs that are killed at random moments and resumed, compared with the uninterrupted run.

For each plan, in process and with 2 workers: train with the command line to the end; then, many
times, start the same training, kill the process at a random moment after the first checkpoint of
the uninterrupted run was written, and continue with `flowrl resume`. A resumed run is equal if all
its results, without times, and the final weights are. Writes the figures to
results/chaos_driver.json, and this table to results/chaos_driver.md:

- equal: resumed runs that are equal to the uninterrupted one, of all;
- before: those that were killed before the first checkpoint, which start again with `flowrl train`;
- resume: seconds from the command to the first result of the continued run (median).

    python benchmarks/chaos_driver.py [--plans ppo dqn] [--kills 20] [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from flowrl.benchmark.run import commit, machine
from flowrl.data.checkpoint import read_checkpoint

RESULTS = Path(__file__).parent / "results"
ENVS = {"ppo": "CartPole-v1", "dqn": "CartPole-v1", "sac": "Pendulum-v1", "ppo_dqn": None}
SETTINGS = {
    "ppo": ["--train-batch-size=400", "--stop-timesteps=60000"],
    "dqn": ["--learning-starts=200", "--min-sample-timesteps-per-iteration=250",
            "--stop-timesteps=12000"],
    "sac": ["--learning-starts=100", "--min-sample-timesteps-per-iteration=100",
            "--stop-timesteps=1500"],
    "ppo_dqn": ["--min-sample-timesteps-per-iteration=500", "--stop-timesteps=12000"],
}  # fmt: skip
TIMES = ("time", "timers", "throughput", "sampler_", "diagnosis", "policy_lags", "restart", "perf")
COLUMNS = ("plan", "workers", "equal", "before", "resume")


def flowrl(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own."""
    command = [sys.executable, "-m", "flowrl", *arguments, "--display", "none"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, start_new_session=True, **quiet)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a command; raise if it failed."""
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)


def results_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the results of a run, flat, without times."""
    lines = (run_dir / "result.json").read_text().splitlines()
    return [dict(flat(json.loads(line))) for line in lines]


def flat(tree: dict[str, Any], prefix: str = "") -> Any:
    """Yield (name, value) of the values of nested dicts, without times."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flat(value, f"{name}/")
        elif not any(word in name for word in TIMES):
            yield name, value


def weights_of(run_dir: Path) -> bytes:
    """Return the weights of the last checkpoint of a run."""
    last = max((run_dir / "checkpoints").glob("*/manifest.json"), key=lambda path: path.parent.name)
    state, _ = read_checkpoint(last.parent)
    policies = state["worker"]["policies"]
    return b"".join(
        array.tobytes()
        for policy_id in sorted(policies)
        for _, array in sorted(policies[policy_id]["weights"].items())
    )


def first_difference(run_dir: Path, other: Path) -> str | None:
    """Return the first result or the weights that differ between two runs; None if none does."""
    one, two = results_of(run_dir), results_of(other)
    for number, (left, right) in enumerate(zip(one, two, strict=False), 1):
        for name in left.keys() | right.keys():
            if left.get(name) != right.get(name):
                return f"result {number}, {name}: {left.get(name)} instead of {right.get(name)}"
    if len(one) != len(two):
        return f"{len(one)} results instead of {len(two)}"
    return None if weights_of(run_dir) == weights_of(other) else "weights"


def kill_and_resume(arguments: list[str], run_dir: Path, delay_s: float) -> tuple[bool, float]:
    """Kill a training after a delay and continue it to its end.

    Returns:
        Whether it was killed before its first checkpoint; seconds until the next result.
    """
    process = flowrl(*arguments, "--run-dir", str(run_dir))
    time.sleep(delay_s)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    result_file = run_dir / "result.json"
    before = result_file.stat().st_size if result_file.exists() else 0
    resumes = has_checkpoint(run_dir)
    started = time.perf_counter()
    if resumes:
        process = flowrl("resume", str(run_dir))
    else:
        process = flowrl(*arguments, "--run-dir", str(run_dir))
    while process.poll() is None and (
        not result_file.exists() or result_file.stat().st_size in (0, before)
    ):
        time.sleep(0.01)
    seconds = time.perf_counter() - started
    finish(process)
    return not resumes, seconds


def has_checkpoint(run_dir: Path) -> bool:
    """Return whether a run has a complete checkpoint."""
    return any((run_dir / "checkpoints").glob("*/manifest.json"))


def measure(plan: str, num_workers: int, num_kills: int, jobs: int) -> dict[str, Any]:
    """Kill and resume runs of a plan; return the figures."""
    rng = random.Random(f"{plan} {num_workers}")
    arguments = ["train", plan, "--no-tuned", "--seed=1", f"--num-workers={num_workers}"]
    arguments += [*SETTINGS[plan], "--checkpoint-frequency=1"]
    if ENVS[plan] is not None:
        arguments += ["--env", str(ENVS[plan])]
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference"
        started = time.perf_counter()
        process = flowrl(*arguments, "--run-dir", str(reference))
        while process.poll() is None and not has_checkpoint(reference):
            time.sleep(0.01)
        first = time.perf_counter() - started
        finish(process)
        seconds = time.perf_counter() - started
        delays = [rng.uniform(first, seconds) for _ in range(num_kills)]

        def one(number: int) -> tuple[str | None, bool, float]:
            run_dir = Path(folder) / str(number)
            was_before, resume_s = kill_and_resume(arguments, run_dir, delays[number])
            return first_difference(run_dir, reference), was_before, resume_s

        with ThreadPoolExecutor(jobs) as pool:
            ended = list(pool.map(one, range(num_kills)))
    return {
        "plan": plan,
        "num_workers": num_workers,
        "date": str(date.today()),
        "machine": machine(),
        "commit": commit(),
        "jobs": jobs,
        "kills": num_kills,
        "differences": [difference for difference, *_ in ended if difference is not None],
        "before": sum(was_before for _, was_before, _ in ended),
        "resume_s": [resume_s for _, was_before, resume_s in ended if not was_before],
    }


def cells(figures: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the table."""
    kills, times = figures["kills"], figures["resume_s"]
    return [
        figures["plan"],
        f"{figures['num_workers'] or 'in process'}",
        f"{kills - len(figures['differences'])} of {kills}",
        f"{figures['before']}",
        f"{median(times):.1f} s" if times else "-",
    ]


def main() -> None:
    """Measure the plans and write the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--plans", nargs="+", choices=tuple(ENVS), default=tuple(ENVS))
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--kills", type=int, default=20, help="killed runs per plan (default: 20)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    options = parser.parse_args()
    path = RESULTS / "chaos_driver.json"
    measured = json.loads(path.read_text()) if path.exists() else {}
    for plan in options.plans:
        for num_workers in options.workers:
            figures = measure(plan, num_workers, options.kills, options.jobs)
            measured[f"{plan} {num_workers}"] = figures
            named = zip(COLUMNS, cells(figures), strict=True)
            print(", ".join(map(": ".join, named)), *figures["differences"], sep="\n  ", flush=True)
            path.write_text(json.dumps(measured, indent=1) + "\n")
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, measured.values())]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    runs = {f"{m['machine']}, {m['date']}, commit {m['commit']}" for m in measured.values()}
    (RESULTS / "chaos_driver.md").write_text(f"{text}\n{'; '.join(sorted(runs))}.\n")


if __name__ == "__main__":
    main()
