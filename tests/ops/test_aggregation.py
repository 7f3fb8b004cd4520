"""Fragments by reference, and the tasks that join them."""

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


def refs(number):
    """Fragments of 3 rows, left where they are."""
    for i in range(number):
        ref = leave_in_store(rows(3, 3 * i))
        ref.sources = (Source(i),)
        yield ref


def test_references_are_joined_without_being_fetched(monkeypatch):
    import ray

    made = list(refs(4))
    monkeypatch.setattr(ray, "get", None)
    concat = ConcatBatches(6)
    joined = [one for ref in made for one in concat(ref)]
    assert [(type(one), one.count, len(one.parts)) for one in joined] == [(BatchRef, 6, 2)] * 2
    assert joined[1].steps_by_policy() == {"default_policy": 6}
    assert [source.worker for source in joined[1].sources] == [2, 3]
    assert len(set(joined[0].nodes)) == 1
    assert joined[0].nodes[0] is not None


@pytest.mark.parametrize("tasks", [0, 1, 3])
def test_the_batches_are_what_they_would_be(tasks):
    fragments = LocalIterator(lambda: refs(8), "fragments").combine(ConcatBatches(6))
    with AggregateBatches(fragments, tasks) as stream:
        got = sorted(stream, key=lambda batch: batch["obs"][0])
    assert [type(batch) for batch in got] == [SampleBatch] * 4
    np.testing.assert_array_equal(np.concatenate([b["obs"] for b in got]), np.arange(24))
    assert [[s.worker for s in b.sources] for b in got] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_batches_pass_and_both_kinds_are_joined():
    first, second = rows(3), next(refs(1))
    [joined] = [one for batch in (first, second) for one in ConcatBatches(6)(batch)] or [None]
    assert joined is None  # two operators: neither has enough
    concat = ConcatBatches(6)
    assert concat(first) == []
    [joined] = concat(second)
    assert isinstance(joined, BatchRef)
    np.testing.assert_array_equal(joined.get()["obs"], [0, 1, 2, 0, 1, 2])
    [passed] = AggregateBatches(LocalIterator([first]))
    assert passed is first


def test_several_policies():
    batch = MultiAgentBatch({"a": rows(2), "b": rows(4)}, 4)
    joined = BatchRef.concat_samples([leave_in_store(batch), leave_in_store(batch)])
    assert (joined.env_steps(), joined.agent_steps()) == (8, 12)
    [got] = AggregateBatches(LocalIterator([joined]), 1)
    assert {pid: own.count for pid, own in got.policy_batches.items()} == {"a": 4, "b": 8}
    assert got.env_steps() == 8


class Holder:
    def put(self, batch):
        return leave_in_store(batch)


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [0, 2])
def test_a_fragment_that_was_lost_counts_as_dropped(tasks):
    import ray

    holder = ray.remote(num_cpus=0)(Holder).remote()
    lost = ray.get(holder.put.remote(rows(100_000)))  # small ones travel with the reference
    ray.kill(holder)
    until = time.monotonic() + 30
    while lost.get().count and time.monotonic() < until:
        time.sleep(0.1)  # its memory outlives the process a little
    made = [BatchRef.concat_samples([next(refs(1)), lost]), lost, next(refs(1))]
    stream = AggregateBatches(LocalIterator(made), tasks)
    got = sorted(stream.take(2), key=lambda batch: batch.count)
    assert [batch.count for batch in got] == [3, 3]
    assert stream.take(1) == []
    assert stream.metrics.counters["num_env_steps_dropped"] == 200_000


class DeadlyOnce(BatchRef):
    """Ends the process that fetches it, once."""

    def get(self):
        if not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os._exit(1)
        return super().get()


@pytest.mark.slow
def test_a_task_that_dies_is_run_again(tmp_path):
    batch = DeadlyOnce([rows(3)], 3, {"default_policy": 3})
    batch.mark = str(tmp_path / "died")
    with AggregateBatches(LocalIterator([batch]), 1) as stream:
        assert [one.count for one in stream] == [3]
    assert (tmp_path / "died").exists()


def test_what_cannot_be_joined_is_told():
    odd = BatchRef.concat_samples([rows(2), SampleBatch({"other": np.zeros(2), "seq_lens": [2]})])
    for tasks in (0, 1):
        with pytest.raises(ValueError, match="seq_lens") as caught:
            AggregateBatches(LocalIterator([odd]), tasks).take(1)
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
        for _ in range(3):
            result = algorithm.train()
        assert "AggregateBatches(num_tasks=2)" in algorithm.plan.explain()
        trained, sampled = (result[f"num_env_steps_{what}"] for what in ("trained", "sampled"))
        assert 0 < trained <= sampled
        assert trained % 40 == 0
        told = result["learners"]["default_policy"]
        assert np.isfinite(told["total_loss"])
        assert told["policy_lag_max"] >= 0


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint(tmp_path):
    mixed = {"replay_proportion": 1.0, "replay_buffer_num_slots": 4}
    with small(**mixed).build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        result = algorithm.train()
    with type(algorithm).from_checkpoint(tmp_path / "c") as again:
        assert again.train()["training_iteration"] == result["training_iteration"]


def test_references_that_are_kept_are_saved_as_rows(tmp_path):
    mix = MixInReplay(2, 1.0)
    for ref in refs(3):
        mix(ref)
    write_checkpoint(tmp_path / "c", mix.state_dict(), {})
    state, _ = read_checkpoint(tmp_path / "c")
    kept = [batch["obs"].tolist() for batch in state["buffer"]["batches"]]
    assert kept == [[3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize("tasks", [-1, True, 1.5, "2"])
def test_numbers_that_are_none(tasks):
    with pytest.raises(ValueError, match="num_tasks is a whole number from 0"):
        AggregateBatches(LocalIterator([]), tasks)


def test_aggregation_needs_workers():
    with pytest.raises(ConfigError, match="num_aggregation_workers"):
        small(num_workers=0).validate()
