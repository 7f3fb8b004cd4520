"""Train rows of the benchmark with Stable-Baselines3, in a virtual environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from flowrl.benchmark.rows import BenchmarkRow
from flowrl.errors import ConfigError
from flowrl.trainer.tuned_examples import tuned_folder

REQUIREMENTS = ("stable-baselines3==2.9.2", "sb3-contrib==2.9.2")
ENVIRONMENT = "sb3-environment"  # folder of the virtual environment, among those of the rows
# Packages that both environments have in the same versions, where they are installed.
SHARED = (
    "numpy", "gymnasium", "box2d", "mujoco", "ale-py", "opencv-python-headless", "minatar",
)  # fmt: skip


def settings_of(row: BenchmarkRow) -> dict[str, Any]:
    """Return the settings of Stable-Baselines3 for a row, from `tuned_examples/sb3.yaml`.

    Raises:
        ConfigError: the file has none.
    """
    shipped: dict[str, dict[str, Any]] = yaml.safe_load((tuned_folder() / "sb3.yaml").read_text())
    if row.name not in shipped:
        raise ConfigError(
            f"benchmark: --against sb3 has no settings for {row.name}; those of "
            f"{', '.join(shipped)} are in tuned_examples/sb3.yaml"
        )
    return shipped[row.name]


def install(folder: Path) -> None:
    """Create a virtual environment with Stable-Baselines3, unless the folder has it.

    It has the same versions of torch, gymnasium and the environments as the running interpreter.

    Raises:
        ConfigError: the environment cannot be created, or a package cannot be installed.
    """
    if (folder / "ready").exists():
        return
    print(f"installing Stable-Baselines3 into {folder} …", flush=True)
    packages = [f"{name}=={installed}" for name in SHARED if (installed := _installed(name))]
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        [*_pip(folder), f"torch=={_installed('torch')}"],
        [*_pip(folder), *REQUIREMENTS, *packages],
    ]
    for command in commands:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise ConfigError(f"benchmark: {' '.join(command)} failed:\n{done.stdout}")
    (folder / "ready").touch()


def _pip(folder: Path) -> list[str]:
    return [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]


def _installed(package: str) -> str | None:
    """Return the version of an installed package without its build, such as +cpu, which the package
    index chooses; None: it is not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def run_process(command: list[str]) -> None:
    """Run a process and wait for its end, also after Ctrl-C, which it receives, too.

    Raises:
        subprocess.CalledProcessError: the process failed.
        SystemExit: Ctrl-C.
    """
    process = subprocess.Popen(command)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise SystemExit(130) from None
    if code:
        raise subprocess.CalledProcessError(code, command)


def train_sb3(row: BenchmarkRow, seed: int, run_dir: Path, episodes: int) -> dict[str, Any]:
    """Train a row from the start, and evaluate its last policy; return the fields of `Outcome`.

    The virtual environment is two folders above the run directory, as the command has them.

    Raises:
        ConfigError: there are no settings for the row.
        subprocess.CalledProcessError: the training failed.
        SystemExit: Ctrl-C.
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
            "settings": settings_of(row),
            "started": time.time(),  # the seconds include the start of the process
        })
    )  # fmt: skip
    script = Path(__file__).with_name("sb3_script.py")
    python = run_dir.parents[1] / ENVIRONMENT / "bin" / "python"
    run_process([str(python), str(script), str(spec), str(outcome)])
    values: dict[str, Any] = json.loads(outcome.read_text())
    return values
