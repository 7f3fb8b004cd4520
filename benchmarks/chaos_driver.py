"""Runs that are killed at random moments and resumed, compared with the uninterrupted run.

For each plan, in process and with 2 workers: train with the command line to the end; then, many
times, start the same training, kill the process at a random moment after its first checkpoint, and
continue with `flowrl resume`. A resumed run is equal if all its results, without times, and the
final weights are. Writes the figures to results/chaos_driver.json, and this table to
results/chaos_driver.md:

- equal: resumed runs that are equal to the uninterrupted one, of all;
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
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figures, measured_here

from flowrl.data.checkpoint import list_checkpoints, read_checkpoint
from flowrl.trainer.runs.comparison import first_difference

ENVS = {"ppo": "CartPole-v1", "dqn": "CartPole-v1", "sac": "Pendulum-v1", "ppo_dqn": None}
SETTINGS = {
    "ppo": ["--train-batch-size=400", "--stop-timesteps=60000"],
    "dqn": ["--learning-starts=200", "--min-sample-timesteps-per-iteration=250",
            "--stop-timesteps=12000"],
    "sac": ["--learning-starts=100", "--min-sample-timesteps-per-iteration=100",
            "--stop-timesteps=1500"],
    "ppo_dqn": ["--min-sample-timesteps-per-iteration=500", "--stop-timesteps=12000"],
}  # fmt: skip
COLUMNS = ("plan", "workers", "equal", "resume")


def flowrl(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own."""
    command = [sys.executable, "-m", "flowrl", *arguments, "--display", "none"]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a command; raise if it failed."""
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)


def results_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the results of a run."""
    return [json.loads(line) for line in (run_dir / "result.json").read_text().splitlines()]


def weights_of(run_dir: Path) -> bytes:
    """Return the weights of the last checkpoint of a run."""
    state, _ = read_checkpoint(list_checkpoints(run_dir)[-1])
    policies = state["worker"]["policies"]
    return b"".join(
        array.tobytes()
        for policy_id in sorted(policies)
        for _, array in sorted(policies[policy_id]["weights"].items())
    )


def difference(run_dir: Path, other: Path) -> str | None:
    """Return the first result or the weights that differ between two runs; None if none does."""
    one, two = results_of(run_dir), results_of(other)
    for number, (left, right) in enumerate(zip(one, two, strict=False), 1):
        if found := first_difference(left, right):
            return f"result {number}, {found}"
    if len(one) != len(two):
        return f"{len(one)} results instead of {len(two)}"
    return None if weights_of(run_dir) == weights_of(other) else "weights"


def last_checkpoint(run_dir: Path) -> int:
    """Return the iteration of a run's newest complete checkpoint; 0 if there is none."""
    complete = list_checkpoints(run_dir)
    return int(complete[-1].name) if complete else 0


def kill_and_resume(arguments: list[str], run_dir: Path, iteration: int, delay_s: float) -> float:
    """Kill a training some time after the checkpoint of an iteration, and continue it to its end.

    Returns:
        seconds from the command to the first result of the continued training.
    """
    process = flowrl(*arguments, "--run-dir", str(run_dir))
    while process.poll() is None and last_checkpoint(run_dir) < iteration:
        time.sleep(0.01)
    time.sleep(delay_s)
    os.killpg(process.pid, signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise RuntimeError("the run had ended before it was killed")
    saved, killed_at = last_checkpoint(run_dir), time.time()
    started = time.perf_counter()
    process = flowrl("resume", str(run_dir))
    results = run_dir / "result.json"
    while process.poll() is None and (
        results.stat().st_mtime < killed_at or results.read_text().count("\n") <= saved
    ):
        time.sleep(0.05)
    seconds = time.perf_counter() - started
    finish(process)
    return seconds


def measure(plan: str, num_workers: int, num_kills: int, jobs: int) -> dict[str, Any]:
    """Kill and resume runs of a plan; return the figures."""
    rng = random.Random(f"{plan} {num_workers}")
    arguments = ["train", plan, "--no-tuned", "--seed=1", f"--num-workers={num_workers}"]
    arguments += [*SETTINGS[plan], "--checkpoint-frequency=1"]
    if ENVS[plan] is not None:
        arguments += ["--env", str(ENVS[plan])]
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference"
        process = flowrl(*arguments, "--run-dir", str(reference))
        while process.poll() is None and not last_checkpoint(reference):
            time.sleep(0.01)
        started = time.time()
        finish(process)
        seconds = (reference / "result.json").stat().st_mtime - started
        iterations = len(results_of(reference))
        moments = [
            (rng.randint(1, iterations - 2), rng.uniform(0.0, seconds / iterations))
            for _ in range(num_kills)
        ]

        def one(number: int) -> tuple[str | None, float]:
            run_dir = Path(folder) / str(number)
            resume_s = kill_and_resume(arguments, run_dir, *moments[number])
            return difference(run_dir, reference), resume_s

        with ThreadPoolExecutor(jobs) as pool:
            ended = list(pool.map(one, range(num_kills)))
    return {
        "plan": plan,
        "num_workers": num_workers,
        "measured": [measured_here(f"{jobs} runs at the same time")],
        "kills": num_kills,
        "differences": [difference for difference, _ in ended if difference is not None],
        "resume_s": [resume_s for _, resume_s in ended],
    }


def cells(figures: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the table."""
    kills = figures["kills"]
    return [
        figures["plan"],
        f"{figures['num_workers'] or 'in process'}",
        f"{kills - len(figures['differences'])} of {kills}",
        f"{median(figures['resume_s']):.1f} s",
    ]


def main() -> None:
    """Measure the plans and write the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--plans", nargs="+", choices=tuple(ENVS), default=tuple(ENVS))
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--kills", type=int, default=20, help="killed runs per plan (default: 20)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    options = parser.parse_args()
    table = Figures("chaos_driver", COLUMNS, cells)
    for plan in options.plans:
        for num_workers in options.workers:
            figures = measure(plan, num_workers, options.kills, options.jobs)
            table.add(f"{plan} {num_workers}", figures)
            print(*figures["differences"], sep="\n")


if __name__ == "__main__":
    main()
