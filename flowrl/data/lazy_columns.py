"""LazyColumn: a column that a test pass did not see anybody read. It stays where it was made.

Reading it is always right: what was left on a worker is fetched, with a warning that says how to
have it shipped.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

log = logging.getLogger("flowrl")

SMALL_BYTES = 50_000  # what is smaller travels along: fetching it would cost more

_told: set[str] = set()


class LazyColumn:
    """The rows of a column, made or fetched when they are first asked for.

    Args:
        name: of the column.
        make: gives the array [rows, …].
        shape, dtype: of that array.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], np.ndarray],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ):
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._make: Callable[[], np.ndarray] | None = make
        self._array: np.ndarray | None = None

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that are in this process."""
        return 0 if self._array is None else self._array.nbytes

    def array(self) -> np.ndarray:
        """The rows.

        Raises:
            RuntimeError: they were left on a worker that is gone.
        """
        if self._array is None:
            assert self._make is not None
            self._array = self._make()
            self._make = None
        return self._array

    def left_behind(self, put: Callable[[Any], Any], get: Callable[[Any], Any]) -> LazyColumn:
        """The column for another process: in full if it is small, else as a reference.

        Args:
            put: stores a value here and gives a reference that can travel.
            get: fetches the value of a reference, there.
        """
        array = self.array()
        value: Any = pickle.dumps(array.tolist()) if array.dtype == object else array
        size = len(value) if isinstance(value, bytes) else value.nbytes
        if size > SMALL_BYTES:
            return LazyColumn(
                self.name, _Fetched(self.name, put(value), get), self.shape, self.dtype
            )
        return LazyColumn(self.name, _Sent(value), self.shape, self.dtype)

    def __reduce__(self) -> Any:
        make = self._make if isinstance(self._make, (_Fetched, _Sent)) else _Sent(self.array())
        return LazyColumn, (self.name, make, self.shape, self.dtype)


class _Sent:
    """Rows that travelled, objects as a pickle that is opened when they are read."""

    def __init__(self, value: Any):
        self.value = value

    def __call__(self) -> np.ndarray:
        if not isinstance(self.value, bytes):
            return self.value
        items = pickle.loads(self.value)
        array = np.empty(len(items), object)
        array[:] = items
        return array


class _Fetched:
    """Rows that were left in the store of the worker that made them."""

    def __init__(self, name: str, reference: Any, get: Callable[[Any], Any]):
        self.name = name
        self.reference = reference
        self.get = get

    def __call__(self) -> np.ndarray:
        if self.name not in _told:
            _told.add(self.name)
            log.warning(
                "column %r is fetched from its worker: the policy's loss did not read it when it "
                "was tried, so it is not shipped. To have it in every batch, set "
                "policy.view_requirements[%r] = ViewRequirement()",
                self.name,
                self.name,
            )
        try:
            return _Sent(self.get(self.reference))()
        except Exception as error:
            raise RuntimeError(
                f"column {self.name!r} was left on its worker, which is gone: {error!r}"
            ) from error
