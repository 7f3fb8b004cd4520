"""Replay operators in plans: storing, drawing, priorities, mixing in."""

import numpy as np
import pytest

from flowrl.data import SampleBatch
from flowrl.iter import LocalIterator
from flowrl.ops import (
    Concurrently,
    MixInReplay,
    Replay,
    SimpleReplayBuffer,
    StoreToReplayBuffer,
    UpdateReplayPriorities,
    _get_shared_metrics,
)
from flowrl.replay import MultiAgentReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer


def rows(n, value=0):
    return SampleBatch(
        obs=np.full((n, 2), value, np.float32),
        new_obs=np.full((n, 2), value, np.float32),
        rewards=np.zeros(n, np.float32),
    )


def make(kind=ReplayBuffer, **settings):
    return MultiAgentReplayBuffer(
        lambda policy_id: kind(100, seed=0), replay_batch_size=4, **settings
    )


def source(count=None, size=5):
    numbers = iter(int, 1) if count is None else range(count)
    return LocalIterator(lambda: (rows(size, i) for i, _ in enumerate(numbers)), "source")


@pytest.mark.parametrize("mode", ["round_robin", "async"])
@pytest.mark.parametrize("intensity", [None, 0.5, 3])
def test_storing_and_drawing_keep_the_training_intensity(mode, intensity):
    buffer = make(learning_starts=12, training_intensity=intensity)
    stored_counts = []

    def count(batch):
        stored_counts.append(_get_shared_metrics().counters["num_agent_steps_stored"])
        return batch

    store = source().for_each(StoreToReplayBuffer(local_buffer=buffer))
    draw = Replay(local_buffer=buffer).for_each(count)
    plan = Concurrently([store, draw], mode=mode, output_indexes=[1])
    drawn = plan.take(60)
    assert [batch.count for batch in drawn] == [4] * 60
    for i, stored in enumerate(stored_counts):
        if intensity is None:  # drawing starts after the third batch
            assert stored == 15 + 5 * i
        else:
            ratio = intensity * (stored - 12)
            assert ratio - max(4, 5 * intensity) <= 4 * (i + 1) <= ratio
    assert "Replay(MultiAgentReplayBuffer(replay_batch_size=4" in plan.explain()


def test_branches_that_alternate_are_pulled_only_when_they_are_due(monkeypatch):
    buffer = make(learning_starts=500)
    store = source().for_each(StoreToReplayBuffer(local_buffer=buffer))
    draws = Replay(local_buffer=buffer)
    asked = []
    is_due = draws.stage._is_due
    monkeypatch.setattr(draws.stage, "_is_due", lambda: asked.append(is_due()) or asked[-1])
    plan = Concurrently([store, draws], mode="round_robin", output_indexes=[1])
    plan.take(5)
    del asked[:]
    plan.take(20)
    assert asked == [True] * 20


def test_branches_with_buffers_of_their_own_keep_their_turns():
    def branch(name):
        buffer = make(learning_starts=8)
        store = source().for_each(StoreToReplayBuffer(local_buffer=buffer))
        draw = Replay(local_buffer=buffer).for_each(lambda batch: name)
        return Concurrently([store, draw], mode="round_robin", output_indexes=[1])

    both = Concurrently([branch("a"), branch("b")], mode="round_robin", round_robin_weights=[1, 2])
    assert both.take(9) == ["a", "b", "b"] * 3
    assert not both.stage._shares_buffer
    assert all(part._shares_buffer for part in both.stage.parents)


def test_draws_stop_at_the_ratio_after_the_stored_stream_ends():
    buffer = make()
    store = source(3).for_each(StoreToReplayBuffer(local_buffer=buffer))
    plan = Concurrently([store, Replay(local_buffer=buffer)], output_indexes=[1])
    assert len(plan.take(3)) == 3
    with pytest.raises(RuntimeError, match=r"Replay.*store another batch before drawing again"):
        next(plan)


def test_operators_pulled_by_hand_store_and_draw_in_any_order():
    buffer = make()
    store = source().for_each(StoreToReplayBuffer(local_buffer=buffer))
    draw = Replay(local_buffer=buffer)
    with pytest.raises(RuntimeError, match=r"Replay\(.*the replay buffer is empty: store a batch"):
        next(draw)
    assert [next(store).count for _ in range(3)] == [5, 5, 5]
    assert [next(draw).count for _ in range(5)] == [4] * 5
    assert next(store).count == 5
    assert next(draw).count == 4
    assert len(buffer) == 20


def test_operators_pulled_by_hand_wait_for_learning_starts():
    buffer = make(learning_starts=12)
    store = source().for_each(StoreToReplayBuffer(local_buffer=buffer))
    store.take(2)
    draw = Replay(local_buffer=buffer)
    with pytest.raises(
        RuntimeError, match="learning_starts=12 and 10 rows are stored: store 2 mor"
    ):
        next(draw)
    store.take(2)
    assert next(draw).count == 4


def test_operators_pulled_by_hand_keep_a_training_intensity():
    buffer = make(learning_starts=10, training_intensity=0.5)
    store = source().for_each(StoreToReplayBuffer(local_buffer=buffer))
    draw = Replay(local_buffer=buffer)
    store.take(3)
    missing = "training_intensity=0.5 allows 2 drawn rows, and 0 have been drawn: store 3 more rows"
    with pytest.raises(RuntimeError, match=missing):
        next(draw)
    next(store)
    due = r"StoreToReplayBuffer.*requires 5 drawn rows, and 0 have been drawn: draw 1 batches"
    with pytest.raises(RuntimeError, match=due):
        next(store)
    assert next(draw).count == 4
    next(store)


def test_a_simple_buffer_is_drawn_from_by_hand():
    buffer = SimpleReplayBuffer(4, seed=0)
    draw = Replay(local_buffer=buffer)
    with pytest.raises(RuntimeError, match="the replay buffer is empty: store a batch"):
        next(draw)
    source(1).for_each(StoreToReplayBuffer(local_buffer=buffer)).take(1)
    assert [batch.count for batch in draw.take(3)] == [5, 5, 5]


def test_state_of_a_plan_contains_the_buffer():
    def plan(buffer):
        store = source().for_each(StoreToReplayBuffer(local_buffer=buffer))
        return Concurrently([store, Replay(local_buffer=buffer)], output_indexes=[1])

    first, second = make(training_intensity=2), make(training_intensity=2)
    original, restored = plan(first), plan(second)
    original.take(5)
    restored.load_state_dict(original.state_dict())
    assert len(second) == len(first) > 0
    expected = next(original)["batch_indexes"]
    np.testing.assert_array_equal(next(restored)["batch_indexes"], expected)


def test_state_of_a_plan_contains_a_buffer_that_an_own_operator_fills():
    filled, other = make(), make()
    source(3).for_each(lambda batch: filled.add(batch)).take(3)
    original, restored = Replay(local_buffer=filled), Replay(local_buffer=other)
    original.take(1)
    restored.load_state_dict(original.state_dict())
    assert len(other) == 15
    expected = next(original)["batch_indexes"]
    np.testing.assert_array_equal(next(restored)["batch_indexes"], expected)


def test_state_of_a_plan_contains_a_buffer_once():
    def plan(buffer):
        stores = [source().for_each(StoreToReplayBuffer(local_buffer=buffer)) for _ in range(2)]
        return Concurrently([*stores, Replay(local_buffer=buffer)], output_indexes=[2])

    first, second = make(), make()
    original, restored = plan(first), plan(second)
    original.take(5)
    state = original.state_dict()
    assert len(state["shared"]) == 1
    with pytest.raises(ValueError, match="another plan: stages share the states of"):
        restored.load_state_dict({**state, "shared": {}})
    restored.load_state_dict(state)
    assert len(second) == len(first) > 0


def test_buffer_errors_name_the_operator():
    buffer = make()
    store = LocalIterator([rows(3), rows(3).without_columns("rewards")]).for_each(
        StoreToReplayBuffer(local_buffer=buffer)
    )
    next(store)
    buffer.sample()
    with pytest.raises(ValueError, match="without 'rewards'") as caught:
        next(store)
    assert "StoreToReplayBuffer" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("operator", [StoreToReplayBuffer, Replay, UpdateReplayPriorities])
def test_other_types_of_buffers_are_rejected(operator):
    match = r"local_buffer must be a MultiAgentReplayBuffer or a SimpleReplayBuffer, got a dict"
    with pytest.raises(TypeError, match=match):
        operator(local_buffer={})
    if operator is UpdateReplayPriorities:
        with pytest.raises(TypeError, match="a SimpleReplayBuffer has no priorities"):
            operator(local_buffer=SimpleReplayBuffer(3))


def test_priorities_are_absolute_td_errors():
    buffer = make(PrioritizedReplayBuffer)
    buffer.add(rows(8))
    update = UpdateReplayPriorities(local_buffer=buffer)
    errors = np.array([-3.0, 1.0, 0.0])
    info = {"default_policy": {"row_stats": {"batch_indexes": np.arange(3), "td_error": errors}}}
    item = (rows(3), info)
    assert update(item) is item
    weights = buffer.buffers["default_policy"].state_dict()["weights"]
    np.testing.assert_allclose(weights[:3], (np.array([3.0, 1.0, 0.0]) + 1e-6) ** 0.6)
    assert weights[3] == 1.0
    update((rows(3), {"default_policy": {"learner_stats": {}}}))
    with pytest.raises(TypeError, match=r"takes \(batch, info\), got SampleBatch"):
        update(rows(3))


# -- SimpleReplayBuffer and MixInReplay ------------------------------------------------------------


def test_other_items_and_unknown_policies_are_rejected():
    store = StoreToReplayBuffer(local_buffer=make())
    with pytest.raises(TypeError, match="takes batches, got tuple: chain it before the operator"):
        store((rows(3), {}))
    buffer = make(PrioritizedReplayBuffer)
    buffer.add(rows(3))
    with pytest.raises(KeyError, match="policy 'other', whose rows are not in this replay buffer"):
        buffer.update_priorities("other", np.array([0]), np.array([1.0]))


def test_simple_buffer_draws_whole_batches():
    buffer = SimpleReplayBuffer(3, seed=0)
    with pytest.raises(ValueError, match="empty"):
        buffer.sample()
    assert not buffer.can_sample()
    for i in range(5):
        buffer.add(rows(2, i))
    drawn = [int(buffer.sample()["obs"][0, 0]) for _ in range(300)]
    assert set(drawn) == {2, 3, 4}
    assert min(map(drawn.count, (2, 3, 4))) > 70
    other = SimpleReplayBuffer(3, seed=1)
    other.load_state_dict(buffer.state_dict())
    for _ in range(9):
        assert buffer.sample() is other.sample()
    with pytest.raises(ValueError, match="num_slots"):
        SimpleReplayBuffer(0)


@pytest.mark.parametrize(("proportion", "expected"), [(0, 10), (0.5, 15), (1.5, 25), (2, 30)])
def test_mix_in_replay_keeps_the_proportion(proportion, expected):
    plan = source(10).combine(MixInReplay(4, proportion, seed=0))
    items = [int(batch["obs"][0, 0]) for batch in plan]
    assert len(items) == expected  # later batches make up for the first one, which has no replay
    newest = -1
    for item in items:
        assert newest - 4 <= item <= newest + 1
        newest = max(newest, item)


def test_fractions_of_mix_in_replay_can_be_saved_and_loaded():
    mix = MixInReplay(4, 0.1, seed=0)
    for i in range(30):
        mix(rows(2, i))
        MixInReplay(4, 0.1).load_state_dict(mix.state_dict())
    with pytest.raises(ValueError, match="batches_due: must be at least 0, got -1"):
        mix.load_state_dict({**mix.state_dict(), "batches_due": -1.0})


def test_mix_in_replay_resumes_with_a_smaller_proportion():
    mix = MixInReplay(4, 2.0, seed=0)
    mix(rows(2))
    fewer = MixInReplay(4, 0.5, seed=0)
    fewer.load_state_dict(mix.state_dict())
    assert len(fewer(rows(2))) <= 3


def test_size_in_the_statistics_has_its_unit():
    simple, multi = SimpleReplayBuffer(3), make()
    for buffer in (simple, multi):
        buffer.add(rows(5))
    stores = [StoreToReplayBuffer(local_buffer=buffer) for buffer in (simple, multi)]
    assert [store.extra_stats() for store in stores] == [{"batches": 1}, {"rows": 5}]
    streams = [Replay(local_buffer=buffer) for buffer in (simple, multi)]
    assert [stream.stage.extra_stats() for stream in streams] == [{"batches": 1}, {"rows": 5}]


def test_mix_in_replay_rejects_invalid_arguments():
    with pytest.raises(ValueError, match="needs num_slots"):
        MixInReplay(0, 0.5)
    with pytest.raises(ValueError, match="at least 0"):
        MixInReplay(3, -1)
    assert MixInReplay(0, 0)(rows(1))[0].count == 1
