"""Figures of faults: seconds until training continues, env steps lost, damage found.

Each fault is injected several times into trainings on CartPole, or into their files. Writes the
figures to results/faults.json and this table, with a row per figure, to results/faults.md: the
median over the repetitions, the lowest and the highest value.

    python benchmarks/faults.py [--faults "a replay actor is killed"] [--rounds 3]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figures, measured_here
from gymnasium.envs.classic_control import CartPoleEnv

from flowrl.data.checkpoint import (
    CheckpointError,
    list_checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from flowrl.data.checkpoint_storage import LocalStorage
from flowrl.trainer.plan_settings import plan_config

COLUMNS = ("fault", "figure", "median", "lowest, highest")
Values = dict[str, list[float]]  # figure -> one value per repetition
FAULTS: dict[str, Callable[[int], Values]] = {}


def fault(name: str) -> Callable[[Callable[[int], Values]], Callable[[int], Values]]:
    """Register the function that injects a fault a number of times and returns its figures."""

    def register(function: Callable[[int], Values]) -> Callable[[int], Values]:
        FAULTS[name] = function
        return function

    return register


def descendants(pid: int) -> list[int]:
    """Return the ids of a process' descendants."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found


def command_of(pid: int) -> str:
    """Return the command of a process without its arguments; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""


def actor_pids(pid: int, class_name: str) -> list[int]:
    """Return the process ids of the actors of a class that a process has started."""
    found = descendants(pid)
    return sorted(one for one in found if command_of(one).startswith(f"ray::{class_name}"))


def build(plan: str, env: Any = "CartPole-v1", **settings: Any) -> Any:
    """Return an algorithm with the settings of a plan."""
    config = plan_config(plan, "CartPole-v1", tuned=False)
    always = {"env": env, "total_timesteps": 10**9, "monitor": False, "seed": 0}
    return config.updated(**always, **settings).build(plan=plan)


def longest_gap(algorithm: Any, seconds: float) -> float:
    """Train for a time; return the longest time between two results."""
    started = last = time.perf_counter()
    longest = 0.0
    while last - started < seconds:
        algorithm.train()
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


def rate(algorithm: Any, seconds: float) -> float:
    """Train for a time; return the env steps per second."""
    steps, started = algorithm.env_steps, time.perf_counter()
    while time.perf_counter() - started < seconds:
        algorithm.train()
    return (algorithm.env_steps - steps) / (time.perf_counter() - started)


# -- workers ---------------------------------------------------------------------------------------


@fault("all workers are killed at once (A2C, 2 workers)")
def kill_all_workers(rounds: int) -> Values:
    times = []
    with build("a2c", num_workers=2) as algorithm:
        for _ in range(rounds):
            rate(algorithm, 2.0)
            for pid in actor_pids(os.getpid(), "RolloutWorker"):
                os.kill(pid, signal.SIGKILL)
            killed = time.perf_counter()
            restarts = algorithm.train()["num_remote_worker_restarts"]
            times.append(time.perf_counter() - killed)
            while restarts < 2 * len(times):
                restarts = algorithm.train()["num_remote_worker_restarts"]
    return {"s to the next result": times}


class DelayedCartPole(CartPoleEnv):
    """CartPole whose steps take a time, and another time on worker 1.

    Args:
        context: of the environment's worker.
        step_s, slow_step_s: duration of a step, and of one on worker 1 [s].
    """

    def __init__(self, context: Any, step_s: float, slow_step_s: float):
        super().__init__()
        self._step_s = slow_step_s if context.worker_index == 1 else step_s

    def step(self, action: Any) -> Any:
        until = time.perf_counter() + self._step_s
        while time.perf_counter() < until:
            time.sleep(5e-5)
        return super().step(action)


@fault("one of 4 workers is 10 times slower (IMPALA)")
def slow_worker(rounds: int) -> Values:
    kept = []
    settings = {"num_workers": 4, "rollout_fragment_length": 20}
    for _ in range(rounds):
        rates = []
        for slow_step_s in (2e-4, 2e-3):
            env = partial(DelayedCartPole, step_s=2e-4, slow_step_s=slow_step_s)
            with build("impala", env, **settings) as algorithm:
                rate(algorithm, 4.0)
                rates.append(rate(algorithm, 8.0))
        kept.append(100 * rates[1] / rates[0])
    return {"% of the env steps/s of 4 even workers (77.5 if each had a core)": kept}


@fault("one of 2 workers is slow, limit of 2 on the policy lag (IMPALA, 200,000 env steps)")
def limited_lag(rounds: int) -> Values:
    dropping, waiting, lags = [], [], []
    for _ in range(rounds):
        unlimited, _ = rate_and_lag()
        dropped, drop_lag = rate_and_lag(max_policy_lag=2, stale_policy="drop")
        waited, wait_lag = rate_and_lag(max_policy_lag=2, stale_policy="wait")
        dropping.append(100 * dropped / unlimited)
        waiting.append(100 * waited / unlimited)
        lags.append(max(drop_lag, wait_lag))
    return {
        '% of the trained env steps/s, stale_policy="drop"': dropping,
        '% of the trained env steps/s, stale_policy="wait"': waiting,
        "largest policy lag": lags,
    }


def rate_and_lag(**settings: Any) -> tuple[float, int]:
    """Train 200,000 env steps; return the trained env steps per second and the largest lag."""
    env = partial(DelayedCartPole, step_s=0.0, slow_step_s=1e-3)
    with build("impala", env, num_workers=2, **settings) as algorithm:
        rate(algorithm, 4.0)
        counters = algorithm.plan.metrics.counters
        first, started = counters["num_env_steps_trained"], time.perf_counter()
        lags = []
        while counters["num_env_steps_trained"] < first + 200_000:
            lags.append(algorithm.train()["env_runners"]["policy_lag_max"])
        trained = counters["num_env_steps_trained"] - first
        return trained / (time.perf_counter() - started), max(lags)


# -- environments ----------------------------------------------------------------------------------


class FaultyCartPole(CartPoleEnv):
    """CartPole that raises in 1 of 1,000 steps; counts all steps."""

    steps = failures = 0
    rng = random.Random(0)  # of all environments

    def step(self, action: Any) -> Any:
        if self.rng.random() < 1e-3:
            FaultyCartPole.failures += 1
            raise RuntimeError("the simulator has crashed")
        FaultyCartPole.steps += 1
        return super().step(action)


@fault("an environment raises in 1 of 1,000 steps (PPO, in process)")
def raising_environment(rounds: int) -> Values:
    lost = []
    for _ in range(rounds):
        FaultyCartPole.steps = FaultyCartPole.failures = 0
        with build("ppo", lambda context: FaultyCartPole(), num_envs_per_worker=4) as algorithm:
            rate(algorithm, 4.0)
            unreported = FaultyCartPole.steps - algorithm.env_steps
        lost.append(unreported / FaultyCartPole.failures)
    return {"env steps lost per failure": lost}


class BrokenCartPole(CartPoleEnv):
    """CartPole whose steps always raise."""

    def step(self, action: Any) -> Any:
        raise RuntimeError("the simulator does not start")


@fault("an environment always raises (A2C, 2 workers)")
def broken_environment(rounds: int) -> Values:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        with build("a2c", BrokenCartPole, num_workers=2) as algorithm:
            message = ""
            try:
                algorithm.train()
            except RuntimeError as error:
                message = str(error)
            times.append(time.perf_counter() - started)
        assert "the simulator does not start" in message
    return {"s from the start of Ray to its error": times}


class DisturbedCartPole(CartPoleEnv):
    """CartPole that calls a function in its first step after a file exists, on worker 1."""

    def __init__(self, context: Any, trigger: str, disturb: Callable[[], None]):
        super().__init__()
        self._trigger = trigger if context.worker_index == 1 else None
        self._disturb = disturb

    def step(self, action: Any) -> Any:
        if self._trigger is not None and os.path.exists(self._trigger):
            os.remove(self._trigger)
            self._disturb()
        return super().step(action)


def disturb(action: Callable[[], None], rounds: int, **settings: Any) -> list[float]:
    """Return the longest time between two results of A3C around each call of a function by an
    environment of one of two workers."""
    gaps = []
    with tempfile.TemporaryDirectory() as folder:
        trigger = os.path.join(folder, "trigger")
        env = lambda context: DisturbedCartPole(context, trigger, action)  # noqa: E731
        with build("a3c", env, num_workers=2, **settings) as algorithm:
            for _ in range(rounds):
                rate(algorithm, 6.0)
                Path(trigger).touch()
                gaps.append(longest_gap(algorithm, 6.0))
                assert not os.path.exists(trigger)
            result = algorithm.train()
            assert result["num_remote_worker_restarts"] + result["num_env_restarts"] >= rounds
    return gaps


@fault("an environment has a segmentation fault (A3C, 2 workers)")
def segmentation_fault(rounds: int) -> Values:
    return {"longest time between results [s]": disturb(lambda: ctypes.string_at(0), rounds)}


@fault("a step hangs, limit of 1 s (A3C, 2 workers)")
def hanging_step(rounds: int) -> Values:
    gaps = disturb(lambda: time.sleep(600), rounds, env_step_timeout_s=1.0)
    return {"longest time between results [s]": gaps}


@fault("a step ignores signals and hangs, limit of a fragment of 3 s (A3C, 2 workers)")
def hanging_worker(rounds: int) -> Values:
    gaps = disturb(lambda: os.kill(os.getpid(), signal.SIGSTOP), rounds, sample_timeout_s=3.0)
    return {"longest time between results [s]": gaps}


class InvalidCartPole(CartPoleEnv):
    """CartPole whose 500th observation is not a number."""

    steps = 0

    def step(self, action: Any) -> Any:
        InvalidCartPole.steps += 1
        observation, *rest = super().step(action)
        return observation * (np.nan if InvalidCartPole.steps == 500 else 1.0), *rest


@fault("an observation is NaN (A2C, in process)")
def invalid_observation(rounds: int) -> Values:
    trained, steps = [], []
    for _ in range(rounds):
        InvalidCartPole.steps = 0
        with build("a2c", InvalidCartPole) as algorithm:
            with suppress(ValueError):
                while True:
                    algorithm.train()
            counters = algorithm.plan.metrics.counters
            weights = algorithm.get_policy().get_weights().values()
            assert all(np.isfinite(weight).all() for weight in weights)
            trained.append(max(0, counters["num_env_steps_trained"] - 499))
            steps.append(InvalidCartPole.steps - 500)
    return {"rows trained with it": trained, "env steps until the error": steps}


# -- replay, learners ------------------------------------------------------------------------------


@fault("a replay actor is killed (Ape-X, 2 workers, 4 replay actors)")
def kill_replay_shard(rounds: int) -> Values:
    gaps, lost = [], []
    settings = {"num_workers": 2, "learning_starts": 1000, "num_replay_shards": 4}
    with build("apex", **settings) as algorithm:
        counters = algorithm.plan.metrics.counters
        for number in range(rounds):
            rate(algorithm, 4.0)
            before = counters["num_replay_rows_lost"], counters["num_replay_shard_restarts"]
            os.kill(actor_pids(os.getpid(), "ReplayShard")[number % 4], signal.SIGKILL)
            gaps.append(longest_gap(algorithm, 6.0))
            assert counters["num_replay_shard_restarts"] == before[1] + 1
            lost.append(counters["num_replay_rows_lost"] - before[0])
    return {"longest time between results [s]": gaps, "rows lost": lost}


@fault("a learner is killed (IMPALA, 2 workers, 2 learners)")
def kill_learner(rounds: int) -> Values:
    gaps = []
    with build("impala", num_workers=2, num_learners=2) as algorithm:
        counters = algorithm.plan.metrics.counters
        for _ in range(rounds):
            rate(algorithm, 6.0)
            before = counters["num_learner_restarts"]
            os.kill(actor_pids(os.getpid(), "LearnerActor")[0], signal.SIGKILL)
            gaps.append(longest_gap(algorithm, 12.0))
            assert counters["num_learner_restarts"] == before + 1
    return {"longest time between results [s]": gaps}


# -- processes of a run ----------------------------------------------------------------------------


@contextmanager
def impala_run() -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start a training with 2 workers; yield its process and run directory after its first
    results. All its processes are killed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "flowrl", "train", "impala", "--no-tuned"]
        command += ["--num-workers=2", "--stop-timesteps=1000000000", "--display=none"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([*command, "--run-dir", str(run_dir)], **quiet)
        results, started = run_dir / "result.json", []
        try:
            while not (results.exists() and results.stat().st_size):
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(2.0)
            started = descendants(process.pid)
            yield process, run_dir
        finally:
            process.kill()
            process.wait()
            for pid in filter(is_running, started):
                os.kill(pid, signal.SIGKILL)


def end_run(stop: Callable[[int], None], exit_code: int, rounds: int) -> Values:
    """Return the seconds from the call of a function with the process id of a run to its end."""
    times = []
    for _ in range(rounds):
        with impala_run() as (process, run_dir):
            started = time.perf_counter()
            stop(process.pid)
            assert process.wait(120) == exit_code
            times.append(time.perf_counter() - started)
            assert list_checkpoints(run_dir)
    return {"s to the end, with a checkpoint": times}


def kill_descendant(pid: int, name: str) -> None:
    """Kill the descendant of a process whose command ends with a name."""
    victim = next(one for one in descendants(pid) if command_of(one).endswith(name))
    os.kill(victim, signal.SIGKILL)


@fault("SIGTERM (IMPALA, 2 workers)")
def terminate(rounds: int) -> Values:
    return end_run(lambda pid: os.kill(pid, signal.SIGTERM), 143, rounds)


@fault("Ray's raylet is killed (IMPALA, 2 workers)")
def kill_raylet(rounds: int) -> Values:
    return end_run(partial(kill_descendant, name="raylet"), 1, rounds)


@fault("Ray's GCS is killed (IMPALA, 2 workers)")
def kill_gcs(rounds: int) -> Values:
    return end_run(partial(kill_descendant, name="gcs_server"), 1, rounds)


@fault("the process is killed (IMPALA, 2 workers)")
def kill_driver(rounds: int) -> Values:
    workers, all_processes = [], []
    for _ in range(rounds):
        with impala_run() as (process, _):
            left = descendants(process.pid)
            of_workers = actor_pids(process.pid, "RolloutWorker")
            process.kill()
            killed = time.perf_counter()
            process.wait()
            workers.append(seconds_until_ended(of_workers, killed))
            all_processes.append(seconds_until_ended(left, killed))
    return {"s until no worker is left": workers, "s until no process is left": all_processes}


def seconds_until_ended(pids: list[int], since: float) -> float:
    """Wait until processes have ended; return the seconds since a moment."""
    while any(map(is_running, pids)):
        assert time.perf_counter() - since < 300
        time.sleep(0.1)
    return time.perf_counter() - since


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- files -----------------------------------------------------------------------------------------


def checkpoint_of_dqn(folder: str) -> Path:
    """Return a checkpoint of DQN with a replay buffer."""
    path = Path(folder) / "checkpoint"
    with build("dqn", learning_starts=100, replay_buffer_capacity=1000) as algorithm:
        algorithm.train()
        algorithm.save(path)
    return path


@fault("a bit of a checkpoint is flipped, or a file is cut (DQN), 1,000 times")
def damage_checkpoint(rounds: int) -> Values:
    rng = random.Random(0)
    found, slowest = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint_of_dqn(folder)
        files = sorted(path.iterdir())
        for _ in range(rounds):
            rejected, times = 0, []
            for number in range(1000):
                file = rng.choice(files)
                original = file.read_bytes()
                damaged = bytearray(original)
                position = rng.randrange(len(original))
                if number % 2:
                    damaged[position] ^= 1 << rng.randrange(8)
                else:
                    del damaged[position:]
                file.write_bytes(damaged)
                started = time.perf_counter()
                try:
                    read_checkpoint(path)
                except CheckpointError as error:
                    rejected += file.name in str(error)
                    times.append(1000 * (time.perf_counter() - started))
                file.write_bytes(original)
            found.append(rejected / 10)
            slowest.append(max(times))
    return {"% refused with the name of the file": found, "ms to the slowest refusal": slowest}


def save_until(victim: int, path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint and end this process, with SIGKILL at a call of the file system."""
    calls = 0

    def numbered(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    try:
        for owner, names in (
            (LocalStorage, ("write", "publish", "remove")), (os, ("fsync", "replace")),
        ):  # fmt: skip
            for name in names:
                setattr(owner, name, numbered(getattr(owner, name)))
        write_checkpoint(path, state, {})
        os._exit(0)
    finally:
        os._exit(1)


@fault("the process is killed at a write, sync or rename of a checkpoint, each in turn")
def kill_while_saving(rounds: int) -> Values:
    loaded, points = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint"
            state = {"array": np.zeros(1 << 16), "number": 0}
            write_checkpoint(path, state, {})
            point = intact = 0
            while True:
                point += 1
                child = os.fork()
                if not child:
                    save_until(point, path, {**state, "number": point})
                _, status = os.waitpid(child, 0)
                if status == 0:  # there is no such call
                    break
                assert os.WTERMSIG(status) == signal.SIGKILL
                with suppress(CheckpointError):
                    intact += read_checkpoint(path)[0]["number"] in range(point + 1)
            points.append(point - 1)
            loaded.append(100 * intact / (point - 1))
    return {"points": points, "% with an intact checkpoint": loaded}


@fault("a setting is invalid (command line)")
def invalid_settings(rounds: int) -> Values:
    flags = (
        "--lr=nan", "--num-workers=1000000000", "--gamma=2", "--train-batch-size=-1",
        "--num-sgd-iter=99999999999999999999999", "--lamda=0.9", "--env=Missing-v0",
    )  # fmt: skip
    refused, slowest = [], []
    for _ in range(rounds):
        codes, times = [], []
        for flag in flags:
            started = time.perf_counter()
            command = [sys.executable, "-m", "flowrl", "train", "ppo", flag]
            done = subprocess.run(command, capture_output=True, timeout=60)
            times.append(time.perf_counter() - started)
            codes.append(done.returncode == 2 and b"Traceback" not in done.stderr)
        refused.append(sum(codes))
        slowest.append(max(times))
    return {"s to the slowest refusal": slowest, f"refused, of {len(flags)}": refused}


# -- table -----------------------------------------------------------------------------------------


def cells(figures: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the table."""
    values = np.percentile(figures["values"], [0, 50, 100])
    low, median, high = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)
    return [figures["fault"], figures["figure"], median, f"{low}, {high}"]


def main() -> None:
    """Inject the faults, each in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--faults", nargs="+", choices=tuple(FAULTS), default=tuple(FAULTS))
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each fault")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(FAULTS[options.measure](options.rounds)))
        return
    table = Figures("faults", COLUMNS, cells)
    for name in options.faults:
        command = [sys.executable, __file__, "--measure", name, "--rounds", str(options.rounds)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        for figure, values in json.loads(output.splitlines()[-1]).items():
            row = {"fault": name, "figure": figure, "values": [float(value) for value in values]}
            measured = [measured_here(f"{options.rounds} repetitions")]
            table.add(f"{name}: {figure}", {**row, "measured": measured})


if __name__ == "__main__":
    main()
