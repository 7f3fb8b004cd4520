"""Environments that disturb their process: it ends, forks, prints, ignores signals."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from flowrl.algorithms.a2c import A2CConfig
from flowrl.algorithms.a3c import A3CConfig
from tests.processes import wait_until_ended


class DisturbingCartPole(CartPoleEnv):
    """Calls a function in its 60th step, in the first process of worker 1 that reaches it."""

    def __init__(self, context, disturb, marker):
        super().__init__()
        self.disturb = disturb if context.worker_index == 1 else None
        self.marker, self.num_steps = marker, 0

    def step(self, action):
        self.num_steps += 1
        if self.disturb is not None and self.num_steps == 60:
            with contextlib.suppress(FileExistsError), open(self.marker, "x") as file:
                child = self.disturb()
                file.write(str(child or ""))
        return super().step(action)


def segfault():
    ctypes.string_at(0)


def end_process():
    os._exit(3)


def fork_a_child():
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    return child


def print_a_flood():
    for _ in range(20_000):
        sys.stdout.write("x" * 99 + "\n")


def block_signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def use_much_memory():
    np.ones(50_000_000)


def open_many_files():
    DisturbingCartPole.files = [open(os.devnull) for _ in range(500)]  # noqa: SIM115


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disturb", "restarts"),
    [
        (segfault, 1),
        (end_process, 1),
        (fork_a_child, 0),
        (print_a_flood, 0),
        (block_signals, 0),
        (use_much_memory, 0),
        (open_many_files, 0),
    ],
)
@pytest.mark.parametrize("config_class", [A2CConfig, A3CConfig])
def test_training_continues(ray_session, tmp_path, config_class, disturb, restarts):
    marker = str(tmp_path / "done")
    config = config_class(
        env=lambda context: DisturbingCartPole(context, disturb, marker),
        num_workers=2,
        num_envs_per_worker=2,
        rollout_fragment_length=10,
        train_batch_size=40,
        seed=1,
        monitor=False,
    )
    with config.build() as algorithm:
        while not os.path.exists(marker) or algorithm.env_steps < 4000:
            result = algorithm.train()
        until = time.monotonic() + 60
        while result["num_remote_worker_restarts"] < restarts and time.monotonic() < until:
            result = algorithm.train()
        assert result["num_remote_worker_restarts"] == restarts
        assert result["num_healthy_workers"] == 2
        assert np.isfinite(result["episode_reward_mean"])
        get_pid = lambda worker: os.getpid()  # noqa: E731
        workers = algorithm.workers.foreach_worker(get_pid)[1:]
    child = Path(marker).read_text()
    wait_until_ended([*workers, *map(int, filter(None, [child]))])
