"""FromIterable, the source stage of a stream of Python items."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from flowrl.errors import add_note
from flowrl.iter.errors import call_in_stage, mark_permanent, note_origin
from flowrl.iter.stage import Stage, close_generator
from flowrl.state_schema import Fields, Natural

MAX_FAILURES = 10  # of a generator at one place, after which Skip does not try it again


class FromIterable(Stage):
    """Return the items of an iterable, or of a callable that returns one at the first pull.

    A generator is exhausted after it raises; the callable then creates a new one and the items
    returned before are skipped. The position in a sequence is part of saved state; an index whose
    item cannot be read counts as read.

    Args:
        iterable: an iterable, or a callable that returns one. A LocalIterator or a generator that
            the callable returns is stopped or closed with the plan.
        title: display text; None displays the name.
    """

    state_fields: ClassVar[Fields] = {"position": Natural}

    name = "from_iterable"

    def __init__(
        self, iterable: Iterable[Any] | Callable[[], Iterable[Any]], title: str | None = None
    ):
        if not callable(iterable) and not hasattr(iterable, "__iter__"):
            raise TypeError(
                "a stream needs an iterable or a callable that returns one, got "
                f"{type(iterable).__name__}"
            )
        super().__init__()
        self.title = title
        self._iterable = iterable
        self._iterator: Iterator[Any] | None = None
        self._skip = 0  # items to skip in a new iterator
        self._unreadable = 0  # indices of a sequence that raised
        self._failed_at = -1  # items that were returned before the last error
        self._num_failures = 0  # at that place
        self.resumable = isinstance(iterable, Sequence)

    def _open(self) -> Iterator[Any]:
        iterable = self._iterable() if callable(self._iterable) else self._iterable
        is_builtin = isinstance(iterable, (list, tuple, range))
        # the iterator of another sequence may have ended after an error
        if isinstance(iterable, Sequence) and (self._skip or not is_builtin):
            indices, self._skip = range(self._skip, len(iterable)), 0
            return map(iterable.__getitem__, indices)  # a deque cannot be sliced
        return iter(iterable)

    def pull(self, block: bool) -> Any:
        if self._iterator is None:
            self._iterator = call_in_stage(self, self._open)
        try:
            while self._skip:
                next(self._iterator)
                self._skip -= 1
            item = next(self._iterator)
        except StopIteration:
            raise
        except BaseException as error:
            self._handle_error(error)
            raise
        self.items += 1
        return item

    def _handle_error(self, error: BaseException) -> None:
        note_origin(error, self, None)
        if self.resumable:
            self._unreadable += 1
        iterator = self._iterator
        if inspect.isgenerator(iterator) and iterator.gi_frame is None:
            if callable(self._iterable):
                is_same_place = self._failed_at == self.items
                self._num_failures = self._num_failures + 1 if is_same_place else 1
                if self._num_failures >= MAX_FAILURES:
                    mark_permanent(error)
                self._iterator, self._skip, self._failed_at = None, self.items, self.items
            else:
                add_note(
                    error, "this generator cannot be restarted: pass a callable that creates it"
                )
                mark_permanent(error)
                self._iterator = _RaisesAgain(error)

    def stop(self) -> None:
        if not callable(self._iterable):
            return
        iterator: Any = self._iterator
        if isinstance(getattr(iterator, "stage", None), Stage):
            iterator.stop()
        elif isinstance(iterator, Repeated):
            iterator.close()
        close_generator(iterator)

    def can_return_not_ready(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "position": self.items + self._unreadable}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.resumable:
            super().load_state_dict(state)
            self._unreadable = state["position"] - self.items
            self._iterator, self._skip = None, state["position"]


class _RaisesAgain:
    """Raises the error of an exhausted generator on every `next()`: an error is not the end of a
    stream."""

    def __init__(self, error: BaseException):
        self._error = error

    def __iter__(self) -> _RaisesAgain:
        return self

    def __next__(self) -> Any:
        raise self._error


class Repeated:
    """The items of an iterable, repeated; an exception does not end the iteration."""

    def __init__(self, items: Any):
        self._items = items
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> Repeated:
        return self

    def close(self) -> None:
        """Close the iterator, if it is a generator."""
        close_generator(self._iterator)

    def __next__(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._items() if callable(self._items) else self._items)
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise StopIteration  # the iterable is empty
