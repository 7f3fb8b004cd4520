"""Sequences for recurrent models: rows chopped where a trajectory ends, padded with a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.data.sample_batch import SampleBatch

MASK = "loss_mask"


def sequence_lengths(
    max_seq_len: int, episode_ids: Any, unroll_ids: Any = None, agent_indices: Any = None
) -> np.ndarray:
    """Lengths [sequences], int32, of the sequences in rows one after another.

    A new one begins wherever the episode, the unroll or the agent is another than in the row
    before (each is compared by itself), and after `max_seq_len` rows.

    Raises:
        ValueError: max_seq_len is below 1, or the keys differ in length.

    >>> sequence_lengths(4, [1, 1, 1, 5, 5, 5, 5, 5]).tolist()
    [3, 4, 1]
    """
    if max_seq_len < 1:
        raise ValueError(f"max_seq_len must be at least 1, got {max_seq_len}")
    keys = [np.asarray(k) for k in (episode_ids, unroll_ids, agent_indices) if k is not None]
    if len({len(key) for key in keys}) > 1:
        raise ValueError(f"keys of different lengths: {[len(key) for key in keys]}")
    rows = len(keys[0])
    if not rows:
        return np.zeros(0, np.int32)
    new = np.zeros(rows, bool)
    new[0] = True
    for key in keys:
        new[1:] |= key[1:] != key[:-1]
    begins = np.flatnonzero(new)
    within = np.arange(rows) - np.repeat(begins, np.diff([*begins, rows]))
    starts = np.flatnonzero(within % max_seq_len == 0)
    return np.diff([*starts, rows]).astype(np.int32)


def chop_into_sequences(
    *,
    feature_columns: Sequence[Any],
    state_columns: Sequence[Any],
    max_seq_len: int,
    episode_ids: Any = None,
    unroll_ids: Any = None,
    agent_indices: Any = None,
    dynamic_max: bool = True,
    seq_lens: Any = None,
    states_already_reduced_to_init: bool = False,
    shuffle: bool = False,
    rng: np.random.Generator | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Chop rows into sequences of equal length, zeros at their ends.

    Args:
        feature_columns: arrays [rows, …].
        state_columns: arrays [rows, …], of which each sequence's first row is kept; or one row
            per sequence already, with `states_already_reduced_to_init`.
        max_seq_len: rows per sequence, at most.
        episode_ids, unroll_ids, agent_indices: [rows] each; see `sequence_lengths`.
        dynamic_max: pad to the longest sequence there is, not to `max_seq_len`.
        seq_lens: the lengths, if they are known.
        shuffle: sequences in random order, by `rng`.

    Returns:
        features, each [sequences * length, …]; initial states, each [sequences, …]; lengths
        [sequences], int32.

    Raises:
        ValueError: neither lengths nor episode ids; a sequence is longer than `max_seq_len`.
    """
    if seq_lens is None:
        if episode_ids is None:
            raise ValueError("chop_into_sequences needs seq_lens or episode_ids")
        seq_lens = sequence_lengths(max_seq_len, episode_ids, unroll_ids, agent_indices)
    lens = np.asarray(seq_lens, np.int32)
    length = int(lens.max()) if dynamic_max and len(lens) else max_seq_len
    if len(lens) and lens.max() > length:
        raise ValueError(f"a sequence of {lens.max()} rows does not fit max_seq_len={max_seq_len}")
    begins = np.cumsum(lens) - lens
    order = np.arange(len(lens))
    if shuffle:
        order = (rng if rng is not None else np.random.default_rng()).permutation(len(lens))
    place = np.empty(len(lens), np.int64)
    place[order] = np.arange(len(lens))
    target = np.repeat(place * length - begins, lens) + np.arange(int(lens.sum()))
    features = []
    for column in map(np.asarray, feature_columns):
        padded = np.zeros((len(lens) * length, *column.shape[1:]), column.dtype)
        padded[target] = column
        features.append(padded)
    at = slice(None) if states_already_reduced_to_init else begins
    states = [np.asarray(column)[at][order] for column in state_columns]
    return features, states, lens[order]


def pad_batch_to_sequences_of_same_size(
    batch: SampleBatch, max_seq_len: int | None = None
) -> SampleBatch:
    """The batch with its sequences padded by zeros to one length, and the column `loss_mask`.

    A batch that is padded already is given back. The mask, bool [rows], is True where a row is
    real: means in a loss are over those alone.

    Args:
        batch: with `seq_lens`, or with `eps_id` to chop it by.
        max_seq_len: the length; None for the longest sequence there is.

    Raises:
        ValueError: a sequence is longer than `max_seq_len`; the batch has neither column.
    """
    if batch.zero_padded:
        return batch
    if "seq_lens" not in batch:
        if "eps_id" not in batch:
            raise ValueError("a batch without seq_lens and eps_id cannot be chopped into sequences")
        keys = [batch.get(name) for name in ("eps_id", "unroll_id", "agent_index")]
        batch = batch.with_columns(seq_lens=sequence_lengths(max_seq_len or batch.count, *keys))
    lens = batch["seq_lens"]
    length = max_seq_len or (int(lens.max()) if len(lens) else 1)
    return batch.with_columns(**{MASK: np.ones(batch.count, bool)}).right_zero_pad(length)


def places_in_runs(begins: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places in runs that begin at `begins` [n], one run after another, and how far from its
    run's beginning each is.

    >>> [places.tolist() for places in places_in_runs(np.array([5, 0]), np.array([2, 3]))]
    [[5, 6, 0, 1, 2], [0, 1, 0, 1, 2]]
    """
    ends = np.cumsum(lengths)
    within = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
    return np.repeat(begins, lengths) + within, within


def burn_in_spans(
    batch: SampleBatch, max_seq_len: int, burn_in: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the sequences of a batch lie, each with the rows of its burn-in before it.

    Args:
        batch: rows with `eps_id`, and `unroll_id` and `agent_index` where there are several.
        max_seq_len: rows per sequence without its burn-in, at most.
        burn_in: rows before each, fewer where the trajectory's part of the fragment begins.

    Returns:
        first rows [sequences]; lengths; how many of those rows are burn-in. All int64.
    """
    keys = [batch.get(name) for name in ("eps_id", "unroll_id", "agent_index")]
    lens = sequence_lengths(max_seq_len, *keys).astype(np.int64)
    begins = np.cumsum(lens) - lens
    parts = sequence_lengths(max(batch.count, 1), *keys)
    part_begins = np.repeat(np.cumsum(parts) - parts, parts)[begins]
    heads = np.minimum(burn_in, begins - part_begins)
    return begins - heads, lens + heads, heads


def with_burn_in(batch: SampleBatch, max_seq_len: int, burn_in: int) -> SampleBatch:
    """The batch in sequences, each after the `burn_in` rows that lie before it.

    Args:
        batch: see `burn_in_spans`; columns `state_in_…` have a row for each row.
        max_seq_len, burn_in: see `burn_in_spans`.

    Returns:
        a batch with `seq_lens`, states as they were before each burn-in, and the column
        `loss_mask`, bool [rows], which is False for burn-in rows.

    Raises:
        ValueError: no column `eps_id`; the batch is in sequences already.
    """
    if "eps_id" not in batch or "seq_lens" in batch:
        raise ValueError(
            "burn-in needs the column eps_id, and states of every row (not of sequences): a batch "
            "as workers of a policy with burn_in sample it"
        )
    starts, total, heads = burn_in_spans(batch, max_seq_len, burn_in)
    index, within = places_in_runs(starts, total)
    states = {n: np.asarray(c)[starts] for n, c in batch.items() if n.startswith("state_in_")}
    rows = batch.without_columns(*states).take_rows(index)
    mask = within >= np.repeat(heads, total)
    return rows.with_columns(**states, seq_lens=total.astype(np.int32), **{MASK: mask})


def add_time_dimension(padded: Any, max_seq_len: int, time_major: bool = False) -> Any:
    """Rows [sequences * length, …] as [sequences, length, …], or [length, sequences, …]."""
    array = padded.reshape(-1, max_seq_len, *padded.shape[1:])
    return array.swapaxes(0, 1) if time_major else array
