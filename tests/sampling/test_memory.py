"""Sampling for long keeps nothing: memory and the number of objects stay as they are."""

import gc
import logging
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from flowrl.envs import MultiAgentEnv
from flowrl.sampling import RolloutWorker, SimpleListCollector

from .fakes import CountEnv, Idle

ENVS, FRAGMENT = 16, 250


class Crowd(MultiAgentEnv):
    """Agents that come and go, each for a few steps; episodes of 250."""

    observation_space = CountEnv.observation_space
    action_space = CountEnv.action_space

    def reset(self, *, seed=None, options=None):
        self.now = 0
        return self.observe(), {}

    def observe(self):
        there = range(self.now // 5, self.now // 5 + 2)
        return {agent: np.array([0, self.now], np.float32) for agent in there}

    def step(self, action_dict):
        self.now += 1
        obs = self.observe()
        gone = {agent: True for agent in action_dict if agent not in obs}
        over = self.now == FRAGMENT
        return (
            obs,
            dict.fromkeys(obs, 1.0),
            {**gone, "__all__": over},
            {"__all__": False},
            {},
        )


MODES = {
    "columns": {},
    "columns, soft horizon": {"horizon": 7, "soft_horizon": True},
    "rows": {"sample_collector": SimpleListCollector},
    "rows, soft horizon": {
        "sample_collector": SimpleListCollector,
        "horizon": 7,
        "soft_horizon": True,
    },
    "whole episodes": {"batch_mode": "complete_episodes"},
    "agents": {},
    "failures": {"max_num_env_restarts": 10**9},
    "failures in rows": {
        "max_num_env_restarts": 10**9,
        "sample_collector": SimpleListCollector,
    },
}


def megabytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(mode, steps):
    """Growth in MB and in objects over so many env steps, after a warm-up."""
    logging.disable(logging.WARNING)
    failing = {"fail_at": (10, 3)} if mode.startswith("failures") else {}
    worker = RolloutWorker(
        lambda context: Crowd() if mode == "agents" else CountEnv(23, reuse=False, **failing),
        {"default_policy": Idle},
        {"num_envs_per_worker": ENVS, "rollout_fragment_length": FRAGMENT, **MODES[mode]},
    )

    def sample(wanted):
        done = 0
        while done < wanted:
            done += worker.sample().env_steps()
            worker.reply_tags()  # takes the episodes away, as a plan does
        gc.collect()
        return megabytes(), len(gc.get_objects())

    before = sample(max(steps // 20, 8_000))
    after = sample(steps)
    worker.stop()
    logging.disable(logging.NOTSET)
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("mode", ["columns, soft horizon", "rows, soft horizon", "agents"])
def test_nothing_is_kept(mode):
    _, objects = measure(mode, 8_000)
    # what a fragment holds at its cut differs a little from one to the next
    assert objects < 2_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_millions_of_steps(mode):
    """In a process of its own: what others have left in the heap would be counted as growth."""
    millions = 2 if mode.startswith("columns") or mode == "failures" else 1
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        grown, objects = pool.apply(measure, (mode, millions * 1_000_000))
    assert grown < 4 * millions
    assert objects < 2_000
