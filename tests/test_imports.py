"""Importing flowrl changes nothing in the user's process."""

import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

import flowrl
from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.errors import ConfigError
from flowrl.policies import Policy
from flowrl.threads import limit_threads, num_free_cores
from flowrl.trainer.registry import algorithm_class, algorithm_names, algorithm_path

ROOT = Path(__file__).parents[1]

CHECK = """
import contextlib, importlib, logging, os, pkgutil, random, signal, sys, warnings

# dependencies change some of this state themselves, so they are imported before
import gymnasium, numpy as np, optree, pydantic, ray, rich.console
import safetensors.torch, torch, torch.distributed, torch.export, tyro, yaml
import gymnasium.vector, gymnasium.wrappers
from threadpoolctl import threadpool_info, threadpool_limits

for extra in ("pyarrow.parquet", "ray.tune"):
    with contextlib.suppress(ImportError):
        importlib.import_module(extra)

def state():
    loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    return {
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "BLAS threads": [(pool["filepath"], pool["num_threads"]) for pool in threadpool_info()],
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "logging": {
            logger.name: (logger.level, list(logger.handlers), logger.propagate, logger.disabled)
            for logger in loggers
            if not logger.name.startswith("flowrl")
        },
        "logging disabled": logging.root.manager.disable,
        "flowrl handlers": list(logging.getLogger("flowrl").handlers),
        "random": random.getstate(),
        "numpy random": str(np.random.get_state()),
        "torch random": torch.get_rng_state().tolist(),
        "float errors": np.geterr(),
        "excepthook": sys.excepthook,
        "directory": os.getcwd(),
        "path": list(sys.path),
    }

before = state()
import flowrl
names = [module.name for module in pkgutil.walk_packages(flowrl.__path__, "flowrl.")]
names = [n for n in names if not n.endswith(("__main__", "sb3_script")) and "_plans" not in n]
if "ray.tune" not in sys.modules:
    names.remove("flowrl.tune")
for name in names:
    importlib.import_module(name)
after = state()
new = set(after["logging"]) - set(before["logging"])
for name in new:
    del after["logging"][name]
changed = [name for name in before if before[name] != after[name]]
assert not changed, {name: (before[name], after[name]) for name in changed}
print(len(names))
"""


def test_importing_every_module_changes_no_process_state():
    env = {name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")}
    command = [sys.executable, "-c", CHECK]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert process.returncode == 0, process.stderr[-3000:]
    assert int(process.stdout) > 100


class Images(gym.Env):
    """An environment whose observations are images."""

    observation_space = gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


def blas_threads():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_threads_are_limited_when_an_algorithm_is_built():
    before = torch.get_num_threads()
    config = A2CConfig(env="CartPole-v1")
    try:
        torch.set_num_threads(2)
        with threadpool_limits(2, "blas"):
            config.resources(num_threads_per_process=None).build()
            assert (torch.get_num_threads(), blas_threads()) == (2, {2})
            config.resources(num_threads_per_process=1).build()
            assert (torch.get_num_threads(), blas_threads()) == (1, {1})
    finally:
        torch.set_num_threads(before)


def test_only_torch_has_several_threads():
    """Threads of two libraries, which wait in busy loops, would take each other's cores."""
    before = torch.get_num_threads()
    config = A2CConfig(env="CartPole-v1")
    try:
        with threadpool_limits(2, "blas"):
            config.resources(num_threads_per_process=2).build()
            assert (torch.get_num_threads(), blas_threads()) == (2, {1})
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("env", "num_workers", "expected"),
    [
        ("CartPole-v1", 0, ["auto"]),
        (Images, 0, ["auto", 8]),
        (Images, 3, ["auto", 5]),
        (Images, 20, ["auto", 1]),
    ],
)
def test_convolutions_use_the_cores_that_no_worker_uses(env, num_workers, expected, monkeypatch):
    limits = []
    monkeypatch.setattr("flowrl.threads.num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("flowrl.trainer.algorithm.limit_threads", limits.append)
    settings = {"horizon": 5, "train_batch_size": 8, "seed": 0}
    with A2CConfig(env=env, num_workers=num_workers, **settings).build() as algorithm:
        monkeypatch.setattr(type(algorithm.plan), "__next__", lambda plan: {})  # starts no workers
        with pytest.raises(ConfigError, match="must end in"):
            algorithm.train()
    assert limits == expected


def test_resumed_algorithm_uses_the_free_cores(monkeypatch, tmp_path):
    limits = []
    monkeypatch.setattr("flowrl.trainer.algorithm.num_free_cores", lambda num_workers: 3)
    monkeypatch.setattr("flowrl.trainer.algorithm.limit_threads", limits.append)
    settings = {"horizon": 5, "train_batch_size": 8, "rollout_fragment_length": 4, "seed": 0}
    with A2CConfig(env=Images, **settings).build() as algorithm:
        algorithm.train()
        algorithm.train()
        algorithm.save(tmp_path / "checkpoint")
    with A2C.from_checkpoint(tmp_path / "checkpoint", env=Images) as algorithm:
        algorithm.train()
    assert limits == ["auto", 3, "auto", 3]


@pytest.mark.parametrize(("value", "expected"), [("2", 2), ("16", 8), ("0", 8), ("x", 8)])
def test_free_cores_are_limited_by_the_environment(value, expected, monkeypatch):
    monkeypatch.setattr("flowrl.threads.num_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert num_free_cores(0) == expected


@pytest.mark.slow
def test_threads_are_limited_on_workers(ray_session):
    config = A2CConfig(env="CartPole-v1", num_workers=1).resources(num_threads_per_process=2)

    def threads(worker):
        np.ones((8, 8)) @ np.ones((8, 8))
        return torch.get_num_threads(), sorted(blas_threads())

    with config.build() as algorithm:
        limit_threads(1)
        _, remote = algorithm.workers.foreach_worker(threads)
    limit_threads(1)
    assert remote == (2, [1])


def test_flowrl_offers_every_algorithm_and_its_config():
    shipped = [n for n in algorithm_names() if algorithm_path(n).startswith("flowrl.")]
    assert len(shipped) == 16
    for name in shipped:
        algorithm = getattr(flowrl, algorithm_path(name).split(":")[1])
        assert algorithm is algorithm_class(name)
        assert getattr(flowrl, algorithm.config_class.__name__) is algorithm.config_class
    others = {
        "Algorithm",
        "AlgorithmConfig",
        "ConfigError",
        "DefaultCallbacks",
        "Policy",
        "PolicySpec",
        "register_env",
    }
    algorithms = [algorithm_class(name) for name in shipped]
    names = {a.__name__ for a in algorithms} | {a.config_class.__name__ for a in algorithms}
    assert set(flowrl.__all__) == set(dir(flowrl)) == names | others
    assert flowrl.Policy is Policy


def test_importing_flowrl_imports_no_heavy_package():
    check = (
        "import flowrl, sys; assert 'PPO' in dir(flowrl); "
        "assert not {'torch', 'ray', 'gymnasium'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("A2c", "Did you mean 'A2C'?"),
        ("PPOTrainer", "Did you mean 'PPO'?"),
        ("ImpalaConfig", "Did you mean 'IMPALAConfig'?"),
        ("Rainbow", 'Use Algorithm.from_plan("rainbow")'),
        ("make_vec_env", 'Use PPO("CartPole-v1", num_envs_per_worker=4).'),
        ("RecurrentPPO", 'Use PPO(env, model={"use_lstm": True}).'),
        ("VecNormalize", "Use PPO(env, normalize_observations=True, normalize_rewards=True)."),
        ("evaluate_policy", "Use algorithm.evaluate(episodes=10)."),
        ("benchmarks", ""),
    ],
)
def test_unknown_name_in_flowrl_has_a_hint(name, hint):
    with pytest.raises(AttributeError) as error:
        getattr(flowrl, name)
    expected = f"module 'flowrl' has no attribute {name!r}. {hint}"
    assert str(error.value).startswith(expected.rstrip())


def test_module_of_flowrl_that_is_not_imported_is_named():
    code = "import flowrl, sys; print('numpy' in sys.modules); flowrl.cli"
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert process.stdout == "False\n"
    assert "It is a module: import flowrl.cli." in process.stderr
