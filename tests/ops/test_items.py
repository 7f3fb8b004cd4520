"""Operators name items that they do not take, and say how to change the plan."""

import re

import pytest

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.data import SampleBatch
from flowrl.iter import MetricsContext, metrics_scope
from flowrl.ops import (
    AggregateBatches,
    AverageGradients,
    BatchRef,
    BroadcastUpdateLearnerWeights,
    ComputeGradients,
    ConcatBatches,
    CountRollouts,
    MixInReplay,
    ParallelRollouts,
    SelectExperiences,
    StandardizeFields,
    StoreToReplayBuffer,
    TrainOneStep,
    UpdateWorkerWeights,
    WriteParquet,
)
from flowrl.replay import MultiAgentReplayBuffer, ReplayBuffer
from flowrl.sampling import WorkerSet
from tests.extras import require_extra

NO_BATCH = "make sure that the operator before it returns the batch"
TRAINED = "chain it before the operator that trains"
FETCH = "pass the stream through AggregateBatches, which fetches the rows"


@pytest.fixture
def workers():
    with WorkerSet("CartPole-v1", A2CTorchPolicy, {"rollout_fragment_length": 4}) as worker_set:
        yield worker_set


@pytest.fixture
def operators(workers, tmp_path):
    """Yield name -> operator on batches."""
    require_extra("offline")
    buffer = MultiAgentReplayBuffer(lambda: ReplayBuffer(8), replay_batch_size=4)
    made = (
        TrainOneStep(workers),
        ComputeGradients(workers),
        ConcatBatches(8),
        SelectExperiences(["a"]),
        StandardizeFields(["obs"]),
        StoreToReplayBuffer(local_buffer=buffer),
        WriteParquet(tmp_path),
        MixInReplay(4, 0.5),
        BroadcastUpdateLearnerWeights(workers),
        UpdateWorkerWeights(workers, 8),
    )
    with metrics_scope(MetricsContext()):
        yield {type(operator).__name__: operator for operator in made}


OPERATORS = (
    "TrainOneStep",
    "ComputeGradients",
    "ConcatBatches",
    "SelectExperiences",
    "StandardizeFields",
    "StoreToReplayBuffer",
    "WriteParquet",
    "MixInReplay",
    "BroadcastUpdateLearnerWeights",
    "UpdateWorkerWeights",
)
IN_MESSAGE = {"TrainOneStep": "a learner", "ComputeGradients": "a learner"}


@pytest.mark.parametrize(
    ("item", "found", "hint"),
    [
        (None, "NoneType", NO_BATCH),
        (3, "int", NO_BATCH),
        ((), "tuple", NO_BATCH),
        ({"obs": 1}, "dict", NO_BATCH),
        ((SampleBatch(obs=[1.0]), {}), "tuple", TRAINED),
        (((), SampleBatch(obs=[1.0])), "tuple", "chain .for_each(CountRollouts(workers)) after"),
        ([SampleBatch(obs=[1.0])], "list", "chain .combine(ConcatBatches(…)) instead of .batch(n)"),
    ],
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_on_batches_reject_other_items(operators, operator, item, found, hint):
    message = f"{IN_MESSAGE.get(operator, operator)} takes batches, got {found}: {hint}"
    with pytest.raises(TypeError, match=re.escape(message)):
        operators[operator](item)


@pytest.mark.parametrize(
    "operator", ["TrainOneStep", "ComputeGradients", "StandardizeFields", "WriteParquet"]
)
def test_operators_that_need_the_rows_say_how_to_fetch_them(operators, operator):
    message = f"{IN_MESSAGE.get(operator, operator)} takes batches, got BatchRef: {FETCH}"
    with pytest.raises(TypeError, match=re.escape(message)):
        operators[operator](BatchRef([], 4, {"default_policy": 4}))


def test_batch_refs_are_fetched_as_the_message_says(ray_session):
    config = {"rollout_fragment_length": 4}
    with WorkerSet("CartPole-v1", A2CTorchPolicy, config, num_workers=1) as workers:
        rollouts = ParallelRollouts(workers, mode="async", by_reference=True)
        with AggregateBatches(rollouts).for_each(TrainOneStep(workers)) as trained:
            batch, info = next(trained)
    assert info["default_policy"]["num_agent_steps_trained"] == batch.count == 4


@pytest.mark.parametrize("item", [3, SampleBatch(obs=[1.0]), (1, SampleBatch(obs=[1.0]))])
def test_count_rollouts_needs_sources(workers, item):
    message = r"CountRollouts takes pairs .*chain \.zip_with_source\(\) before it"
    with pytest.raises(TypeError, match=message):
        CountRollouts(workers)(item)


def test_average_gradients_needs_a_list():
    with pytest.raises(TypeError, match="AverageGradients takes a list of Gradients"):
        AverageGradients()(3)
