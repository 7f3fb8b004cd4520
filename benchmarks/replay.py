"""Replay buffers: storing fragments and drawing batches, beside a bare numpy ring and peers.

Fragments of 200 rows of one environment; a draw is of 256 rows. Small rows are CartPole's (4
floats), capacity 100,000; images are 84x84x4 bytes, capacity 10,000. Every figure is a median of
rounds in turn; ratios are to the bare ring (storing, drawing) or to cpprb (prioritized pairs: a
draw and an update of its priorities).

    python benchmarks/replay.py [--rounds 7] [--no-peers]

The bare ring is what one would write without a library: an array per column, `obs` and `new_obs`
both, written by slices and read by fancy indexing. cpprb, Tianshou and Stable-Baselines3 run in an
environment of their own (.peers/), as far as they can be installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
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
SECONDS = 0.25  # of one measurement


def fragments(kind: str, count: int) -> list[dict[str, np.ndarray]]:
    """Columns of fragments of one environment, whose episodes last 100 steps."""
    shape, dtype, _ = SIZES[kind]
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        observations = rng.integers(0, 255, (ROWS + 1, *shape)).astype(dtype)
        steps = np.arange(i * ROWS, (i + 1) * ROWS)
        made.append(
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
    return made


class BareRing:
    """An array per column."""

    def __init__(self, kind: str):
        self.capacity = SIZES[kind][2]
        self.columns: dict[str, np.ndarray] = {}
        self.at = self.size = 0
        self.rng = np.random.default_rng(0)

    def add(self, rows: dict[str, np.ndarray]) -> None:
        if not self.columns:
            made = {k: np.empty((self.capacity, *v.shape[1:]), v.dtype) for k, v in rows.items()}
            self.columns = made
        end = self.at + ROWS  # the capacity is a multiple of it
        for name, column in rows.items():
            self.columns[name][self.at : end] = column
        self.at = end % self.capacity
        self.size = min(self.size + ROWS, self.capacity)

    def sample(self) -> Any:
        index = self.rng.integers(0, self.size, DRAW)
        return {name: column[index] for name, column in self.columns.items()}


class Flowrl:
    """ReplayBuffer, or the prioritized one."""

    def __init__(self, kind: str, prioritized: bool = False):
        from flowrl.data import PrioritizedReplayBuffer, ReplayBuffer

        made = PrioritizedReplayBuffer if prioritized else ReplayBuffer
        self.buffer: Any = made(SIZES[kind][2], seed=0)
        self.errors = np.random.default_rng(0).random(DRAW)

    @staticmethod
    def fragment(rows: dict[str, np.ndarray]) -> Any:
        """As the sampler makes it: each observation once, `new_obs` by position."""
        from flowrl.data import SampleBatch
        from flowrl.data.windows import Windows

        cuts = np.flatnonzero(rows["terminateds"])
        cuts = np.union1d(cuts, [ROWS - 1])
        base = np.concatenate([rows["obs"], rows["new_obs"][cuts]])
        index = np.arange(1, ROWS + 1)
        index[cuts] = np.arange(ROWS, len(base))
        batch = SampleBatch({name: c for name, c in rows.items() if name != "new_obs"})
        dict.__setitem__(batch, "obs", base[:ROWS])
        dict.__setitem__(batch, "new_obs", Windows(base, index))
        return batch

    def add(self, batch: Any) -> None:
        self.buffer.add(batch)

    def sample(self) -> Any:
        return self.buffer.sample(DRAW)

    def pair(self) -> None:
        drawn = self.buffer.sample(DRAW)
        self.buffer.update_priorities(drawn["batch_indexes"], self.errors)


class Cpprb:
    """cpprb, a buffer in C++."""

    def __init__(self, kind: str, prioritized: bool = False):
        from cpprb import PrioritizedReplayBuffer, ReplayBuffer

        shape, dtype, capacity = SIZES[kind]
        columns = {
            "obs": {"shape": shape, "dtype": dtype},
            "next_obs": {"shape": shape, "dtype": dtype},
            "act": {"dtype": np.int64},
            "rew": {},
            "done": {"dtype": np.bool_},
        }
        made = PrioritizedReplayBuffer if prioritized else ReplayBuffer
        self.buffer: Any = made(capacity, columns)
        self.errors = np.random.default_rng(0).random(DRAW)

    @staticmethod
    def fragment(rows: dict[str, np.ndarray]) -> Any:
        names = {"obs": "obs", "next_obs": "new_obs", "act": "actions", "rew": "rewards"}
        return {name: rows[own] for name, own in names.items()} | {"done": rows["terminateds"]}

    def add(self, rows: Any) -> None:
        self.buffer.add(**rows)

    def sample(self) -> Any:
        return self.buffer.sample(DRAW)

    def pair(self) -> None:
        drawn = self.buffer.sample(DRAW)
        self.buffer.update_priorities(drawn["indexes"], self.errors)


class Tianshou:
    """Tianshou's buffers, whose trees are compiled by numba."""

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
    """Stable-Baselines3's buffer."""

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
    "cpprb": Cpprb,
    "Tianshou": Tianshou,
    "SB3": Sb3,
}


def per_second(work: Callable[[], Any]) -> float:
    """Calls per second."""
    done, started = 0, time.perf_counter()
    while True:
        for _ in range(8):
            work()
        done += 8
        elapsed = time.perf_counter() - started
        if elapsed > SECONDS:
            return done / elapsed


def add_next(buffer: Any, some: Iterator[Any]) -> None:
    buffer.add(next(some))


def measure(name: str) -> dict[str, float]:
    """One round of a buffer: what it does per second."""
    made = RUNS[name]
    prepare = getattr(made, "fragment", lambda rows: rows)
    told = {}
    for kind in SIZES:
        given = [prepare(rows) for rows in fragments(kind, 25)]
        some = itertools.cycle(given)
        buffer = made(kind)
        for _ in range(SIZES[kind][2] // ROWS + len(given)):
            buffer.add(next(some))  # until it is full and has been written over
        told[f"{kind}: rows stored/s"] = ROWS * per_second(partial(add_next, buffer, some))
        told[f"{kind}: batches/s"] = per_second(buffer.sample)
        if kind == "small" and hasattr(made, "pair"):
            buffer = made(kind, prioritized=True)
            for _ in range(SIZES[kind][2] // ROWS):
                buffer.add(next(some))
            told["prioritized pairs/s"] = per_second(buffer.pair)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--peers-python", help="an interpreter that has the peers already")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    pythons = dict.fromkeys(("bare ring", "flowrl"), sys.executable)
    if not options.no_peers:
        sys.path.insert(0, str(Path(__file__).parent))
        from peer_env import peer_python

        python = options.peers_python or str(
            peer_python("replay", "cpprb==11.0.0", "tianshou==2.0.1", "stable-baselines3==2.9.2")
        )
        pythons |= dict.fromkeys(("cpprb", "Tianshou", "SB3"), python)
    told: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    for number in range(options.rounds):
        for name, python in pythons.items():
            command = [python, __file__, "--one", name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"# {name} left out: {done.stderr.strip().splitlines()[-1]}", flush=True)
                continue
            told[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"# round {number}, {name}: {told[name][-1]}", flush=True)
    figures = list(told["flowrl"][0])
    print("| | " + " | ".join(f"{figure} | ×" for figure in figures) + " |")
    print("|---" + "|---:|---:" * len(figures) + "|")
    for name, rounds in told.items():
        cells = []
        for figure in figures:
            base = "cpprb" if "pairs" in figure and told.get("cpprb") else "bare ring"
            own = [one[figure] for one in rounds if figure in one]
            pairs = zip(rounds, told[base], strict=False)
            ratios = [a[figure] / b[figure] for a, b in pairs if figure in a and figure in b]
            cells.append(f"{np.median(own):,.0f}" if own else "")
            cells.append(f"{np.median(ratios):.2f}" if ratios else "")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
