"""Draws of sequences and episodes against the trajectories that they are cut from."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.a2c import A2CConfig, A2CTorchPolicy
from flowrl.data import SampleBatch
from flowrl.replay import MultiAgentReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from flowrl.sampling import RolloutWorker
from tests.replay.streams import FragmentStream


def fragment(stream, steps, kind="indexed"):
    """Return rows whose recurrent state is [episode, step], like the observation."""
    batch = stream.fragment(steps, kind)
    return batch.with_columns(state_in_0=batch["obs"].copy())


def cut(batch, max_seq_len, burn_in):
    """Cut a batch into sequences; return their rows (episode, step) and numbers of burn-in rows."""
    rows = [tuple(row) for row in batch["obs"].astype(int).tolist()]
    sequences = []
    for _, part in itertools.groupby(rows, key=lambda row: row[0]):
        trajectory = list(part)
        for start in range(0, len(trajectory), max_seq_len):
            head = min(burn_in, start)
            sequences.append((tuple(trajectory[start - head : start + max_seq_len]), head))
    return sequences


def drawn_from(buffer, count):
    """Return the sequences of a draw like `cut`; check that each has the state of its first row."""
    batch = buffer.sample(count)
    rows = [tuple(row) for row in batch["obs"].astype(int).tolist()]
    mask = batch["loss_mask"] if "loss_mask" in batch else np.ones(batch.count, bool)
    sequences, start = [], 0
    for length, state in zip(batch["seq_lens"], batch["state_in_0"].astype(int), strict=True):
        sequence, loss_mask = rows[start : start + length], mask[start : start + length]
        assert tuple(state) == sequence[0]
        head = int(length - loss_mask.sum())
        assert not loss_mask[:head].any()
        sequences.append((tuple(sequence), head))
        start += length
    assert start == batch.count
    return sequences


@settings(max_examples=50)
@given(
    envs=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 9), min_size=4, max_size=12),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    max_seq_len=st.integers(1, 5),
    burn_in=st.integers(0, 4),
    capacity=st.integers(28, 60),
    kind=st.sampled_from(["indexed", "plain"]),
    prioritized=st.booleans(),
)
def test_complete_sequences_are_drawn(
    envs, lengths, steps, max_seq_len, burn_in, capacity, kind, prioritized
):
    make = PrioritizedReplayBuffer if prioritized else ReplayBuffer
    arguments = {"storage_unit": "sequences", "max_seq_len": max_seq_len, "burn_in": burn_in}
    buffer, stream, stored = make(capacity, seed=0, **arguments), FragmentStream(envs, lengths), []
    for count in steps:
        batch = fragment(stream, count, kind)
        buffer.add(batch)
        stored += cut(batch, max_seq_len, burn_in)
        present = {(episode, step) for episode, step, *_ in stream.rows[-capacity:]}
        complete = {(rows, head) for rows, head in stored if set(rows) <= present}
        drawn = set(drawn_from(buffer, 40))
        assert drawn <= complete
        if len(complete) < 4:
            assert drawn == complete
        loss_rows = [len(rows) - head for rows, head in complete]
        assert buffer.rows_per_item() == pytest.approx(np.mean(loss_rows))


def test_scattered_rows_are_sorted():
    """Concatenated fragments of several environments interleave their trajectories."""
    stream = FragmentStream(2, [9, 9])
    parts = fragment(stream, 3), fragment(stream, 3)
    buffer = ReplayBuffer(40, storage_unit="sequences", max_seq_len=3, seed=0)
    buffer.add(SampleBatch.concat_samples(parts))
    expected = {rows for part in parts for rows, _ in cut(part, 3, 0)}
    assert {rows for rows, _ in drawn_from(buffer, 60)} == expected


def test_complete_episodes_are_drawn():
    stream = FragmentStream(1, [3, 5, 2, 4, 6])
    buffer = ReplayBuffer(12, storage_unit="episodes", seed=0)
    for length in (3, 5, 2, 4):
        buffer.add(stream.fragment(length))
    batch = buffer.sample(50)
    assert set(batch["seq_lens"].tolist()) == {5, 2, 4}  # the first is partly overwritten
    assert set(batch["obs"][:, 0].astype(int)) == {1, 2, 3}
    assert batch["terminateds"][np.cumsum(batch["seq_lens"]) - 1].all()
    with pytest.raises(ValueError, match=r"part of an episode.*complete_episodes"):
        buffer.add(stream.fragment(2))
    assert len(buffer) == 12
    tail = FragmentStream(1, [5])
    tail.fragment(2)
    with pytest.raises(ValueError, match="part of an episode"):
        buffer.add(tail.fragment(3))  # contains the end of the episode, not its start
    small = ReplayBuffer(4, storage_unit="episodes")
    with pytest.raises(ValueError, match="episodes of 5 rows do not fit a capacity of 4"):
        small.add(FragmentStream(1, [5]).fragment(5))


def test_n_steps_reach_beyond_the_sequence_but_not_beyond_the_trajectory():
    stream = FragmentStream(1, [8])
    buffer = ReplayBuffer(20, storage_unit="sequences", max_seq_len=4, n_step=3, gamma=0.5, seed=0)
    buffer.add(fragment(stream, 8))
    batch = buffer.sample(30)
    steps = batch["obs"][:, 1].astype(int)
    assert set(steps) == set(range(8))
    assert (batch["n_steps"] == np.minimum(3, 8 - steps)).all()
    rewards = np.arange(8) / 8
    expected = [sum(0.5**k * rewards[s + k] for k in range(min(3, 8 - s))) for s in steps]
    np.testing.assert_allclose(batch["rewards"], expected, rtol=1e-6)


def test_sequence_priority_is_max_and_mean_of_its_rows():
    """0.9 of the maximum error and 0.1 of the mean."""
    stream = FragmentStream(1, [100])
    buffer = PrioritizedReplayBuffer(
        40, storage_unit="sequences", max_seq_len=4, alpha=1.0, beta=1.0, eps=0.0, seed=0
    )
    buffer.add(fragment(stream, 12))
    errors = np.array([0, 0, 0, 4, 1, 1, 1, 1, 2, 0, 0, 2], np.float32)
    buffer.update_priorities(np.repeat([0, 1, 2], 4), errors)
    priorities = np.array([0.9 * 4 + 0.1, 1.0, 0.9 * 2 + 0.1])
    batch = buffer.sample(3000)
    items = batch["batch_indexes"][::4]
    assert (batch["obs"][::4, 1] == 4 * items).all()
    shares = np.bincount(items, minlength=3) / 3000
    np.testing.assert_allclose(shares, priorities / priorities.sum(), atol=1e-3)
    weights = {int(i): float(w) for i, w in zip(items, batch["weights"][::4], strict=True)}
    assert weights == pytest.approx({i: 1 / p for i, p in enumerate(priorities)}, rel=1e-5)
    with pytest.raises(ValueError, match=r"which has stored 3 sequences"):
        buffer.update_priorities(np.array([3]), np.array([1.0]))


@pytest.mark.parametrize("unit", ["sequences", "episodes"])
def test_restored_buffer_draws_identically(unit):
    buffers = [
        PrioritizedReplayBuffer(30, storage_unit=unit, max_seq_len=3, seed=seed) for seed in (0, 1)
    ]
    stream = FragmentStream(1, [3, 4, 5] * 9)
    for length in [3, 4, 5] * 4:
        buffers[0].add(fragment(stream, length))
    buffers[0].update_priorities(buffers[0].sample(2)["batch_indexes"][:1], np.array([3.0]))
    buffers[1].load_state_dict(buffers[0].state_dict())
    next_fragment = fragment(stream, 3)
    for buffer in buffers:
        buffer.add(next_fragment)
    drawn, restored_drawn = (buffer.sample(20) for buffer in buffers)
    assert drawn.keys() == restored_drawn.keys()
    for name in drawn:
        np.testing.assert_array_equal(drawn[name], restored_drawn[name])
    state = buffers[0].state_dict()
    for other, match in (
        (ReplayBuffer(30, storage_unit=unit, max_seq_len=3), "kind='PrioritizedReplayBuffer'"),
        (PrioritizedReplayBuffer(30), f"storage_unit='{unit}', this buffer has"),
        (
            PrioritizedReplayBuffer(30, storage_unit=unit, max_seq_len=4),
            "max_seq_len=3, this buffer has",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            other.load_state_dict(state)
        assert len(other) == 0
    with pytest.raises(ValueError, match="storage_unit='timesteps'"):
        buffers[0].load_state_dict(PrioritizedReplayBuffer(30).state_dict())


@pytest.mark.parametrize("burn_in", [0, 3])
def test_recurrent_policy_learns_from_draws_as_from_fragments(burn_in):
    """The gradient of all sequences, each drawn once, is the gradient of the fragment."""
    config = A2CConfig(
        env="CartPole-v1",
        seed=0,
        allow_off_policy=True,
        rollout_fragment_length=24,
        model={"use_lstm": True, "max_seq_len": 6, "burn_in": burn_in, "lstm_cell_size": 8},
    )
    worker = RolloutWorker("CartPole-v1", A2CTorchPolicy, config)
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


@pytest.mark.parametrize("order", ["by episode", "by step"])
def test_episodes_with_lost_lives_and_interleaved_rows_are_stored(order):
    batch = FragmentStream(2, [4, 4]).fragment(4, "plain")
    if order == "by step":
        batch = batch.take_rows(np.argsort(batch["t"], kind="stable"))
    flags = batch["terminateds"] | (batch["t"] == 1)
    buffer = ReplayBuffer(20, storage_unit="episodes", seed=0)
    buffer.add(batch.with_columns(terminateds=flags))
    drawn = buffer.sample(20)
    assert set(drawn["seq_lens"].tolist()) == {4}
    assert drawn["t"].tolist() == [0, 1, 2, 3] * 20
    assert (drawn["eps_id"].reshape(20, 4) == drawn["eps_id"][::4, None]).all()


def test_sequences_do_not_continue_in_a_copy_of_their_episode():
    batch = FragmentStream(1, [6]).fragment(6, "plain")
    copy = batch.with_columns(rewards=batch["rewards"] + 100)
    buffer = ReplayBuffer(40, storage_unit="sequences", max_seq_len=4, burn_in=2, seed=0)
    buffer.add(SampleBatch.concat_samples([batch, copy]))
    drawn = buffer.sample(50)
    ends = np.cumsum(drawn["seq_lens"])
    sequences = np.split(drawn["rewards"] >= 100, ends[:-1])
    assert {bool(rows.any()) for rows in sequences} == {False, True}
    assert all(rows.all() or not rows.any() for rows in sequences)


def test_invalid_sequences_are_rejected():
    batch = fragment(FragmentStream(1, [9]), 6)
    sequences = {"storage_unit": "sequences", "max_seq_len": 4}
    buffer = ReplayBuffer(40, **sequences)
    for invalid, match in (
        (batch.without_columns("eps_id"), "column eps_id, which is missing"),
        (batch.with_columns(loss_mask=np.ones(6, bool)), "padding or burn-in"),
        (
            batch.with_columns(seq_lens=np.array([6]), state_in_0=np.zeros((1, 2))),
            "sequences of up to 6 rows.*max_seq_len=4",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            buffer.add(invalid)
    buffer.add(batch)
    with pytest.raises(
        ValueError, match=r"a batch with states \[\], earlier batches had \['state_in_0'\]"
    ):
        buffer.add(batch.without_columns("state_in_0"))
    with pytest.raises(ValueError, match="sequences of 44 rows do not fit a capacity of 40"):
        ReplayBuffer(40, storage_unit="sequences", max_seq_len=44).add(batch)
    for arguments, match in (
        ({"storage_unit": "rows"}, "storage_unit must be one of timesteps, sequences, episodes"),
        ({"burn_in": 3}, 'burn_in above 0 needs storage_unit="sequences", got burn_in=3'),
        ({**sequences, "burn_in": -1}, "burn_in must be an int"),
        ({**sequences, "burn_in": 2.5}, "burn_in must be an int"),
        ({**sequences, "max_seq_len": 0}, "max_seq_len must be an int"),
    ):
        with pytest.raises(ValueError, match=match):
            ReplayBuffer(40, **arguments)
    with pytest.raises(ValueError, match="ReplayBuffer with storage_unit"):
        ReplayBuffer(40).add(batch)


@pytest.mark.parametrize("loads", [False, True])
def test_states_belong_to_their_sequences_and_take_room_for_stored_ones_only(loads):
    def new_buffer():
        return ReplayBuffer(200, storage_unit="sequences", max_seq_len=4, seed=0)

    buffer, stream = new_buffer(), FragmentStream(1, [7] * 1000)
    for number in range(150):
        batch = stream.fragment(10)
        # the state of a row is its episode and step
        batch["state_in_0"] = np.stack([batch["eps_id"], batch["t"]], 1).astype(np.float32)
        batch["state_in_1"] = np.zeros((10, 2000), np.float32)
        buffer.add(batch)
        assert sum(waiting["state_in_1"].nbytes for waiting in buffer._pending) < 5e6
        if loads and number in (3, 40):
            other = new_buffer()
            other.load_state_dict(buffer.state_dict())
            buffer = other
        drawn = buffer.sample(20)
        first = np.cumsum(drawn["seq_lens"]) - drawn["seq_lens"]
        np.testing.assert_array_equal(
            drawn["state_in_0"], np.stack([drawn["eps_id"][first], drawn["t"][first]], 1)
        )
    assert len(buffer._sequences.states["state_in_0"]) < 3 * len(buffer)


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        (
            {"t": [2, 3, 0, 1, 2, 3], "unroll_id": [0, 0, 1, 1, 1, 1]},
            "several rows of the same step of an episode",
        ),
        ({"seq_lens": [4, 2, 0]}, r"at least 1 and add up to 6 rows, got \[4 2 0\]"),
        ({"seq_lens": [2, 2]}, r"at least 1 and add up to 6 rows, got \[2 2\]"),
    ],
)
def test_sequences_that_cannot_be_stored_whole_are_rejected(columns, match):
    batch = SampleBatch(
        obs=np.arange(6.0), new_obs=np.arange(1.0, 7.0), eps_id=np.zeros(6, int), t=np.arange(6)
    )
    batch = batch.with_columns(**{name: np.array(column) for name, column in columns.items()})
    buffer = ReplayBuffer(20, storage_unit="sequences", max_seq_len=4)
    with pytest.raises(ValueError, match=match):
        buffer.add(batch)
    assert buffer.num_added == 0


@pytest.mark.parametrize(
    "change",
    [
        {"first_rows": np.array([50])},
        {"first_rows": np.array([-3])},
        {"first_rows": np.array([0.0])},
        {"burn_ins": np.array([7])},
        {"lengths": np.array([-5])},
        {"lengths": np.array([0])},
        {"lengths": np.array([2, 2])},
        {"states": {"state_in_0": np.zeros((2, 1), np.float32)}},
    ],
)
def test_state_of_sequences_that_do_not_fit_the_rows_is_refused(change):
    buffer = ReplayBuffer(20, storage_unit="sequences", max_seq_len=4)
    buffer.add(fragment(FragmentStream(1, [9]), 3))
    state = buffer.state_dict()
    state["sequences"] |= change
    with pytest.raises(ValueError, match=r"are not . sequences of 3 rows"):
        ReplayBuffer(20, storage_unit="sequences", max_seq_len=4).load_state_dict(state)
