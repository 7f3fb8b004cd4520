"""Replay buffers on actors: filled by reference, drawn from ahead, made again when they die."""

import time

import numpy as np
import pytest

from flowrl.data import SampleBatch
from flowrl.iter import LocalIterator, MetricsContext, Source, metrics_scope
from flowrl.ops import (
    BatchRef,
    Concurrently,
    ParallelRollouts,
    Replay,
    ReplayActors,
    StoreToReplayBuffer,
    UpdateReplayPriorities,
)
from flowrl.ops.replay_actors import ReplayShard
from flowrl.replay import MultiAgentReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from flowrl.sampling import WorkerSet

from ..sampling.fakes import CountEnv, Idle


def rows(n, value=0):
    return SampleBatch(
        obs=np.full((n, 2), value, np.float32),
        new_obs=np.full((n, 2), value, np.float32),
        rewards=np.zeros(n, np.float32),
    )


def make(num_shards=2, **settings):
    def buffer(shard):
        return MultiAgentReplayBuffer(
            lambda policy_id: PrioritizedReplayBuffer(200, seed=shard), replay_batch_size=4
        )

    return ReplayActors(buffer, num_shards, 4, seed=0, **settings)


@pytest.fixture
def actors(ray_session):
    made = make(learning_starts=12, training_intensity=2)
    with metrics_scope(MetricsContext()):
        yield made
        made.stop()


def settled(actors):
    """Once every shard has stored what it was sent."""
    until = time.monotonic() + 60  # for a machine that is busy
    while any(actors._adds):
        assert time.monotonic() < until
        actors._collect()
        time.sleep(0.01)
    return actors.rows


def test_a_plan_over_shards(actors):
    source = LocalIterator(lambda: (rows(5, i) for i in iter(int, 1)), "source")
    store = source.for_each(StoreToReplayBuffer(actors=actors))
    plan = Concurrently([store, Replay(actors=actors)], mode="async", output_indexes=[1])
    drawn = plan.take(40)
    assert [batch.count for batch in drawn] == [4] * 40
    assert {batch.sources[0].worker for batch in drawn} == {0, 1}
    ratio = actors.ratio
    assert ratio.drawn <= 2 * (ratio.stored - 12) <= ratio.drawn + 4 * 4 + 2 * 5 * 9
    assert min(settled(actors)) > 0
    stats = actors.stats()
    added = sum(shard["default_policy"]["num_rows_added"] for shard in stats)
    assert added == ratio.stored == plan.metrics.counters["num_agent_steps_stored"]
    plan.stop()
    assert actors._handles == []


def test_fragments_come_by_reference(ray_session):
    def buffer(shard):
        return MultiAgentReplayBuffer(lambda pid: ReplayBuffer(500, seed=0), replay_batch_size=8)

    config = {"rollout_fragment_length": 10, "num_envs_per_worker": 2}
    workers = WorkerSet(lambda context: CountEnv(), Idle, config, num_workers=2)
    rollouts = ParallelRollouts(workers, mode="async", by_reference=True)
    batch = next(rollouts)
    assert isinstance(batch, BatchRef)
    assert (batch.env_steps(), batch.agent_steps(), batch.count) == (20, 20, 20)
    assert batch.get()["obs"].shape == (20, 2)
    assert len(batch.sources) == 1
    rollouts.stop()
    actors = ReplayActors(buffer, 2, 8)
    rollouts = ParallelRollouts(workers, mode="async", by_reference=True)
    store = rollouts.for_each(StoreToReplayBuffer(actors=actors))
    plan = Concurrently([store, Replay(actors=actors)], mode="async", output_indexes=[1])
    drawn = plan.take(5)
    assert drawn[0]["new_obs"].shape == (8, 2)
    local = buffer(0)
    StoreToReplayBuffer(local_buffer=local).buffer.add(batch.get())
    assert len(local) == 20
    plan.stop()
    workers.stop()
    in_process = WorkerSet(lambda context: CountEnv(), Idle, config)
    assert isinstance(
        next(ParallelRollouts(in_process, mode="async", by_reference=True)), SampleBatch
    )
    with pytest.raises(ValueError, match='by_reference is for mode="async"'):
        ParallelRollouts(in_process, by_reference=True)


def test_priorities_go_back_to_the_shard_of_the_batch(actors):
    for i in range(8):
        actors.add(rows(5, i))
    settled(actors)
    update = UpdateReplayPriorities(actors=actors)
    asked = actors.ask()
    index = asked.shard
    [batch] = actors.taken(asked)
    told = {"batch_indexes": batch["batch_indexes"], "td_error": np.full(4, -9.0)}
    update((batch, {"default_policy": {"rows": told}}))
    states = actors.state_dict()["shards"]
    weights = [shard["buffers"]["default_policy"]["weights"] for shard in states]
    assert weights[index].max() > 2
    assert weights[1 - index].max() == 1.0


def test_a_shard_that_dies_is_made_again(actors):
    import ray

    for i in range(10):
        actors.add(rows(5, i))
    before = list(settled(actors))
    ray.kill(actors.handles()[0])
    with metrics_scope(MetricsContext()) as metrics:
        for i in range(20):
            actors.add(rows(5, i))
        settled(actors)
        assert metrics.counters["num_replay_shard_restarts"] == 1
        assert metrics.counters["num_replay_rows_lost"] == before[0]
    assert sum(actors.rows) == 150 - before[0]
    ray.kill(actors.handles()[1])
    with metrics_scope(MetricsContext()) as metrics:
        taken = [actors.taken(actors.ask()) for _ in range(2)]
        assert [len(batches) for batches in taken] == [1, 0]
        assert metrics.counters["num_replay_shard_restarts"] == 1
    assert actors.ratio.drawn == 4


def test_nothing_is_stored_twice():
    shard = ReplayShard(make()._make, 0)
    assert [shard.add(rows(5), number).rows for number in (1, 2, 1)] == [5, 10, 10]


@pytest.mark.slow
def test_a_restored_shard_stores_what_comes_then():
    """The numbers of batches begin where the state was saved."""
    shard = ReplayShard(make()._make, 0)
    shard.add(rows(3), 1)
    state = shard.state_dict()
    shard.add(rows(3), 2)
    assert shard.load_state_dict(state) == 3
    assert shard.add(rows(3), 2).rows == 6


def update(actors, times):
    for _ in range(times):
        actors.update_priorities(0, "default_policy", np.array([0]), np.array([1.0]))


def test_several_batches_come_with_one_request(actors):
    for i in range(8):
        actors.add(rows(5, i))
    settled(actors)
    asked = actors.ask(3)
    assert asked.number == 3
    batches = actors.taken(asked)
    assert [batch.count for batch in batches] == [4, 4, 4]
    assert {batch.sources[0].worker for batch in batches} == {asked.shard}
    many = actors.ask(100)
    assert many.number == 11  # 2 x (40 - 12) rows are due
    assert not actors.can_draw()
    assert actors.state_dict()["ratio"]["drawn"] == 12  # a checkpoint has none of these
    assert len(actors.taken(many)) == 11
    assert actors.state_dict()["ratio"]["drawn"] == 56


def test_a_checkpoint_survives_what_the_plan_survives(actors):
    import ray

    for i in range(8):
        actors.add(rows(5, i))
    settled(actors)
    ray.kill(actors.handles()[0])
    with metrics_scope(MetricsContext()) as metrics:
        actors.add(rows(5))
        actors.add(rows(5))
        state = actors.state_dict()
        assert metrics.counters["num_replay_shard_restarts"] == 1
    other = make(learning_starts=12, training_intensity=2)
    other.load_state_dict(state)
    assert sum(other.rows) == sum(actors.rows) >= 10
    other.stop()


def test_rows_and_places_are_told_with_what_is_drawn(actors):
    for i in range(3):
        actors.add(rows(5, i))
    while not all(actors.rows):
        with metrics_scope(MetricsContext()) as metrics:
            actors.add(rows(5))
            actors.taken(actors.ask())
            assert metrics.counters["num_bytes_between_nodes"] == 0
    assert set(actors._nodes) == {actors._node}


def test_a_death_is_noticed_once(actors):
    import ray

    for i in range(8):
        actors.add(rows(5, i))
    settled(actors)
    asked = [actors.ask() for _ in range(4)]
    ray.kill(actors.handles()[0])
    with metrics_scope(MetricsContext()) as metrics:
        for one in asked:
            actors.taken(one)
        assert metrics.counters["num_replay_shard_restarts"] <= 1


def test_priorities_that_cannot_be_are_told(actors):
    for _ in range(6):
        actors.add(rows(4))
    settled(actors)
    drawn = actors.ratio.drawn
    actors.update_priorities(0, "nobody", np.array([0]), np.array([1.0]))
    actors.update_priorities(0, "default_policy", np.array([0]), np.array([7.0]))
    with pytest.raises(KeyError, match="nobody"):
        actors.taken(actors.ask(2))
    assert actors.ratio.drawn == drawn  # these were not drawn
    weights = actors.state_dict()["shards"][0]["buffers"]["default_policy"]["weights"]
    assert weights.max() > 2  # the other one was made
    actors.update_priorities(0, "nobody", np.array([0]), np.array([1.0]))
    with pytest.raises(KeyError, match="nobody"):  # nothing is drawn for long
        update(actors, 63)
    two = rows(2)
    two.sources = (Source(0, origin="replay"),) * 2
    told = {"default_policy": {"rows": {"td_error": np.ones(2), "batch_indexes": np.arange(2)}}}
    with pytest.raises(ValueError, match="this batch has 2 sources"):
        UpdateReplayPriorities(actors=actors)((two, told))


@pytest.mark.slow
def test_a_restored_set_of_shards_goes_on(actors):
    for i in range(8):
        actors.add(rows(5, i))
    state = actors.state_dict()
    other = make(learning_starts=12, training_intensity=2)
    other.load_state_dict(state)
    for one in (actors, other):
        one.add(rows(5, 9))
        settled(one)
    [first], [second] = (one.taken(one.ask()) for one in (actors, other))
    np.testing.assert_array_equal(first["batch_indexes"], second["batch_indexes"])
    assert actors.rng.integers(1000) == other.rng.integers(1000)
    with pytest.raises(ValueError, match="a state of 2 replay shards for 3"):
        make(3).load_state_dict(state)
    other.stop()


@pytest.mark.slow
def test_a_shards_error_names_the_operator(actors):
    waiting = make(1, learning_starts=1000)
    items = [rows(20), *([rows(20).without_columns("rewards")] * 50)]
    store = LocalIterator(items).for_each(StoreToReplayBuffer(actors=waiting))

    def store_all():
        for _ in store:
            settled(waiting)

    with pytest.raises(ValueError, match="without 'rewards'"):
        store_all()
    waiting.stop()


def test_what_cannot_be():
    with pytest.raises(ValueError, match="num_shards is a whole number from 1"):
        make(0)
    for operator in (StoreToReplayBuffer, Replay, UpdateReplayPriorities):
        with pytest.raises(ValueError, match="one of local_buffer and actors"):
            operator()
        with pytest.raises(TypeError, match="actors is a ReplayActors, got a dict"):
            operator(actors={})
    with pytest.raises(ValueError, match="num_async is at least 1"):
        Replay(actors=make(), num_async=0)
