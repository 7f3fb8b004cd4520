"""SampleBatch and MultiAgentBatch: the experience of one policy, and of several.

Batches flow from sampling to learning. Operators share batches between branches, so a batch is not
changed in place: `with_columns()` returns a new batch that shares the other columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from flowrl.data.columns import (
    ALIASES,
    PER_SEQUENCE,
    Columns,
    as_arrays,
    concat_columns,
    copied,
    deduplicate,
    expand_runs,
    map_leaves,
    readonly_view,
    restore_duplicates,
)
from flowrl.setting_values import check_int

AgentID = Any  # chosen by the environment, usually a str or an int
EpisodeID = int
PolicyID = str
TensorType = Any  # a numpy array or a framework's tensor

DEFAULT_POLICY_ID = "default_policy"


class SampleBatch(Columns):
    """Columns [count, …] of one policy's experience; see `Columns` for the columns themselves.

    `batch[i:j]` returns rows as a batch, and `batch[i]` one row as a dict. With `seq_lens`
    [sequences] the rows are consecutive sequences, `state_in_*` has one row per sequence, and a
    slice must begin and end between sequences.

    Attributes:
        sources: the fragments that the rows come from (see `flowrl.iter.Source`).
        zero_padded: whether all sequences are padded with zeros to `max_seq_len` rows.
        max_seq_len: rows per padded sequence; None without padding.

    Raises:
        ValueError: the columns differ in length.
    """

    OBS = CUR_OBS = "obs"
    NEXT_OBS = NEW_OBS = "new_obs"
    ACTIONS = ACTION = "actions"
    REWARDS = REWARD = "rewards"
    PREV_ACTIONS = "prev_actions"
    PREV_REWARDS = "prev_rewards"
    TERMINATEDS = "terminateds"
    TRUNCATEDS = "truncateds"
    DONES = DONE = "dones"
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
        self.sources: tuple[Any, ...] = getattr(columns, "sources", ())
        super().__init__(columns, **more)

    @classmethod
    def unchecked(cls, columns: dict[str, Any], like: SampleBatch | None = None) -> SampleBatch:
        """Create a batch without checking its columns.

        Args:
            columns: name -> array, nest of arrays, or `IndexedColumn`, all of equal length.
            like: batch to take sources and padding from.
        """
        batch = cls.__new__(cls)
        dict.__init__(batch, columns)
        batch.sources = like.sources if like is not None else ()
        batch.zero_padded = like.zero_padded if like is not None else False
        batch.max_seq_len = like.max_seq_len if like is not None else None
        return batch

    def env_steps(self) -> int:
        """Return the number of environment steps: the rows, for a single agent."""
        return self.count

    def agent_steps(self) -> int:
        """Return the number of agent steps: the rows."""
        return self.count

    def steps_by_policy(self) -> dict[str, int]:
        """Return policy id -> rows; see `policy_batches`."""
        return {DEFAULT_POLICY_ID: self.count}

    # -- columns -------------------------------------------------------------------------------

    @overload
    def __getitem__(self, key: str) -> Any: ...

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, key: slice | np.ndarray | list[int]) -> SampleBatch: ...

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return as_arrays(dict.__getitem__(self, key))
        if isinstance(key, slice):
            return self._slice_rows(key)
        if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
            return self.row(int(key))
        if not isinstance(key, (list, np.ndarray)):
            raise TypeError(
                f"a SampleBatch is read by column name, row number, slice or array, got {key!r}"
            )
        return self.take_rows(np.asarray(key))

    @property
    def data(self) -> SampleBatch:
        """The columns as a mapping: the batch itself."""
        return self

    def with_columns(self, **columns: Any) -> SampleBatch:
        """Return a new batch with these columns added or replaced; the others are shared."""
        batch = self.copy(shallow=True)
        for name, value in columns.items():
            batch[name] = value
        return batch

    def without_columns(self, *names: str) -> SampleBatch:
        """Return a new batch without these columns; the others are shared."""
        stored_names = {ALIASES.get(name, name) for name in names}
        columns = {name: column for name, column in self.stored() if name not in stored_names}
        return SampleBatch.unchecked(columns, like=self)

    def without_lazy_columns(self) -> SampleBatch:
        """Return a new batch without the columns that are not computed or fetched yet."""
        return self.without_columns(*(name for name in self if self.is_lazy(name)))

    def copy(self, shallow: bool = False) -> SampleBatch:
        """Return a new batch; its arrays are copies unless `shallow`."""
        shared = dict(self.stored())
        columns = shared if shallow else {k: map_leaves(copied, v) for k, v in self.items()}
        return SampleBatch.unchecked(columns, like=self)

    def read_only_copy(self) -> SampleBatch:
        """Return a shallow copy whose arrays are read-only views."""
        columns = {name: map_leaves(readonly_view, column) for name, column in self.stored()}
        return SampleBatch.unchecked(columns, like=self)

    # -- rows ----------------------------------------------------------------------------------

    def _slice_rows(self, key: slice) -> SampleBatch:
        if self.SEQ_LENS not in self:
            return self.map_rows(lambda leaf: leaf[key])
        start, stop, step = key.indices(self.count)
        if step != 1:
            raise ValueError(f"a batch with seq_lens is sliced with step 1, got {step}")
        ends = np.cumsum(self[self.SEQ_LENS])
        starts = ends - self[self.SEQ_LENS]
        if stop <= start:
            return self.map_rows(lambda leaf: leaf[:0], slice(0, 0))
        if start not in starts or stop not in ends:
            raise ValueError(
                f"rows {start}:{stop} contain part of a sequence only: slice a batch with seq_lens "
                "between sequences, or split it with flowrl.data.sequences.sequence_minibatches()"
            )
        is_before_stop = (starts < stop) | (stop == self.count)  # for sequences without rows
        inside = np.flatnonzero((starts >= start) & (ends <= stop) & is_before_stop)
        sequences = slice(int(inside[0]), int(inside[-1]) + 1)
        if self.zero_padded and self.max_seq_len is not None:
            start, stop = sequences.start * self.max_seq_len, sequences.stop * self.max_seq_len
        return self.map_rows(lambda leaf: leaf[start:stop], sequences)

    def map_rows(
        self,
        fn: Callable[[np.ndarray], np.ndarray],
        sequences: slice | np.ndarray | None = None,
    ) -> SampleBatch:
        """Apply `fn` to each array; arrays with a row per sequence: leaf[sequences], if given."""

        def pick(leaf: np.ndarray) -> np.ndarray:
            # right_zero_pad(exclude_states=False) leaves one state per row
            return leaf[sequences] if len(leaf) == num_sequences else fn(leaf)

        if sequences is None:
            columns = {
                name: fn(column) if type(column) is np.ndarray else map_leaves(fn, column)
                for name, column in self.stored()
            }
            return SampleBatch.unchecked(columns, like=self)
        num_sequences = len(self[self.SEQ_LENS])
        columns = {}
        for name, column in self.stored():
            per_sequence = name.startswith(PER_SEQUENCE)
            columns[name] = map_leaves(pick if per_sequence else fn, column)
        return SampleBatch.unchecked(columns, like=self)

    def take_rows(self, index: np.ndarray) -> SampleBatch:
        """Return copies of the rows at `index` [n], in that order.

        Raises:
            ValueError: the batch has seq_lens.
            IndexError: there is no such row.
        """
        if self.SEQ_LENS in self:
            raise ValueError("a batch with seq_lens has no single rows: slice it instead")
        if not len(index):
            index = np.zeros(0, np.int64)  # np.asarray([]) has a float dtype
        return self.map_rows(lambda leaf: leaf[index])

    def slice(self, start: int, end: int) -> SampleBatch:
        """Return rows start … end-1, sharing memory."""
        return self[start:end]

    def shuffle(self, rng: np.random.Generator | None = None) -> SampleBatch:
        """Return a new batch with the rows in random order.

        Raises:
            ValueError: the batch has seq_lens.
        """
        rng = rng if rng is not None else np.random.default_rng()
        return self.take_rows(rng.permutation(self.count))

    def split_by_episode(self, key: str | None = None) -> list[SampleBatch]:
        """Split where `eps_id` changes or, without that column, after rows that end an episode.

        Args:
            key: "eps_id" or "dones" to split only by that. The end of an episode is read from
                `dones`, or from those of `terminateds` and `truncateds` that the batch has.

        Raises:
            KeyError: the batch has none of these columns.
            ValueError: another key is given.
        """
        if not self.count:
            return []
        ends = [0, *self._episode_ends(key).tolist(), self.count]
        return [self[i:j] for i, j in itertools.pairwise(ends)]

    def timeslices(
        self, size: int | None = None, num_slices: int | None = None
    ) -> list[SampleBatch]:
        """Split into slices of `size` rows (the last may be shorter), or into `num_slices` slices
        of nearly equal size.

        Raises:
            ValueError: not exactly one of size and num_slices is given, it is below 1, or a
                sequence would be cut (`flowrl.data.sequences.sequence_minibatches` keeps them
                whole).
        """
        if (size is None) == (num_slices is None):
            raise ValueError("timeslices() takes either size or num_slices")
        if size is not None:
            if size < 1:
                raise ValueError(f"timeslices: size must be at least 1, got {size}")
            return [self[i : i + size] for i in range(0, self.count, size)]
        assert num_slices is not None
        if num_slices < 1:
            raise ValueError(f"timeslices: num_slices must be at least 1, got {num_slices}")
        ends = [self.count * i // num_slices for i in range(num_slices + 1)]
        return [self[i:j] for i, j in itertools.pairwise(ends)]

    def right_zero_pad(self, max_seq_len: int, exclude_states: bool = True) -> SampleBatch:
        """Return a new batch whose sequences are padded with zeros at their ends to `max_seq_len`.

        Args:
            max_seq_len: rows per sequence.
            exclude_states: leave `state_in_*` as it is; False needs a state per row.

        Raises:
            ValueError: the batch has no seq_lens, is padded already, or has a longer sequence.
        """
        if self.SEQ_LENS not in self:
            raise ValueError("right_zero_pad() needs the column seq_lens")
        lens = self[self.SEQ_LENS]
        if self.zero_padded:
            raise ValueError("this batch is already zero-padded")
        if len(lens) and max(lens) > max_seq_len:
            raise ValueError(
                f"a sequence of {max(lens)} rows does not fit max_seq_len={max_seq_len}"
            )
        index, _ = expand_runs(np.arange(len(lens)) * max_seq_len, lens)

        def pad(leaf: np.ndarray) -> np.ndarray:
            padded = np.zeros((len(lens) * max_seq_len, *leaf.shape[1:]), leaf.dtype)
            padded[index] = leaf
            return padded

        skip = PER_SEQUENCE if exclude_states else ("seq_lens",)
        columns = {k: v if k.startswith(skip) else map_leaves(pad, v) for k, v in self.items()}
        batch = SampleBatch.unchecked(columns, like=self)
        batch.zero_padded, batch.max_seq_len = True, max_seq_len
        return batch

    # -- several batches -----------------------------------------------------------------------

    @staticmethod
    def concat_samples(batches: Iterable[Any]) -> Any:
        """Concatenate the rows and sources of batches; empty batches are skipped.

        A column that some batches lack is dropped if it is lazy in another batch; otherwise, it is
        filled with zeros, or with the values of rows that come from no replay buffer: `weights` and
        `n_steps` with 1, `batch_indexes` with -1, `loss_mask` with True, `infos` with {} (warns
        once per column).

        Raises:
            ValueError: the batches differ in padding, or only some have sequences.
        """
        batches = [batches] if isinstance(batches, (SampleBatch, Mapping)) else list(batches)
        for batch in batches:
            if not hasattr(batch, "concat_samples"):
                raise TypeError(
                    f"concat_samples takes a list of batches, got a {type(batch).__name__} in it"
                )
            if not isinstance(batch, SampleBatch):
                return batch.concat_samples(batches)
        batches = [batch for batch in batches if batch.count]
        if len(batches) < 2:
            return batches[0].copy(shallow=True) if batches else SampleBatch()
        first = batches[0]
        for other in batches[1:]:
            differing = sorted(set(other) ^ set(first))
            if any(name.startswith(PER_SEQUENCE) for name in differing):
                raise ValueError(f"cannot concatenate: only some batches have {differing}")
            if (other.zero_padded, other.max_seq_len) != (first.zero_padded, first.max_seq_len):
                raise ValueError("cannot concatenate: the batches differ in zero padding")
        joined = SampleBatch.unchecked(concat_columns(batches), like=first)
        joined.sources = tuple(source for batch in batches for source in batch.sources)
        return joined

    def concat(self, other: SampleBatch) -> SampleBatch:
        """Return the rows of this batch followed by those of `other`."""
        return SampleBatch.concat_samples([self, other])

    @property
    def policy_batches(self) -> dict[str, SampleBatch]:
        """Default policy id -> this batch, as in a MultiAgentBatch."""
        return {DEFAULT_POLICY_ID: self}

    def as_multi_agent(self) -> MultiAgentBatch:
        """Return a MultiAgentBatch with this batch under the id of the default policy."""
        batch = MultiAgentBatch(self.policy_batches, self.count)
        batch.sources = self.sources
        return batch

    def __reduce__(self) -> Any:
        attributes = (self.sources, self.zero_padded, self.max_seq_len)
        return _unpickle, (deduplicate(dict(self.stored())), attributes)


def _unpickle(columns: dict[str, Any], attributes: tuple[Any, ...]) -> SampleBatch:
    batch = SampleBatch.unchecked(restore_duplicates(columns))
    batch.sources, batch.zero_padded, batch.max_seq_len = attributes
    return batch


class MultiAgentBatch:
    """Batches by policy id.

    Args:
        policy_batches: policy id -> SampleBatch with the rows of that policy's agents.
        env_steps: environment steps that the rows come from (several agents may act in one step).
    """

    def __init__(self, policy_batches: Mapping[str, SampleBatch], env_steps: int):
        check_int("MultiAgentBatch: env_steps", env_steps, 0)
        self.policy_batches = dict(policy_batches)
        for policy_id, batch in self.policy_batches.items():
            if not isinstance(batch, SampleBatch):
                raise TypeError(
                    "MultiAgentBatch takes policy id -> SampleBatch, got a "
                    f"{type(batch).__name__} for {policy_id!r}"
                )
        self.sources: tuple[Any, ...] = ()
        self._env_steps = int(env_steps)

    @property
    def count(self) -> int:
        """Environment steps."""
        return self._env_steps

    def __len__(self) -> int:
        return self._env_steps

    def __bool__(self) -> bool:
        return self._env_steps > 0

    def env_steps(self) -> int:
        """Return the number of environment steps."""
        return self._env_steps

    def agent_steps(self) -> int:
        """Return the number of rows of all policies."""
        return sum(batch.agent_steps() for batch in self.policy_batches.values())

    def steps_by_policy(self) -> dict[str, int]:
        """Return policy id -> rows."""
        return {policy_id: rows.count for policy_id, rows in self.policy_batches.items()}

    def size_bytes(self) -> int:
        """Return the bytes of all columns in this process."""
        return sum(batch.size_bytes() for batch in self.policy_batches.values())

    def __getitem__(self, policy_id: str) -> SampleBatch:
        if policy_id not in self.policy_batches:
            is_column = any(policy_id in rows for rows in self.policy_batches.values())
            hint = "; this is a column of the batches in policy_batches" if is_column else ""
            raise KeyError(
                f"no policy {policy_id!r} in this batch; it has {sorted(self.policy_batches)}{hint}"
            )
        return self.policy_batches[policy_id]

    if not TYPE_CHECKING:  # type checkers report the access themselves

        def __getattr__(self, name: str) -> Any:
            hint = ""
            if not name.startswith("_") and hasattr(SampleBatch, name):
                hint = (
                    ": policy_batches has a SampleBatch for each policy, and with_batches({…}) "
                    "returns a batch with changed ones"
                )
            raise AttributeError(f"'MultiAgentBatch' object has no attribute {name!r}{hint}")

    def __contains__(self, policy_id: object) -> bool:
        return policy_id in self.policy_batches

    def select(self, policy_ids: Iterable[str]) -> MultiAgentBatch:
        """Return a new batch with these policies only and the same env steps and sources."""
        selected = set(policy_ids)
        return self.with_batches({p: b for p, b in self.policy_batches.items() if p in selected})

    def with_batches(self, policy_batches: Mapping[str, SampleBatch]) -> MultiAgentBatch:
        """Return a new batch with other policy batches and the same env steps and sources."""
        batch = MultiAgentBatch(policy_batches, self._env_steps)
        batch.sources = self.sources
        return batch

    def copy(self, shallow: bool = False) -> MultiAgentBatch:
        """Return a new batch; its arrays are copies unless `shallow`."""
        return self.with_batches({p: b.copy(shallow) for p, b in self.policy_batches.items()})

    def read_only_copy(self) -> MultiAgentBatch:
        """Return a shallow copy whose arrays are read-only views."""
        return self.with_batches({p: b.read_only_copy() for p, b in self.policy_batches.items()})

    def as_multi_agent(self) -> MultiAgentBatch:
        """Return this batch."""
        return self

    @staticmethod
    def wrap_as_needed(
        policy_batches: Mapping[str, SampleBatch], env_steps: int
    ) -> SampleBatch | MultiAgentBatch:
        """Return a SampleBatch if the default policy is the only one, else a MultiAgentBatch."""
        if set(policy_batches) == {DEFAULT_POLICY_ID}:
            return policy_batches[DEFAULT_POLICY_ID]
        return MultiAgentBatch(policy_batches, env_steps)

    @staticmethod
    def concat_samples(batches: Iterable[Any]) -> MultiAgentBatch:
        """Concatenate rows policy by policy; add up env steps and sources."""
        rows_by_policy: dict[str, list[SampleBatch]] = {}
        env_steps = 0
        sources: list[Any] = []
        for batch in batches:
            if not (batch.count or batch.agent_steps()):
                continue
            batch = batch.as_multi_agent()
            env_steps += batch.env_steps()
            sources.extend(batch.sources)
            for policy_id, rows in batch.policy_batches.items():
                rows_by_policy.setdefault(policy_id, []).append(rows)
        policy_batches = {p: SampleBatch.concat_samples(rows) for p, rows in rows_by_policy.items()}
        joined = MultiAgentBatch(policy_batches, env_steps)
        joined.sources = tuple(sources)
        return joined

    def __repr__(self) -> str:
        return f"MultiAgentBatch({self.policy_batches}, env_steps={self._env_steps})"


Batch = SampleBatch | MultiAgentBatch
