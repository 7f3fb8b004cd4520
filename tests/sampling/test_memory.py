"""Memory and the number of objects stay constant while sampling."""

import gc
import itertools
import logging
import multiprocessing
import os
import weakref
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.envs import MultiAgentEnv
from flowrl.sampling import RolloutWorker, SimpleListCollector

from .fakes import CountEnv, Idle

ENVS, FRAGMENT = 16, 250


class ChangingAgents(MultiAgentEnv):
    """Each agent acts for ten steps; episodes have 250 steps."""

    observation_space = CountEnv.observation_space
    action_space = CountEnv.action_space

    def reset(self, *, seed=None, options=None):
        self.now = 0
        return self.observe(), {}

    def observe(self):
        agents = range(self.now // 5, self.now // 5 + 2)
        return {agent: np.array([0, self.now], np.float32) for agent in agents}

    def step(self, action_dict):
        self.now += 1
        obs = self.observe()
        ended = {agent: True for agent in action_dict if agent not in obs}
        done = self.now == FRAGMENT
        return (
            obs,
            dict.fromkeys(obs, 1.0),
            {**ended, "__all__": done},
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
    "nested observations": {"model": {"fcnet_hiddens": [4]}},
    "recurrent": {"model": {"use_lstm": True, "lstm_cell_size": 4, "fcnet_hiddens": [4]}},
}


class Nested(gymnasium.ObservationWrapper):
    """The observation as a Dict of two arrays."""

    def __init__(self, env):
        super().__init__(env)
        space = env.observation_space
        self.observation_space = gymnasium.spaces.Dict(first=space, second=space)

    def observation(self, observation):
        return {"first": observation, "second": observation}


def megabytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(mode, steps):
    """Return the growth in MB and in objects over `steps` env steps, after a warm-up."""
    logging.disable(logging.WARNING)
    failing = {"fail_at": (10, 3)} if mode.startswith("failures") else {}

    def make(context):
        if mode == "agents":
            return ChangingAgents()
        env = CountEnv(23, reuse=False, **failing)
        return Nested(env) if mode == "nested observations" else env

    worker = RolloutWorker(
        make,
        {"default_policy": A2CTorchPolicy if "model" in MODES[mode] else Idle},
        {"num_envs_per_worker": ENVS, "rollout_fragment_length": FRAGMENT, **MODES[mode]},
    )

    def sample(num_steps):
        sampled = 0
        while sampled < num_steps:
            sampled += worker.sample().env_steps()
            worker.reply_tags()  # clears the episodes, as a plan does
        gc.collect()
        return megabytes(), len(gc.get_objects())

    before = sample(max(steps // 20, 8_000))
    after = sample(steps)
    worker.stop()
    logging.disable(logging.NOTSET)
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("mode", ["columns, soft horizon", "rows, soft horizon", "agents"])
def test_sampling_keeps_no_objects(mode):
    _, objects = measure(mode, 8_000)
    # the number of objects at the end of a fragment varies a little
    assert objects < 2_000


@pytest.mark.parametrize("mode", ["failures", "failures in rows"])
def test_errors_of_environments_are_not_in_reference_cycles(mode):
    errors = weakref.WeakSet()

    class BrokenError(ValueError):
        def __init__(self, *args):
            super().__init__(*args)
            errors.add(self)
            next(raised)

    raised = itertools.count()
    worker = RolloutWorker(
        lambda context: CountEnv(23, fail_at=(2, 3), fail_with=BrokenError),
        {"default_policy": Idle},
        {"num_envs_per_worker": 4, "rollout_fragment_length": FRAGMENT, **MODES[mode]},
    )
    logging.disable(logging.WARNING)  # pytest keeps log records, which refer to errors
    gc.collect()
    gc.disable()
    try:
        worker.sample()
        left = len(errors)
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
    assert next(raised) > 4
    assert left == 0
    worker.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_memory_is_constant_over_millions_of_steps(mode):
    """Run in a new process, because earlier tests affect the heap."""
    millions = 2 if mode.startswith("columns") or mode == "failures" else 1
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        growth, objects = pool.apply(measure, (mode, millions * 1_000_000))
    assert growth < 4 * millions
    assert objects < 2_000
