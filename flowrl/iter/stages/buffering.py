"""Stages that buffer items: batch and shuffle."""

from __future__ import annotations

import os
import random
from typing import Any, ClassVar

from flowrl.iter.stage import NOT_READY, Stage
from flowrl.setting_values import check_int
from flowrl.source import Source, sources_from_list, sources_to_list
from flowrl.state_schema import Fields


class Batch(Stage):
    """Return lists of `size` items; the last one may be shorter."""

    state_fields: ClassVar[Fields] = {"pending": list[Any], "sources": list[list[Any]]}

    name = "batch"
    yields_lists = True  # except if an item has several sources or none

    def __init__(self, parent: Stage, size: int):
        check_int("batch(n): n", size)
        super().__init__(parent)
        self.title = f"batch({size})"
        self.size = size
        self._pending: list[Any] = []
        self._pending_sources: list[Source] = []
        self._item_sources: tuple[Source, ...] = ()

    def pull(self, block: bool) -> Any:
        parent = self.parents[0]
        while len(self._pending) < self.size:
            try:
                item = self._pull_up(block)
            except StopIteration:
                if not self._pending:
                    raise
                break
            if item is NOT_READY:
                return item
            self._pending.append(item)
            self._pending_sources.extend(parent.sources)
        batch, self._pending = self._pending, []
        self._item_sources, self._pending_sources = tuple(self._pending_sources), []
        self.items += 1
        return batch

    def extra_stats(self) -> dict[str, Any]:
        return {"queued": len(self._pending)}

    def state_dict(self) -> dict[str, Any]:
        sources = sources_to_list(self._pending_sources)
        return {**super().state_dict(), "pending": list(self._pending), "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._pending = list(state["pending"])
        self._pending_sources = list(sources_from_list(state["sources"]))


class Shuffle(Stage):
    """Return the items in random order within a sliding window of `size` items.

    Args:
        seed: seed of the order; None derives it from the seed of the plan.
    """

    state_fields: ClassVar[Fields] = {"window": list[list[Any]], "random": list[Any]}

    name = "shuffle"

    def __init__(self, parent: Stage, size: int, seed: int | None):
        check_int("shuffle_buffer_size", size)
        if seed is not None:
            check_int("shuffle: seed", seed, 0)
        super().__init__(parent)
        self.title = f"shuffle({size}, seed={seed})"
        self.size = size
        self.seed = seed
        self._random = random.Random(os.urandom(16) if seed is None else int(seed))
        self._window: list[tuple[Any, tuple[Source, ...]]] = []
        self._loaded = False
        self._ended = False
        self._item_sources: tuple[Source, ...] = ()

    def start(self, seed: str | None) -> None:
        if self.seed is None and seed is not None and not self._loaded:
            self._random.seed(seed)

    def pull(self, block: bool) -> Any:
        window = self._window
        while not self._ended and len(window) < self.size:
            try:
                item = self._pull_up(block)
            except StopIteration:
                self._ended = True
                break
            if item is NOT_READY:
                return item
            window.append((item, self.parents[0].sources))
        if not window:
            raise StopIteration
        item, self._item_sources = window.pop(self._random.randint(0, len(window) - 1))
        self.items += 1
        return item

    def extra_stats(self) -> dict[str, Any]:
        return {"queued": len(self._window)}

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = self._random.getstate()
        return {
            **super().state_dict(),
            "window": [[item, sources_to_list(sources)] for item, sources in self._window],
            "random": [version, list(words), gauss],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._window = [(item, sources_from_list(sources)) for item, sources in state["window"]]
        version, words, gauss = state["random"]
        self._random.setstate((version, tuple(words), gauss))
        self._loaded = True
