"""MultiAgentReplayBuffer: one buffer per policy, and the ratio of drawn to stored rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.interrupts import delayed_interrupts
from flowrl.replay import MultiAgentReplayBuffer, ReplayBuffer


def rows(n, value=0.0):
    return SampleBatch(
        obs=np.full((n, 2), value, np.float32),
        new_obs=np.full((n, 2), value + 1, np.float32),
        rewards=np.zeros(n, np.float32),
    )


def make(**arguments):
    arguments = {"replay_batch_size": 8, **arguments}
    return MultiAgentReplayBuffer(lambda policy_id: ReplayBuffer(1000, seed=0), **arguments)


def test_each_policy_has_its_own_buffer():
    buffer = make(policies=["a", "b"])
    buffer.add(MultiAgentBatch({"a": rows(5, 1.0), "b": rows(9, 2.0), "c": rows(0)}, 9))
    drawn = buffer.sample()
    assert (drawn.env_steps(), drawn.agent_steps()) == (8, 16)
    assert set(drawn["a"]["obs"].ravel()) == {1.0}
    assert set(drawn["b"]["obs"].ravel()) == {2.0}
    assert {pid: s["num_rows"] for pid, s in buffer.stats().items()} == {"a": 5, "b": 9}
    with pytest.raises(KeyError, match=r"\['c'\] for a replay buffer of \['a', 'b'\]: select"):
        buffer.add(MultiAgentBatch({"a": rows(5), "c": rows(2)}, 5))
    assert len(buffer) == 14


def test_invalid_policy_batch_rejects_the_whole_batch():
    buffer = make(training_intensity=1)
    buffer.add(MultiAgentBatch({"a": rows(5)}, 5))
    with pytest.raises(ValueError, match="the batch lacks "):
        buffer.add(MultiAgentBatch({"a": rows(5), "b": SampleBatch(x=np.zeros(5))}, 5))
    assert (len(buffer), list(buffer.buffers), buffer.ratio.stored) == (5, ["a"], 5)
    buffer.add(MultiAgentBatch({"a": rows(5)}, 5))
    assert buffer.can_sample()


def test_extra_draws_do_not_delay_the_next_draw():
    buffer = make()
    buffer.add(rows(5))
    for _ in range(3):
        buffer.sample()
    buffer.add(rows(5))
    assert buffer.can_sample()


def test_single_agent_draws_are_sample_batches():
    buffer = make()
    buffer.add(rows(5))
    assert isinstance(buffer.sample(), SampleBatch)


@pytest.mark.parametrize("intensity", [0.25, 1, 3.7, 64])
@pytest.mark.parametrize("fragment", [1, 7, 50])
def test_ratio_is_exact_to_one_batch(intensity, fragment):
    """10,000 steps in which storing or drawing stalls at times."""
    rng = np.random.default_rng(0)
    buffer = make(training_intensity=intensity, learning_starts=20)
    stored = drawn = 0
    for step in range(10_000):
        stalled = (step // 100) % 3  # 0: none, 1: storing, 2: drawing
        assert buffer.can_add() != buffer.can_sample()
        if buffer.can_add():
            if stalled != 1 or rng.random() < 0.1:
                buffer.add(rows(fragment))
                stored += fragment
        elif stalled != 2 or rng.random() < 0.1:
            buffer.sample()
            drawn += 8
        ahead = intensity * max(0, stored - 20) - drawn
        assert -1e-6 <= ahead < intensity * fragment + 8
    assert drawn


@settings(max_examples=30)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(0, 60))
def test_without_training_intensity_one_batch_is_drawn_per_stored_batch(sizes, starts):
    buffer = make(learning_starts=starts)
    stored = drawn = learning = 0
    for size in sizes:
        assert buffer.can_add()
        buffer.add(rows(size))
        stored += size
        learning += stored >= starts
        while buffer.can_sample():
            buffer.sample()
            drawn += 1
        assert drawn == learning


def test_interrupted_add_stores_and_counts_all_rows(monkeypatch):
    buffer = make(training_intensity=1)
    add = ReplayBuffer.add

    def interrupted(self, batch):
        add(self, batch)
        delayed_interrupts.call(interrupt)

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(ReplayBuffer, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffer.add(rows(9))
    assert len(buffer) == 9
    assert buffer.ratio.stored == 9


def test_restored_buffer_continues_identically():
    buffer = make(training_intensity=2, learning_starts=4)
    buffer.add(rows(9))
    buffer.sample()
    restored = make(training_intensity=2, learning_starts=4)
    restored.load_state_dict(buffer.state_dict())
    buffer.add(rows(5, 3.0))
    restored.add(rows(5, 3.0))
    while buffer.can_sample():
        assert restored.can_sample()
        np.testing.assert_array_equal(buffer.sample()["obs"], restored.sample()["obs"])
    assert not restored.can_sample()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"replay_batch_size": 0}, "replay_batch_size must be an int"),
        ({"learning_starts": -1}, "learning_starts must be an int of at least 0"),
        ({"training_intensity": 0}, "training_intensity must be above 0"),
        ({"training_intensity": float("nan")}, "training_intensity must be above 0"),
    ],
)
def test_invalid_settings_are_rejected(arguments, match):
    with pytest.raises(ValueError, match=match):
        make(**arguments)
    with pytest.raises(TypeError, match="policies must be a collection"):
        make(policies="a")
    with pytest.raises(ValueError, match="policies is empty, so no rows would be stored"):
        make(policies=[])
    with pytest.raises(ValueError, match="empty"):
        make().sample()


def env_steps(first, count, policies="ab"):
    steps = {"eps_id": np.zeros(count, int), "t": np.arange(first, first + count)}
    batches = {pid: rows(count, first).with_columns(**steps) for pid in policies}
    return MultiAgentBatch(batches, count)


def full(*args):
    raise OSError("No space left on device")


@pytest.mark.parametrize("stored", ["", "a"])
def test_error_of_the_first_rows_of_a_policy_in_lockstep_is_raised(monkeypatch, stored):
    buffer = make(mode="lockstep")
    if stored:
        buffer.add(env_steps(0, 4, stored))
    with monkeypatch.context() as patch:
        patch.setattr(ReplayBuffer, "_keep", full)
        with pytest.raises(OSError, match="No space"):
            buffer.add(env_steps(4, 4))
    buffer.add(env_steps(8, 4))
    assert {int(t) for _ in range(9) for t in buffer.sample().policy_batches["a"]["t"]} >= {8, 11}


def test_lockstep_draws_continue_after_rows_of_one_policy_could_not_be_stored(monkeypatch):
    buffer = MultiAgentReplayBuffer(
        lambda policy_id: ReplayBuffer(8, seed=0), mode="lockstep", replay_batch_size=4
    )
    buffer.add(env_steps(0, 8))
    with monkeypatch.context() as patch:
        patch.setattr(buffer.buffers["b"], "add", full)
        with pytest.raises(OSError, match="No space"):
            buffer.add(env_steps(8, 4))
    drawn = [buffer.sample().policy_batches for _ in range(20)]
    assert {int(t) for batches in drawn for t in batches["a"]["t"]} == {4, 5, 6, 7}
    assert all((batches["a"]["t"] == batches["b"]["t"]).all() for batches in drawn)
