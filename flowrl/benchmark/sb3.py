"""Train rows of the benchmark with Stable-Baselines3, in a virtual environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flowrl.benchmark.processes import run_training
from flowrl.benchmark.rows import BenchmarkRow
from flowrl.errors import ConfigError

REQUIREMENTS = ("stable-baselines3==2.9.2", "sb3-contrib==2.9.2")
VENV_FOLDER = "sb3-environment"  # virtual environment of SB3, in the folder of the runs
# Packages that both environments have in the same versions, where they are installed.
PACKAGES = (
    "numpy", "gymnasium", "box2d", "pygame", "pygame-ce", "mujoco", "imageio", "ale-py",
    "opencv-python-headless", "minatar",
)  # fmt: skip


def requirements() -> list[str]:
    """Return Stable-Baselines3 and the packages of environments, each with its version."""
    versions = ((name, installed_version(name)) for name in PACKAGES)
    return [*REQUIREMENTS, *(f"{name}=={installed}" for name, installed in versions if installed)]


def install(folder: Path) -> None:
    """Create a virtual environment with Stable-Baselines3, unless the folder has it with the same
    versions of torch, gymnasium and the environments as the running interpreter.

    Raises:
        ConfigError: the environment cannot be created, or a package cannot be installed.
    """
    torch = f"torch=={installed_version('torch')}"
    packages = requirements()
    ready, wanted = folder / "ready", "\n".join([torch, *packages])
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return
    ready.unlink(missing_ok=True)
    print(f"installing Stable-Baselines3 into {folder} …", flush=True)
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        [*_pip(folder), torch],
        [*_pip(folder), *packages],
    ]
    for command in commands:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise ConfigError(f"benchmark: {' '.join(command)} failed:\n{done.stdout}")
    ready.write_text(wanted, encoding="utf-8")


def _pip(folder: Path) -> list[str]:
    return [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]


def installed_version(package: str) -> str | None:
    """Return the version of an installed package without its build, such as +cpu, which the package
    index chooses; None: it is not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def train_sb3(row: BenchmarkRow, seed: int, run_dir: Path, episodes: int) -> dict[str, Any]:
    """Train a row from the start, and evaluate its last policy.

    The virtual environment is two folders above the run directory, as the command has them.

    Returns:
        the fields of `Outcome`, with `versions` (package -> version) instead of the origin.

    Raises:
        ConfigError: there are no settings for the row.
        subprocess.CalledProcessError: the training failed.
        SystemExit: Ctrl-C or SIGTERM.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    spec, outcome = run_dir / "spec.json", run_dir / "outcome.json"
    spec.write_text(
        json.dumps({
            "algorithm": row.plan,
            "env": row.env,
            "env_steps": row.env_steps,
            "seed": seed,
            "episodes": episodes,
            "explore": row.explore,
            "settings": row.settings("sb3"),
            "started": time.time(),  # the seconds include the start of the process
        })
    )  # fmt: skip
    script = Path(__file__).with_name("sb3_script.py")
    python = run_dir.parents[1] / VENV_FOLDER / "bin" / "python"
    run_training([str(python), str(script), str(spec), str(outcome)])
    values: dict[str, Any] = json.loads(outcome.read_text(encoding="utf-8"))
    return values
