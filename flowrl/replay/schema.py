"""ColumnSchema: the columns that a ring buffer stores, and checks of new batches against them."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree

from flowrl.data.columns import FLAT_KINDS, PER_SEQUENCE
from flowrl.data.indexed_columns import NextRows
from flowrl.data.sample_batch import SampleBatch

OBS, NEXT_OBS = SampleBatch.OBS, SampleBatch.NEXT_OBS
DONE_FLAGS = ("terminateds", "truncateds")
NOT_STORED = ("unroll_id", "env_id", "infos")  # details of sampling, and info dicts


def stored_names(batch: SampleBatch) -> set[str]:
    """Return the names of the columns of a batch that a ring buffer stores."""
    return {name for name in batch if name not in NOT_STORED and not batch.is_lazy(name)}


def check_first_batch(batch: SampleBatch, in_files: bool) -> None:
    """Check the first batch of a ring buffer.

    Args:
        batch: the batch.
        in_files: whether the ring buffer keeps its columns in files.

    Raises:
        ValueError: observations are missing, a column has a wrong shape or dtype, or the rows are
            sequences.
    """
    names = stored_names(batch)
    if OBS not in names or NEXT_OBS not in names:
        missing = " and ".join(name for name in (OBS, NEXT_OBS) if name not in names)
        raise ValueError(
            f"a replay buffer stores obs and new_obs: the batch lacks {missing}, its columns are "
            f"{sorted(names)}"
        )
    recurrent = sorted(n for n in names if n.startswith(PER_SEQUENCE))
    if recurrent:
        raise ValueError(
            f"a batch of sequences (columns {', '.join(recurrent)}) for a buffer of single rows: "
            'for recurrent policies use a ReplayBuffer with storage_unit="sequences"'
        )
    for name in names & set(FLAT_KINDS):
        column = np.asarray(batch[name])
        kinds, description = FLAT_KINDS[name]
        if column.ndim != 1 or column.dtype.kind not in kinds:
            raise ValueError(
                f"column {name!r}: expected {description} [rows], got {column.dtype} "
                f"{list(column.shape)}"
            )
    obs, next_obs = batch[OBS], batch[NEXT_OBS]
    leaves: list[Any] = [optree.tree_leaves(obs), optree.tree_leaves(next_obs)]
    if optree.tree_structure(obs) != optree.tree_structure(next_obs) or not all(
        _fits(other, one.shape[1:], one.dtype) for one, other in zip(*leaves, strict=True)
    ):
        raise ValueError("new_obs have another shape or dtype than obs")
    for name in names - {NEXT_OBS}:
        treespec = treespec_of(batch[name])
        if treespec_from_json(treespec_to_json(treespec)) != treespec:
            raise ValueError(
                f"column {name!r}: nested columns are plain dicts and tuples of arrays"
            )
    for name in names if in_files else ():
        column_leaves: Any = optree.tree_leaves(batch[name])
        if any(leaf.dtype.hasobject for leaf in column_leaves):
            raise ValueError(
                f"column {name!r} holds objects, which cannot be stored in files: drop the column"
            )


def _fits(leaf: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    return leaf.shape[1:] == shape and _can_be_stored(leaf.dtype, dtype)


def _can_be_stored(new: np.dtype[Any], stored: np.dtype[Any]) -> bool:
    """Return whether values of a dtype can be stored as another one: integers as integers, and
    strings, only without loss."""
    if (new.kind in "SU") != (stored.kind in "SU"):
        return False
    are_exact = new.kind in "SU" or (new.kind in "iu" and stored.kind in "iu")
    return np.can_cast(new, stored, "safe" if are_exact else "same_kind")


class ColumnSchema:
    """Nested structures, shapes and dtypes of stored columns.

    Args:
        columns: name -> arrays [rows, …] of the column's leaves, without `new_obs`.
        treespecs: name -> structure of a nested column; None for an array.
    """

    def __init__(self, columns: dict[str, list[np.ndarray]], treespecs: dict[str, Any]):
        self.treespecs = treespecs
        self._leaves = {
            name: [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
            for name, leaves in columns.items()
        }
        self._arrays = [  # name, row shape, dtype; no shape for a nested column
            (name, None if treespecs[stored] is not None else leaves[0][0], leaves[0][1])
            for stored, leaves in self._leaves.items()
            for name in ((OBS, NEXT_OBS) if stored == OBS else (stored,))
        ]

    def check(self, batch: SampleBatch) -> None:
        """Check that a batch has these columns; other columns of it are ignored.

        Raises:
            ValueError: a column is missing or has another structure, shape or dtype.
        """
        for name, shape, dtype in self._arrays:
            column = dict.get(batch, name)
            if column is None:
                raise ValueError(
                    f"a batch without {name!r}, which earlier batches had: it has "
                    f"{sorted(stored_names(batch))}"
                )
            if shape is None:
                self._check_structure(name, column)
                continue
            if type(column) is NextRows and name == NEXT_OBS:
                continue  # shares its base with obs
            if not hasattr(column, "dtype"):
                raise ValueError(f"column {name!r} is nested, earlier batches had arrays")
            same_shape = column.shape[1:] == shape if shape else column.ndim == 1
            new = column.dtype
            if not same_shape or (new is not dtype and not _can_be_stored(new, dtype)):
                raise ValueError(
                    f"column {name!r} has rows of {new} {list(column.shape[1:])}, earlier batches "
                    f"had {dtype} {list(shape)}"
                )

    def _check_structure(self, name: str, column: Any) -> None:
        stored = OBS if name == NEXT_OBS else name
        same_nest = optree.tree_structure(column) == self.treespecs[stored]
        leaves: Any = optree.tree_leaves(column) if same_nest else ()
        pairs = zip(leaves, self._leaves[stored], strict=False)
        if not same_nest or not all(_fits(leaf, *expected) for leaf, expected in pairs):
            raise ValueError(
                f"column {name!r}: its structure, shapes or dtypes differ from earlier batches"
            )


# -- nests -----------------------------------------------------------------------------------------


def treespec_of(column: Any) -> Any:
    """Return the structure of a nested column; None for an array."""
    return None if isinstance(column, np.ndarray) else optree.tree_structure(column)


def treespec_to_json(treespec: Any) -> Any:
    """Return a structure of dicts and tuples as JSON; None for an array."""
    if treespec is None:
        return None
    return _tree_to_json(optree.tree_unflatten(treespec, [None] * treespec.num_leaves))


def treespec_from_json(json: Any) -> Any:
    """Undo `treespec_to_json`."""
    return None if json is None else optree.tree_structure(_tree_from_json(json))


def _tree_to_json(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {"dict": {key: _tree_to_json(part) for key, part in tree.items()}}
    return {"tuple": [_tree_to_json(part) for part in tree]} if isinstance(tree, tuple) else "leaf"


def _tree_from_json(json: Any) -> Any:
    if json == "leaf":
        return 0
    if "dict" in json:
        return {key: _tree_from_json(part) for key, part in json["dict"].items()}
    return tuple(_tree_from_json(part) for part in json["tuple"])
