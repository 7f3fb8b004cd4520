"""Write and read throughput of a checkpoint with a full replay buffer, compared with the disk.

The script alternately writes as many bytes sequentially to one file, and a checkpoint of a replay
buffer with `write_checkpoint`; both are flushed with fsync. Then reads the checkpoint. Prints
medians over the rounds.

    python benchmarks/checkpoint.py [--gigabytes 1] [--rounds 5] [--folder .]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.data import SampleBatch
from flowrl.data.checkpoint import CHUNK_BYTES, read_checkpoint, write_checkpoint
from flowrl.replay import ReplayBuffer


def full_buffer(size: int) -> ReplayBuffer:
    """Return a full buffer of images with about `size` bytes."""
    capacity = size // (84 * 84)
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer(capacity)
    while len(buffer) < capacity:
        obs = rng.integers(0, 255, (500, 84, 84), dtype=np.uint8)
        buffer.add(
            SampleBatch(
                obs=obs,
                new_obs=np.concatenate([obs[1:], obs[:1]]),
                actions=np.zeros(500, np.int64),
                rewards=np.zeros(500, np.float32),
                terminateds=np.zeros(500, bool),
                truncateds=np.zeros(500, bool),
                eps_id=np.full(500, len(buffer)),
                t=np.arange(500),
            )
        )
    return buffer


def write_seconds(path: Path, data: np.ndarray) -> float:
    """Write the bytes to a file, flush them to the disk and return the seconds."""
    started = time.perf_counter()
    with open(path, "wb") as file:
        for begin in range(0, len(data), CHUNK_BYTES):
            file.write(data[begin : begin + CHUNK_BYTES].data)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    buffer = full_buffer(int(options.gigabytes * 1e9))
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    seconds: dict[str, list[float]] = {"disk": [], "save": [], "read": []}
    try:
        state: dict[str, Any] = {"buffer": buffer.state_dict()}
        write_checkpoint(folder / "c", state, {})
        size = sum(file.stat().st_size for file in (folder / "c").iterdir())
        data = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
        for _ in range(options.rounds):
            seconds["disk"].append(write_seconds(folder / "raw", data))
            os.remove(folder / "raw")
            shutil.rmtree(folder / "c")
            started = time.perf_counter()
            write_checkpoint(folder / "c", {"buffer": buffer.state_dict()}, {})
            seconds["save"].append(time.perf_counter() - started)
            started = time.perf_counter()
            read_checkpoint(folder / "c")
            seconds["read"].append(time.perf_counter() - started)
    finally:
        shutil.rmtree(folder)
    print(f"{size / 1e9:.2f} GB, medians of {options.rounds} rounds\n")
    print("| | GB/s |\n|---|---:|")
    for name, times in seconds.items():
        print(f"| {name} | {size / 1e9 / np.median(times):.2f} |")
    ratios = np.array(seconds["disk"]) / np.array(seconds["save"])
    print(f"\nsave / disk: {np.median(ratios):.2f}")


if __name__ == "__main__":
    main()
