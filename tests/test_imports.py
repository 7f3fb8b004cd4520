"""Importing flowrl changes nothing in the user's process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flowrl
from flowrl.policies import Policy
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


@pytest.mark.slow
def test_importing_every_module_changes_no_process_state():
    env = {name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")}
    command = [sys.executable, "-c", CHECK]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert process.returncode == 0, process.stderr[-3000:]
    assert int(process.stdout) > 100


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
