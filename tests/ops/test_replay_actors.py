"""Replay buffers on actors: storing by reference, requests ahead, replacement of dead shards."""

import time

import numpy as np
import pytest

from flowrl.data import SampleBatch
from flowrl.errors import ConfigError
from flowrl.iter import LocalIterator, MetricsContext, Source, metrics_scope
from flowrl.iter.waiting import ready_refs
from flowrl.ops import (
    BatchRef,
    Concurrently,
    ParallelRollouts,
    Replay,
    ReplayActors,
    StoreToReplayBuffer,
    UpdateReplayPriorities,
)
from flowrl.replay import MultiAgentReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from flowrl.sampling import WorkerSet
from tests.processes import kill_actor

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


class RepeatedJournal:
    """The journal of a rerun, in which the shards are objects of this process."""

    replays = True

    def __init__(self):
        self.plan_log = self

    def observe(self, name, value):
        return value

    def end(self, reason):
        pass


def in_process(replay_actors):
    """Let the shards be objects of this process, which do not have to be started."""
    replay_actors.journal = RepeatedJournal()
    return replay_actors


@pytest.fixture
def local_actors():
    return in_process(make(learning_starts=12, training_intensity=2))


@pytest.fixture
def actors(ray_session):
    replay_actors = make(learning_starts=12, training_intensity=2)
    with metrics_scope(MetricsContext()):
        yield replay_actors
        replay_actors.stop()


def rows_of(actors):
    return [shard.rows for shard in actors.shards]


def wait_until_stored(actors):
    """Wait until the shards have stored all batches; return their numbers of rows."""
    deadline = time.monotonic() + 60  # generous, for busy machines
    while any(shard.pending_adds for shard in actors.shards):
        assert time.monotonic() < deadline
        actors._process_stored("draws")
        time.sleep(0.01)
    return rows_of(actors)


def test_restored_shards_ignore_priorities_of_dead_ones():
    actors, copy = in_process(make(1)), in_process(make(1))
    actors.add(rows(100))
    actors._process_stored("draws")
    (drawn,) = actors.receive_batches(actors.request_batches())
    actors._replace_shard(0, RuntimeError("killed"))
    actors.add(rows(8))
    actors._process_stored("draws")
    copy.load_state_dict(actors.state_dict())
    for each in (actors, copy):
        each.update_priorities(drawn.sources[0], "default_policy", np.array([50]), np.ones(1))
        (batch,) = each.receive_batches(each.request_batches())
        assert batch.sources[0].incarnation == 1


def test_plan_over_shards_keeps_the_replay_ratio(actors):
    source = LocalIterator(lambda: (rows(5, i) for i in iter(int, 1)), "source")
    store = source.for_each(StoreToReplayBuffer(actors=actors))
    plan = Concurrently([store, Replay(actors=actors)], mode="async", output_indexes=[1])
    drawn = plan.take(40)
    assert [batch.count for batch in drawn] == [4] * 40
    assert {batch.sources[0].shard for batch in drawn} == {0, 1}
    ratio = actors.ratio
    assert ratio.drawn <= 2 * (ratio.stored - 12) <= ratio.drawn + 4 * 4 + 2 * 5 * 9
    assert min(wait_until_stored(actors)) > 0
    stats = actors.stats()
    added = sum(shard["default_policy"]["num_rows_added"] for shard in stats)
    assert added == ratio.stored == plan.metrics.counters["num_agent_steps_stored"]
    plan.stop()
    assert all(shard.actor is None for shard in actors.shards)


def test_storing_waits_for_shards_only_when_it_is_due(local_actors):
    local_actors.add(rows(12))
    local_actors._process_stored("draws")
    while not local_actors._full_shards():
        local_actors.add(rows(8))
    assert not local_actors.can_add()  # a draw is due
    assert local_actors.waits() == []
    while local_actors.ratio.may_draw(4):
        local_actors.receive_batches(local_actors.request_batches())
    assert local_actors.waits()
    assert local_actors.can_add()


@pytest.mark.slow
def test_operators_pulled_by_hand_store_and_draw_in_any_order(ray_session):
    actors = make()
    source = LocalIterator(lambda: (rows(5, i) for i in iter(int, 1)), "source")
    store = source.for_each(StoreToReplayBuffer(actors=actors))
    with Replay(actors=actors, num_async=2) as draw:
        with pytest.raises(RuntimeError, match="the replay buffer is empty: store a batch"):
            next(draw)
        next(store)
        assert next(draw).count == 4  # the other shard is empty
        store.take(3)
        assert [batch.count for batch in draw.take(10)] == [4] * 10


@pytest.mark.slow
def test_operators_pulled_by_hand_keep_a_training_intensity(actors):
    source = LocalIterator(lambda: (rows(5, i) for i in iter(int, 1)), "source")
    store = source.for_each(StoreToReplayBuffer(actors=actors))
    draw = Replay(actors=actors)
    store.take(2)
    with pytest.raises(
        RuntimeError, match="learning_starts=12 and 10 rows are stored: store 2 mor"
    ):
        next(draw)
    next(store)
    with pytest.raises(RuntimeError, match="requires 6 drawn rows, and 0 have been drawn: draw 1"):
        next(store)
    assert next(draw).count == 4
    with pytest.raises(RuntimeError, match="allows 6 drawn rows, and 4 have been drawn: store 1"):
        next(draw)
    next(store)


@pytest.mark.slow
def test_lost_rows_are_stored_again_before_the_next_draw(ray_session):
    actors = make(1, training_intensity=1)
    source = LocalIterator(lambda: (rows(5, i) for i in iter(int, 1)), "source")
    store = source.for_each(StoreToReplayBuffer(actors=actors))
    with metrics_scope(MetricsContext()), Replay(actors=actors, num_async=1) as draw:
        next(store)
        wait_until_stored(actors)
        kill_actor(actors.started_shards()[0].actor)
        with pytest.raises(RuntimeError, match="the replay buffer has nothing to draw: store mo"):
            next(draw)
        next(store)
        assert next(draw).count == 4


@pytest.mark.slow
def test_fragments_are_stored_by_reference(ray_session):
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


def test_shard_of_a_batch_receives_its_priorities(local_actors):
    for i in range(8):
        local_actors.add(rows(5, i))
    wait_until_stored(local_actors)
    update = UpdateReplayPriorities(actors=local_actors)
    request = local_actors.request_batches()
    [batch] = local_actors.receive_batches(request)
    row_stats = {"batch_indexes": batch["batch_indexes"], "td_error": np.full(4, -9.0)}
    update((batch, {"default_policy": {"row_stats": row_stats}}))
    states = local_actors.state_dict()["shards"]
    weights = [shard["buffers"]["default_policy"]["weights"] for shard in states]
    assert weights[request.source.shard].max() > 2
    assert weights[1 - request.source.shard].max() == 1.0


def test_dead_shard_is_replaced(actors):
    for i in range(10):
        actors.add(rows(5, i))
    before = list(wait_until_stored(actors))
    kill_actor(actors.started_shards()[0].actor)
    with metrics_scope(MetricsContext()) as metrics:
        for i in range(20):
            actors.add(rows(5, i))
        wait_until_stored(actors)
        assert metrics.counters["num_replay_shard_restarts"] == 1
        assert metrics.counters["num_replay_rows_lost"] == before[0]
    assert sum(rows_of(actors)) == 150 - before[0]
    kill_actor(actors.started_shards()[1].actor)
    with metrics_scope(MetricsContext()) as metrics:
        drawn = [actors.receive_batches(actors.request_batches()) for _ in range(2)]
        assert [len(batches) for batches in drawn] == [1, 0]
        assert metrics.counters["num_replay_shard_restarts"] == 1
    assert actors.ratio.drawn == 4


def test_rows_that_are_stored_again_are_not_lost(actors):
    for i in range(10):
        actors.add(rows(5, i))
    deadline = time.monotonic() + 60
    while not all(ready_refs([add.ref]) for s in actors.shards for add in s.pending_adds):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with metrics_scope(MetricsContext()) as metrics:
        # the replies to draws count rows of batches whose own replies are not processed yet
        assert all(actors.receive_batches(actors.request_batches()) for _ in range(2))
        kill_actor(actors.started_shards()[0].actor)
        before = rows_of(actors)[0]
        assert actors.receive_batches(actors.request_batches()) == []
        stored = sum(wait_until_stored(actors))
        assert metrics.counters["num_replay_rows_lost"] == before == 50 - stored


SHARD_0 = Source(0, origin="replay")


def update_priorities(actors, times):
    for _ in range(times):
        actors.update_priorities(SHARD_0, "default_policy", np.array([0]), np.array([1.0]))


def test_one_request_returns_several_batches(local_actors):
    for i in range(8):
        local_actors.add(rows(5, i))
    wait_until_stored(local_actors)
    request = local_actors.request_batches(3)
    assert request.num_batches == 3
    batches = local_actors.receive_batches(request)
    assert [batch.count for batch in batches] == [4, 4, 4]
    assert {batch.sources[0].shard for batch in batches} == {request.source.shard}
    pending = local_actors.request_batches(100)
    assert pending.num_batches == 11  # 2 x (40 - 12) rows are due
    assert not local_actors.can_sample()
    assert local_actors.state_dict()["ratio"]["drawn"] == 12  # without the pending batches
    assert len(local_actors.receive_batches(pending)) == 11
    assert local_actors.state_dict()["ratio"]["drawn"] == 56


@pytest.mark.slow
def test_state_dict_replaces_a_dead_shard(ray_session):
    actors = make(learning_starts=12, training_intensity=2)
    with metrics_scope(MetricsContext()) as metrics:
        for i in range(8):
            actors.add(rows(5, i))
        wait_until_stored(actors)
        kill_actor(actors.started_shards()[0].actor)
        actors.add(rows(5))
        actors.add(rows(5))
    state = actors.state_dict()  # a checkpoint is written outside of a pull
    assert metrics.counters["num_replay_shard_restarts"] == 1
    other = make(learning_starts=12, training_intensity=2)
    other.load_state_dict(state)
    assert sum(rows_of(other)) == sum(rows_of(actors)) >= 10
    actors.stop()
    other.stop()


@pytest.mark.slow
def test_replies_contain_row_counts_and_nodes(actors):
    for i in range(3):
        actors.add(rows(5, i))
    while not all(rows_of(actors)):
        with metrics_scope(MetricsContext()) as metrics:
            actors.add(rows(5))
            actors.receive_batches(actors.request_batches())
            assert metrics.counters["num_bytes_between_nodes"] == 0
    assert {shard.node for shard in actors.shards} == {actors._node}


def test_shard_that_is_killed_for_lack_of_memory_is_replaced(local_actors, monkeypatch):
    from ray.exceptions import OutOfMemoryError

    for i in range(8):
        local_actors.add(rows(5, i))
    wait_until_stored(local_actors)
    request = local_actors.request_batches()

    def killed(ref):
        monkeypatch.undo()
        raise OutOfMemoryError("Task was killed due to the node running low on memory")

    monkeypatch.setattr("flowrl.ops.replay_actors.fetch", killed)
    with metrics_scope(MetricsContext()) as metrics:
        assert local_actors.receive_batches(request) == []
        assert metrics.counters["num_replay_shard_restarts"] == 1


def test_shard_that_dies_again_and_again_is_an_error(local_actors, monkeypatch):
    from ray.exceptions import OutOfMemoryError

    def killed(ref):
        raise OutOfMemoryError("Task was killed due to the node running low on memory")

    with metrics_scope(MetricsContext()) as metrics:
        local_actors.add(rows(5))
        with monkeypatch.context() as patch:
            patch.setattr("flowrl.ops.replay_actors.fetch", killed)
            local_actors._process_stored("draws")
            local_actors._process_stored("draws")
            with pytest.raises(RuntimeError, match="replay actor 1 died 3 times") as error:
                local_actors._process_stored("draws")
        assert isinstance(error.value.__cause__, OutOfMemoryError)
        assert metrics.counters["num_replay_shard_restarts"] == 2
        assert sum(wait_until_stored(local_actors)) == 5
        assert [shard.deaths for shard in local_actors.shards] == [0, 0]


def test_errors_of_shards_have_their_own_type(ray_session):
    def make_shard(shard):
        return MultiAgentReplayBuffer(no_buffer, replay_batch_size=4)

    actors = ReplayActors(make_shard, 1, 4)
    with metrics_scope(MetricsContext()):
        actors.add(rows(5))
        with pytest.raises(ConfigError) as caught:
            wait_until_stored(actors)
    assert str(caught.value) == "no buffer for default_policy"
    assert "in no_buffer" in caught.value.__notes__[0]
    larger = in_process(make(1))
    larger.add(rows(5))
    with pytest.raises(ConfigError, match="no buffer for default_policy"):
        actors.load_state_dict(larger.state_dict())
    actors.stop()


def test_state_of_a_larger_buffer_is_rejected():
    smaller = in_process(ReplayActors(lambda shard: make_buffer_of(10), 2, 4))
    larger = in_process(make())
    larger.add(rows(5))
    with pytest.raises(ValueError, match="capacity"):
        smaller.load_state_dict(larger.state_dict())


def no_buffer(policy_id):
    raise ConfigError(f"no buffer for {policy_id}")


def make_buffer_of(capacity):
    return MultiAgentReplayBuffer(
        lambda policy_id: PrioritizedReplayBuffer(capacity), replay_batch_size=4
    )


def test_rows_of_smaller_batches_are_drawn_up_to_the_ratio():
    actors = in_process(
        ReplayActors(lambda shard: make_buffer_of(200), 1, 40, training_intensity=1)
    )
    for i in range(20):
        actors.add(rows(5, i))
    actors._process_stored("draws")
    request = actors.request_batches(100)
    assert request.num_batches == 2  # 100 rows are due, and a batch has at most 40
    assert actors.state_dict()["ratio"]["drawn"] == 0
    while True:
        actors.receive_batches(request)
        assert actors.ratio.drawn <= 100
        request = actors.request_batches(100)
        if not request.num_batches:
            break
    assert actors.ratio.drawn > 100 - 40


def test_lost_batches_of_a_live_shard_keep_its_rows(local_actors, monkeypatch):
    from ray.exceptions import ObjectLostError

    for i in range(8):
        local_actors.add(rows(5, i))
    before = list(wait_until_stored(local_actors))
    request = local_actors.request_batches()

    def lost(ref):
        monkeypatch.undo()
        raise ObjectLostError("0", None, "")

    monkeypatch.setattr("flowrl.ops.replay_actors.fetch", lost)
    assert local_actors.receive_batches(request) == []
    assert local_actors.ratio.drawn == 0
    assert rows_of(local_actors) == before


@pytest.mark.slow
def test_dead_shard_is_replaced_only_once(actors):
    for i in range(8):
        actors.add(rows(5, i))
    wait_until_stored(actors)
    kill_actor(actors.started_shards()[0].actor)
    requests = [actors.request_batches() for _ in range(4)]
    assert [request.source.shard for request in requests] == [0, 1, 0, 1]
    with metrics_scope(MetricsContext()) as metrics:
        found = [bool(actors.receive_batches(request)) for request in requests]
        assert metrics.counters["num_replay_shard_restarts"] == 1
    assert found == [False, True, False, True]


@pytest.mark.slow
def test_priorities_of_rows_that_died_with_their_shard_are_dropped(actors):
    for i in range(8):
        actors.add(rows(5, i))
    wait_until_stored(actors)
    with metrics_scope(MetricsContext()):
        batches = [actors.receive_batches(actors.request_batches())[0] for _ in range(2)]
        late = actors.request_batches()
        kill_actor(actors.started_shards()[0].actor)
        assert actors.receive_batches(actors.request_batches()) != []  # of shard 1
        assert actors.receive_batches(actors.request_batches()) == []  # replaces shard 0
        while rows_of(actors)[0] < 10:
            actors.add(rows(5))
            wait_until_stored(actors)
        stored = list(rows_of(actors))
        actors.receive_batches(late)
        assert rows_of(actors) == stored  # not those of the dead shard
        operator = UpdateReplayPriorities(actors=actors)
        for batch in batches:
            values = {"td_error": np.full(4, 9.0), "batch_indexes": batch["batch_indexes"]}
            operator((batch, {"default_policy": {"row_stats": values}}))
    states = [shard["buffers"]["default_policy"] for shard in actors.state_dict()["shards"]]
    assert [bool(state["weights"].max() > 2) for state in states] == [False, True]


def test_errors_of_priority_updates_are_raised(local_actors):
    for _ in range(6):
        local_actors.add(rows(4))
    wait_until_stored(local_actors)
    drawn = local_actors.ratio.drawn
    local_actors.update_priorities(SHARD_0, "unknown", np.array([0]), np.array([1.0]))
    local_actors.update_priorities(SHARD_0, "default_policy", np.array([0]), np.array([7.0]))
    with pytest.raises(KeyError, match="unknown"):
        local_actors.receive_batches(local_actors.request_batches(2))
    assert local_actors.ratio.drawn == drawn  # the failed request does not count
    weights = local_actors.state_dict()["shards"][0]["buffers"]["default_policy"]["weights"]
    assert weights.max() > 2  # the valid update was applied
    local_actors.update_priorities(SHARD_0, "unknown", np.array([0]), np.array([1.0]))
    with pytest.raises(KeyError, match="unknown"):  # sent without a draw after 64 updates
        update_priorities(local_actors, 63)
    batch = rows(2)
    batch.sources = (Source(0, origin="replay"),) * 2
    info = {
        "default_policy": {"row_stats": {"td_error": np.ones(2), "batch_indexes": np.arange(2)}}
    }
    with pytest.raises(ValueError, match="this batch has 2 sources"):
        UpdateReplayPriorities(actors=local_actors)((batch, info))


@pytest.mark.slow
def test_restored_shards_draw_the_same_batches(actors):
    for i in range(8):
        actors.add(rows(5, i))
    state = actors.state_dict()
    other = make(learning_starts=12, training_intensity=2)
    other.load_state_dict(state)
    for replay_actors in (actors, other):
        replay_actors.add(rows(5, 9))
        wait_until_stored(replay_actors)
    [first], [second] = (each.receive_batches(each.request_batches()) for each in (actors, other))
    np.testing.assert_array_equal(first["batch_indexes"], second["batch_indexes"])
    assert actors.rng.integers(1000) == other.rng.integers(1000)
    with pytest.raises(ValueError, match="a state of 2 replay actors for 3"):
        make(3).load_state_dict(state)
    other.stop()


@pytest.mark.slow
def test_shard_error_is_raised_by_the_storing_operator(actors):
    single_shard = make(1, learning_starts=1000)
    items = [rows(20), *([rows(20).without_columns("rewards")] * 50)]
    store = LocalIterator(items).for_each(StoreToReplayBuffer(actors=single_shard))

    def store_all():
        for _ in store:
            wait_until_stored(single_shard)

    with pytest.raises(ValueError, match="without 'rewards'"):
        store_all()
    single_shard.stop()


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match="num_shards must be an int of at least 1"):
        make(0)
    for operator in (StoreToReplayBuffer, Replay, UpdateReplayPriorities):
        with pytest.raises(ValueError, match="give local_buffer or actors, got neither"):
            operator()
        with pytest.raises(TypeError, match="actors must be a ReplayActors, got a dict"):
            operator(actors={})
    with pytest.raises(ValueError, match="num_async must be an int of at least 1"):
        Replay(actors=make(), num_async=0)


def test_plan_that_only_stores_stops_the_actors(ray_session):
    actors = make()
    plan = LocalIterator([rows(4)]).for_each(StoreToReplayBuffer(actors=actors))
    plan.take(1)
    handles = [shard.actor for shard in actors.started_shards()]
    plan.stop()
    with pytest.raises(ray_session.exceptions.RayActorError):
        ray_session.get([handle.state_dict.remote() for handle in handles], timeout=30)
