"""EnvSampler: sample fragments from all environments of a worker."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.sampling.episode import EpisodeMetrics, MultiAgentEpisode
from flowrl.sampling.sampler import TIMINGS
from flowrl.sampling.worker_config import WorkerConfig


class EnvSampler(ABC):
    """Samples fragments of all environments of a worker.

    With `batch_mode="complete_episodes"`, a fragment has whole episodes; otherwise, episodes
    continue from one fragment to the next. If an environment fails, the rows of its episode that
    are in no fragment yet are dropped. After an exception, all rows that are in no fragment are
    dropped, and the next call of `collect` starts new episodes.

    Args:
        settings: the sampling settings.

    Attributes:
        episodes: metrics of the ended episodes, until FragmentSampler takes them.
        env_steps: env steps in fragments so far.
        timings: seconds so far, see TIMINGS.
    """

    def __init__(self, settings: WorkerConfig):
        self.settings = settings
        self.episodes: list[EpisodeMetrics] = []
        self.env_steps = 0
        self.timings = dict.fromkeys(TIMINGS, 0.0)
        self._whole = settings.batch_mode == "complete_episodes"
        self._has_open_episodes = False  # the next fragment continues them
        self.is_stopped = False  # set by another thread; ends the running fragment by an error

    def collect(self, min_steps: int) -> SampleBatch | MultiAgentBatch:
        """Return one fragment.

        Args:
            min_steps: number of env steps, or of agent steps with `count_steps_by="agent_steps"`. A
                step of all environments and whole episodes may have more; after failures of
                environments, a fragment may have fewer, or none.
        """
        started = time.perf_counter()
        self._begin_fragment()
        if not self._has_open_episodes:
            self._start()
            self.timings["env_step_s"] += time.perf_counter() - started  # resets of environments
        self._has_open_episodes = False  # until the fragment is complete
        self._roll(min_steps)
        rolled, inference_s = time.perf_counter(), self.timings["inference_s"]
        batch = self._finish(min_steps)
        self._has_open_episodes = True
        self.env_steps += batch.env_steps()
        finished = time.perf_counter()
        values_s = self.timings["inference_s"] - inference_s  # see FragmentBuilder
        self.timings["postprocess_s"] += finished - rolled - values_s
        self.timings["sample_s"] += finished - started
        return batch

    def discard_episodes(self) -> None:
        """Let the next fragment start new episodes."""
        self._has_open_episodes = False

    def _raise_if_stopped(self) -> None:
        if self.is_stopped:
            raise RuntimeError("this sampler was stopped")

    @abstractmethod
    def _begin_fragment(self) -> None:
        """Prepare for the steps of a fragment: the views of policies may have changed."""

    @abstractmethod
    def _start(self) -> None:
        """Start an episode in every environment."""

    @abstractmethod
    def _roll(self, min_steps: int) -> None:
        """Act and step until the fragment is complete."""

    @abstractmethod
    def _finish(self, min_steps: int) -> SampleBatch | MultiAgentBatch:
        """Build the fragment, and keep the other rows for later ones."""

    @property
    @abstractmethod
    def faulty_episodes(self) -> int:
        """Number of episodes that were dropped because their environment failed."""

    @abstractmethod
    def episode(self, episode_id: int) -> MultiAgentEpisode | None:
        """Return the record of a running episode; None without callbacks of episodes."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state of environments, episodes and counters, without the policies."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Load the result of `state_dict`.

        Returns:
            number of episodes that could not be resumed; new episodes replace them.

        Raises:
            KeyError, ValueError: the state belongs to other environments or policies.
        """
