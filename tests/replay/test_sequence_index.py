"""Sequences and episodes in replay buffers, against the trajectories that they are cut from."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.a2c import A2CConfig, A2CTorchPolicy
from flowrl.data import SampleBatch
from flowrl.replay import MultiAgentReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from flowrl.sampling import RolloutWorker
from tests.replay.test_buffers import Stream


def fragment(stream, steps, kind="windows"):
    """A state says which row it is of, [episode, step], as the observation does."""
    batch = stream.fragment(steps, kind)
    return batch.with_columns(state_in_0=batch["obs"].copy())


def cut(batch, max_seq_len, burn_in):
    """The sequences of a batch, the plain way: their rows (episode, step), and how many of them
    are burn-in."""
    rows = [tuple(row) for row in batch["obs"].astype(int).tolist()]
    made = []
    for _, part in itertools.groupby(rows, key=lambda row: row[0]):
        own = list(part)
        for at in range(0, len(own), max_seq_len):
            head = min(burn_in, at)
            made.append((tuple(own[at - head : at + max_seq_len]), head))
    return made


def drawn_from(buffer, count):
    """The sequences of a draw likewise; each has the state of its first row."""
    batch = buffer.sample(count)
    rows = [tuple(row) for row in batch["obs"].astype(int).tolist()]
    mask = batch["loss_mask"] if "loss_mask" in batch else np.ones(batch.count, bool)
    made, begin = [], 0
    for length, state in zip(batch["seq_lens"], batch["state_in_0"].astype(int), strict=True):
        own, real = rows[begin : begin + length], mask[begin : begin + length]
        assert tuple(state) == own[0]
        head = int(length - real.sum())
        assert not real[:head].any()
        made.append((tuple(own), head))
        begin += length
    assert begin == batch.count
    return made


@settings(max_examples=50, deadline=None)
@given(
    envs=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 9), min_size=4, max_size=12),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    max_seq_len=st.integers(1, 5),
    burn_in=st.integers(0, 4),
    capacity=st.integers(28, 60),
    kind=st.sampled_from(["windows", "plain"]),
    prioritized=st.booleans(),
)
def test_draws_are_the_sequences_that_are_whole(
    envs, lengths, steps, max_seq_len, burn_in, capacity, kind, prioritized
):
    made = PrioritizedReplayBuffer if prioritized else ReplayBuffer
    unit = {"storage_unit": "sequences", "max_seq_len": max_seq_len, "burn_in": burn_in}
    buffer, stream, stored = made(capacity, seed=0, **unit), Stream(envs, lengths), []
    for count in steps:
        batch = fragment(stream, count, kind)
        buffer.add(batch)
        stored += cut(batch, max_seq_len, burn_in)
        there = {(episode, step) for episode, step, *_ in stream.rows[-capacity:]}
        whole = {(rows, head) for rows, head in stored if set(rows) <= there}
        drawn = set(drawn_from(buffer, 40))
        assert drawn <= whole
        if len(whole) < 4:
            assert drawn == whole
        to_learn = [len(rows) - head for rows, head in whole]
        assert buffer.rows_per_item() == pytest.approx(np.mean(to_learn))


def test_rows_that_came_in_pieces_are_put_in_order():
    """As where fragments of several environments were joined."""
    stream = Stream(2, [9, 9])
    one, two = fragment(stream, 3), fragment(stream, 3)
    buffer = ReplayBuffer(40, storage_unit="sequences", max_seq_len=3, seed=0)
    buffer.add(SampleBatch.concat_samples([one, two]))
    expected = {rows for part in (one, two) for rows, _ in cut(part, 3, 0)}
    assert {rows for rows, _ in drawn_from(buffer, 60)} == expected


def test_episodes_are_whole():
    stream = Stream(1, [3, 5, 2, 4, 6])
    buffer = ReplayBuffer(12, storage_unit="episodes", seed=0)
    for length in (3, 5, 2, 4):
        buffer.add(stream.fragment(length))
    batch = buffer.sample(50)
    assert set(batch["seq_lens"].tolist()) == {5, 2, 4}  # the first has lost a row
    assert set(batch["obs"][:, 0].astype(int)) == {1, 2, 3}
    assert batch["terminateds"][np.cumsum(batch["seq_lens"]) - 1].all()
    with pytest.raises(ValueError, match=r"part of an episode.*complete_episodes"):
        buffer.add(stream.fragment(2))
    assert len(buffer) == 12
    tail = Stream(1, [5])
    tail.fragment(2)
    with pytest.raises(ValueError, match="part of an episode"):
        buffer.add(tail.fragment(3))  # ends, but does not begin in it
    small = ReplayBuffer(4, storage_unit="episodes")
    with pytest.raises(ValueError, match="episodes of 5 rows do not fit a capacity of 4"):
        small.add(Stream(1, [5]).fragment(5))


def test_sequences_span_several_steps():
    """n-step returns of their rows look beyond the sequence, not beyond the trajectory."""
    stream = Stream(1, [8])
    buffer = ReplayBuffer(20, storage_unit="sequences", max_seq_len=4, n_step=3, gamma=0.5, seed=0)
    buffer.add(fragment(stream, 8))
    batch = buffer.sample(30)
    steps = batch["obs"][:, 1].astype(int)
    assert set(steps) == set(range(8))
    assert (batch["n_steps"] == np.minimum(3, 8 - steps)).all()
    rewards = np.arange(8) / 8
    expected = [sum(0.5**k * rewards[s + k] for k in range(min(3, 8 - s))) for s in steps]
    np.testing.assert_allclose(batch["rewards"], expected, rtol=1e-6)


def test_a_sequence_has_one_priority():
    """0.9 of its rows' largest error and 0.1 of their mean; draws follow."""
    stream = Stream(1, [100])
    buffer = PrioritizedReplayBuffer(
        40, storage_unit="sequences", max_seq_len=4, alpha=1.0, beta=1.0, eps=0.0, seed=0
    )
    buffer.add(fragment(stream, 12))
    errors = np.array([0, 0, 0, 4, 1, 1, 1, 1, 2, 0, 0, 2], np.float32)
    buffer.update_priorities(np.repeat([0, 1, 2], 4), errors)
    priorities = np.array([0.9 * 4 + 0.1, 1.0, 0.9 * 2 + 0.1])
    batch = buffer.sample(3000)
    units = batch["batch_indexes"][::4]
    assert (batch["obs"][::4, 1] == 4 * units).all()
    shares = np.bincount(units, minlength=3) / 3000
    np.testing.assert_allclose(shares, priorities / priorities.sum(), atol=1e-3)
    weights = {int(u): float(w) for u, w in zip(units, batch["weights"][::4], strict=True)}
    assert weights == pytest.approx({u: 1 / p for u, p in enumerate(priorities)}, rel=1e-5)
    with pytest.raises(ValueError, match=r"sequences .* of 3 that were ever stored"):
        buffer.update_priorities(np.array([3]), np.array([1.0]))


@pytest.mark.parametrize("unit", ["sequences", "episodes"])
def test_a_restored_buffer_draws_the_same(unit):
    made = [
        PrioritizedReplayBuffer(30, storage_unit=unit, max_seq_len=3, seed=seed) for seed in (0, 1)
    ]
    stream = Stream(1, [3, 4, 5] * 9)
    for length in [3, 4, 5] * 4:
        made[0].add(fragment(stream, length))
    made[0].update_priorities(made[0].sample(2)["batch_indexes"][:1], np.array([3.0]))
    made[1].load_state_dict(made[0].state_dict())
    more = fragment(stream, 3)
    for buffer in made:
        buffer.add(more)
    one, two = (buffer.sample(20) for buffer in made)
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])
    state = made[0].state_dict()
    for odd, match in (
        (ReplayBuffer(30, storage_unit=unit, max_seq_len=3), "kind='PrioritizedReplayBuffer'"),
        (PrioritizedReplayBuffer(30), f"storage_unit='{unit}' for one with 'timesteps'"),
        (PrioritizedReplayBuffer(30, storage_unit=unit, max_seq_len=4), "max_seq_len=3 for one"),
    ):
        with pytest.raises(ValueError, match=match):
            odd.load_state_dict(state)
        assert len(odd) == 0
    with pytest.raises(ValueError, match="storage_unit='timesteps'"):
        made[0].load_state_dict(PrioritizedReplayBuffer(30).state_dict())


@pytest.mark.parametrize("burn_in", [0, 3])
def test_a_policy_that_remembers_learns_from_draws_as_from_samples(burn_in):
    """The gradient of a drawn batch that has every sequence once is that of the fragment."""
    config = A2CConfig(
        env="CartPole-v1",
        seed=0,
        allow_off_policy=True,
        rollout_fragment_length=24,
        model={"use_lstm": True, "max_seq_len": 6, "burn_in": burn_in, "lstm_cell_size": 8},
    )
    worker = RolloutWorker("CartPole-v1", A2CTorchPolicy, config, fragment_length=24)
    policy, sampled = worker.policy, worker.sample()
    buffer = MultiAgentReplayBuffer(
        lambda _: ReplayBuffer(
            100, storage_unit="sequences", max_seq_len=6, burn_in=burn_in, seed=0
        ),
        replay_batch_size=1,
    )
    buffer.add(sampled)
    expected, _ = policy.compute_gradients(sampled)
    parts, weights, seen = [], [], set()
    while sum(weights) < sampled.count:
        drawn = buffer.sample()
        if int(drawn["batch_indexes"][0]) not in seen:
            seen.add(int(drawn["batch_indexes"][0]))
            gradient, _ = policy.compute_gradients(drawn)
            rows = int(drawn["loss_mask"].sum()) if burn_in else drawn.count
            parts.append(rows * gradient)
            weights.append(rows)
    assert buffer.ratio.drawn >= sampled.count
    np.testing.assert_allclose(sum(parts) / sum(weights), expected, atol=2e-6)


def test_what_has_no_such_units_is_refused():
    batch = fragment(Stream(1, [9]), 6)
    sequences = {"storage_unit": "sequences", "max_seq_len": 4}
    buffer = ReplayBuffer(40, **sequences)
    for odd, match in (
        (batch.without_columns("eps_id"), "column eps_id, which is missing"),
        (batch.with_columns(loss_mask=np.ones(6, bool)), "padding or burn-in"),
        (
            batch.with_columns(seq_lens=np.array([6]), state_in_0=np.zeros((1, 2))),
            "sequences of up to 6 rows.*max_seq_len=4",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            buffer.add(odd)
    buffer.add(batch)
    with pytest.raises(ValueError, match=r"a batch with \[\], those before had \['state_in_0'\]"):
        buffer.add(batch.without_columns("state_in_0"))
    with pytest.raises(ValueError, match="sequences of 44 rows do not fit a capacity of 40"):
        ReplayBuffer(40, storage_unit="sequences", max_seq_len=44).add(batch)
    for settings_, match in (
        ({"storage_unit": "rows"}, "storage_unit is one of timesteps, sequences, episodes"),
        ({"burn_in": 3}, "of sequences only"),
        ({**sequences, "burn_in": -1}, "burn_in is at least 0"),
        ({**sequences, "max_seq_len": 0}, "max_seq_len: a whole number"),
    ):
        with pytest.raises(ValueError, match=match):
            ReplayBuffer(40, **settings_)
    with pytest.raises(ValueError, match="give the buffer storage_unit"):
        ReplayBuffer(40).add(batch)
