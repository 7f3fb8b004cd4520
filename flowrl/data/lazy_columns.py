"""LazyColumn: a column that the policy's loss does not read, computed or fetched on access.

Workers ship only the columns that the loss reads (detected on the first fragment). Any other
column stays in the worker's object store and is fetched on access, with a warning that names the
setting to ship it.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

log = logging.getLogger("flowrl")

SMALL_BYTES = 50_000  # smaller columns are shipped: a fetch costs more

_warned_columns: set[str] = set()  # warn once per column


class LazyColumn:
    """Rows of a column that are computed or fetched on first access.

    Args:
        name: name of the column.
        compute: returns the array [rows, …].
        shape, dtype: of that array.
    """

    def __init__(
        self,
        name: str,
        compute: Callable[[], np.ndarray],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ):
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._compute: Callable[[], np.ndarray] | None = compute
        self._array: np.ndarray | None = None

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes in this process."""
        return 0 if self._array is None else self._array.nbytes

    def array(self) -> np.ndarray:
        """Return the rows [rows, …].

        Raises:
            RuntimeError: the worker that holds the rows is gone.
        """
        compute = self._compute  # another thread may be the first to set `_array`
        if self._array is None:
            assert compute is not None
            self._array = compute()
            self._compute = None
        return self._array

    def to_reference(self, put: Callable[[Any], Any], get: Callable[[Any], Any]) -> LazyColumn:
        """Return the column for another process: the rows if they are small, else a reference.

        Args:
            put: stores a value in this process and returns a picklable reference.
            get: returns the value of a reference, called in the other process.
        """
        array = self.array()
        value: Any = pickle.dumps(array.tolist()) if array.dtype == object else array
        size = len(value) if isinstance(value, bytes) else value.nbytes
        if size > SMALL_BYTES:
            remote = _RemoteRows(self.name, put(value), get)
            return LazyColumn(self.name, remote, self.shape, self.dtype)
        return LazyColumn(self.name, _ShippedRows(value), self.shape, self.dtype)

    def __reduce__(self) -> Any:
        compute = self._compute
        if not isinstance(compute, (_RemoteRows, _ShippedRows)):
            compute = _ShippedRows(self.array())
        return LazyColumn, (self.name, compute, self.shape, self.dtype)


class _ShippedRows:
    """Rows in the message itself; objects are pickled and unpickled on access."""

    def __init__(self, value: Any):
        self.value = value

    def __call__(self) -> np.ndarray:
        if not isinstance(self.value, bytes):
            return self.value
        items = pickle.loads(self.value)
        array = np.empty(len(items), object)
        array[:] = items
        return array


class _RemoteRows:
    """Rows in the object store of the worker that sampled them."""

    def __init__(self, name: str, reference: Any, get: Callable[[Any], Any]):
        self.name = name
        self.reference = reference
        self.get = get

    def __call__(self) -> np.ndarray:
        if self.name not in _warned_columns:
            _warned_columns.add(self.name)
            log.warning(
                "column %r is fetched from its worker: workers do not ship it because the policy's "
                "loss did not read it in the trial on the first fragment. To ship it, set "
                "policy.view_requirements[%r] = ViewRequirement()",
                self.name,
                self.name,
            )
        try:
            fetched = self.get(self.reference)
        except Exception as error:
            raise RuntimeError(
                f"column {self.name!r} is stored on a worker that is gone: {error!r}"
            ) from error
        return _ShippedRows(fetched)()
