"""States of the wrong structure are refused when they are loaded, or they train.

The states are those of valid checkpoints, in which one value has another type or size, or is
missing.
"""

import random

import numpy as np
import pytest

from flowrl.data import SampleBatch
from flowrl.data.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from flowrl.trainer import checkpointing
from flowrl.trainer.plan_settings import plan_config
from tests.comparisons import assert_same

SMALL = {"seed": 1, "total_timesteps": 10_000}
ON_POLICY = {"num_workers": 0, "num_envs_per_worker": 2, "rollout_fragment_length": 32}
PPO = {"train_batch_size": 64, "sgd_minibatch_size": 32, "num_sgd_iter": 1, **ON_POLICY}
OFF_POLICY = {
    "learning_starts": 20,
    "train_batch_size": 8,
    "replay_buffer_capacity": 200,
    "min_sample_timesteps_per_iteration": 40,
}
CASES = {
    "ppo": ("ppo", "CartPole-v1", {**PPO, "normalize_observations": True, "kl_coeff": 0.2}),
    "ppo with memory": (
        "ppo",
        "CartPole-v1",
        {**PPO, "model": {"use_lstm": True, "lstm_cell_size": 4}},
    ),
    "dqn": ("dqn", "CartPole-v1", {**OFF_POLICY, "n_step": 2, "target_network_update_freq": 8}),
    "sac": ("sac", "Pendulum-v1", {**OFF_POLICY, "prioritized_replay": True}),
    "impala": (
        "impala",
        "CartPole-v1",
        {
            **ON_POLICY,
            "train_batch_size": 64,
            "min_sample_timesteps_per_iteration": 64,
            "replay_proportion": 0.5,
            "replay_buffer_num_slots": 4,
        },
    ),
}
MISSING = object()
# items between operators and outputs of a policy, whose types only the plan and the policy know;
# whether a branch has ended is valid either way
UNKNOWN = ("pending", "columns/rows/state_out", "sequences/states", "/step", "learned", "/done/")


def config_of(case):
    plan, env, settings = CASES[case]
    config = plan_config(plan, env, tuned=False)
    model = config.model.updated(fcnet_hiddens=[8], **settings.get("model", {}))
    return config.updated(env=env, **{**settings, **SMALL, "model": model})


def values_of(tree, path=()):
    """Yield (path, value) of every value in a tree."""
    yield path, tree
    if isinstance(tree, dict) and not isinstance(tree, SampleBatch):
        for key, value in tree.items():
            yield from values_of(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from values_of(value, (*path, index))


def mutations_of(value, path):
    """Return values that are no valid replacement, or only by chance."""
    if isinstance(value, np.ndarray):
        wrong = [True, "x", None, MISSING, value[:0] if value.ndim else None]
        if "columns" not in path or "ring" not in path:  # a replay buffer takes rows of any shape
            wrong.append(value[..., None])
        return [*wrong, value * np.nan] if value.dtype.kind == "f" else wrong
    if isinstance(value, dict):
        return [True, None, [], MISSING]
    if isinstance(value, (list, tuple)):
        return [True, None, {}, MISSING, value[:-1], type(value)([*value, "x"])]
    return [True, "x", -1, None, MISSING, [], {}, 1.5, 10**24, float("nan")]


def replaced(tree, path, value):
    """Return a copy of a tree with another value at a path."""
    if not path:
        return value
    head, *rest = path
    if isinstance(tree, dict):
        if not rest and value is MISSING:
            return {key: other for key, other in tree.items() if key != head}
        return {**tree, head: replaced(tree[head], rest, value)}
    items = list(tree)
    if not rest and value is MISSING:
        del items[head]
    else:
        items[head] = replaced(items[head], rest, value)
    return type(tree)(items)


@pytest.fixture(scope="module", params=CASES)
def saved(request, tmp_path_factory):
    """A config, the path of a checkpoint, its state and its manifest."""
    config = config_of(request.param)
    path = tmp_path_factory.mktemp("checkpoint")
    with config.build() as algorithm:
        for _ in range(3):
            algorithm.train()
        algorithm.save(path)
    return config, path, *read_checkpoint(path)


@pytest.mark.parametrize("count", [30, pytest.param(400, marks=pytest.mark.slow)])
def test_mutated_state_is_refused_or_trains(saved, monkeypatch, count):
    config, path, state, manifest = saved
    mutations = [
        (where, value)
        for where, original in values_of(state)
        for value in mutations_of(original, where)
        if where and not any(name in "/".join(map(str, where)) for name in UNKNOWN)
    ]
    chosen = random.Random(count).sample(mutations, count)
    refused = 0
    algorithm = config.build()
    try:
        for where, value in chosen:
            mutated = replaced(state, where, value)
            monkeypatch.setattr(
                checkpointing, "read_checkpoint", lambda *_, s=mutated: (s, manifest)
            )
            try:
                algorithm.restore(path)
            except CheckpointError:
                refused += 1
            else:
                algorithm.train()
    finally:
        algorithm.stop()
    assert refused > count / 10  # about half of them


def test_refused_state_changes_nothing(saved, monkeypatch):
    config, path, state, manifest = saved
    with config.build() as algorithm:
        algorithm.restore(path)
        before = algorithm.state_dict()
        for name, field in (
            ("plan/metrics/counters", "metrics/counters"),
            ("sampling/local/env_sampler", "sampling/env_sampler"),
            ("worker", "state/worker"),
        ):
            mutated = replaced(state, name.split("/"), [1])
            monkeypatch.setattr(
                checkpointing, "read_checkpoint", lambda *_, s=mutated: (s, manifest)
            )
            with pytest.raises(CheckpointError, match=f"{field}: input should be"):
                algorithm.restore(path)
        after = algorithm.state_dict()
    assert_same(after, before)


def test_sealed_checkpoint_with_a_wrong_window_names_the_field(saved, tmp_path):
    config, _, state, manifest = saved
    name = next(n for n in state["plan"]["stages"] if n.startswith("StandardMetricsReporting"))
    where = ("plan", "stages", name, "operator", "window")
    metadata = {key: value for key, value in manifest.items() if key not in ("format", "files")}
    write_checkpoint(tmp_path / "wrong", replaced(state, where, True), metadata)
    algorithm = config.build()
    with pytest.raises(CheckpointError, match=r"wrong: .*operator/window: input should be"):
        algorithm.restore(tmp_path / "wrong")
    algorithm.stop()
