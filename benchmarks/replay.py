"""Replay buffers: storing fragments and drawing batches, compared with a numpy ring and peers.

Fragments have 200 rows of one environment; batches have 256 rows. Small rows are CartPole's (4
floats), with capacity 100,000; images have 84x84x4 bytes, with capacity 10,000. Each buffer has its
own process; the processes alternate, 0.1 s each. Prints medians over the rounds and median ratios
per round: to the bare ring (storing, drawing) or to cpprb (prioritized pairs: drawing a batch and
updating its priorities).

    python benchmarks/replay.py [--rounds 21] [--no-peers]

The bare ring is a minimal implementation: one array per column, including both `obs` and `new_obs`,
written by slices and read by integer indexing. It stores the same columns as cpprb. cpprb, Tianshou
and Stable-Baselines3 run in a separate virtual environment (.peers/) and are omitted if they cannot
start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np

ROWS, DRAW = 200, 256
SIZES = {"small": ((4,), np.float32, 100_000), "images": ((84, 84, 4), np.uint8, 10_000)}
SECONDS = 0.1  # of one measurement


def fragments(kind: str, count: int) -> list[dict[str, np.ndarray]]:
    """Return the columns of `count` fragments of one environment with episodes of 100 steps."""
    shape, dtype, _ = SIZES[kind]
    rng = np.random.default_rng(0)
    batches = []
    for i in range(count):
        observations = rng.integers(0, 255, (ROWS + 1, *shape)).astype(dtype)
        steps = np.arange(i * ROWS, (i + 1) * ROWS)
        batches.append(
            {
                "obs": observations[:-1],
                "new_obs": observations[1:],
                "actions": rng.integers(0, 2, ROWS),
                "rewards": np.ones(ROWS, np.float32),
                "terminateds": steps % 100 == 99,
                "eps_id": steps // 100,
                "t": steps % 100,
            }
        )
    return batches


class BareRing:
    """A ring buffer with one array per column."""

    def __init__(self, kind: str):
        self.capacity = SIZES[kind][2]
        self.columns: dict[str, np.ndarray] = {}
        self.at = self.size = 0
        self.rng = np.random.default_rng(0)

    def add(self, rows: dict[str, np.ndarray]) -> None:
        if not self.columns:
            self.columns = {
                name: np.empty((self.capacity, *column.shape[1:]), column.dtype)
                for name, column in rows.items()
            }
        end = self.at + ROWS  # the capacity is a multiple of ROWS
        for name, column in rows.items():
            self.columns[name][self.at : end] = column
        self.at = end % self.capacity
        self.size = min(self.size + ROWS, self.capacity)

    def sample(self) -> Any:
        index = self.rng.integers(0, self.size, DRAW)
        return {name: column[index] for name, column in self.columns.items()}


class Flowrl:
    """flowrl's ReplayBuffer or PrioritizedReplayBuffer."""

    directory: str | None = None

    def __init__(self, kind: str, prioritized: bool = False):
        from flowrl.replay import PrioritizedReplayBuffer, ReplayBuffer

        buffer_class = PrioritizedReplayBuffer if prioritized else ReplayBuffer
        self.buffer: Any = buffer_class(SIZES[kind][2], seed=0, directory=self.directory)
        self.errors = np.random.default_rng(0).random(DRAW)

    @staticmethod
    def fragment(rows: dict[str, np.ndarray]) -> Any:
        """Return a batch like the sampler's: each observation once, `new_obs` is an index."""
        from flowrl.data import SampleBatch
        from flowrl.data.indexed_columns import NextRows

        cuts = np.flatnonzero(rows["terminateds"])
        cuts = np.union1d(cuts, [ROWS - 1])
        base = np.concatenate([rows["obs"], rows["new_obs"][cuts]])
        batch = SampleBatch({name: c for name, c in rows.items() if name != "new_obs"})
        dict.__setitem__(batch, "obs", base[:ROWS])
        dict.__setitem__(batch, "new_obs", NextRows(base, ROWS, cuts))
        return batch

    def add(self, batch: Any) -> None:
        self.buffer.add(batch)

    def sample(self) -> Any:
        return self.buffer.sample(DRAW)

    def pair(self) -> None:
        drawn = self.buffer.sample(DRAW)
        self.buffer.update_priorities(drawn["batch_indexes"], self.errors)


class FlowrlInFiles(Flowrl):
    """flowrl's buffers with rows in memory-mapped files."""

    directory = tempfile.gettempdir()


class Cpprb:
    """cpprb's buffers, which are written in C++."""

    def __init__(self, kind: str, prioritized: bool = False):
        from cpprb import PrioritizedReplayBuffer, ReplayBuffer

        shape, dtype, capacity = SIZES[kind]
        columns = {
            "obs": {"shape": shape, "dtype": dtype},
            "next_obs": {"shape": shape, "dtype": dtype},
            "act": {"dtype": np.int64},
            "rew": {},
            "done": {"dtype": np.bool_},
            "eps_id": {"dtype": np.int64},
            "t": {"dtype": np.int64},
        }
        buffer_class = PrioritizedReplayBuffer if prioritized else ReplayBuffer
        self.buffer: Any = buffer_class(capacity, columns)
        self.errors = np.random.default_rng(0).random(DRAW)

    @staticmethod
    def fragment(rows: dict[str, np.ndarray]) -> Any:
        names = {"new_obs": "next_obs", "actions": "act", "rewards": "rew", "terminateds": "done"}
        return {names.get(name, name): column for name, column in rows.items()}

    def add(self, rows: Any) -> None:
        self.buffer.add(**rows)

    def sample(self) -> Any:
        return self.buffer.sample(DRAW)

    def pair(self) -> None:
        drawn = self.buffer.sample(DRAW)
        self.buffer.update_priorities(drawn["indexes"], self.errors)


class Tianshou:
    """Tianshou's buffers, whose sum trees are compiled by numba."""

    def __init__(self, kind: str, prioritized: bool = False):
        from tianshou.data import PrioritizedReplayBuffer, ReplayBuffer

        capacity = SIZES[kind][2]
        self.buffer: Any = (
            PrioritizedReplayBuffer(capacity, alpha=0.6, beta=0.4)
            if prioritized
            else ReplayBuffer(capacity)
        )
        self.errors = np.random.default_rng(0).random(DRAW)

    @staticmethod
    def fragment(rows: dict[str, np.ndarray]) -> Any:
        from tianshou.data import Batch

        false = np.zeros(ROWS, bool)
        return [
            Batch(
                obs=rows["obs"][i],
                act=rows["actions"][i],
                rew=float(rows["rewards"][i]),
                terminated=bool(rows["terminateds"][i]),
                truncated=bool(false[i]),
                obs_next=rows["new_obs"][i],
                info={},
            )
            for i in range(ROWS)
        ]

    def add(self, rows: Any) -> None:
        for row in rows:
            self.buffer.add(row)

    def sample(self) -> Any:
        return self.buffer.sample(DRAW)

    def pair(self) -> None:
        _, index = self.buffer.sample(DRAW)
        self.buffer.update_weight(index, self.errors)


class Sb3:
    """Stable-Baselines3's ReplayBuffer."""

    def __init__(self, kind: str):
        from gymnasium import spaces
        from stable_baselines3.common.buffers import ReplayBuffer

        shape, dtype, capacity = SIZES[kind]
        space = spaces.Box(0, 255, shape, dtype)
        self.buffer: Any = ReplayBuffer(capacity, space, spaces.Discrete(2), device="cpu")

    @staticmethod
    def fragment(rows: dict[str, np.ndarray]) -> Any:
        return [
            (
                rows["obs"][i : i + 1],
                rows["new_obs"][i : i + 1],
                rows["actions"][i : i + 1],
                rows["rewards"][i : i + 1],
                rows["terminateds"][i : i + 1],
                [{}],
            )
            for i in range(ROWS)
        ]

    def add(self, rows: Any) -> None:
        for row in rows:
            self.buffer.add(*row)

    def sample(self) -> Any:
        return self.buffer.sample(DRAW)


RUNS: dict[str, Any] = {
    "bare ring": BareRing,
    "flowrl": Flowrl,
    "flowrl in files": FlowrlInFiles,
    "cpprb": Cpprb,
    "Tianshou": Tianshou,
    "SB3": Sb3,
}


def timed_calls(name: str) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Fill the buffers of an entry; return figure -> (number that a call counts as, call)."""
    entry = RUNS[name]
    prepare = getattr(entry, "fragment", lambda rows: rows)
    calls: dict[str, tuple[int, Callable[[], Any]]] = {}
    for kind in SIZES:
        batches = [prepare(rows) for rows in fragments(kind, 25)]
        stream = itertools.cycle(batches)
        buffer = entry(kind)
        for _ in range(SIZES[kind][2] // ROWS + len(batches)):
            buffer.add(next(stream))  # until rows are overwritten
        calls[f"{kind}: rows stored/s"] = ROWS, partial(add_next, buffer, stream)
        calls[f"{kind}: batches/s"] = 1, buffer.sample
        if kind == "small" and hasattr(entry, "pair"):
            buffer = entry(kind, prioritized=True)
            for _ in range(SIZES[kind][2] // ROWS):
                buffer.add(next(stream))
            calls["prioritized pairs/s"] = 1, buffer.pair
    return calls


def add_next(buffer: Any, stream: Iterator[Any]) -> None:
    buffer.add(next(stream))


def serve(name: str) -> None:
    """Measure and print the figure named by each line on stdin."""
    calls = timed_calls(name)
    print(json.dumps(list(calls)), flush=True)
    for line in sys.stdin:
        count, call = calls[line.strip()]
        num_calls, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < SECONDS:
            for _ in range(8):
                call()
            num_calls += 8
        print(count * num_calls / elapsed, flush=True)


class Process:
    """A process with one buffer, which measures figures on request."""

    def __init__(self, name: str, python: str):
        command = [python, __file__, "--serve", name]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        try:
            self.figures = set(json.loads(self._line()))
        except ValueError:
            errors = self._process.communicate()[1].strip().splitlines()
            raise OSError(errors[-1] if errors else "the process ended") from None

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def measure(self, figure: str) -> float:
        """Return the rate [1/s]."""
        assert self._process.stdin is not None
        print(figure, file=self._process.stdin, flush=True)
        return float(self._line())

    def stop(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--peers-python", help="interpreter with the peers installed")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    pythons = dict.fromkeys(("bare ring", "flowrl", "flowrl in files"), sys.executable)
    if not options.no_peers:
        sys.path.insert(0, str(Path(__file__).parent))
        from peer_env import peer_python

        python = options.peers_python or str(
            peer_python("replay", "cpprb==11.0.0", "tianshou==2.0.1", "stable-baselines3==2.9.2")
        )
        pythons |= dict.fromkeys(("cpprb", "Tianshou", "SB3"), python)
    running: dict[str, Process] = {}
    for name, python in pythons.items():
        try:
            running[name] = Process(name, python)
        except OSError as error:
            print(f"# {name} omitted: {error}", flush=True)
    figures = [f"{kind}: {unit}/s" for kind in SIZES for unit in ("rows stored", "batches")]
    figures.append("prioritized pairs/s")
    rates: dict[tuple[str, str], list[float]] = {}
    for figure in figures:
        for _ in range(options.rounds):
            for name, process in running.items():
                if figure in process.figures:
                    rates.setdefault((name, figure), []).append(process.measure(figure))
    for process in running.values():
        process.stop()
    print("| | " + " | ".join(f"{figure} | ×" for figure in figures) + " |")
    print("|---" + "|---:|---:" * len(figures) + "|")
    for name in running:
        cells = []
        for figure in figures:
            base = "bare ring"
            if "pairs" in figure:
                base = "cpprb" if "cpprb" in running else "flowrl"
            values = rates.get((name, figure), [])
            ratios = [a / b for a, b in zip(values, rates[base, figure], strict=False)]
            cells.append(f"{np.median(values):,.0f}" if values else "")
            cells.append(f"{np.median(ratios):.2f}" if ratios else "")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
