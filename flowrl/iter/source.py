"""The stage that a stream of Python items starts from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from flowrl.iter.errors import note_origin, operator_error
from flowrl.iter.stage import Stage


class FromIterable(Stage):
    """Source stage over a Python iterable, or a callable that returns one at the first pull.

    A generator that raised is over for Python; it is made again from the callable and the items
    that it gave before are skipped. Over a sequence the position is saved with a plan.
    """

    kind = "from_iterable"

    def __init__(self, make: Iterable[Any] | Callable[[], Iterable[Any]], name: str = ""):
        if not callable(make) and not hasattr(make, "__iter__"):
            raise TypeError(
                "a stream is made of an iterable, or a callable that returns one, got "
                f"{type(make).__name__}"
            )
        super().__init__()
        self._make = make
        self._name = name or self.kind
        self._iterator: Iterator[Any] | None = None
        self._skip = 0  # items to leave out of an iterator made again
        self.resumable = isinstance(make, Sequence)

    def _open(self) -> Iterator[Any]:
        try:
            made = self._make() if callable(self._make) else self._make
            if isinstance(made, Sequence) and self._skip:
                made, self._skip = made[self._skip :], 0
            return iter(made)
        except BaseException as error:
            note_origin(error, self, None)
            raise operator_error(error) from error.__cause__

    def pull(self, block: bool) -> Any:
        if self._iterator is None:
            self._iterator = self._open()
        try:
            while self._skip:
                next(self._iterator)
                self._skip -= 1
            item = next(self._iterator)
        except StopIteration:
            raise
        except BaseException as error:
            self._after(error)
            raise
        self.items += 1
        return item

    def _after(self, error: BaseException) -> None:
        note_origin(error, self, None)
        iterator = self._iterator
        if inspect.isgenerator(iterator) and iterator.gi_frame is None:
            if callable(self._make):
                self._iterator, self._skip = None, self.items
            else:
                error.add_note("this generator cannot go on: give a callable that makes it")
                self._iterator = _Over(error)

    def can_wait(self) -> bool:
        return False

    def label(self) -> str:
        return self._name

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.resumable:
            super().load_state_dict(state)
            self._iterator, self._skip = None, self.items


class _Over:
    """Raises what ended a generator, again and again: an error is not the end of a stream."""

    def __init__(self, error: BaseException):
        self._error = error

    def __iter__(self) -> _Over:
        return self

    def __next__(self) -> Any:
        raise self._error
