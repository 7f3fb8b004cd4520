"""ColumnShipping: which columns of a fragment leave the worker, and which are fetched on access."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from flowrl.data import SampleBatch
from flowrl.data.indexed_columns import IndexedColumn
from flowrl.data.lazy_columns import LazyColumn
from flowrl.data.sample_batch import PolicyID
from flowrl.policies.policy import Policy
from flowrl.sampling.output_checks import SAMPLER_COLUMNS

_ALWAYS_SHIPPED = SAMPLER_COLUMNS - {"infos"}


class ColumnShipping:
    """Ships the sampler's columns, recurrent states and the columns that policies read. Other large
    outputs of policies stay in the object store until they are accessed.

    The columns that a policy reads are detected on its first fragment (`Policy.columns_read`).
    `infos` is built only if a policy reads it or `collect_infos` is set.

    Args:
        policy_map: policy id -> Policy.
        remote: whether the worker is a Ray actor; in process, all columns but `infos` are ready.
        collect_infos: the setting.
    """

    def __init__(self, policy_map: Mapping[PolicyID, Policy], remote: bool, collect_infos: bool):
        self._policy_map = policy_map
        self._remote = remote
        self._collect_infos = collect_infos
        self._read: dict[PolicyID, set[str] | None] = {}  # None: all columns

    def prepare(self, batches: Mapping[PolicyID, SampleBatch]) -> dict[PolicyID, SampleBatch]:
        """Return the batches by policy; columns that are not shipped become references."""
        ray: Any = sys.modules.get("ray") if self._remote else None
        if ray is not None and not ray.is_initialized():
            ray = None
        return {
            policy_id: self._prepare(policy_id, rows, ray) for policy_id, rows in batches.items()
        }

    def _prepare(self, policy_id: PolicyID, rows: SampleBatch, ray: Any) -> SampleBatch:
        if rows.count and policy_id not in self._read:
            self._read[policy_id] = self._columns_read(policy_id, rows)
        read = self._read.get(policy_id)
        if ray is None and (read is None or "infos" not in read):
            return rows  # only infos are lazy, and they stay lazy
        columns: dict[str, Any] = {}
        if read is None or ray is None:
            read = {name for name, _ in rows.stored()} - {"infos"} | (read or set())
        for name, column in rows.stored():
            if name in read or name in _ALWAYS_SHIPPED or name.startswith("state_in_"):
                if isinstance(column, IndexedColumn) and column.is_lazy:
                    column = np.asarray(column)
            elif ray is not None and isinstance(column, (np.ndarray, IndexedColumn)):
                column = _as_lazy(name, column).to_reference(ray.put, ray.get)
            columns[name] = column
        return SampleBatch.unchecked(columns, like=rows)

    def _columns_read(self, policy_id: PolicyID, rows: SampleBatch) -> set[str] | None:
        """Return the columns that a policy reads in its first rows or requests by views."""
        policy = self._policy_map[policy_id]
        read = policy.columns_read(rows)
        if read is None and not self._collect_infos:
            return None
        views = {n for n, view in policy.view_requirements.items() if view.used_for_training}
        infos = {"infos"} if self._collect_infos else set()
        return (set(rows) if read is None else read) | views | infos


def _as_lazy(name: str, column: np.ndarray | IndexedColumn) -> IndexedColumn:
    """Return a column as a lazy one."""
    if isinstance(column, IndexedColumn) and column.is_lazy:
        return column
    array = np.asarray(column)
    lazy = LazyColumn(name, partial(_identity, array), array.shape, array.dtype)
    return IndexedColumn(lazy, np.arange(len(array)))


def _identity(array: np.ndarray) -> np.ndarray:
    return array
