"""SampleBatch: named columns of numpy arrays with one leading dimension, the rows.

What flows from sampling to learning. Operators share batches between branches, so a batch is not
changed in place: `with_columns()` gives a new one that shares the untouched columns.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import optree

from flowrl.data.indexed_columns import IndexedColumn

log = logging.getLogger("flowrl")

_warned_of: set[str] = set()  # columns, each once

DEFAULT_POLICY_ID = "default_policy"

_ALIASES = {"next_obs": "new_obs"}
_PER_SEQUENCE = ("seq_lens", "state_in_")


def _leaves(column: Any) -> list[np.ndarray]:
    return [column] if isinstance(column, np.ndarray) else optree.tree_leaves(column)


def _map(fn: Callable[[Any], Any], column: Any) -> Any:
    return fn(column) if isinstance(column, np.ndarray) else optree.tree_map(fn, column)


def _read_only(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf.clone() if hasattr(leaf, "clone") else leaf
    view = leaf.view()
    view.flags.writeable = False
    return view


def _as_column(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    if name == "infos":
        column = np.empty(len(value), dtype=object)
        column[:] = value
        return column
    if isinstance(value, (dict, tuple)):
        return optree.tree_map(np.asarray, value)  # type: ignore[arg-type]
    return value if hasattr(value, "shape") else np.asarray(value)


class SampleBatch(dict[str, Any]):
    """Columns [count, …] of one policy's experience, numpy arrays or nests of them.

    `dones` is derived: terminated or truncated. `next_obs` reads `new_obs`. `batch[i:j]` gives
    rows. With `seq_lens` [num sequences] the rows are sequences one after another, `state_in_*`
    has one row per sequence, and slices keep to whole sequences.

    `sources` says which fragments the rows came from (see `flowrl.iter.Source`).

    Raises:
        ValueError: columns of different lengths.
    """

    OBS = CUR_OBS = "obs"
    NEXT_OBS = "new_obs"
    ACTIONS = "actions"
    REWARDS = "rewards"
    PREV_ACTIONS = "prev_actions"
    PREV_REWARDS = "prev_rewards"
    TERMINATEDS = "terminateds"
    TRUNCATEDS = "truncateds"
    DONES = "dones"
    INFOS = "infos"
    SEQ_LENS = "seq_lens"
    T = "t"
    ACTION_DIST_INPUTS = "action_dist_inputs"
    ACTION_PROB = "action_prob"
    ACTION_LOGP = "action_logp"
    VF_PREDS = "vf_preds"
    ADVANTAGES = "advantages"
    VALUE_TARGETS = "value_targets"
    EPS_ID = "eps_id"
    ENV_ID = "env_id"
    UNROLL_ID = "unroll_id"
    AGENT_INDEX = "agent_index"

    def __init__(self, columns: Mapping[str, Any] | None = None, /, **more: Any):
        super().__init__()
        self.sources: tuple[Any, ...] = ()
        self.zero_padded = False
        self.max_seq_len: int | None = None
        for name, value in {**(columns or {}), **more}.items():
            if value is not None:
                super().__setitem__(name, _as_column(name, value))
        self._check_lengths()

    @classmethod
    def _of(cls, columns: dict[str, Any], like: SampleBatch | None = None) -> SampleBatch:
        """A batch of checked columns, without checking again."""
        batch = cls.__new__(cls)
        dict.__init__(batch, columns)
        batch.sources = like.sources if like is not None else ()
        batch.zero_padded = like.zero_padded if like is not None else False
        batch.max_seq_len = like.max_seq_len if like is not None else None
        return batch

    def _check_lengths(self) -> None:
        lengths = {
            name: len(leaf)
            for name, column in self.stored()
            if not name.startswith(_PER_SEQUENCE)
            for leaf in _leaves(column)
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of a SampleBatch differ in length: {lengths}")
        if self.SEQ_LENS in self and not self.zero_padded and lengths:
            rows, total = next(iter(lengths.values())), int(np.sum(self[self.SEQ_LENS]))
            if rows != total:
                raise ValueError(f"seq_lens add up to {total}, but the columns have {rows} rows")

    # -- size ----------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Rows, padding not counted."""
        if dict.__contains__(self, self.SEQ_LENS):
            return int(np.sum(self[self.SEQ_LENS]))
        for column in dict.values(self):
            if type(column) is np.ndarray:
                return len(column)
            for leaf in _leaves(column):
                return len(leaf)
        return 0

    def __len__(self) -> int:
        return self.count

    def __bool__(self) -> bool:
        return self.count > 0

    def env_steps(self) -> int:
        """Steps of the environment in this batch (one agent: its rows)."""
        return self.count

    def agent_steps(self) -> int:
        """Steps of agents in this batch: its rows."""
        return self.count

    def steps_by_policy(self) -> dict[str, int]:
        """Policy id -> rows; see `policy_batches`."""
        return {DEFAULT_POLICY_ID: self.count}

    def size_bytes(self) -> int:
        """Bytes of the columns' arrays."""
        return sum(leaf.nbytes for _, column in self.stored() for leaf in _leaves(column))

    # -- columns -------------------------------------------------------------------------------

    def __getitem__(self, key: str | slice | np.ndarray) -> Any:
        if isinstance(key, str):
            column = super().__getitem__(key)
            return np.asarray(column) if isinstance(column, IndexedColumn) else column
        if isinstance(key, slice):
            return self._rows(key)
        return self.take_rows(key)

    def __missing__(self, key: str) -> Any:
        if key in _ALIASES:
            return self[_ALIASES[key]]
        if key == self.DONES and self.TERMINATEDS in self:
            return np.logical_or(self[self.TERMINATEDS], self[self.TRUNCATEDS])
        raise KeyError(f"no column {key!r} in this batch; it has {sorted(self)}")

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        if key == self.DONES:
            return super().__contains__(self.TERMINATEDS)
        return isinstance(key, str) and super().__contains__(_ALIASES.get(key, ""))

    def __setitem__(self, key: str, value: Any) -> None:
        column = _as_column(key, value)
        if not key.startswith(_PER_SEQUENCE) and self:
            for leaf in _leaves(column):
                if len(leaf) != self._padded_count():
                    raise ValueError(
                        f"column {key!r} has {len(leaf)} rows, the batch {self._padded_count()}"
                    )
        super().__setitem__(key, column)

    def _padded_count(self) -> int:
        for name, column in self.stored():
            if not name.startswith(_PER_SEQUENCE):
                return len(_leaves(column)[0])
        return 0

    def stored(self) -> Iterator[tuple[str, Any]]:
        """The columns as they lie in memory: some may be `IndexedColumn`, which read as arrays."""
        return iter(super().items())

    def _unread(self, name: str) -> bool:
        """Whether a column is there, but still to be made or fetched."""
        column = dict.get(self, name)
        return isinstance(column, IndexedColumn) and column.unread

    def without_unread(self) -> SampleBatch:
        """A new batch without the columns that nobody has read yet and the loss does not read."""
        return self.without_columns(*(name for name in self if self._unread(name)))

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # with one of its own, dict(batch) reads columns as we do

    def items(self) -> Any:
        """(name, column) pairs."""
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        """The columns."""
        return [self[name] for name in self]

    def pop(self, key: str, *default: Any) -> Any:
        """The column, taken out of the batch."""
        column = super().pop(key, *default)
        return np.asarray(column) if isinstance(column, IndexedColumn) else column

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    @property
    def data(self) -> SampleBatch:
        """The columns as a mapping: the batch itself."""
        return self

    def columns(self, keys: Sequence[str]) -> list[Any]:
        """The named columns, in that order."""
        return [self[key] for key in keys]

    def with_columns(self, **columns: Any) -> SampleBatch:
        """A new batch with these columns added or replaced; the others are shared."""
        batch = self.copy(shallow=True)
        for name, value in columns.items():
            batch[name] = value
        return batch

    def without_columns(self, *names: str) -> SampleBatch:
        """A new batch without these columns; the others are shared."""
        return SampleBatch._of({k: v for k, v in self.stored() if k not in names}, like=self)

    def copy(self, shallow: bool = False) -> SampleBatch:
        """A new batch; its arrays are copies unless `shallow`."""
        shared = dict(self.stored())
        columns = shared if shallow else {k: _map(np.copy, v) for k, v in self.items()}
        return SampleBatch._of(columns, like=self)

    def isolated(self) -> SampleBatch:
        """A shallow copy whose arrays are read-only views: a reader's own."""
        return SampleBatch._of({k: _map(_read_only, v) for k, v in self.stored()}, like=self)

    # -- rows ----------------------------------------------------------------------------------

    def _rows(self, key: slice) -> SampleBatch:
        start, stop, step = key.indices(self.count)
        if step != 1:
            raise ValueError(f"a SampleBatch is sliced with step 1, got {step}")
        if self.SEQ_LENS not in self:
            return self._map_rows(lambda leaf: leaf[start:stop])
        if self.zero_padded:
            raise ValueError("a zero-padded batch has no rows to slice: slice before padding")
        ends = np.cumsum(self[self.SEQ_LENS])
        begins = ends - self[self.SEQ_LENS]
        keep = np.flatnonzero((begins >= start) & (ends <= stop))
        if not len(keep):
            return self._map_rows(lambda leaf: leaf[:0], slice(0, 0))
        rows = slice(int(begins[keep[0]]), int(ends[keep[-1]]))
        return self._map_rows(lambda leaf: leaf[rows], slice(int(keep[0]), int(keep[-1]) + 1))

    def _map_rows(
        self,
        fn: Callable[[np.ndarray], np.ndarray],
        sequences: slice | np.ndarray | None = None,
    ) -> SampleBatch:
        def pick(leaf: np.ndarray) -> np.ndarray:
            return leaf[sequences]

        columns = {}
        for name, column in self.stored():
            per_sequence = sequences is not None and name.startswith(_PER_SEQUENCE)
            columns[name] = _map(pick if per_sequence else fn, column)
        return SampleBatch._of(columns, like=self)

    def take_rows(self, index: np.ndarray) -> SampleBatch:
        """The rows at `index` [n], copied, in that order."""
        if self.SEQ_LENS in self:
            raise ValueError("rows of a batch with seq_lens belong to sequences: slice it instead")
        return self._map_rows(lambda leaf: leaf[index])

    def slice(self, start: int, end: int) -> SampleBatch:
        """Rows start … end-1, sharing memory."""
        return self[start:end]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row as a dict."""
        columns = self.items()
        for i in range(self.count):
            row = operator.itemgetter(i)
            yield {name: _map(row, column) for name, column in columns}

    def shuffle(self, rng: np.random.Generator | None = None) -> SampleBatch:
        """A new batch with the rows in random order, the same for every column.

        Raises:
            ValueError: the batch has seq_lens.
        """
        rng = rng if rng is not None else np.random.default_rng()
        return self.take_rows(rng.permutation(self.count))

    def split_by_episode(self) -> list[SampleBatch]:
        """Consecutive rows of equal `eps_id`; without that column, cut after `dones`.

        Raises:
            KeyError: the batch has neither.
        """
        if not self.count:
            return []
        if self.EPS_ID in self:
            cuts = np.flatnonzero(np.diff(self[self.EPS_ID])) + 1
        else:
            cuts = np.flatnonzero(self[self.DONES][:-1]) + 1
        ends = [0, *cuts.tolist(), self.count]
        return [self[i:j] for i, j in itertools.pairwise(ends)]

    def timeslices(
        self, size: int | None = None, num_slices: int | None = None
    ) -> list[SampleBatch]:
        """Pieces of `size` rows (the last shorter), or `num_slices` pieces of near equal size."""
        if (size is None) == (num_slices is None):
            raise ValueError("timeslices() takes one of size and num_slices")
        if size is not None:
            if size < 1:
                raise ValueError(f"timeslices: size must be at least 1, got {size}")
            return [self[i : i + size] for i in range(0, self.count, size)]
        assert num_slices is not None
        if num_slices < 1:
            raise ValueError(f"timeslices: num_slices must be at least 1, got {num_slices}")
        ends = [self.count * i // num_slices for i in range(num_slices + 1)]
        return [self[i:j] for i, j in itertools.pairwise(ends)]

    def sequence_minibatches(
        self, size: int, rng: np.random.Generator | None = None, shuffle: bool = True
    ) -> Iterator[SampleBatch]:
        """Whole sequences, in random order if they are to be shuffled, in batches of at least
        `size` rows whose `loss_mask` is not False (the last may have fewer).

        Raises:
            ValueError: the batch is zero-padded.
        """
        if self.zero_padded:
            raise ValueError("a zero-padded batch has no minibatches: take without_padding()")
        rng = rng if rng is not None else np.random.default_rng()
        lens = self[self.SEQ_LENS]
        begins = np.cumsum(lens) - lens
        counted = lens
        if "loss_mask" in self:
            real = np.concatenate([[0], np.cumsum(self["loss_mask"])])
            counted = real[begins + lens] - real[begins]
        chosen: list[int] = []
        rows = 0
        order = rng.permutation(len(lens)).tolist() if shuffle else list(range(len(lens)))
        for number, sequence in enumerate(order, 1):
            chosen.append(sequence)
            rows += int(counted[sequence])
            if rows >= size or number == len(order):
                at = np.concatenate([np.arange(begins[i], begins[i] + lens[i]) for i in chosen])
                yield self._map_rows(operator.itemgetter(at), np.array(chosen))
                chosen, rows = [], 0

    def right_zero_pad(self, max_seq_len: int, exclude_states: bool = True) -> SampleBatch:
        """A new batch whose sequences are all `max_seq_len` rows, zeros at their ends.

        Raises:
            ValueError: no seq_lens, or a sequence longer than `max_seq_len`.
        """
        if self.SEQ_LENS not in self:
            raise ValueError("right_zero_pad() needs the column seq_lens")
        lens = self[self.SEQ_LENS]
        if self.zero_padded:
            raise ValueError("this batch is zero-padded already")
        if len(lens) and max(lens) > max_seq_len:
            raise ValueError(f"a sequence of {max(lens)} rows does not fit {max_seq_len}")
        ends = np.cumsum(lens)
        target = np.concatenate(
            [np.arange(n) + i * max_seq_len for i, n in enumerate(lens)] or [np.zeros(0, int)]
        )
        assert len(target) == (ends[-1] if len(ends) else 0)

        def pad(leaf: np.ndarray) -> np.ndarray:
            padded = np.zeros((len(lens) * max_seq_len, *leaf.shape[1:]), leaf.dtype)
            padded[target] = leaf
            return padded

        skip = _PER_SEQUENCE if exclude_states else ("seq_lens",)
        columns = {k: v if k.startswith(skip) else _map(pad, v) for k, v in self.items()}
        batch = SampleBatch._of(columns, like=self)
        batch.zero_padded, batch.max_seq_len = True, max_seq_len
        return batch

    def without_masked_rows(self) -> tuple[SampleBatch, SampleBatch | None]:
        """The rows whose `loss_mask` is True, and those before them in their sequences.

        Returns:
            the rows to learn from, with the sequences' lengths so; the rows that lie before the
            first of each sequence (its burn-in) with the same sequences, of which some may have
            none, or None where there are none at all. Padding is in neither. `state_in_…` of both
            are as they were before the burn-in.

        Raises:
            KeyError: no column `loss_mask`.
        """
        mask = np.asarray(self["loss_mask"]).astype(bool)
        if self.SEQ_LENS not in self:
            rows = self._map_rows(lambda leaf: leaf[mask])
            return rows.without_columns("loss_mask"), None
        lens = self[self.SEQ_LENS]
        width = np.full(len(lens), self.max_seq_len) if self.zero_padded else lens
        sequence = np.repeat(np.arange(len(lens)), width)
        real = np.bincount(sequence[mask], minlength=len(lens))
        seen = np.concatenate([[0], np.cumsum(mask)])
        before = seen[:-1] - np.repeat(seen[np.cumsum(width) - width], width)
        head = ~mask & (before == 0) & (real > 0)[sequence]
        kept = np.flatnonzero(real > 0)
        rows = self._sequences_of(mask, kept, real[kept])
        if not head.any():
            return rows, None
        return rows, self._sequences_of(
            head, kept, np.bincount(sequence[head], minlength=len(lens))[kept]
        )

    def without_padding(self) -> SampleBatch:
        """The batch without the rows that only fill sequences up to one length."""
        if not self.zero_padded:
            return self
        lens = self[self.SEQ_LENS]
        real = (np.arange(self.max_seq_len or 0) < lens[:, None]).reshape(-1)
        return self._sequences_of(real, np.arange(len(lens)), lens, keep_mask=True)

    def _sequences_of(
        self, rows: np.ndarray, sequences: np.ndarray, lens: np.ndarray, keep_mask: bool = False
    ) -> SampleBatch:
        """Only these rows and sequences, of these lengths."""
        batch = self._map_rows(lambda leaf: leaf[rows], sequences)
        batch.zero_padded = False
        if not keep_mask:
            batch = batch.without_columns("loss_mask")
        columns = dict(batch.stored())
        columns[self.SEQ_LENS] = np.asarray(lens).astype(np.int32)
        return SampleBatch._of(columns, like=batch)

    # -- several batches -----------------------------------------------------------------------

    @staticmethod
    def concat_samples(batches: Iterable[Any]) -> Any:
        """One batch of the rows of all; empty ones are skipped, sources are joined.

        A column that only some have is zeros in the others, with a warning.

        Raises:
            ValueError: the batches differ in padding, or in having sequences.
        """
        given = list(batches)
        full = [batch for batch in given if batch.count]
        for batch in full:
            if not isinstance(batch, SampleBatch):
                return batch.concat_samples(full)
        if len(full) < 2:
            return full[0].copy(shallow=True) if full else SampleBatch()
        first = full[0]
        for other in full[1:]:
            odd = sorted(set(other) ^ set(first))
            if any(name.startswith(_PER_SEQUENCE) for name in odd):
                raise ValueError(f"batches to be concatenated differ in the columns {odd}")
            if (other.zero_padded, other.max_seq_len) != (first.zero_padded, first.max_seq_len):
                raise ValueError("batches to be concatenated differ in zero padding")
        full = _evened(full)
        columns: dict[str, Any] = {}
        for name in full[0]:
            stored = [dict.__getitem__(batch, name) for batch in full]
            if all(isinstance(part, IndexedColumn) for part in stored):
                columns[name] = IndexedColumn.concat(stored)
                continue
            parts: list[Any] = [batch[name] for batch in full]
            columns[name] = (
                np.concatenate(parts)
                if isinstance(parts[0], np.ndarray)
                else optree.tree_map(lambda *leaves: np.concatenate(leaves), *parts)
            )
        joined = SampleBatch._of(columns, like=first)
        joined.sources = tuple(source for batch in full for source in batch.sources)
        return joined

    def concat(self, other: SampleBatch) -> SampleBatch:
        """The rows of this batch, then those of `other`."""
        return SampleBatch.concat_samples([self, other])

    @property
    def policy_batches(self) -> dict[str, SampleBatch]:
        """This batch as the only policy's, the view it shares with MultiAgentBatch."""
        return {DEFAULT_POLICY_ID: self}

    def as_multi_agent(self) -> Any:
        """A MultiAgentBatch with this batch as the default policy's."""
        from flowrl.data.multi_agent_batch import MultiAgentBatch

        batch = MultiAgentBatch(self.policy_batches, self.count)
        batch.sources = self.sources
        return batch

    def __reduce__(self) -> Any:
        state = (self.sources, self.zero_padded, self.max_seq_len)
        return _restore, (_parted(dict(self.stored())), state)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __repr__(self) -> str:
        stored = dict(self.stored())
        lines = ",\n  ".join(f"{k!r}: {_summary(stored[k])}" for k in sorted(self))
        return "{ " + lines + "\n}"


def _evened(batches: list[SampleBatch]) -> list[SampleBatch]:
    """The batches with the same columns. What nobody was seen to read is left out where one of
    them lacks it (a checkpoint leaves it out), anything else is filled with zeros."""
    names = dict.fromkeys(name for batch in batches for name in batch)
    odd = [name for name in names if not all(dict.__contains__(batch, name) for batch in batches)]
    if not odd:
        return batches
    unread = {name for name in odd if any(batch._unread(name) for batch in batches)}
    filled = [name for name in odd if name not in unread]
    if filled and not _warned_of.issuperset(filled):
        _warned_of.update(filled)
        log.warning("the columns %s are in some batches only: zeros stand in the others", filled)
    evened = []
    for batch in batches:
        zeros: dict[str, Any] = {}
        for name in filled:
            if not dict.__contains__(batch, name):
                like = next(b[name] for b in batches if dict.__contains__(b, name))
                zeros[name] = _map(partial(_zeros, batch.count), like)
        evened.append(batch.with_columns(**zeros).without_columns(*unread))
    return evened


def _zeros(rows: int, leaf: np.ndarray) -> np.ndarray:
    return np.zeros((rows, *leaf.shape[1:]), leaf.dtype)


class _Lead:
    """In a pickle, for a column that is the first rows of another one's base."""

    def __init__(self, of: str, rows: int):
        self.of = of
        self.rows = rows


def _parted(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns with none stored twice."""
    windows = {name: c for name, c in columns.items() if isinstance(c, IndexedColumn)}
    bases = {name: c.base for name, c in windows.items() if not c.unread}
    for name, column in columns.items():
        for of, base in bases.items():
            if isinstance(column, np.ndarray) and column.base is base and _leads(column, base):
                columns[name] = _Lead(of, len(column))
    return columns


def _leads(column: np.ndarray, base: np.ndarray) -> bool:
    same_start = column.__array_interface__["data"] == base.__array_interface__["data"]
    return same_start and column.shape[1:] == base.shape[1:] and column.strides == base.strides


def _restore(columns: dict[str, Any], state: tuple[Any, ...]) -> SampleBatch:
    for name, column in columns.items():
        if isinstance(column, _Lead):
            columns[name] = columns[column.of].base[: column.rows]
    batch = SampleBatch._of(columns)
    batch.sources, batch.zero_padded, batch.max_seq_len = state
    return batch


def _summary(column: Any) -> str:
    if isinstance(column, IndexedColumn):
        if column.unread:
            return f"np.ndarray({column.shape}, dtype={column.dtype}, not read yet)"
        column = np.asarray(column)
    if not isinstance(column, np.ndarray):
        return str(optree.tree_map(_summary, column)) if not hasattr(column, "shape") else "tensor"
    head = f"np.ndarray({column.shape}, dtype={column.dtype}"
    if column.dtype == object:
        return f"{head}, head={column[0] if len(column) else None})"
    if not column.size:
        return f"{head})"
    numbers = column.astype(np.float64)
    low, high, mean = numbers.min(), numbers.max(), numbers.mean()
    return f"{head}, min={low:.4g}, max={high:.4g}, mean={mean:.4g})"
