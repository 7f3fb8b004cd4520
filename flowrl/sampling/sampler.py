"""Samplers: items of experience from a worker's environments, on request or ahead of time."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from flowrl.data import Batch, SampleBatch
from flowrl.sampling.episode import EpisodeMetrics

log = logging.getLogger("flowrl")
JOIN_TIMEOUT_S = 30.0  # maximum time for which stop() waits for the thread
MAX_STEPS_WITHOUT_DATA = 10_000  # env steps without a row or an episode, before a warning

# seconds in environments, action computation, storing of rows, postprocessing, and in total
TIMINGS = ("env_step_s", "inference_s", "collection_s", "postprocess_s", "sample_s")


EPISODE = (
    'finished episode, for which batch_mode="complete_episodes" waits; the rows stay in memory: '
    "set a horizon"
)
"""An item that `warn_without_data` names."""


def warn_without_data(steps: int, num_envs: int, missing: str) -> None:
    """Log a warning once after MAX_STEPS_WITHOUT_DATA env steps without an item.

    Args:
        steps: steps of each environment since the last item.
        num_envs: number of environments.
        missing: what the item waits for.
    """
    if (steps - 1) * num_envs < MAX_STEPS_WITHOUT_DATA <= steps * num_envs:
        log.warning("%d env steps without a %s", MAX_STEPS_WITHOUT_DATA, missing)


class SampleResult(NamedTuple):
    """An item and its metadata.

    episodes: metrics of the episodes that ended in it.
    versions: versions of the weights that acted, by policy id.
    filters: updates of the policies' filters, by policy id.
    """

    batch: Batch
    episodes: list[EpisodeMetrics]
    versions: dict[str, int]
    filters: dict[str, Any]


class SamplerInput(ABC):
    """A source of experience from live environments; the first item starts the environments.

    An item is a fragment, or one or more whole episodes with `batch_mode="complete_episodes"`.
    """

    def __init__(self) -> None:
        self._episodes: list[EpisodeMetrics] = []
        self.weights_versions: dict[str, int] = {}
        self.fresh_filters: list[dict[str, Any]] = []

    @abstractmethod
    def get_data(self) -> Batch:
        """Return the next item.

        Raises:
            RuntimeError: the sampler was stopped.
            Exception: an error that sampling raised, only once; the next call continues.
        """

    def get_metrics(self) -> list[EpisodeMetrics]:
        """Return the episodes that ended in the items since the last call."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def get_extra_batches(self) -> list[Batch]:
        """Return further items that are ready, without waiting."""
        return []

    def next(self) -> Batch:
        """Return the next item, concatenated with all further items that are ready."""
        items = [self.get_data(), *self.get_extra_batches()]
        return items[0] if len(items) == 1 else SampleBatch.concat_samples(items)

    def stop(self) -> None:  # noqa: B027
        """Stop sampling for good."""

    def _unpack(self, result: SampleResult) -> Batch:
        self._episodes += result.episodes
        self.weights_versions = result.versions
        if result.filters:
            self.fresh_filters.append(result.filters)
        return result.batch


class SyncSampler(SamplerInput):
    """Samples on request: all actions of an item use the weights at the time of the call.

    Args:
        collect: returns an item.
    """

    def __init__(self, collect: Callable[[], SampleResult]):
        super().__init__()
        self._collect = collect
        self._stopped = False

    def get_data(self) -> Batch:
        if self._stopped:
            raise RuntimeError("this sampler was stopped")
        return self._unpack(self._collect())

    def stop(self) -> None:
        self._stopped = True


class AsyncSampler(SamplerInput):
    """Samples ahead in a thread, which the first call of `get_data` starts.

    Args:
        collect: returns an item; called in the thread.
        max_ahead: maximum number of ready items. With one update per item, an item's weights are at
            most `max_ahead + 1` updates old.
    """

    def __init__(self, collect: Callable[[], SampleResult], max_ahead: int = 2):
        super().__init__()
        if max_ahead < 1:
            raise ValueError(f"max_ahead must be at least 1, got {max_ahead}")
        self._collect = collect
        self._ready: queue.Queue[SampleResult | BaseException] = queue.Queue(max_ahead)
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                item: SampleResult | BaseException = self._collect()
            except BaseException as error:
                item = error
            self._ready.put(item)  # blocks while the queue is full; stop() makes room
            if isinstance(item, BaseException):
                return  # the next call of get_data starts a new thread

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
        return self._unpack(item)

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
            batches.append(self._unpack(item))

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is None:
            return
        with contextlib.suppress(queue.Empty):  # makes room for the item that the thread has
            while True:
                self._ready.get_nowait()
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning(
                "the sampler's thread still samples after %g s, for example in a step of an "
                "environment: it ends after the step", JOIN_TIMEOUT_S,
            )  # fmt: skip
