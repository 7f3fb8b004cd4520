"""Asynchronous runs that are replayed: equality, size of the journal, cost of the recording.

Each plan trains CartPole with 2 workers, once per seed; `flowrl replay` then runs the training
again in one process. The cost is measured with trainings that alternately have a journal and have
none. Writes the figures to results/replayed_runs.json and this table, with a row per plan, to
results/replayed_runs.md:

- equal: replays whose results, without times, are all equal to those of the run, of all replays;
- results: that were compared;
- journal: kilobytes per million env steps;
- cost: share of the env steps per second that the recording costs (median of the rounds, lowest
  and highest).

    python benchmarks/replayed_runs.py [--plans impala a3c] [--runs 20] [--steps 50000] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figures, measured_here

from flowrl.iter.journal import JournalWriter
from flowrl.trainer.plan_settings import plan_config
from flowrl.trainer.runs.recording import JOURNAL

PLANS = ("impala", "appo", "a3c", "apex")
SETTINGS: dict[str, dict[str, Any]] = {"apex": {"learning_starts": 1000}}
WARM_UP_S, SECONDS_PER_ROUND = 3.0, 8.0
COLUMNS = ("plan", "equal", "results", "journal", "cost")


def flowrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command `flowrl`."""
    command = [sys.executable, "-m", "flowrl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def replays(plan: str, num_runs: int, steps: int) -> dict[str, Any]:
    """Train and replay with several seeds; return the figures."""
    equal, compared, num_bytes, num_steps = [], 0, 0, 0
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.get(plan, {}).items()
    ]
    for seed in range(num_runs):
        with tempfile.TemporaryDirectory() as folder:
            run_dir = os.path.join(folder, "run")
            training = ["train", plan, "--no-tuned", "--num-workers=2", f"--seed={seed}", *flags]
            training += [f"--stop-timesteps={steps}", "--display=none", "--run-dir", run_dir]
            flowrl(*training).check_returncode()
            replay = flowrl("replay", run_dir)
            found = re.search(r"(\d+) of (\d+) results are equal", replay.stdout)
            results = (Path(run_dir) / "result.json").read_text().splitlines()
            equal.append(
                found is not None
                and replay.returncode == 0
                and int(found[1]) == int(found[2]) == len(results)
            )
            compared += len(results)
            num_bytes += (Path(run_dir) / JOURNAL).stat().st_size
            num_steps += json.loads(results[-1])["timesteps_total"]
    return {
        "runs": num_runs,
        "equal": sum(equal),
        "results": compared,
        "bytes_per_million_steps": num_bytes / num_steps * 1e6,
    }


def rate(plan: str, seconds: float, records: bool) -> float:
    """Return the env steps per second of a training, after a warm-up."""
    config = plan_config(plan, "CartPole-v1", tuned=False).updated(
        num_workers=2, total_timesteps=10**9, monitor=False, seed=0, **SETTINGS.get(plan, {})
    )
    with tempfile.TemporaryDirectory() as folder, config.build(plan=plan) as algorithm:
        journal = JournalWriter(Path(folder) / JOURNAL)
        if records:
            algorithm.plan.metrics.journal = journal
        rate = 0.0
        for duration in (WARM_UP_S, seconds):
            algorithm.train()
            steps, started = algorithm.env_steps, time.perf_counter()
            while time.perf_counter() - started < duration:
                algorithm.train()
                if records:
                    journal.flush(algorithm.iteration)
            rate = (algorithm.env_steps - steps) / (time.perf_counter() - started)
        return rate


def costs(plan: str, rounds: int) -> dict[str, Any]:
    """Return the share of the env steps per second that recording costs, of each round."""
    shares = []
    for number in range(rounds):
        rates = {}
        for records in (True, False) if number % 2 else (False, True):
            rates[records] = rate(plan, SECONDS_PER_ROUND, records)
        shares.append(1 - rates[True] / rates[False])
    return {"costs": shares}


def cells(figures: dict[str, Any]) -> list[str]:
    """Return the cells of a plan's row in the table."""
    low, median, high = np.percentile(figures.get("costs") or [np.nan], [0, 50, 100])
    return [
        figures["plan"],
        f"{figures.get('equal', 0)} of {figures.get('runs', 0)}",
        f"{figures.get('results', 0):,}",
        f"{figures.get('bytes_per_million_steps', 0.0) / 1000:,.0f} kB",
        f"{median:.1%} ({low:.1%} to {high:.1%})",
    ]


def main() -> None:
    """Measure the plans and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=PLANS)
    parser.add_argument(
        "--runs",
        type=int,
        default=20,
        help="runs per plan, each with its seed; 0: keep the figures",
    )
    parser.add_argument("--steps", type=int, default=50_000, help="env steps per run")
    parser.add_argument(
        "--rounds", type=int, default=7, help="of the cost, on a quiet machine; 0: keep the figures"
    )
    options = parser.parse_args()
    table = Figures("replayed_runs", COLUMNS, cells)
    for plan in options.plans:
        figures = {"measured": ["", ""], **table.rows.get(plan, {}), "plan": plan}
        of_replays, of_costs = figures["measured"]
        if options.runs:
            figures |= replays(plan, options.runs, options.steps)
            of_replays = measured_here(f"replays: {options.steps:,} env steps per run")
        if options.rounds:
            figures |= costs(plan, options.rounds)
            of_costs = measured_here(f"cost: {options.rounds} rounds")
        table.add(plan, {**figures, "measured": [of_replays, of_costs]})


if __name__ == "__main__":
    main()
