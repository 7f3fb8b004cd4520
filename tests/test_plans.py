"""Every shipped plan runs, tiny, and building it has no effects."""

import ast
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.algorithms.off_policy import OffPolicyConfig
from flowrl.iter.stage import walk
from flowrl.iter.stages.branches import DuplicateChild
from flowrl.ops import ConcatBatches, SelectExperiences
from flowrl.trainer.plan_files import load_plan, shipped_plans

PLANS = list(shipped_plans())
OFFLINE = ("bc", "cql", "marwil")  # which need files: see test_marwil.py, test_cql.py
TINY = {"num_envs_per_worker": 2, "seed": 0, "min_sample_timesteps_per_iteration": 128}
REPLAYED = {"learning_starts": 32, "replay_buffer_capacity": 500}
SHARDED = ("apex", "dqn_distributed")
CODE_LINES = {
    "a2c": 8,
    "a3c": 6,
    "apex": 30,
    "appo": 30,
    "bc": 25,
    "cql": 25,
    "ddppo": 40,
    "dqn": 25,
    "impala": 30,
    "marwil": 25,
    "ppo_dqn": 30,
    "r2d2": 25,
    "rainbow": 25,
    "sac": 25,
    "td3": 25,
    "three_way": 45,
}  # of execution_plan, at most


def tiny(name, num_workers=0):
    """A shipped plan's settings, small, for every algorithm in it."""
    config = load_plan(name).config.updated(**TINY, num_workers=num_workers)
    if config.policies is None:
        more = {"num_replay_shards": 1} if name in SHARDED else {}
        return small(config).updated(**more)
    policies = {
        policy_id: replace(spec, config=small(spec.config))
        for policy_id, spec in config.policies.items()
    }
    return config.updated(policies=policies)


def small(config):
    if isinstance(config, OffPolicyConfig):
        return config.updated(**REPLAYED)
    minibatch = min(config.sgd_minibatch_size, 32)
    return config.updated(train_batch_size=64, sgd_minibatch_size=minibatch)


def held(plan, policy_id):
    """Rows of a policy that wait in a plan: to be joined, or for a branch to take them."""
    stages = list(walk(plan.stage))
    rows = 0
    for stage in stages:
        fn = getattr(stage, "fn", None)
        if isinstance(fn, ConcatBatches):
            rows += sum(batch.steps_by_policy().get(policy_id, 0) for batch in fn._pending)
        if getattr(stage, "learner", None) is not None:
            fresh = [b for b in stage.learner.batches() if "batch_indexes" not in b]  # not replayed
            rows += sum(batch.steps_by_policy().get(policy_id, 0) for batch in fresh)
        if isinstance(fn, SelectExperiences) and isinstance(stage.parents[0], DuplicateChild):
            child = stage.parents[0]
            (duplicate,) = child.parents
            buffer = duplicate.buffers[duplicate.children.index(child)]
            waiting = buffer if policy_id in fn.policy_ids else ()
            rows += sum(batch.steps_by_policy().get(policy_id, 0) for batch, _ in waiting)
    return rows


def check_ledger(algorithm):
    """What was sampled was trained on, is stored (or was overwritten there), or waits."""
    counters = algorithm.plan.metrics.counters
    for policy_id in algorithm.workers.local_worker().policy_map:
        own = {
            kind: counters[f"num_agent_steps_{kind}/{policy_id}"]
            for kind in ("sampled", "trained", "replayed", "stored")
        }
        fresh = own["trained"] - own["replayed"]
        assert own["sampled"] == fresh + own["stored"] + held(algorithm.plan, policy_id)
        assert own["sampled"] > 0


@pytest.mark.slow_on_actors
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(plan, marks=pytest.mark.slow if plan in SHARDED else ())
        for plan in PLANS
        if plan not in OFFLINE
    ],
)
def test_plan_runs(name, num_workers):
    with tiny(name, num_workers).build(plan=name) as algorithm:
        results = []
        for _ in range(3):
            results.append(algorithm.train())
            check_ledger(algorithm)
        policies = set(algorithm.workers.local_worker().policy_map)
    assert results[1]["timesteps_total"] >= 256
    assert set(results[1]["learners"]) == policies
    for told in results[1]["learners"].values():
        assert told["total_loss"] != 0
        assert told["num_agent_steps_trained_lifetime"] > 0


@pytest.mark.parametrize(
    ("name", "workers"),
    [(name, workers) for name in PLANS for workers in (0, 2) if name not in OFFLINE or not workers],
)
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
    (plan,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "execution_plan"
    )
    lines = source.splitlines()[plan.lineno - 1 : plan.end_lineno]
    code = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    assert len(code) <= CODE_LINES.get(name, 20)
