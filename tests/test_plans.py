"""Every shipped plan runs, tiny, and building it has no effects."""

import sys
import threading
from pathlib import Path

import pytest

from flowrl.algorithms.plans import load_plan, shipped_plans

PLANS = list(shipped_plans())
TINY = {"train_batch_size": 64, "num_envs_per_worker": 2, "seed": 0}


def tiny(name, num_workers=0):
    config = load_plan(name).config
    minibatch = min(config.sgd_minibatch_size, 32)
    return config.updated(**TINY, sgd_minibatch_size=minibatch, num_workers=num_workers)


@pytest.mark.parametrize("name", PLANS)
def test_plan_runs(name, num_workers):
    with tiny(name, num_workers).build(plan=name) as algorithm:
        results = [algorithm.train() for _ in range(2)]
    assert results[1]["timesteps_total"] == 128
    assert results[1]["num_env_steps_trained"] == 128
    assert results[1]["learners"]["default_policy"]["total_loss"] != 0


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("workers", [0, 2])
def test_building_has_no_effects(name, workers):
    threads = threading.active_count()
    had_ray = "ray" in sys.modules
    started = had_ray and sys.modules["ray"].is_initialized()
    algorithm = tiny(name, workers).build(plan=name)
    algorithm.plan.explain()
    assert algorithm.workers._local is None
    assert algorithm.workers._remote is None
    assert threading.active_count() == threads
    assert workers or ("ray" in sys.modules) == had_ray
    assert ("ray" in sys.modules and sys.modules["ray"].is_initialized()) == started


@pytest.mark.parametrize("name", PLANS)
def test_plan_files_stay_short(name):
    assert shipped_plans()[name].endswith(".")
    source = Path(load_plan(name).__file__).read_text()
    body = source[source.index("def execution_plan") :].strip().splitlines()
    assert len(body) <= 20
