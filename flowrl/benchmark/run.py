"""Train one row of the benchmark with one seed, evaluate it, and write the result.

python -m flowrl.benchmark.run LIBRARY TABLES.yaml NAME SEED RUN_DIR RESULT.json
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.benchmark.processes import run_training
from flowrl.benchmark.provenance import (
    Origin,
    joined,
    present_origin,
    read_record,
    write_record,
)
from flowrl.benchmark.rows import BenchmarkRow, rows_named
from flowrl.benchmark.sb3 import train_sb3
from flowrl.data.checkpoint import list_checkpoints
from flowrl.errors import ConfigError
from flowrl.trainer.algorithm import Algorithm
from flowrl.trainer.runs.saved_run import read_results
from flowrl.whole_files import write_whole

EVALUATION_EPISODES = 100
WINDOW = 100  # training episodes of a mean return
MAX_POINTS = 100  # of a learning curve


@dataclass(frozen=True)
class Outcome:
    """The result of a training.

    Attributes:
        curve: (env steps, mean return of the last 100 training episodes, seconds of training,
            number of these episodes, which is smaller at the start).
        score, score_std: of the returns of EVALUATION_EPISODES evaluation episodes.
        seconds: wall time of the training with its start, without the evaluation.
        origin: where, when and with which versions the training ran.
    """

    curve: list[tuple[int, float, float, int]]
    score: float
    score_std: float
    seconds: float
    origin: Origin


def train_flowrl(row: BenchmarkRow, seed: int, run_dir: Path) -> Outcome:
    """Train a row in a process, or continue its training, and evaluate its last policy.

    The code that the row names is trusted: the table is the user's own.

    Raises:
        ConfigError: the folder has a run with other settings.
        subprocess.CalledProcessError: the training failed.
        SystemExit: Ctrl-C or SIGTERM; the training has saved a checkpoint.
    """
    command = [sys.executable, "-m", "flowrl"]
    checksum = row.checksum()
    file = run_dir.with_name(f"{run_dir.name}.settings")
    settings, origins = read_record(file)
    has_ended = False
    if list_checkpoints(run_dir):
        if settings not in (None, checksum):
            raise ConfigError(
                f"benchmark: {run_dir} is of a training with other settings: remove it to train "
                "again, or choose another folder (--runs)"
            )
        command += ["resume", str(run_dir), "--trust"]
        curve = learning_curve(run_dir)
        has_ended = bool(curve) and curve[-1][0] >= row.env_steps
    else:
        origins = []
        command += ["train", row.plan, "--env", row.env, "--seed", str(seed)]
        command += ["--stop-timesteps", str(row.env_steps), "--run-dir", str(run_dir)]
        command += ["--metrics-num-episodes-for-smoothing", str(WINDOW)]
    if not has_ended:
        origins = [*origins, present_origin()]
    write_record(file, checksum, origins)
    started = time.perf_counter()
    run_training([*command, "--display", "none"])
    seconds = time.perf_counter() - started
    with Algorithm.from_checkpoint(run_dir, trust=True) as algorithm:
        evaluation = algorithm.evaluate(
            episodes=EVALUATION_EPISODES, explore=row.explore, num_envs=10, seed=10_000 + seed
        )
    curve = learning_curve(run_dir)
    if curve:  # a training that was interrupted has taken longer than this process
        seconds = max(seconds, curve[-1][2])
    return Outcome(
        curve,
        evaluation["episode_reward_mean"],
        evaluation["episode_reward_std"],
        seconds,
        joined(origins),
    )


def learning_curve(run_dir: Path) -> list[tuple[int, float, float, int]]:
    """Return the points of `Outcome.curve` of a run: of each result that has a mean return."""
    points = [
        (
            result["timesteps_total"],
            result["episode_reward_mean"],
            result["time_total_s"],
            result["episodes_in_window"],
        )
        for result in read_results(run_dir)
    ]
    return [point for point in points if point[1] is not None and math.isfinite(point[1])]


def result_of(
    row: BenchmarkRow, seed: int, outcome: Outcome, library: str = "flowrl"
) -> dict[str, Any]:
    """Return the result of a training for its file.

    Keys: those of `Outcome`, the curve with at most MAX_POINTS; `best`, highest mean return of 100
    training episodes (None: fewer have ended); `threshold`, that of the row;
    `steps_to_threshold`, `seconds_to_threshold`: at the first point of the curve at which the mean
    return of 100 episodes reaches it (None: never); `settings`, see BenchmarkRow.checksum; where
    and when the training was run.

    Raises:
        ValueError: no episode has ended, or the score is not finite.
    """
    curve = outcome.curve
    if not curve:
        raise ValueError(f"{row.name}: no episode has ended within {row.env_steps:,} env steps")
    if not math.isfinite(outcome.score):
        raise ValueError(f"{row.name}: the mean return of the evaluation is {outcome.score}")
    full = [point for point in curve if point[3] >= WINDOW]
    first = None
    if row.threshold is not None:
        first = next((point for point in full if point[1] >= row.threshold), None)
    step = max(1, -(-(len(curve) - 1) // (MAX_POINTS - 1)))
    shown = [*curve[:-1:step], curve[-1]]
    return {
        "plan": row.plan,
        "env": row.env,
        "seed": seed,
        "env_steps": curve[-1][0],
        "score": outcome.score,
        "score_std": outcome.score_std,
        "best": max((mean for _, mean, *_ in full), default=None),
        "threshold": row.threshold,
        "steps_to_threshold": None if first is None else first[0],
        "seconds_to_threshold": None if first is None else round(first[2], 1),
        "seconds": round(outcome.seconds, 1),
        "curve": [[steps, round(mean, 3), round(at, 1)] for steps, mean, at, _ in shown],
        "settings": row.checksum(library),
        **outcome.origin,
    }


def main() -> None:
    library, tables, name, seed, run_dir, result = sys.argv[1:]
    (row,) = rows_named([name], Path(tables))
    try:
        if library == "sb3":
            trained = train_sb3(row, int(seed), Path(run_dir), EVALUATION_EPISODES)
            origin = {**present_origin(), "versions": trained.pop("versions")}
            outcome = Outcome(**trained, origin=origin)
        else:
            outcome = train_flowrl(row, int(seed), Path(run_dir))
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    except subprocess.CalledProcessError as error:
        if error.returncode < 0:
            raise SystemExit(f"signal {-error.returncode} ended the training") from None
        raise SystemExit(error.returncode) from None  # the training has printed why
    write_whole(Path(result), json.dumps(result_of(row, int(seed), outcome, library)) + "\n")


if __name__ == "__main__":
    main()
