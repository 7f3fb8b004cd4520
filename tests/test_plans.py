"""Every shipped plan trains with small settings; building it has no effects."""

import ast
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.algorithms.off_policy import OffPolicyConfig
from flowrl.iter.stage import walk
from flowrl.iter.stages.branches import DuplicateChild
from flowrl.ops import (
    ApplyGradients,
    ComputeGradients,
    ConcatBatches,
    SelectExperiences,
)
from flowrl.ops.gradients import CountGradients
from flowrl.ops.report import operators_of
from flowrl.ops.rollout import CountRollouts
from flowrl.ops.train_on_workers import TrainOnWorkersStage
from flowrl.sampling import WorkerSet
from flowrl.trainer.plan_files import load_plan, shipped_plans
from flowrl.trainer.plan_settings import plan_config
from tests.learner_threads import held_batches

PLANS = list(shipped_plans())
OFFLINE = ("bc", "cql", "marwil")  # these need files: see test_marwil.py, test_cql.py
SMALL = {"num_envs_per_worker": 2, "seed": 0, "min_sample_timesteps_per_iteration": 128}
REPLAYED = {"learning_starts": 32, "replay_buffer_capacity": 500, "train_batch_size": 32}
SHARDED = ("apex", "dqn_distributed")
MAX_CODE_LINES = {
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
}  # of execution_plan; 20 for other plans


def small_config(name, num_workers=0):
    """Return small settings of a shipped plan, for every algorithm in it."""
    config = plan_config(name).updated(**SMALL, num_workers=num_workers)
    if config.policies is None:
        shards = {"num_replay_shards": 1} if name in SHARDED else {}
        return small_settings(config).updated(**shards)
    policies = {
        policy_id: replace(spec, config=small_settings(spec.config))
        for policy_id, spec in config.policies.items()
    }
    return config.updated(policies=policies)


def small_settings(config):
    if isinstance(config, OffPolicyConfig):
        return config.updated(**REPLAYED)
    minibatch = min(config.sgd_minibatch_size, 32)
    return config.updated(train_batch_size=64, sgd_minibatch_size=minibatch)


def waiting_rows(plan, policy_id):
    """Count a policy's rows in ConcatBatches, learner queues and the buffers of Duplicate."""
    stages = list(walk(plan.stage))
    rows = 0
    for stage in stages:
        fn = getattr(stage, "fn", None)
        if isinstance(fn, ConcatBatches):
            pending = fn.state_dict()["pending"]
            rows += sum(batch.steps_by_policy().get(policy_id, 0) for batch in pending)
        if getattr(stage, "learner_thread", None) is not None:
            # replayed batches have batch_indexes
            fresh = [
                batch
                for batch in held_batches(stage.learner_thread)
                if "batch_indexes" not in batch
            ]
            rows += sum(batch.steps_by_policy().get(policy_id, 0) for batch in fresh)
        if isinstance(fn, SelectExperiences) and isinstance(stage.parents[0], DuplicateChild):
            child = stage.parents[0]
            (duplicate,) = child.parents
            buffer = duplicate.buffers[duplicate.children.index(child)]
            batches = [batch for batch, _ in buffer] if policy_id in fn.policy_ids else []
            rows += sum(batch.steps_by_policy().get(policy_id, 0) for batch in batches)
    return rows


def check_ledger(algorithm):
    """Check that every sampled row was trained on, stored in a buffer, or waits in the plan."""
    counters = algorithm.plan.metrics.counters
    for policy_id in algorithm.workers.local_worker().policy_map:
        steps = {
            kind: counters[f"num_agent_steps_{kind}/{policy_id}"]
            for kind in ("sampled", "trained", "replayed", "stored")
        }
        fresh = steps["trained"] - steps["replayed"]
        waiting = waiting_rows(algorithm.plan, policy_id)
        assert steps["sampled"] == fresh + steps["stored"] + waiting
        assert steps["sampled"] > 0


def check_timers_and_info(result, plan):
    """Check that a result has the timers of the plan's operators, and the counters of steps."""
    operators = [operator for _, operator in operators_of(plan.stage)]
    timer_names = {
        CountRollouts: ["sample"],
        CountGradients: ["grad_wait", "compute_grads"],
        ComputeGradients: ["compute_grads"],
        ApplyGradients: ["apply_grad"],
        TrainOnWorkersStage: [],  # its workers sample and learn in one request
    }
    timers = result["timers"]
    assert set(map(type, operators)) & set(timer_names)
    for operator in operators:
        for name in timer_names.get(type(operator), ()):
            assert timers[f"{name}_time_ms"] > 0
            assert timers[f"{name}_throughput"] > 0
    trainers = [operator for operator in operators if getattr(operator, "trains", False)]
    learn_times = [name for name in timers if name.startswith("learn_time_ms")]
    assert len(learn_times) == sum(not isinstance(op, ApplyGradients) for op in trainers)
    assert all(timers[name] > 0 for name in learn_times)
    info = result["info"]
    for kind in ("sampled", "trained"):
        steps = result[f"num_env_steps_{kind}"]
        assert info[f"num_steps_{kind}"] == info[f"num_env_steps_{kind}"] == steps > 0
        assert info[f"num_agent_steps_{kind}"] == result[f"num_agent_steps_{kind}"] >= steps
    return timers["update_time_ms"]


@pytest.mark.slow_on_actors
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(plan, marks=pytest.mark.slow if plan in SHARDED else ())
        for plan in PLANS
        if plan not in OFFLINE
    ],
)
def test_plan_trains_and_accounts_for_every_step(name, num_workers):
    with small_config(name, num_workers).build(plan=name) as algorithm:
        results = []
        for _ in range(3):
            results.append(algorithm.train())
            check_ledger(algorithm)
        policies = set(algorithm.workers.local_worker().policy_map)
    update_time_ms = check_timers_and_info(results[0], algorithm.plan)
    assert (update_time_ms > 0) == (num_workers > 0)  # the local worker needs no copy of weights
    assert results[1]["timesteps_total"] >= 256
    assert set(results[1]["learners"]) == policies
    for stats in results[1]["learners"].values():
        assert stats["total_loss"] != 0
        assert stats["num_agent_steps_trained_lifetime"] > 0


@pytest.mark.parametrize(
    ("name", "workers"),
    [(name, workers) for name in PLANS for workers in (0, 2) if name not in OFFLINE or not workers],
)
def test_building_has_no_effects(name, workers, monkeypatch):
    def create_workers(self):
        pytest.fail("building created workers")

    monkeypatch.setattr(WorkerSet, "local_worker", create_workers)
    monkeypatch.setattr(WorkerSet, "remote_workers", create_workers)
    threads = set(threading.enumerate())
    ray_imported = "ray" in sys.modules
    ray_started = ray_imported and sys.modules["ray"].is_initialized()
    algorithm = small_config(name, workers).build(plan=name)
    algorithm.plan.explain()
    assert not set(threading.enumerate()) - threads
    assert workers or ("ray" in sys.modules) == ray_imported
    assert ("ray" in sys.modules and sys.modules["ray"].is_initialized()) == ray_started


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
    assert len(code) <= MAX_CODE_LINES.get(name, 20)
