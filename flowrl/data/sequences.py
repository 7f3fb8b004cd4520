"""Sequences for recurrent models: rows cut at trajectory ends, padded, and masked."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flowrl.data.columns import expand_runs, map_leaves
from flowrl.data.sample_batch import Batch, SampleBatch

LOSS_MASK = "loss_mask"
TRAJECTORY_KEYS = ("eps_id", "unroll_id", "agent_index", "t")  # arguments of sequence_lengths


def sequence_lengths(
    max_seq_len: int,
    episode_ids: Any,
    unroll_ids: Any = None,
    agent_indices: Any = None,
    steps: Any = None,
) -> np.ndarray:
    """Return the lengths [sequences], int32, of the sequences in consecutive rows.

    A sequence begins where the episode, the unroll or the agent differs from the row before, where
    the step is not later than that of the row before, and after `max_seq_len` rows.

    Raises:
        ValueError: max_seq_len is below 1, or the ids differ in length.

    >>> sequence_lengths(4, [1, 1, 1, 5, 5, 5, 5, 5]).tolist()
    [3, 4, 1]
    """
    if max_seq_len < 1:
        raise ValueError(f"max_seq_len must be at least 1, got {max_seq_len}")
    keys = [np.asarray(k) for k in (episode_ids, unroll_ids, agent_indices) if k is not None]
    if steps is not None:
        steps = np.asarray(steps)
        restarts = np.zeros(len(steps), np.int64)
        restarts[1:] = np.cumsum(steps[1:] <= steps[:-1])
        keys.append(restarts)
    if len({len(key) for key in keys}) > 1:
        raise ValueError(f"ids of different lengths: {[len(key) for key in keys]}")
    rows = len(keys[0])
    if not rows:
        return np.zeros(0, np.int32)
    changed = np.zeros(rows, bool)
    changed[0] = True
    for key in keys:
        changed[1:] |= key[1:] != key[:-1]
    trajectory_starts = np.flatnonzero(changed)
    offsets = np.arange(rows) - np.repeat(trajectory_starts, np.diff([*trajectory_starts, rows]))
    starts = np.flatnonzero(offsets % max_seq_len == 0)
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
    """Chop rows into sequences and pad them with zeros at their ends to equal length.

    Args:
        feature_columns: arrays [rows, …].
        state_columns: arrays [rows, …], of which each sequence's first row is kept; with
            `states_already_reduced_to_init`, arrays [sequences, …].
        max_seq_len: maximum number of rows per sequence.
        episode_ids, unroll_ids, agent_indices: [rows] each; see `sequence_lengths`.
        dynamic_max: pad to the longest sequence instead of `max_seq_len`.
        seq_lens: lengths [sequences]; None derives them from the ids.
        states_already_reduced_to_init: see `state_columns`.
        shuffle: return the sequences in random order.
        rng: generator of that order; None uses an unseeded one.

    Returns:
        features, each [sequences * length, …]; initial states, each [sequences, …]; lengths
        [sequences], int32.

    Raises:
        ValueError: neither seq_lens nor episode_ids is given, or a sequence is longer than
            `max_seq_len`.
    """
    if seq_lens is None:
        if episode_ids is None:
            raise ValueError("chop_into_sequences needs seq_lens or episode_ids")
        seq_lens = sequence_lengths(max_seq_len, episode_ids, unroll_ids, agent_indices)
    lens = np.asarray(seq_lens, np.int32)
    if len(lens) and lens.max() > max_seq_len:
        raise ValueError(f"a sequence of {lens.max()} rows does not fit max_seq_len={max_seq_len}")
    length = int(lens.max()) if dynamic_max and len(lens) else max_seq_len
    starts = np.cumsum(lens) - lens
    order = np.arange(len(lens))
    if shuffle:
        order = (rng if rng is not None else np.random.default_rng()).permutation(len(lens))
    position = np.empty(len(lens), np.int64)
    position[order] = np.arange(len(lens))
    target, _ = expand_runs(position * length, lens)
    features = []
    for column in map(np.asarray, feature_columns):
        padded = np.zeros((len(lens) * length, *column.shape[1:]), column.dtype)
        padded[target] = column
        features.append(padded)
    initial = slice(None) if states_already_reduced_to_init else starts
    states = [np.asarray(column)[initial][order] for column in state_columns]
    return features, states, lens[order]


def pad_batch_to_sequences_of_same_size(
    batch: SampleBatch, max_seq_len: int | None = None
) -> SampleBatch:
    """Pad the sequences of a batch with zeros to equal length and add the column `loss_mask`.

    A batch that is already padded is returned unchanged. The mask, bool [rows], is False for
    padding and, if the batch has a `loss_mask`, where that is False (burn-in rows). A loss averages
    over the other rows.

    Args:
        batch: batch with `seq_lens`, or with `eps_id` to chop it by; then columns `state_in_…` have
            a state for each row, of which each sequence's first one is kept.
        max_seq_len: length of the padded sequences; None for that of the longest sequence.

    Raises:
        ValueError: a sequence is longer than `max_seq_len`, or the batch has neither column.
    """
    if batch.zero_padded:
        return batch
    if "seq_lens" not in batch:
        if "eps_id" not in batch:
            raise ValueError("a batch without seq_lens and eps_id cannot be chopped into sequences")
        keys = map(batch.get, TRAJECTORY_KEYS)
        length = max_seq_len or max(batch.count, 1)
        lens = sequence_lengths(length, *keys)
        starts = np.cumsum(lens) - lens
        states = {n: c for n, c in batch.items() if n.startswith("state_in_")}
        states = {n: map_leaves(operator.itemgetter(starts), c) for n, c in states.items()}
        batch = batch.with_columns(**states, seq_lens=lens)
    lens = batch["seq_lens"]
    length = max_seq_len or (int(lens.max()) if len(lens) else 1)
    if LOSS_MASK not in batch:
        batch = batch.with_columns(**{LOSS_MASK: np.ones(batch.count, bool)})
    return batch.right_zero_pad(length)


def without_padding(batch: SampleBatch) -> SampleBatch:
    """Return the batch without the zero padding of its sequences."""
    if not batch.zero_padded:
        return batch
    lens = batch["seq_lens"]
    real = (np.arange(batch.max_seq_len or 0) < lens[:, None]).reshape(-1)
    return _select(batch, real, np.arange(len(lens)), lens)


def without_masked_rows(batch: SampleBatch) -> tuple[SampleBatch, SampleBatch | None]:
    """Split a batch by its `loss_mask`.

    Returns:
        the rows to learn from, with the lengths of their sequences; and the burn-in rows, which
        precede the first row to learn from in each sequence (a sequence may have none), or None
        if there are no burn-in rows. Padding is in neither. `state_in_…` of both are the states
        before the burn-in.

    Raises:
        KeyError: no column `loss_mask`.
    """
    mask = np.asarray(batch[LOSS_MASK]).astype(bool)
    if "seq_lens" not in batch:
        return batch.map_rows(lambda leaf: leaf[mask]).without_columns(LOSS_MASK), None
    lens = batch["seq_lens"]
    width = np.full(len(lens), batch.max_seq_len) if batch.zero_padded else lens
    sequence = np.repeat(np.arange(len(lens)), width)
    loss_lens = np.bincount(sequence[mask], minlength=len(lens))
    seen = np.concatenate([[0], np.cumsum(mask)])
    seen_in_sequence = seen[:-1] - np.repeat(seen[np.cumsum(width) - width], width)
    burn_in = ~mask & (seen_in_sequence == 0) & (loss_lens > 0)[sequence]
    kept = np.flatnonzero(loss_lens > 0)
    rows = _select(batch, mask, kept, loss_lens[kept]).without_columns(LOSS_MASK)
    if not burn_in.any():
        return rows, None
    burn_in_lens = np.bincount(sequence[burn_in], minlength=len(lens))[kept]
    return rows, _select(batch, burn_in, kept, burn_in_lens).without_columns(LOSS_MASK)


def _select(
    batch: SampleBatch, rows: np.ndarray, sequences: np.ndarray, lens: np.ndarray
) -> SampleBatch:
    """Return these rows and sequences, with new sequence lengths and without padding."""
    selected = batch.map_rows(lambda leaf: leaf[rows], sequences)
    selected.zero_padded, selected.max_seq_len = False, None
    columns = dict(selected.stored()) | {"seq_lens": np.asarray(lens).astype(np.int32)}
    return SampleBatch.unchecked(columns, like=selected)


def sequence_minibatches(
    batch: SampleBatch, size: int, rng: np.random.Generator | None = None, shuffle: bool = True
) -> Iterator[SampleBatch]:
    """Iterate over minibatches of whole sequences. Each has a row to learn from.

    Args:
        batch: batch with `seq_lens`.
        size: minimum number of rows to learn from in a minibatch (rows whose `loss_mask` is not
            False); the last minibatch may have fewer.
        rng: generator of the order; None uses an unseeded one.
        shuffle: take the sequences in random order.

    Raises:
        ValueError: the batch is zero-padded.
    """
    if batch.zero_padded:
        raise ValueError(
            "a zero-padded batch has no minibatches: call "
            "flowrl.data.sequences.without_padding() first"
        )
    rng = rng if rng is not None else np.random.default_rng()
    lens, loss_rows = batch["seq_lens"], loss_rows_of_sequences(batch)
    chosen: list[int] = []
    rows = 0
    order = rng.permutation(len(lens)).tolist() if shuffle else list(range(len(lens)))
    for number, sequence in enumerate(order, 1):
        chosen.append(sequence)
        rows += int(loss_rows[sequence])
        if rows >= size or (rows and number == len(order)):
            yield take_sequences(batch, np.array(chosen))
            chosen, rows = [], 0


def count_loss_rows(batch: Batch) -> int:
    """Return the number of rows to learn from, of all policies: those whose `loss_mask` is not
    False."""
    return sum(
        int(np.count_nonzero(rows[LOSS_MASK])) if LOSS_MASK in rows else rows.count
        for rows in batch.policy_batches.values()
    )


def loss_rows_of_sequences(batch: SampleBatch) -> np.ndarray:
    """Return the number of rows to learn from in each sequence, [sequences]: those whose
    `loss_mask` is not False."""
    lens: np.ndarray = batch["seq_lens"]
    if LOSS_MASK not in batch:
        return lens
    before = np.concatenate([[0], np.cumsum(batch[LOSS_MASK])])
    ends = np.cumsum(lens)
    loss_rows: np.ndarray = before[ends] - before[ends - lens]
    return loss_rows


def take_sequences(batch: SampleBatch, index: np.ndarray) -> SampleBatch:
    """Return copies of the sequences with these numbers [n], in that order."""
    lens = batch["seq_lens"]
    starts = np.cumsum(lens) - lens
    rows, _ = expand_runs(starts[index], lens[index])
    return batch.map_rows(operator.itemgetter(rows), index)


def burn_in_spans(
    batch: SampleBatch, max_seq_len: int, burn_in: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where the sequences of a batch lie, each including its preceding burn-in rows.

    Args:
        batch: rows with `eps_id`, and with `unroll_id` and `agent_index` if it contains several.
        max_seq_len: maximum number of rows per sequence, without burn-in.
        burn_in: burn-in rows per sequence; fewer near the start of a trajectory in the fragment.

    Returns:
        first rows, lengths, and numbers of burn-in rows; [sequences] each, int64.
    """
    keys = [batch.get(name) for name in TRAJECTORY_KEYS]
    lens = sequence_lengths(max_seq_len, *keys).astype(np.int64)
    starts = np.cumsum(lens) - lens
    trajectory_lens = sequence_lengths(max(batch.count, 1), *keys)
    trajectory_starts = np.cumsum(trajectory_lens) - trajectory_lens
    available = starts - np.repeat(trajectory_starts, trajectory_lens)[starts]
    burn_in_lens = np.minimum(burn_in, available)
    return starts - burn_in_lens, lens + burn_in_lens, burn_in_lens


def with_burn_in(batch: SampleBatch, max_seq_len: int, burn_in: int) -> SampleBatch:
    """Chop a batch into sequences, each preceded by its burn-in rows.

    Args:
        batch: see `burn_in_spans`; columns `state_in_…` have one state per row.
        max_seq_len, burn_in: see `burn_in_spans`.

    Returns:
        a batch with `seq_lens`, the states before each burn-in, and the column `loss_mask`, bool
        [rows], which is False for burn-in rows.

    Raises:
        ValueError: the batch has no column `eps_id`, or consists of sequences already.
    """
    if "eps_id" not in batch or "seq_lens" in batch:
        raise ValueError(
            "burn-in needs the column eps_id and a state for each row instead of each sequence, as "
            "in a batch that workers sample for a policy with burn_in"
        )
    starts, lengths, burn_in_lens = burn_in_spans(batch, max_seq_len, burn_in)
    index, offsets = expand_runs(starts, lengths)
    states = {n: np.asarray(c)[starts] for n, c in batch.items() if n.startswith("state_in_")}
    rows = batch.without_columns(*states).take_rows(index)
    mask = offsets >= np.repeat(burn_in_lens, lengths)
    return rows.with_columns(**states, seq_lens=lengths.astype(np.int32), **{LOSS_MASK: mask})


def add_time_dimension(padded: Any, max_seq_len: int, time_major: bool = False) -> Any:
    """Reshape rows [sequences * length, …] to [sequences, length, …] or [length, sequences, …]."""
    array = padded.reshape(-1, max_seq_len, *padded.shape[1:])
    return array.swapaxes(0, 1) if time_major else array
