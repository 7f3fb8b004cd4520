"""Evaluator: the evaluations of an algorithm, on request and at regular intervals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.policies.policy import Policy
from flowrl.sampling.worker_set import WorkerSet
from flowrl.setting_values import whole_number
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.evaluation import (
    EvaluationWorkers,
    check_evaluation_workers,
    evaluate_policies,
    evaluation_settings,
    recorder_for,
    summarize_episodes,
)
from flowrl.trainer.metric_names import NamedMetrics
from flowrl.trainer.video import VideoRecorder


class Evaluator:
    """Evaluates the policies of an algorithm, in this process or on workers.

    Args:
        config: the algorithm's settings.
        workers: the WorkerSet whose local policies are evaluated.
        policy_class: default class of the policies.
    """

    def __init__(
        self, config: AlgorithmConfig, workers: WorkerSet, policy_class: type[Policy] | None
    ):
        self._config = config
        self._workers = workers
        self._policy_class = policy_class
        self._evaluation_workers: EvaluationWorkers | None = None
        self._is_regular = False  # the evaluation was due, not requested

    def evaluate(
        self,
        iteration: int,
        episodes: int | None = None,
        explore: bool | None = None,
        num_envs: int | None = None,
        timesteps: int | None = None,
        video_dir: Path | str | None = None,
        seed: int | None = None,
    ) -> dict[str, Any]:
        """Evaluate the policies in this process; see Algorithm.evaluate.

        Raises:
            ConfigError: episodes and timesteps are both given, or a number is not positive.
        """
        config = evaluation_settings(self._config)
        if seed is not None:
            config = config.updated(seed=seed)
        if episodes is not None and timesteps is not None:
            raise ConfigError("evaluate: give episodes or timesteps, not both")
        by_steps = timesteps is not None
        if episodes is None and not by_steps:
            by_steps = config.evaluation_duration_unit == "timesteps"
        count = timesteps if timesteps is not None else episodes
        count = config.evaluation_duration if count is None else count
        count = _count("timesteps" if timesteps is not None else "episodes", count)
        num_envs = _count("num_envs", config.num_envs_per_worker if num_envs is None else num_envs)
        worker = self._workers.local_worker()
        video = recorder_for(config, iteration) if self._is_regular else None
        if video_dir is not None:
            name, count_videos = f"evaluation-{iteration:06d}", config.evaluation_video_episodes
            video = VideoRecorder(video_dir, name, count_videos, "video_dir (--video)")
        if explore is not None and not isinstance(explore, bool):
            raise ConfigError(f"evaluate: explore must be True, False or None, got {explore!r}")
        explore = self._explores() if explore is None else explore
        with worker.lock:  # a learner thread uses the same networks
            self._workers.weight_sync.merge_filter_updates()
            played = evaluate_policies(
                worker.policy_map, config, count, explore, num_envs, by_steps, video=video
            )
        return NamedMetrics(summarize_episodes(played, list(worker.policy_map)))

    def evaluate_if_due(
        self, iteration: int, evaluate: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Return the metrics of an evaluation that is due or has finished, or None.

        Args:
            iteration: number of the training iteration.
            evaluate: evaluates in this process; used without evaluation workers.
        """
        config = self._config
        if config.evaluation_interval is None:
            return None
        due = iteration % config.evaluation_interval == 0
        if not config.evaluation_num_workers:
            if not due:
                return None
            self._is_regular = True
            try:
                return NamedMetrics({**evaluate(), "training_iteration": iteration})
            finally:
                self._is_regular = False
        if self._evaluation_workers is None:
            check_evaluation_workers(config)
            settings = evaluation_settings(config)
            self._evaluation_workers = EvaluationWorkers(settings, self._policy_class)
        workers = self._evaluation_workers
        metrics = None
        if due and not config.evaluation_parallel_to_training:
            self._start(workers, iteration)
            metrics = workers.collect()
        elif workers.is_running and (due or workers.is_done()):
            metrics = workers.collect()
        if due and config.evaluation_parallel_to_training:
            self._start(workers, iteration)
        return metrics

    def _start(self, workers: EvaluationWorkers, iteration: int) -> None:
        """Start an evaluation of the current policies on the evaluation workers."""
        workers.prepare()  # before a learner thread has to wait
        worker = self._workers.local_worker()
        with worker.lock:  # a learner thread changes the weights
            self._workers.weight_sync.merge_filter_updates()
            workers.start(worker.policy_map, self._explores(), iteration)

    def finish(self) -> dict[str, Any] | None:
        """Wait for the evaluation that runs parallel to training, and return its metrics; None if
        none is running."""
        workers = self._evaluation_workers
        return None if workers is None or not workers.is_running else workers.collect()

    def _explores(self) -> bool:
        return bool(self._config.evaluation_config.get("explore", False))

    def discard(self) -> None:
        """Ignore a running evaluation."""
        if self._evaluation_workers is not None:
            self._evaluation_workers.discard()

    def stop(self) -> None:
        """Stop the evaluation workers."""
        if self._evaluation_workers is not None:
            self._evaluation_workers.stop()


def _count(name: str, value: Any) -> int:
    count = None if isinstance(value, str) else whole_number(value)
    if count is None or count < 1:
        is_env = hasattr(value, "reset")
        hint = '; another environment is the setting evaluation_config={"env": …}' * is_env
        raise ConfigError(f"{name}: must be an int >= 1, got {value!r}{hint}")
    return count
