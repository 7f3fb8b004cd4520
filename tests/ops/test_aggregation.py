"""Fragments passed by reference, and the tasks that concatenate them."""

import os
import time

import numpy as np
import pytest

from flowrl.algorithms.appo import APPOConfig
from flowrl.algorithms.impala import IMPALAConfig
from flowrl.data import BatchRef, MultiAgentBatch, SampleBatch
from flowrl.data.checkpoint import read_checkpoint, write_checkpoint
from flowrl.iter import LocalIterator, Source
from flowrl.ops import AggregateBatches, ConcatBatches, MixInReplay
from flowrl.ops.aggregation import leave_in_store
from flowrl.policies import ConfigError

pytestmark = pytest.mark.usefixtures("ray_session")


def rows(count, first=0):
    batch = SampleBatch({"obs": np.arange(first, first + count, dtype=np.float32)})
    batch.sources = (Source(first),)
    return batch


def make_refs(number):
    """Yield references to fragments of 3 rows."""
    for i in range(number):
        ref = leave_in_store(rows(3, 3 * i))
        ref.sources = (Source(i),)
        yield ref


def test_references_are_concatenated_without_fetching(monkeypatch):
    import ray

    refs = list(make_refs(4))
    monkeypatch.setattr(ray, "get", None)
    concat = ConcatBatches(6)
    joined = [batch for ref in refs for batch in concat(ref)]
    assert [(type(ref), ref.count, len(ref.parts)) for ref in joined] == [(BatchRef, 6, 2)] * 2
    assert joined[1].steps_by_policy() == {"default_policy": 6}
    assert [source.shard for source in joined[1].sources] == [2, 3]
    assert len(set(joined[0].nodes)) == 1
    assert joined[0].nodes[0] is not None


@pytest.mark.parametrize("tasks", [0, 1, 3])
def test_batches_contain_all_rows_and_their_sources(tasks):
    fragments = LocalIterator(lambda: make_refs(8), "fragments").combine(ConcatBatches(6))
    with AggregateBatches(fragments, tasks) as stream:
        batches = sorted(stream, key=lambda batch: batch["obs"][0])
    assert [type(batch) for batch in batches] == [SampleBatch] * 4
    np.testing.assert_array_equal(np.concatenate([b["obs"] for b in batches]), np.arange(24))
    assert [[s.shard for s in b.sources] for b in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_batches_pass_unchanged_and_are_concatenated_with_references():
    first, second = rows(3), next(make_refs(1))
    assert [ConcatBatches(6)(batch) for batch in (first, second)] == [[], []]  # both too small
    concat = ConcatBatches(6)
    assert concat(first) == []
    [joined] = concat(second)
    assert isinstance(joined, BatchRef)
    np.testing.assert_array_equal(joined.get()["obs"], [0, 1, 2, 0, 1, 2])
    [passed] = AggregateBatches(LocalIterator([first]))
    assert passed is first


def test_multi_agent_batches_are_concatenated():
    batch = MultiAgentBatch({"a": rows(2), "b": rows(4)}, 4)
    joined = BatchRef.concat_samples([leave_in_store(batch), leave_in_store(batch)])
    assert (joined.env_steps(), joined.agent_steps()) == (8, 12)
    [batch] = AggregateBatches(LocalIterator([joined]), 1)
    assert {pid: part.count for pid, part in batch.policy_batches.items()} == {"a": 4, "b": 8}
    assert batch.env_steps() == 8


class Holder:
    def put(self, batch):
        return leave_in_store(batch)


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [0, 2])
def test_lost_fragments_count_as_dropped(tasks):
    import ray

    holder = ray.remote(num_cpus=0)(Holder).remote()
    lost = ray.get(holder.put.remote(rows(100_000)))  # Ray inlines small objects
    ray.kill(holder)
    deadline = time.monotonic() + 30
    while lost.get().count and time.monotonic() < deadline:
        time.sleep(0.1)  # Ray frees the memory shortly after the process dies
    batches = [BatchRef.concat_samples([next(make_refs(1)), lost]), lost, next(make_refs(1))]
    stream = AggregateBatches(LocalIterator(batches), tasks)
    received = sorted(stream.take(2), key=lambda batch: batch.count)
    assert [batch.count for batch in received] == [3, 3]
    assert stream.take(1) == []
    assert stream.metrics.counters["num_env_steps_dropped"] == 200_000


class KillsFirstTask(BatchRef):
    """Kills the first process that fetches it."""

    def get(self):
        if not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os._exit(1)
        return super().get()


@pytest.mark.slow
def test_died_task_is_retried(tmp_path):
    ref = KillsFirstTask([rows(3)], 3, {"default_policy": 3})
    ref.marker = str(tmp_path / "died")
    with AggregateBatches(LocalIterator([ref]), 1) as stream:
        assert [batch.count for batch in stream] == [3]
    assert (tmp_path / "died").exists()


def test_error_of_incompatible_fragments_names_the_operator():
    with_sequences = SampleBatch({"other": np.zeros(2), "seq_lens": [2]})
    incompatible = BatchRef.concat_samples([rows(2), with_sequences])
    for tasks in (0, 1):
        with pytest.raises(ValueError, match="seq_lens") as caught:
            AggregateBatches(LocalIterator([incompatible]), tasks).take(1)
        assert "AggregateBatches" in "".join(caught.value.__notes__)


def small(kind=IMPALAConfig, **settings):
    base = {
        "num_workers": 2, "rollout_fragment_length": 10, "train_batch_size": 40, "seed": 0,
        "min_sample_timesteps_per_iteration": 200, "num_aggregation_workers": 2,
    }  # fmt: skip
    return kind(env="CartPole-v1", **{**base, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [IMPALAConfig, APPOConfig])
def test_plans_learn_from_aggregated_batches(kind):
    with small(kind).build() as algorithm:
        before = algorithm.get_policy().get_weights()
        for _ in range(3):
            result = algorithm.train()
        after = algorithm.get_policy().get_weights()
        assert all((after[name] != before[name]).any() for name in before)
        assert "AggregateBatches(num_tasks=2)" in algorithm.plan.explain()
        trained, sampled = result["num_env_steps_trained"], result["num_env_steps_sampled"]
        assert 0 < trained <= sampled
        assert trained % 40 == 0
        stats = result["learners"]["default_policy"]
        assert np.isfinite(stats["total_loss"])


@pytest.mark.slow
def test_run_resumes_from_a_checkpoint(tmp_path):
    replay = {"replay_proportion": 1.0, "replay_buffer_num_slots": 4}
    with small(**replay).build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        counters = dict(algorithm.plan.metrics.counters)
        weights = algorithm.get_policy().get_weights()
    with type(algorithm).from_checkpoint(tmp_path / "c") as resumed:
        restored = dict(resumed.plan.metrics.counters)
        lost = restored.get("num_env_steps_dropped", 0) - counters.get("num_env_steps_dropped", 0)
        assert lost >= 0  # fragments in flight
        assert restored["num_env_steps_sampled"] == counters["num_env_steps_sampled"] + lost
        assert restored["num_env_steps_trained"] == counters["num_env_steps_trained"]
        for name, value in resumed.get_policy().get_weights().items():
            np.testing.assert_array_equal(value, weights[name])
        result = resumed.train()
        assert result["training_iteration"] == 2
        assert result["num_env_steps_sampled"] > counters["num_env_steps_sampled"] > 0


def test_references_are_saved_as_rows(tmp_path):
    mix = MixInReplay(2, 1.0)
    for ref in make_refs(3):
        mix(ref)
    write_checkpoint(tmp_path / "c", mix.state_dict(), {})
    state, _ = read_checkpoint(tmp_path / "c")
    stored = [batch["obs"].tolist() for batch in state["buffer"]["batches"]]
    assert stored == [[3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize("tasks", [-1, True, 1.5, "2"])
def test_invalid_numbers_of_tasks_are_rejected(tasks):
    with pytest.raises(ValueError, match="num_tasks must be an int of at least 0"):
        AggregateBatches(LocalIterator([]), tasks)


def test_aggregation_needs_workers():
    with pytest.raises(ConfigError, match="num_aggregation_workers"):
        small(num_workers=0).validate()
