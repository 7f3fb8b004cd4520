"""Draw the pictures of README.md: `python docs/pictures.py` (a few seconds).

- dataflow.svg: the plan `ppo_dqn`.
- speed.svg: the tables of training speed in the pages.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from plan_diagram import svg

from flowrl.trainer.plan_settings import plan_config

DOCS = Path(__file__).parent
PICTURES = DOCS / "_static"
BLUE, GRAY = "#2a6fdb", "#9aa4b2"


def dataflow() -> None:
    """Draw a plan with two algorithms."""
    with plan_config("ppo_dqn").build(plan="ppo_dqn") as algorithm:
        drawing = svg(algorithm.plan.stats())
    # on a white ground, because pages may be dark
    drawing = drawing.replace("currentColor", "#1f2937")
    drawing = re.sub(
        r"(<svg [^>]*>)",
        r'\1<rect width="100%" height="100%" fill="white" stroke="none"/>',
        drawing,
    )
    (PICTURES / "dataflow.svg").write_text(drawing + "\n")


def _speeds(page: str, script: str) -> dict[str, float]:
    """Return name -> first number of each row of the table that a page has for a script."""
    rows = (DOCS / page).read_text().split(script)[1].split("\n\n|")[1].split("\n\n")[0]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()[2:]]
    return {row[0]: float(row[1].split()[0].replace(",", "")) for row in cells}


def speed() -> None:
    """Draw the speed of training next to other libraries."""
    groups = {
        "PPO": _speeds("explanation/performance.md", "benchmarks/train_ppo.py"),
        "DQN": _speeds("algorithms/dqn.md", "benchmarks/train_dqn.py"),
    }
    figure, axis = plt.subplots(figsize=(8, 2.4))
    labels, values, colors = [], [], []
    for algorithm, speeds in groups.items():
        for name, value in speeds.items():
            labels.append(f"{algorithm}: {name}")
            values.append(value)
            colors.append(BLUE if name.startswith("flowrl") else GRAY)
    places = np.arange(len(labels))[::-1]
    axis.barh(places, values, color=colors)
    axis.set_yticks(places, labels, fontsize=8)
    for place, value in zip(places, values, strict=True):
        axis.text(value, place, f" {value:,.0f}", va="center", fontsize=8)
    axis.set_xlabel("env steps per second, training on CartPole-v1")
    _save(figure, "speed.svg")


def _save(figure: plt.Figure, name: str) -> None:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURES / name, facecolor="white", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "flowrl"  # the same file from the same data
    dataflow()
    speed()
