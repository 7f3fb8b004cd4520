"""Sequences: boundaries, padding and masks."""

import functools
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data import (
    SampleBatch,
    add_time_dimension,
    chop_into_sequences,
    pad_batch_to_sequences_of_same_size,
)
from flowrl.data.sequences import (
    sequence_lengths,
    sequence_minibatches,
    with_burn_in,
    without_padding,
)


def test_chop_into_sequences_example_of_rllib():
    features, states, lens = chop_into_sequences(
        feature_columns=[[101, 102, 103, 201, 202, 203, 204, 205]],
        state_columns=[[209, 208, 207, 109, 108, 107, 106, 105]],
        max_seq_len=4,
        episode_ids=[1, 1, 1, 5, 5, 5, 5, 5],
        agent_indices=[0] * 8,
    )
    assert lens.tolist() == [3, 4, 1]
    assert features[0].tolist() == [101, 102, 103, 0, 201, 202, 203, 204, 205, 0, 0, 0]
    assert states[0].tolist() == [209, 109, 105]


@pytest.mark.parametrize(
    ("keys", "lens"),
    [
        (([1] * 8, [1, 1, 2, 2, 3, 3, 4, 4], [1, 1, 2, 3, 4, 4, 5, 5]), [2, 1, 1, 2, 2]),
        (([1] * 8, None, [1, 1, 2, 1, 1, 2, 2, 3]), [2, 1, 2, 2, 1]),
        # the sum of the ids is the same in both rows
        (([5, 6], None, [1, 0]), [1, 1]),
        (([], None, None), []),
    ],
)
def test_each_id_is_compared_separately(keys, lens):
    assert sequence_lengths(4, *keys).tolist() == lens


def test_dynamic_max_pads_to_the_longest_sequence():
    def padded(dynamic):
        return chop_into_sequences(
            feature_columns=[[1, 2, 3]],
            state_columns=[],
            max_seq_len=4,
            episode_ids=[5, 2, 2],
            dynamic_max=dynamic,
        )[0][0].tolist()

    assert padded(True) == [1, 0, 2, 3]
    assert padded(False) == [1, 0, 0, 0, 2, 3, 0, 0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 5), st.booleans())
@settings(max_examples=60)
def test_padded_sequences_contain_all_rows(episodes, max_seq_len, shuffle):
    rows = np.arange(len(episodes))
    (features,), (states,), lens = chop_into_sequences(
        feature_columns=[rows],
        state_columns=[rows * 10],
        max_seq_len=max_seq_len,
        episode_ids=episodes,
        shuffle=shuffle,
        rng=np.random.default_rng(1),
    )
    sequences = add_time_dimension(features, int(lens.max()))
    unpadded = [sequence[:n].tolist() for sequence, n in zip(sequences, lens, strict=True)]
    assert sorted(functools.reduce(operator.iadd, unpadded, [])) == rows.tolist()
    for sequence, state in zip(unpadded, states, strict=True):
        assert sequence == list(range(sequence[0], sequence[0] + len(sequence)))
        assert state == 10 * sequence[0]
        assert len({episodes[i] for i in sequence}) == 1
        assert len(sequence) <= max_seq_len


def test_padded_batch_has_a_loss_mask():
    batch = SampleBatch(
        obs=np.arange(1, 6),
        seq_lens=np.array([2, 3], np.int32),
        state_in_0=np.array([[1.0], [2.0]]),
        infos=[{}] * 5,
    )
    padded = pad_batch_to_sequences_of_same_size(batch.without_columns("infos"), 4)
    assert padded["obs"].tolist() == [1, 2, 0, 0, 3, 4, 5, 0]
    assert padded["loss_mask"].tolist() == [True, True, False, False, True, True, True, False]
    assert padded["state_in_0"].tolist() == [[1.0], [2.0]]
    assert padded.count == 5
    assert pad_batch_to_sequences_of_same_size(padded) is padded
    assert pad_batch_to_sequences_of_same_size(batch)["obs"].tolist() == [1, 2, 0, 3, 4, 5]
    chopped = pad_batch_to_sequences_of_same_size(SampleBatch(obs=[1, 2, 3], eps_id=[1, 2, 2]))
    assert chopped["obs"].tolist() == [1, 0, 2, 3]
    assert "loss_mask" not in batch


def test_padding_keeps_the_mask_of_burn_in_rows():
    batch = with_burn_in(SampleBatch(obs=np.arange(5), eps_id=np.zeros(5, int)), 3, 2)
    assert batch["seq_lens"].tolist() == [3, 4]
    assert batch["loss_mask"].tolist() == [True] * 3 + [False] * 2 + [True] * 2
    padded = pad_batch_to_sequences_of_same_size(batch)
    assert padded["loss_mask"].tolist() == [True] * 3 + [False] * 3 + [True] * 2


def test_empty_batch_is_padded_to_no_sequences():
    empty = SampleBatch(obs=np.zeros((0, 2)), eps_id=np.zeros(0, int))
    for max_seq_len in (None, 4):
        padded = pad_batch_to_sequences_of_same_size(empty, max_seq_len)
        assert padded.count == 0
        assert padded["seq_lens"].tolist() == padded["loss_mask"].tolist() == []
        assert padded["obs"].shape == (0, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sequence_lengths(0, [1]), "max_seq_len"),
        (lambda: sequence_lengths(2, [1], [1, 2]), "ids of different lengths"),
        (lambda: pad_batch_to_sequences_of_same_size(SampleBatch(obs=[1])), "cannot be chopped"),
        (
            lambda: pad_batch_to_sequences_of_same_size(SampleBatch(obs=[1, 2], seq_lens=[2]), 1),
            "does not fit",
        ),
        (
            lambda: chop_into_sequences(feature_columns=[], state_columns=[], max_seq_len=2),
            "episode_ids",
        ),
    ],
)
def test_invalid_sequences_are_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 12))
@settings(max_examples=60)
def test_minibatches_contain_whole_sequences(lens, size):
    rows = np.arange(sum(lens))
    starts = np.cumsum(lens) - lens
    batch = SampleBatch(x=rows, seq_lens=np.array(lens, np.int32), state_in_0=starts)
    parts = list(sequence_minibatches(batch, size, np.random.default_rng(2)))
    assert sorted(np.concatenate([part["x"] for part in parts]).tolist()) == rows.tolist()
    for part in parts:
        first_rows = np.cumsum(part["seq_lens"]) - part["seq_lens"]
        assert part["x"][first_rows].tolist() == part["state_in_0"].tolist()
    assert all(part.count >= size for part in parts[:-1])
    assert all(part.count < size + 5 for part in parts)


def test_sequences_longer_than_the_limit_are_rejected_although_the_padding_is_dynamic():
    with pytest.raises(ValueError, match="6 rows does not fit max_seq_len=4"):
        chop_into_sequences(
            feature_columns=[np.zeros(6)], state_columns=[], max_seq_len=4, seq_lens=[6]
        )


def test_a_batch_whose_padding_was_removed_joins_others():
    columns = {"obs": np.arange(3.0), "seq_lens": np.array([2, 1], np.int32)}
    padded = pad_batch_to_sequences_of_same_size(SampleBatch(columns), 4)
    rows = without_padding(padded)
    assert rows.max_seq_len is None
    assert SampleBatch.concat_samples([rows, SampleBatch(columns)]).count == 6
