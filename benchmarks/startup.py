"""Start-up: imports, the first env step, the first result, and seconds from the command to 475.

Each command runs in a new process; seconds are counted from its start. "To 475" trains PPO on
CartPole-v1 until the mean return of the last 100 episodes is 475: `flowrl train ppo`, and
Stable-Baselines3 with the settings of its zoo in as short a script as possible (8 environments,
32 steps each, minibatches of 256, 20 epochs, learning rate and clipping that fall to 0 over 100,000
env steps). The commands take turns; prints medians over the rounds.

    python benchmarks/startup.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gymnasium.envs.classic_control import CartPoleEnv
from peer_env import sb3_python, spread

TRAIN = [str(Path(sys.executable).parent / "flowrl"), "train", "ppo"]
FOLDER = Path(__file__).parent


class FirstStep(CartPoleEnv):
    """CartPole that writes the time of its first step to the file that FIRST_STEP names."""

    def step(self, action: Any) -> Any:
        if path := os.environ.pop("FIRST_STEP", ""):
            Path(path).write_text(repr(time.time()))
        return super().step(action)


SB3 = """
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

class StopAt475(BaseCallback):
    def _on_step(self):
        returns = [episode["r"] for episode in self.model.ep_info_buffer]
        return not (len(returns) == 100 and sum(returns) >= 47500)

model = PPO(
    "MlpPolicy", make_vec_env("CartPole-v1", 8), n_steps=32, batch_size=256, n_epochs=20,
    gae_lambda=0.8, gamma=0.98, ent_coef=0.0, learning_rate=lambda left: left * 1e-3,
    clip_range=lambda left: left * 0.2, device="cpu", seed={seed},
)
model.learn(100_000, callback=StopAt475())
print("reached" if model.num_timesteps < 100_000 else "failed")
"""


def seconds_of(
    command: list[str],
    folder: str,
    until: str = "",
    may_fail: bool = False,
    variables: dict[str, str] | None = None,
) -> float:
    """Run a command; return the seconds until its end, or until a line contains `until`; infinity
    if none does and the command may fail to reach its goal. `variables` are added to the
    environment."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **({"PYTHONUNBUFFERED": "1"} if until else {}), **(variables or {})},
    )  # fmt: skip
    assert process.stdout is not None
    lines, seconds = [], 0.0
    for line in process.stdout:
        lines.append(line)
        if until and not seconds and until in line:
            seconds = time.perf_counter() - started
    code = process.wait()
    assert code == 0, "".join(lines)
    if until:
        assert seconds or may_fail, "".join(lines)
        return seconds or math.inf
    return time.perf_counter() - started


def seconds_to_first_step(folder: str) -> float:
    """Return the seconds from `flowrl train` to the first env step."""
    path = Path(folder) / "first_step"
    settings = ["--env", "startup:FirstStep", "--stop-timesteps", "4000", "--run-dir", "first"]
    paths = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    started = time.time()
    variables = {"FIRST_STEP": str(path), "PYTHONPATH": paths}
    seconds_of([*TRAIN, *settings], folder, variables=variables)
    return float(path.read_text()) - started


def seconds_to_first_result(folder: str) -> float:
    """Return the seconds from `flowrl train` with 2 workers to the first line of its table."""
    settings = ["--num-workers", "2", "--stop-timesteps", "4000", "--run-dir", "workers"]
    return seconds_of([*TRAIN, *settings], folder, until="     1 ")


def measure(name: str, seed: int, peer: str) -> float:
    """Return the seconds of an entry."""
    with tempfile.TemporaryDirectory() as folder:
        if name == "flowrl train, first step":
            return seconds_to_first_step(folder)
        if name == "flowrl train, 2 workers, first result":
            return seconds_to_first_result(folder)
        if name == "flowrl train, to 475":
            command = [*TRAIN, "--seed", str(seed)]
            return seconds_of(command, folder, until="reached: mean return", may_fail=True)
        if name == "Stable-Baselines3, to 475":
            program = SB3.format(seed=seed)
            return seconds_of([peer, "-c", program], folder, until="reached", may_fail=True)
        module = name.removeprefix("import ")
        python = peer if module == "stable_baselines3" else sys.executable
        return seconds_of([python, "-c", f"import {module}"], folder)


ENTRIES = (
    "import flowrl",
    "import torch",
    "import stable_baselines3",
    "flowrl train, first step",
    "flowrl train, 2 workers, first result",
    "flowrl train, to 475",
    "Stable-Baselines3, to 475",
)


def main() -> None:
    """Run the entries in turn and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    peer = sb3_python()
    seconds: dict[str, list[float]] = {name: [] for name in ENTRIES}
    for seed in range(options.rounds):
        for name in ENTRIES:
            seconds[name].append(measure(name, seed, peer))
            print(f"# {seed}, {name}: {seconds[name][-1]:.2f}", flush=True)
    print("\n| | seconds |\n|---|---:|")
    for name, values in seconds.items():
        print(f"| {name} | {spread(values)} |")
    ours, theirs = seconds["flowrl train, to 475"], seconds["Stable-Baselines3, to 475"]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if math.isfinite(a + b)]
    print(
        f"\nflowrl / Stable-Baselines3, to 475, {len(ratios)} of {options.rounds} rounds:", end=" "
    )
    print(spread(ratios) if ratios else "not both have reached it")


if __name__ == "__main__":
    main()
