"""The reference of metrics describes exactly the metrics of real results."""

import re
from pathlib import Path

import pytest

from flowrl import DQN, PPO, SAC
from flowrl.trainer import metric_reference
from flowrl.trainer.metric_names import flatten_result
from flowrl.trainer.metric_reference import METRICS

REFERENCE = Path(metric_reference.__file__)
PACKAGE = REFERENCE.parents[1]

SMALL = {"seed": 1, "min_sample_timesteps_per_iteration": 0, "evaluation_interval": 1}
REPLAY = {"learning_starts": 20, "train_batch_size": 16, "evaluation_duration": 1}
RUNS = [
    (PPO, "CartPole-v1", {"train_batch_size": 200, "evaluation_duration": 1}),
    (DQN, "CartPole-v1", REPLAY),
    (SAC, "Pendulum-v1", {**REPLAY, "model": {"fcnet_hiddens": [8]}}),
]
# reported in these runs only by other algorithms, or after failures
OTHERS = {
    *("cql_gap", "min_q_weight", "mean_logp", "mean_weight", "num_skipped_updates"),
    *("checkpoint_time_ms", "learn_time_ms/<operator>", "learn_throughput/<operator>"),
    *("learner_wait_time_ms", "compute_grads_time_ms", "compute_grads_throughput"),
    *("apply_grad_time_ms", "apply_grad_throughput", "num_env_steps_dropped"),
    *("num_learner_restarts", "num_group_restarts", "num_replay_shard_restarts"),
    *("num_replay_rows_lost", "num_replay_fragments_lost", "num_sampling_waits"),
    *("num_weight_broadcasts", "num_weight_syncs", "num_passes_over_data"),
    *("num_bytes_between_nodes", "num_shards_failed"),
    *("agent_reward_mean/<agent>", "env_runners/agent_episode_returns_mean/<agent>"),
    *("grad_wait_time_ms", "grad_wait_throughput"),
}


def is_described_by(name, described):
    """Whether the name of a metric fits one in the reference."""
    pattern = re.sub("<[a-z]+>", "[^/]+", re.escape(described))
    return re.fullmatch(pattern, name) is not None


@pytest.fixture(scope="module")
def names():
    names = set()
    for algorithm_class, env, settings in RUNS:
        with algorithm_class(env, **SMALL, **settings) as algorithm:
            for _ in range(30 if algorithm_class is not PPO else 2):
                result = algorithm.train()
        names |= {name for name, _ in flatten_result(result)}
    return names


def test_every_metric_of_a_result_has_a_unit_and_a_meaning(names):
    for name in names:
        assert any(is_described_by(name, described) for described in METRICS), name
    for name, metric in METRICS.items():
        assert metric.meaning.endswith("."), name
        assert metric.meaning[0].isupper(), name


def test_metrics_of_other_algorithms_are_named_in_the_code():
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path != REFERENCE)
    for name in OTHERS:
        timer = re.fullmatch("(.*?)(_time_ms|_throughput)(/<.*>)?", name)
        word = re.sub("/<.*>$", "", name) if timer is None else timer[1]
        assert re.search(rf"[\"'/]{word}[\"'/]|\b{word}=", source), name


def test_every_described_metric_is_reported(names):
    for described in METRICS:
        if not any(f"/{described}".endswith(f"/{other}") for other in OTHERS):
            assert any(is_described_by(name, described) for name in names), described
