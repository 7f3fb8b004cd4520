"""FragmentSampler: sample fragments from a worker's environments, count steps, save state."""

from __future__ import annotations

from typing import Any

from flowrl.data import DEFAULT_POLICY_ID, MultiAgentBatch, SampleBatch
from flowrl.data.serialization import with_savable_infos
from flowrl.envs.env_record import check_restarting_envs_state
from flowrl.errors import ConfigError
from flowrl.sampling.agent_views import has_agent_views
from flowrl.sampling.callbacks import overrides
from flowrl.sampling.collector_sampler import CollectorSampler
from flowrl.sampling.column_sampler import ColumnSampler
from flowrl.sampling.column_shipping import ColumnShipping
from flowrl.sampling.env_sampler import EnvSampler
from flowrl.sampling.environments import WorkerEnvironments
from flowrl.sampling.episode import EpisodeMetrics, MultiAgentEpisode
from flowrl.sampling.ids import IdCounter
from flowrl.sampling.multi_agent_sampler import MultiAgentSampler
from flowrl.sampling.sampler import AsyncSampler, SampleResult, SamplerInput, SyncSampler
from flowrl.sampling.sampler_worker import SamplerWorker
from flowrl.sampling.worker_config import WorkerConfig
from flowrl.state_schema import Fields, Natural, check_state

_STATE: Fields = {
    "num_envs": Natural,
    "seed_steps": Natural,
    "env_sampler": dict[str, Any] | None,
    "env_sampler_class": str,
    "batch_mode": str,
    "next_unroll": Natural,
    "returned_steps": list[Natural],
    "reported_steps": list[Natural],
    "episodes_ready": list[Any],
}


class FragmentSampler:
    """Samples fragments, synchronously or ahead of time.

    Args:
        worker: provides policies, callbacks and the lock, which is held while an item is sampled.
        envs: the worker's environments.
        settings: the worker's settings.
        first_id: the first episode and unroll id.
    """

    def __init__(
        self,
        worker: SamplerWorker,
        envs: WorkerEnvironments,
        settings: WorkerConfig,
        first_id: int,
    ):
        self._worker = worker
        self._envs = envs
        self._settings = settings
        self._first_id = first_id
        self._counts_lives = bool(
            envs.is_atari and settings.atari and settings.atari.terminal_on_life_loss
        )
        if self._counts_lives and self._env_sampler_class() is not ColumnSampler:
            raise ConfigError(
                "atari.terminal_on_life_loss: not supported with a sample_collector, several "
                "policies, views of other agents or on_postprocess_trajectory: set it to False"
            )
        self.unroll_ids = IdCounter(first_id)
        self._closes_envs = False  # `stop` was called, and the environments are open
        self._shipping = ColumnShipping(
            worker.policy_map,
            remote=bool(worker.worker_index) and settings.output is None,
            collect_infos=settings.collect_infos,
        )
        self._env_sampler: EnvSampler | None = None
        # env steps that `_sample_item` collects: those of a fragment, or of at least one episode
        self._min_steps = settings.fragment_length * envs.agent_envs.num_envs
        if settings.batch_mode == "complete_episodes":
            self._min_steps = 1
        self._sampler: SamplerInput | None = None
        self._reset_counts()

    def _reset_counts(self) -> None:
        self._episodes_ready: list[Any] = []
        self._returned_steps = [0, 0]  # env steps, agent steps
        self._reported_steps = [0, 0]
        self._reported_failures = [0, 0]  # see `_failures`

    @property
    def env_steps(self) -> int:
        """Env steps returned so far."""
        return self._returned_steps[0]

    @property
    def sampler(self) -> SamplerInput:
        """The SyncSampler or AsyncSampler of this worker; created on the first access."""
        if self._sampler is None:
            sampler_class = AsyncSampler if self._settings.sample_async else SyncSampler
            self._sampler = sampler_class(self._sample_item)
        return self._sampler

    def _sample_item(self) -> SampleResult:
        """Sample one item; runs in the sampler's thread if it has one."""
        with self._worker.lock:
            try:
                return self._sample_locked()
            finally:
                self._close_envs_if_stopped()

    def _sample_locked(self) -> SampleResult:
        """Sample one item; the worker's lock must be held."""
        policy_map = self._worker.policy_map
        if self._env_sampler is None:
            self._env_sampler = self._make_env_sampler()
        batch: Any = self._env_sampler.collect(self._min_steps)
        batches = self._shipping.prepare(batch.policy_batches)
        episodes, self._env_sampler.episodes = self._env_sampler.episodes, []
        filters = {pid: policy.take_filter_updates() for pid, policy in policy_map.items()}
        return SampleResult(
            batch.with_batches(batches)
            if self._worker.is_multi_agent
            else batches.get(DEFAULT_POLICY_ID, SampleBatch()),
            episodes,
            {pid: policy.version for pid, policy in policy_map.items()},
            {pid: seen for pid, seen in filters.items() if seen},
        )

    def _make_env_sampler(self) -> EnvSampler:
        envs, env_sampler_class = self._envs, self._env_sampler_class()
        worker, settings = self._worker, self._settings
        ids = self.unroll_ids, self._first_id
        if env_sampler_class is CollectorSampler:
            collector: Any = settings.sample_collector
            return CollectorSampler(collector, envs.agent_envs, worker, settings, *ids)
        if env_sampler_class is MultiAgentSampler:
            return MultiAgentSampler(envs.agent_envs, worker, settings, *ids)
        assert envs.vector_env is not None
        return ColumnSampler(
            envs.vector_env, worker, settings, envs.agent_envs, *ids, self._counts_lives
        )

    def _env_sampler_class(self) -> type[EnvSampler]:
        """Return the class that samples the environments."""
        worker = self._worker
        if self._settings.sample_collector is not None:
            return CollectorSampler
        by_agent = (
            worker.is_multi_agent
            or has_agent_views(worker.policy_map)
            or overrides(worker.callbacks, "on_postprocess_trajectory")
        )
        return MultiAgentSampler if by_agent else ColumnSampler

    def sample(self) -> SampleBatch | MultiAgentBatch:
        """Return one fragment; with `complete_episodes`, whole episodes of at least its length."""
        sampler, settings = self.sampler, self._settings
        min_steps = settings.fragment_length * self._envs.agent_envs.num_envs
        if settings.batch_mode == "truncate_episodes":
            return sampler.get_data()
        by_agent = settings.count_steps_by == "agent_steps"
        items = self._episodes_ready  # includes episodes from before an error
        while (
            steps := sum(i.agent_steps() if by_agent else i.env_steps() for i in items)
        ) < min_steps:
            if not settings.sample_async:
                self._min_steps = min_steps - steps
            try:
                items.append(sampler.get_data())
            finally:
                self._min_steps = 1
        self._episodes_ready = []
        return items[0] if len(items) == 1 else SampleBatch.concat_samples(items)

    def count(self, samples: SampleBatch | MultiAgentBatch) -> None:
        """Count the steps of samples that the worker returns."""
        self._returned_steps[0] += samples.env_steps()
        self._returned_steps[1] += samples.agent_steps()

    def episode(self, episode_id: int) -> MultiAgentEpisode | None:
        """Return the record of a running episode; None if no callback of episodes is overridden."""
        return None if self._env_sampler is None else self._env_sampler.episode(episode_id)

    def get_metrics(self) -> list[EpisodeMetrics]:
        """Return the episodes that finished since the last call."""
        return [] if self._sampler is None else self._sampler.get_metrics()

    @property
    def num_faulty_episodes(self) -> int:
        """Number of episodes that a failure of their environment ended; results leave them out."""
        return 0 if self._env_sampler is None else self._env_sampler.faulty_episodes

    def _failures(self) -> list[int]:
        """Return the numbers of environments that were restarted and of episodes that failures
        ended."""
        return [self._envs.agent_envs.num_restarts, self.num_faulty_episodes]

    def reply_tags(self) -> dict[str, Any]:
        """Return the metadata of the last fragment: steps, failures and episodes since the last
        call, timings, filter updates."""
        if self._sampler is None or self._env_sampler is None:
            return {}
        filters, self._sampler.fresh_filters = self._sampler.fresh_filters, []
        env_steps, agent_steps = (
            total - reported
            for total, reported in zip(self._returned_steps, self._reported_steps, strict=True)
        )
        self._reported_steps = list(self._returned_steps)
        failures, reported = self._failures(), self._reported_failures
        self._reported_failures = failures
        return {
            "env_steps": env_steps,
            "agent_steps": agent_steps,
            "weights_versions": self._sampler.weights_versions,
            "episodes": [tuple(episode) for episode in self.get_metrics()],
            "timings": {**self._env_sampler.timings, "reset_s": self._envs.agent_envs.reset_s},
            "filters": filters,
            "env_restarts": failures[0] - reported[0],
            "faulty_episodes": failures[1] - reported[1],
        }

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return environments, running episodes and counters, as far as they can be saved.

        Items that an asynchronous sampler has ready are not included.
        """
        returned, reported = list(self._returned_steps), list(self._reported_steps)
        if self._settings.sample_async and self._env_sampler is not None:
            ready = sum(item.env_steps() for item in self._episodes_ready)
            lost = self._env_sampler.env_steps - ready - returned[0]  # those of the items
            returned[0] += lost
            reported[0] += lost  # no reply will report them
        return {
            "num_envs": self._envs.agent_envs.num_envs,
            "seed_steps": self._envs.seed_steps,
            "env_sampler": None if self._env_sampler is None else self._env_sampler.state_dict(),
            "env_sampler_class": self._env_sampler_class().__name__,
            "batch_mode": self._settings.batch_mode,
            "next_unroll": self.unroll_ids.next_id,
            "returned_steps": returned,
            "reported_steps": reported,
            "episodes_ready": [with_savable_infos(item) for item in self._episodes_ready],
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise KeyError or ValueError if `load_state_dict` could not load a state."""
        num_envs, batch_mode = self._envs.agent_envs.num_envs, self._settings.batch_mode
        env_sampler_class = self._env_sampler_class().__name__
        check_state(state, _STATE, "sampling")
        if not len(state["returned_steps"]) == len(state["reported_steps"]) == 2:
            raise ValueError("sampling: returned and reported steps must be two numbers each")
        if state["num_envs"] != num_envs:
            raise ValueError(
                f"the state has {state['num_envs']} environments, this worker {num_envs} "
                "(num_envs_per_worker)"
            )
        if state["env_sampler"] is None:
            return
        if state["batch_mode"] != batch_mode:
            raise ValueError(
                f"the state was sampled with batch_mode={state['batch_mode']!r}, this worker has "
                f"{batch_mode!r}"
            )
        if state["env_sampler_class"] != env_sampler_class:
            raise ValueError(
                "the running episodes were sampled with other settings (sample_collector, "
                "policies, or on_postprocess_trajectory of callbacks_class): keep these settings, "
                "or load only the policies with restore_policies()"
            )
        running = state["env_sampler"].get("open")
        envs = None if running is None else running["envs"]
        if envs is not None and "num_restores" not in envs:  # not of a gymnasium VectorEnv
            check_restarting_envs_state(envs, num_envs)

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Load the result of `state_dict`; the worker's lock must be held.

        Returns:
            number of episodes that could not be resumed; new episodes replace them.

        Raises:
            KeyError, ValueError: it belongs to other settings or environments.
        """
        unroll_ids, self.unroll_ids = self.unroll_ids, IdCounter(state["next_unroll"])
        previous, agent_envs, restarted = self._env_sampler, self._envs.agent_envs, 0
        pairs = zip(self._failures(), self._reported_failures, strict=True)
        unreported = [failures - reported for failures, reported in pairs]
        try:
            if state["env_sampler"] is not None:
                num_steps = 0 if "open" in state["env_sampler"] else state["returned_steps"][0]
                seed_steps = state["seed_steps"]
                if num_steps:  # the episodes could not be saved, or an error had ended them
                    self._envs.reopen(num_steps)
                elif seed_steps != self._envs.seed_steps:
                    self._envs.reopen(seed_steps)
                self._env_sampler = self._make_env_sampler()  # callbacks look up its episodes
                restarted = self._env_sampler.load_state_dict(state["env_sampler"])
                if num_steps:
                    restarted = self._envs.agent_envs.num_envs
            elif previous is not None:
                self._envs.reopen()
                self._env_sampler = None
        except Exception:
            self.unroll_ids, self._env_sampler = unroll_ids, previous
            if self._envs.agent_envs is not agent_envs:
                self._env_sampler = None  # it has the environments of before
                self._reset_counts()
            else:
                if self._env_sampler is not None:
                    self._env_sampler.discard_episodes()
                counts = zip(self._failures(), unreported, strict=True)
                self._reported_failures = [failures - new for failures, new in counts]
            raise
        self._returned_steps = list(state["returned_steps"])
        self._reported_steps = list(state["reported_steps"])
        self._reported_failures = self._failures()
        self._episodes_ready = list(state["episodes_ready"])
        return restarted

    def stop_sampler(self) -> None:
        """Stop the sampler's thread; the next fragment starts a new one."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None

    def stop(self) -> None:
        """Stop sampling for good, and close the environments. If a thread still steps them, it
        closes them after its step."""
        if self._env_sampler is not None:
            self._env_sampler.is_stopped = True
        self.sampler.stop()
        self._closes_envs = True
        if self._worker.lock.acquire(timeout=1.0):  # a thread that samples or learns holds it
            try:
                self._close_envs_if_stopped()
            finally:
                self._worker.lock.release()

    def _close_envs_if_stopped(self) -> None:
        """Close the environments after `stop`; the worker's lock must be held."""
        if self._closes_envs:
            self._closes_envs = False
            self._envs.close()
