"""Peer libraries: virtual environments, created once in .peers/, and runs in turn with flowrl's."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / ".peers"


def peer_python(name: str, *requirements: str) -> Path:
    """Return the interpreter of a peer's environment with flowrl's version of torch and the
    requirements."""
    folder = ROOT / name
    python, ready = folder / "bin" / "python", folder / "ready"
    torch = f"torch=={version('torch').partition('+')[0]}"  # without the build, such as +cpu
    installed = " ".join([torch, *requirements])
    if not ready.exists() or ready.read_text() != installed:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        for packages in ([torch], list(requirements)):
            subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
        ready.write_text(installed)
    return python


def sb3_python() -> str:
    """Return the interpreter of Stable-Baselines3, with flowrl's versions of the packages of
    environments."""
    from flowrl.benchmark.sb3 import requirements

    return str(peer_python("stable-baselines3", *requirements()))


def rllib_python() -> str:
    """Return the interpreter of RLlib 2.60, with the version of Gymnasium that it needs."""
    return str(peer_python("rllib-2.60", "ray[rllib]==2.60.0", "gymnasium==1.2.2", "mpe2==1.1.1"))


def run_alternately(
    script: str, pythons: dict[str, str], rounds: int, *arguments: str
) -> dict[str, list[dict[str, float]]]:
    """Run the entries of a script in turn, each time in a new process.

    Args:
        script: called with the arguments and `--one ENTRY`; its last line of output is JSON.
        pythons: entry -> interpreter.
        rounds: runs of each entry.
        arguments: further arguments.

    Returns:
        entry -> results of the rounds.
    """
    results: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    for number in range(rounds):
        for name, python in pythons.items():
            command = [python, script, *arguments, "--one", name]
            process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[name].append(json.loads(process.stdout.splitlines()[-1]))
            print(f"# round {number}, {name}: {results[name][-1]}", flush=True)
    return results


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Return "median (lowest to highest)"."""
    ordered = sorted(values)
    median, low, high = (
        f"{v:,.{digits}f}" for v in (statistics.median(ordered), ordered[0], ordered[-1])
    )
    return f"{median} ({low} to {high})"
