"""Samplers: batches of experience from a worker's environments, when asked or ahead of time."""

from __future__ import annotations

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.sampling.episode import EpisodeMetrics

Batch = SampleBatch | MultiAgentBatch


class SampleResult(NamedTuple):
    """A batch and what is to be told of it.

    episodes: those that ended in it.
    versions: of the weights that acted, by policy id.
    filters: what the policies' filters saw, by policy id.
    """

    batch: Batch
    episodes: list[EpisodeMetrics]
    versions: dict[str, int]
    filters: dict[str, Any]


class SamplerInput(ABC):
    """A source of experience from live environments. Nothing is stepped before the first item.

    An item is a fragment, or one whole episode in the mode `complete_episodes`.
    """

    def __init__(self) -> None:
        self._episodes: list[EpisodeMetrics] = []
        self.weights_versions: dict[str, int] = {}
        self.fresh_filters: list[dict[str, Any]] = []

    @abstractmethod
    def get_data(self) -> Batch:
        """The next item.

        Raises:
            what sampling it raised, once; the next call samples on.
        """

    def get_metrics(self) -> list[EpisodeMetrics]:
        """The episodes that ended in the items since the last call."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def get_extra_batches(self) -> list[Batch]:
        """Items that are there besides the next one, without waiting."""
        return []

    def next(self) -> Batch:
        """The next item, joined with those that are there besides."""
        items = [self.get_data(), *self.get_extra_batches()]
        return items[0] if len(items) == 1 else SampleBatch.concat_samples(items)

    def stop(self) -> None:  # noqa: B027
        """Sample no more."""

    def _take(self, collected: SampleResult) -> Batch:
        self._episodes += collected.episodes
        self.weights_versions = collected.versions
        if collected.filters:
            self.fresh_filters.append(collected.filters)
        return collected.batch


class SyncSampler(SamplerInput):
    """Samples when it is asked: every action is by the weights in force at the call.

    Args:
        collect: gives an item.
    """

    def __init__(self, collect: Callable[[], SampleResult]):
        super().__init__()
        self._collect = collect

    def get_data(self) -> Batch:
        return self._take(self._collect())


class AsyncSampler(SamplerInput):
    """Samples ahead in a thread, which starts with the first call of `get_data`.

    Args:
        collect: gives an item; called in the thread.
        max_ahead: items that may lie ready. With the one in the making, an item may be as many
            and one more updates of the weights old, where there is an update per item.
    """

    def __init__(self, collect: Callable[[], SampleResult], max_ahead: int = 2):
        super().__init__()
        if max_ahead < 1:
            raise ValueError(f"max_ahead must be at least 1, got {max_ahead}")
        self._collect = collect
        self._ready: queue.Queue[SampleResult | BaseException] = queue.Queue(max_ahead)
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    @property
    def items_ahead(self) -> int:
        """Items that lie ready."""
        return self._ready.qsize()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                item: SampleResult | BaseException = self._collect()
            except BaseException as error:
                item = error
            self._ready.put(item)  # waits while enough lies ready; stop() makes room
            if isinstance(item, BaseException):
                return  # the next call of get_data starts again

    def get_data(self) -> Batch:
        if self._stopped.is_set():
            raise RuntimeError("this sampler was stopped")
        if self._thread is None or (not self._thread.is_alive() and self._ready.empty()):
            self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
            self._thread.start()
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._thread.join()
            raise item
        return self._take(item)

    def get_extra_batches(self) -> list[Batch]:
        batches: list[Batch] = []
        while True:
            try:
                item = self._ready.get_nowait()
            except queue.Empty:
                return batches
            if isinstance(item, BaseException):
                self._ready.put(item)  # for the next get_data
                return batches
            batches.append(self._take(item))

    def stop(self) -> None:
        self._stopped.set()
        while self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._ready.get_nowait()
            self._thread.join(timeout=0.01)
