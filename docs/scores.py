"""Train the plans of the algorithm pages, draw their learning curves and store their scores.

    python docs/scores.py [PLAN …]

Each plan is trained as `flowrl train PLAN --seed N` does, with three seeds; those of LIMITS are
trained with `--stop-timesteps`. The results are
docs/_static/scores/PLAN.json, which the tables of the pages read, and PLAN.svg.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "_static" / "scores"
SEEDS = (0, 1, 2)
# plan -> limit on env steps; None for that of the plan
LIMITS: dict[str, int | None] = {
    "ppo": None, "ppo_async": None, "ddppo": None, "a2c": None, "a2c_replay": None, "a3c": None,
    "impala": None, "appo": None, "dqn": None, "rainbow": None, "dqn_distributed": None,
    "apex": None, "r2d2": None, "sac": 30_000, "td3": 30_000,
}  # fmt: skip
NUM_POINTS = 100  # of each curve
BLUE, GRAY = "#2a6fdb", "#9aa4b2"


def train(plan: str, seed: int) -> dict[str, Any]:
    """Train a plan with one seed; return its learning curve and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "flowrl", "train", plan, "--seed", str(seed)]
        command += ["--run-dir", str(run_dir)]
        if LIMITS[plan] is not None:
            command += ["--stop-timesteps", str(LIMITS[plan])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        with open(run_dir / "progress.csv", newline="") as file:
            rows = [
                (int(row["timesteps_total"]), float(row["episode_reward_mean"]))
                for row in csv.DictReader(file)
                if row["episode_reward_mean"]
            ]
        config = json.loads((run_dir / "config.json").read_text())
    (reached,) = [line for line in done.stdout.splitlines() if line.startswith("reached: ")]
    step = max(1, -(-len(rows) // NUM_POINTS))
    curve = [*rows[:-1:step], rows[-1]]
    return {
        "seed": seed,
        "env": config["env"],
        "curve": [[steps, round(value, 2)] for steps, value in curve],
        "reached": reached.removeprefix("reached: ").rsplit(", after", 1)[0],
    }


def draw(plan: str, runs: list[dict[str, Any]]) -> None:
    """Draw the learning curves of a plan."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flowrl"  # the same file from the same data
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 2.6))
    for run in runs:
        axis.plot(*zip(*run["curve"], strict=True), color=BLUE, alpha=0.4 + 0.3 * (run is runs[0]))
    axis.set_title(
        f"flowrl train {plan}, seeds 0 to {len(runs) - 1}", fontsize=9, family="monospace"
    )
    axis.set_xlabel("env steps", fontsize=9)
    axis.set_ylabel(f"mean return, {runs[0]['env']}", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(color=GRAY, alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(FOLDER / f"{plan}.svg", facecolor="white", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for plan in sys.argv[1:] or LIMITS:
        runs = [train(plan, seed) for seed in SEEDS]
        (FOLDER / f"{plan}.json").write_text(json.dumps(runs) + "\n")
        draw(plan, runs)
        print(plan, *(f"{run['curve'][-1]}" for run in runs), flush=True)


if __name__ == "__main__":
    main()
