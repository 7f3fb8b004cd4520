"""Print, Breakpoint and Record show the items of a plan, and errors keep theirs."""

import sys

import numpy as np
import pytest

from flowrl import PPO
from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.data.indexed_columns import IndexedColumn
from flowrl.data.lazy_columns import LazyColumn
from flowrl.iter import LocalIterator, Source
from flowrl.ops import (
    Breakpoint,
    ParallelRollouts,
    Print,
    Record,
    SelectExperiences,
    TrainOneStep,
)
from flowrl.ops.inspection import summary

SMALL = {
    "train_batch_size": 32,
    "rollout_fragment_length": 32,
    "sgd_minibatch_size": 0,
    "model": {"fcnet_hiddens": [8]},
    "seed": 0,
}


@pytest.fixture
def workers():
    with PPO("CartPole-v1", **SMALL) as algorithm:
        yield algorithm.workers


def test_summary_of_a_batch_has_columns_ranges_and_sources(workers, capsys):
    rollouts = ParallelRollouts(workers).for_each(Print(name="rollouts", workers=workers))
    trained = rollouts.for_each(TrainOneStep(workers))
    trained.take(2)
    first, second = capsys.readouterr().out.split("rollouts #")[1:]
    assert first.startswith("0: 32 env steps, 32 agent steps, from shard 0, weights 0 (0 updates")
    assert second.startswith("1: 32 env steps")
    lines = {line.split()[0]: line for line in first.splitlines()[1:]}
    assert "(32, 4) float32" in lines["obs"]
    assert "(32,) int64  0 to 1" in lines["actions"]
    assert lines["rewards"].endswith("(32,) float32  1 to 1, mean 1")
    assert "false" not in first
    assert "of 32 true" in lines["terminateds"]


def test_ended_episodes_and_the_age_of_weights_are_shown(workers):
    batch = ParallelRollouts(workers).take(1)[0]
    returns = [episode[0] for episode in batch.sources[0].tags["episodes"]]
    assert f"{len(returns)} episodes ended with return {np.mean(returns):.4g}" in summary(batch)
    TrainOneStep(workers)  # no update yet
    workers.local_worker().policy.version += 3
    assert "weights 0 (3 updates old)" in summary(batch, workers=workers)


def test_weights_and_returns_are_those_of_the_policies_of_the_batch():
    episode = (5.0, 10, 0, [("a", "ppo", 3.0), ("b", "dqn", 2.0)], None, None)
    tags = {"weights_versions": {"ppo": 200, "dqn": 126}, "episodes": [episode]}
    both = MultiAgentBatch({name: SampleBatch(obs=np.zeros(2)) for name in ("ppo", "dqn")}, 2)
    both.sources = (Source(0, tags=tags),)
    text = summary(both)
    assert "weights ppo 200, weights dqn 126, 1 episodes ended with return 5" in text
    ppo = summary(SelectExperiences(["ppo"])(both))
    assert "weights 200, 1 episodes ended with return 3" in ppo
    assert "126" not in ppo


def test_every_and_what_select(capsys):
    batches = [SampleBatch(obs=np.full(2, i, np.float32), x=np.zeros(2)) for i in range(5)]
    LocalIterator(batches).for_each(Print(every=2, what=["obs"])).take(5)
    out = capsys.readouterr().out
    assert [line[:9] for line in out.splitlines() if "#" in line] == [
        f"Print #{i}:" for i in (0, 2, 4)
    ]
    assert "x " not in out
    assert "4 to 4, mean 4" in out
    LocalIterator(batches).for_each(Print(what=lambda batch: batch["obs"].sum())).take(1)
    assert capsys.readouterr().out == "Print #0: 0.0\n"
    with pytest.raises(KeyError, match="missing"):
        LocalIterator(batches).for_each(Print(what=["missing"])).take(1)


def test_summary_of_other_items(workers):
    with PPO("CartPole-v1", **SMALL) as algorithm:
        assert summary(algorithm.train()).startswith("result: training_iteration 1, timesteps")
    trained = ParallelRollouts(workers).for_each(TrainOneStep(workers)).take(1)[0]
    assert "default_policy: " in summary(trained)
    assert "total_loss" in summary(trained)
    two = {"a": SampleBatch(obs=np.zeros(3)), "b": SampleBatch(obs=np.array([np.nan, 1.0]))}
    text = summary(MultiAgentBatch(two, 3))
    assert "policy a: 3 rows" in text
    assert "1 to 1, mean 1, 1 NOT FINITE" in text
    assert "(1,) float64, 1 NOT FINITE" in summary(SampleBatch(obs=np.array([np.inf])))
    assert summary(7) == "int 7"
    nested = SampleBatch(obs={"image": np.zeros((2, 3, 3), np.uint8), "speed": np.ones(2)})
    text = "image: (2, 3, 3) uint8  0 to 0; speed: (2,) float64  1 to 1, mean 1"
    assert text in summary(nested)
    assert "pair/1: (2,)" in summary(SampleBatch(obs={"pair": (np.zeros(2), np.zeros(2))}))


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_invalid_arguments_are_rejected(every):
    with pytest.raises(ValueError, match="every"):
        Print(every=every)
    with pytest.raises(ValueError, match="Record"):
        Record(every)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Print(what="obs"), r"such as \['obs'\], or a function"),
        (lambda: Print(what=3), "must be a list of columns.*got 3"),
        (lambda: Print(workers={}), "Print takes the WorkerSet"),
        (lambda: Breakpoint(when=True), "Breakpoint: `when` must be a function or None, got True"),
    ],
)
def test_arguments_of_wrong_types_are_rejected_at_once(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_breakpoint_stops_with_the_item(monkeypatch):
    seen = []
    monkeypatch.setattr(
        sys, "breakpointhook", lambda: seen.append(sys._getframe(1).f_locals["item"])
    )
    stream = LocalIterator([1, 2, 3, 4]).for_each(Breakpoint(when=lambda item: item % 2 == 0))
    assert stream.take(4) == [1, 2, 3, 4]
    assert seen == [2, 4]
    LocalIterator([5]).for_each(Breakpoint()).take(1)
    assert seen[-1] == 5


def test_record_keeps_the_last_items():
    record = Record(2)
    stream = LocalIterator([1, 2, 0, 3]).for_each(record).for_each(lambda item: 6 // item)
    assert stream.take(2) == [6, 3]
    with pytest.raises(ZeroDivisionError):
        next(stream)
    assert list(record.items) == [2, 0]
    assert next(stream) == 2


def test_error_of_an_operator_has_its_item():
    item = {"x": 1}

    def fail(item):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as raised:
        LocalIterator([item]).for_each(fail).take(1)
    assert raised.value.item is item

    class OwnError(Exception):
        item = "own"

    def fail_with_own(item):
        raise OwnError

    with pytest.raises(OwnError) as raised:
        LocalIterator([1]).for_each(fail_with_own).take(1)
    assert raised.value.item == "own"


def test_summary_of_an_item_with_its_sources_shows_the_batch():
    batch = SampleBatch(obs=np.zeros((3, 2), np.float32), rewards=np.ones(3, np.float32))
    assert summary(((Source(0),), batch)).startswith(summary(batch))


def test_lazy_columns_are_not_computed_unless_they_are_named():
    def compute():
        raise AssertionError

    column = IndexedColumn(LazyColumn("infos", compute, (2,), np.dtype(object)), np.arange(2))
    batch = SampleBatch.unchecked({"obs": np.zeros(2), "infos": column})
    assert "obs" in summary(batch)
    assert "infos" not in summary(batch)
    with pytest.raises(AssertionError):
        summary(batch, ["infos"])


def test_columns_that_one_policy_lacks_are_left_out():
    batch = MultiAgentBatch(
        {"a": SampleBatch(obs=np.zeros(2), vf_preds=np.ones(2)), "b": SampleBatch(obs=np.zeros(2))},
        2,
    )
    text = summary(batch, ["obs", "vf_preds"])
    assert text.count("obs") == 2
    assert text.count("vf_preds") == 1
    with pytest.raises(KeyError, match="no column 'values'"):
        summary(batch, ["values"])


def test_integers_are_printed_in_full(capsys):
    Print()(SampleBatch(unroll_id=np.arange(12_681, 12_801)))
    assert "int64  12681 to 12800" in capsys.readouterr().out
