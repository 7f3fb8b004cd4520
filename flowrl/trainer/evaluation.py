"""Evaluation: play whole episodes in separate environments, in this process or on Ray actors."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flowrl.data.spaces import are_compatible
from flowrl.envs.registry import NO_ENV_MESSAGE, EnvContext
from flowrl.errors import ConfigError, add_note
from flowrl.iter import ray_health
from flowrl.iter.ray_runtime import death_errors
from flowrl.iter.recovery import STARTING_S, original_error
from flowrl.policies.policy import Policy
from flowrl.policies.policy_spec import PolicySpec
from flowrl.policies.views import acting_views
from flowrl.sampling.episode import EpisodeMetrics, returns_by_policy
from flowrl.sampling.placement import check_evaluation_resources
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.worker_set import WorkerSet
from flowrl.seeding import derive_seed, random_stream
from flowrl.settings import adjusted
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.metric_names import NamedMetrics
from flowrl.trainer.video import VideoRecorder, check_rendering

log = logging.getLogger("flowrl")

MAX_LOST = 3  # evaluations in a row that may be lost because a worker died
LONG_WAIT_S = 120.0  # time that training waits for an evaluation, before a warning

# steps of each environment without the end of an episode
MAX_EPISODE_STEPS = 200_000  # before the evaluation stops
LONG_EPISODE_STEPS = 20_000  # before a warning
_TIME_LIMIT = (
    "give the environment a limit (gymnasium.wrappers.TimeLimit), or set horizon (--horizon of "
    'flowrl train), for evaluations alone evaluation_config={"horizon": …}'
)


def check_env(config: AlgorithmConfig) -> None:
    """Check that there is an environment to evaluate in; offline training can have spaces only.

    Raises:
        ConfigError: `env` is not set.
    """
    if config.env is None:
        raise ConfigError(NO_ENV_MESSAGE)


class EvaluationEpisodes(NamedTuple):
    """The episodes of an evaluation."""

    episodes: list[EpisodeMetrics]  # in the order in which they ended
    num_faulty: int  # episodes that were dropped because their environment failed
    num_unfinished: int  # episodes that did not end within MAX_EPISODE_STEPS


def evaluate_policies(
    policies: dict[str, Policy],
    config: AlgorithmConfig,
    duration: int,
    explore: bool,
    num_envs: int,
    by_steps: bool = False,
    part: int = 0,
    video: VideoRecorder | None = None,
) -> EvaluationEpisodes:
    """Play whole episodes with frozen observation filters.

    So that short episodes are not overrepresented, each environment plays an equal share of the
    episodes or, with `by_steps`, of the env steps, and plays each episode to its end.
    If no episode ends within MAX_EPISODE_STEPS env steps of each environment, the evaluation ends
    with a warning.

    Args:
        policies: policy id -> policy.
        config: the evaluation's settings, see `evaluation_settings`.
        duration: number of episodes; with `by_steps`, minimum number of env steps.
        explore: sample actions; False takes greedy ones.
        num_envs: environments that are stepped together; not used if the environment is a vector of
            environments.
        by_steps: whether `duration` is in env steps.
        part: index of the worker if several share one evaluation; selects its random seed.
        video: records the first episodes of the first environment; closed at the end.
    """
    check_env(config)
    num_envs = min(num_envs, duration)
    seed_path = ("evaluation", part) if part else ("evaluation",)
    settings = adjusted(
        _evaluation_worker_settings(config),
        num_envs_per_worker=num_envs,
        seed=derive_seed(config.seed, *seed_path),
        rollout_fragment_length=min(64, -(-duration // num_envs)) if by_steps else 64,
        explore=explore,
    )
    env: Any = config.env
    if video is not None:
        env = video.creator(env)
        # these environments do not render, or run in other processes
        if settings.vectorization_mode in ("vector_entry_point", "async"):
            settings = adjusted(settings, vectorization_mode="flowrl")
    worker = _evaluation_worker(env, policies, settings)
    try:
        episodes, num_unfinished = _play_episodes(worker, duration, by_steps, video)
        return EvaluationEpisodes(episodes, worker.num_faulty_episodes, num_unfinished)
    except Exception as error:
        add_note(error, "during an evaluation")
        raise
    finally:
        try:
            if video is not None:
                video.close()
        finally:
            worker.stop()


def _evaluation_worker_settings(config: AlgorithmConfig) -> AlgorithmConfig:
    """Return the settings without what only training uses."""
    return adjusted(
        config,
        batch_mode="truncate_episodes",
        count_steps_by="env_steps",
        horizon=None if config.soft_horizon else config.horizon,
        soft_horizon=False,
        sample_async=False,
        sample_collector=None,
        callbacks_class=None,
        normalize_rewards=False,
        collect_infos=False,
        policies=None,
        policies_to_train=None,
    )


def _evaluation_worker(
    env: Any, policies: dict[str, Policy], settings: AlgorithmConfig
) -> RolloutWorker:
    """Return a worker whose policies act like the given ones.

    If the environment is a vector of environments, their number replaces `num_envs_per_worker`.
    """
    specs = {
        policy_id: PolicySpec(
            _evaluation_policy(policy, settings.explore),
            policy.observation_space,
            policy.action_space,
            policy.config,
        )
        for policy_id, policy in policies.items()
    }
    try:
        return RolloutWorker(env, specs, settings)
    except ConfigError as error:
        num_envs = vars(error).get("num_envs")
        if num_envs is None:
            raise
    return RolloutWorker(env, specs, adjusted(settings, num_envs_per_worker=num_envs))


def _play_episodes(
    worker: RolloutWorker, duration: int, by_steps: bool, video: VideoRecorder | None
) -> tuple[list[EpisodeMetrics], int]:
    """Play the episodes of an evaluation, see `evaluate_policies`.

    Returns:
        the episodes that ended, and the number of those that did not.
    """
    num_envs = worker.num_envs
    # episodes of each environment or, with `by_steps`, env steps before which episodes may start
    left = [duration // num_envs + (i < duration % num_envs) for i in range(num_envs)]
    if video is not None and not by_steps:
        video.episodes = min(video.episodes, left[0])
    episodes: list[EpisodeMetrics] = []
    last_end = 0  # env steps at the end of the last episode
    warned = False
    while num_unfinished := sum(n > 0 if by_steps else n for n in left):
        worker.sample()
        for episode in worker.get_metrics():
            if left[episode.env_id] > 0:
                left[episode.env_id] -= episode.episode_length if by_steps else 1
                episodes.append(episode)
                last_end = worker.env_steps
        steps = worker.env_steps - last_end
        if steps > MAX_EPISODE_STEPS * num_envs:
            log.warning(
                "evaluation: stopped, because no episode ended in the last %s env steps; %s of %s "
                "episodes are not finished and not in the results. To end episodes, %s",
                f"{steps:,}", num_unfinished, len(episodes) + num_unfinished, _TIME_LIMIT,
            )  # fmt: skip
            break
        if steps > LONG_EPISODE_STEPS * num_envs and not warned:
            warned = True
            log.warning(
                "evaluation: no episode has ended in %s env steps so far: if it never ends, %s",
                f"{steps:,}", _TIME_LIMIT,
            )  # fmt: skip
    return episodes, num_unfinished


def summarize_episodes(played: EvaluationEpisodes, policies: Sequence[str] = ()) -> dict[str, Any]:
    """Return the metrics of an evaluation; NaN without an episode.

    Args:
        played: from `evaluate_policies`.
        policies: ids of all policies. The returns of a single policy are those of the episodes.

    Returns:
        `episode_reward_mean`, `_min`, `_max`, `_std`, `episode_len_mean` [env steps],
        `policy_reward_mean` (policy id -> mean return per agent), `episodes`, their number,
        `num_faulty_episodes`, the number of those that were dropped, and
        `num_unfinished_episodes`, the number of those that did not end.
    """
    episodes = played.episodes
    returns = np.array([episode.episode_return for episode in episodes] or [np.nan])
    lengths = np.array([float(episode.episode_length) for episode in episodes] or [np.nan])
    by_policy = returns_by_policy(episodes, policies)
    return {
        "episode_reward_mean": float(returns.mean()),
        "episode_reward_min": float(returns.min()),
        "episode_reward_max": float(returns.max()),
        "episode_reward_std": float(returns.std()),
        "episode_len_mean": float(lengths.mean()),
        "policy_reward_mean": {p: _mean(values) for p, values in by_policy.items()},
        "episodes": len(episodes),
        "num_faulty_episodes": played.num_faulty,
        "num_unfinished_episodes": played.num_unfinished,
    }


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


class EvaluationWorkers:
    """Ray actors that share the episodes of an evaluation.

    Args:
        config: the evaluation's settings, see `evaluation_settings`.
        policy_class: default class of the policies.
    """

    def __init__(self, config: AlgorithmConfig, policy_class: type[Policy] | None):
        check_env(config)
        self._config = config
        self._policy_class = policy_class
        self._workers = self._new_workers()
        self._has_stopped = False
        self._requests: list[Any] = []  # ray.ObjectRef of each worker's episodes
        self._started_at = 0.0  # time.monotonic() of the running evaluation
        self._started: list[Any] = []  # ray.ObjectRef of each worker's first reply
        self._have_started = False  # the workers have sent these replies, or took too long
        self._policies: list[str] = []
        self._iteration = 0
        self._num_lost = 0  # evaluations in a row that were lost because a worker died

    def _new_workers(self) -> WorkerSet:
        config = adjusted(
            self._config,
            num_workers=self._config.evaluation_num_workers,
            num_spare_workers=0,
            num_envs_per_worker=1,
            sample_async=False,
            callbacks_class=None,
        )
        return WorkerSet(config.env_or_spaces(), self._policy_class, config)

    @property
    def is_running(self) -> bool:
        """Whether an evaluation has started and `collect` has not returned it."""
        return bool(self._requests)

    def prepare(self) -> None:
        """Start the processes of the workers, unless they run."""
        if self._has_stopped:
            self._workers, self._has_stopped = self._new_workers(), False
        if not self._started:
            workers = self._workers.remote_workers()
            self._started = [worker.apply.remote(_has_started) for worker in workers]

    def start(self, policies: dict[str, Policy], explore: bool, iteration: int) -> None:
        """Start an evaluation of the policies in their current state, after `prepare`; return
        immediately."""
        weights = {pid: policy.get_weights() for pid, policy in policies.items()}
        filters = {pid: policy.filter_state_dict() for pid, policy in policies.items()}
        first = next(iter(policies.values()))
        global_vars = {
            "timestep": max(policy.timestep for policy in policies.values()),
            "total_timesteps": first.total_timesteps,
        }
        workers = self._workers.remote_workers()
        config, count = self._config, len(workers)
        durations = [config.evaluation_duration // count] * count
        for i in range(config.evaluation_duration % count):
            durations[i] += 1
        self._iteration, self._started_at = iteration, time.monotonic()
        self._policies = list(policies)
        versions = {pid: policy.version for pid, policy in policies.items()}
        state = weights, versions, filters, global_vars, iteration
        self._requests = [
            worker.apply.remote(_evaluate_on_worker, state, config, duration, explore, part)
            for part, (worker, duration) in enumerate(zip(workers, durations, strict=True))
            if duration
        ]

    def is_done(self) -> bool:
        """Return whether `collect` would return without waiting."""
        if self._wait(0.0):
            return True
        return self._wait_for_start(0.0) and self._seconds_left() <= 0

    def _wait(self, seconds: float) -> bool:
        """Wait for the running evaluation, and return whether it is complete."""
        count = len(self._requests)
        return len(ray_health.wait(self._requests, count, seconds)) == count

    def _seconds_left(self) -> float:
        """Return the time until the running evaluation is stopped [s]; the start of new workers may
        take STARTING_S in addition."""
        if (limit := self._config.evaluation_timeout_s) is None:
            return math.inf
        return self._started_at + limit - time.monotonic()

    def _wait_for_start(self, seconds: float) -> bool:
        """Wait until new workers have started, and return whether they have, or took too long. The
        time of the evaluation begins then."""
        if self._config.evaluation_timeout_s is None or self._have_started:
            return True
        left = self._started_at + STARTING_S - time.monotonic()
        count = len(self._started)
        ready = ray_health.wait(self._started, count, max(0.0, min(seconds, left)))
        if len(ready) < count and left > seconds:
            return False
        self._have_started = True
        self._started_at = min(time.monotonic(), self._started_at + STARTING_S)
        return True

    def collect(self) -> dict[str, Any] | None:
        """Wait for the running evaluation and return its metrics.

        `training_iteration` is the iteration of the evaluated policies. Returns None if a worker
        died, or did not finish in `evaluation_timeout_s`: the evaluation is lost, and the next one
        starts new workers.

        Raises:
            Exception: an error on a worker, or its death: the third in a row, or the first if
                `recreate_failed_workers` is False.
        """
        from ray.exceptions import RayTaskError

        limit = self._config.evaluation_timeout_s
        num_lost, self._num_lost = self._num_lost, 0
        if not self._wait(0.0):
            self._wait_for_start(math.inf)
        if limit is not None and not self._wait(max(0.0, self._seconds_left())):
            self._stop_lost(f"it took longer than evaluation_timeout_s={limit:g}")
            return None
        if limit is None and not self._wait(LONG_WAIT_S):
            log.warning(
                "training has waited for the evaluation for %.0f s; evaluation_timeout_s would "
                "limit this time, for example if an environment hangs", LONG_WAIT_S,
            )  # fmt: skip
        try:
            parts = ray_health.get(self._requests)
        except death_errors() as error:
            num_lost += 1
            if num_lost == MAX_LOST:
                add_note(
                    error,
                    f"{MAX_LOST} evaluations in a row were lost because an evaluation worker died; "
                    "the warnings above have the causes. If the workers lack memory, reduce "
                    "evaluation_num_workers",
                )
            if num_lost == MAX_LOST or not self._config.recreate_failed_workers:
                self.stop()
                raise
            self._num_lost = num_lost
            self._stop_lost(f"a worker died: {error!r}")
            return None
        except RayTaskError as error:
            raise original_error(error) from None
        finally:
            self._requests = []
        episodes = [EpisodeMetrics(*fields) for part in parts for fields in part.episodes]
        played = EvaluationEpisodes(
            episodes,
            sum(part.num_faulty for part in parts),
            sum(part.num_unfinished for part in parts),
        )
        metrics = summarize_episodes(played, self._policies)
        return NamedMetrics({**metrics, "training_iteration": self._iteration})

    def _stop_lost(self, reason: str) -> None:
        """Stop the workers of an evaluation that is lost."""
        log.warning("the evaluation is lost because %s", reason)
        self.stop()

    def discard(self) -> None:
        """Ignore the running evaluation, and stop the workers that play it."""
        if self._requests and not self._wait(0.0):
            self.stop()
        self._requests = []

    def stop(self) -> None:
        """Stop the workers; another evaluation starts new ones."""
        self._requests, self._started, self._have_started = [], [], False
        self._workers.stop()
        self._has_stopped = True


def _has_started(worker: RolloutWorker) -> None:
    """Do nothing: the reply says that the worker has started."""


def _evaluate_on_worker(
    worker: RolloutWorker, state: tuple[Any, ...], config: AlgorithmConfig, duration: int,
    explore: bool, part: int,
) -> EvaluationEpisodes:  # fmt: skip
    *weights_and_more, iteration = state
    worker.set_weights(*weights_and_more)
    by_steps = config.evaluation_duration_unit == "timesteps"
    num_envs = config.num_envs_per_worker
    video = None if part else recorder_for(config, iteration)
    return evaluate_policies(
        worker.policy_map, config, duration, explore, num_envs, by_steps, part, video
    )


def recorder_for(config: AlgorithmConfig, iteration: int) -> VideoRecorder | None:
    """Return the recorder of an evaluation's video, or None if there is no video."""
    folder = config.evaluation_video_dir
    if folder is None:
        return None
    name, episodes = f"iteration-{iteration:06d}", config.evaluation_video_episodes
    return VideoRecorder(folder, name, episodes, "evaluation_video_dir")


def check_evaluation_workers(config: AlgorithmConfig) -> None:
    """Check that the cluster has the GPUs and custom resources of all rollout and evaluation
    workers and learners.

    Raises:
        ConfigError: it does not have them.
    """
    settings = adjusted(evaluation_settings(config), num_workers=config.evaluation_num_workers)
    num_learner_gpus = config.get("num_gpus", 0) if settings.num_gpus_per_worker else 0
    check_evaluation_resources([config, settings], num_learner_gpus)


def check_evaluation_env(config: AlgorithmConfig, policies: dict[str, Policy]) -> None:
    """Create the environment of `evaluation_config` once, to check that evaluations will work.

    Raises:
        ConfigError: it cannot be created, its spaces differ from the policies', or
            `evaluation_video_dir` is set and it does not render.
    """
    settings = adjusted(evaluation_settings(config), callbacks_class=None)
    if config.evaluation_video_dir is not None:
        check_env(settings)
        context = EnvContext(dict(settings.env_config), atari=settings.atari)
        check_rendering(settings.env, context, "evaluation_video_dir")
    if not set(config.evaluation_config) - {"explore", "num_envs_per_worker"}:
        return
    specs = {
        pid: PolicySpec(_evaluation_policy(policy, False), config=policy.config)
        for pid, policy in policies.items()
    }
    check_env(settings)
    try:
        worker = RolloutWorker(settings.env_or_spaces(), specs, settings)
    except Exception as error:
        raise ConfigError(f"evaluation_config: cannot create its environment: {error}") from error
    try:
        for policy_id, policy in policies.items():
            for name in ("observation_space", "action_space"):
                space = getattr(policy, name)
                env_space = getattr(worker.policy_map[policy_id], name)
                if not are_compatible(space, env_space):
                    raise ConfigError(
                        f"evaluation_config: its environment has the {name} {env_space}, but "
                        f"policy {policy_id!r} has {space}"
                    )
    finally:
        worker.stop()


def evaluation_settings(config: AlgorithmConfig) -> AlgorithmConfig:
    """Return the settings with those of `evaluation_config` applied.

    Raises:
        ConfigError: `evaluation_config` has an unknown setting.
    """
    try:
        overrides = config.evaluation_overrides()
        settings = config.updated(**overrides)
    except ConfigError as error:
        raise ConfigError(f"evaluation_config: {error}") from None
    one_env = {} if "num_envs_per_worker" in overrides else {"num_envs_per_worker": 1}
    return adjusted(settings, **one_env)


def _evaluation_policy(policy: Policy, explore: bool) -> type[Policy]:
    """Return a policy class that acts like `policy` with its own random stream and noise.

    It does not learn and does not update its filters. Of the policy's outputs it records only those
    that its views read.
    """
    views = policy.view_requirements
    viewed = {view.data_col or name for name, view in acting_views(views).items()}

    class EvaluationPolicy(Policy):
        config_class = type(policy.config)
        __module__ = type(policy).__module__  # samplers copy observations for classes of users

        def __init__(self, observation_space: Any, action_space: Any, config: AlgorithmConfig):
            super().__init__(observation_space, action_space, config)
            self.reward_scaler = None
            self.view_requirements = dict(views)
            own, trained = self.observation_filter, policy.observation_filter
            fits = are_compatible(
                policy.observation_space, observation_space
            )  # else an error, later
            if own is not None and trained is not None and fits:
                own.load_state_dict(trained.state_dict())
            self._network_rng = random_stream(self.config.seed, "policy", "network")
            self.timestep, self.total_timesteps = policy.timestep, policy.total_timesteps
            self.version = policy.version
            copied = getattr(policy, "exploration_for_evaluation", None)
            self._exploration = None if copied is None else copied()

        @property
        def acts_on_views(self) -> bool:
            return policy.acts_on_views

        def compute_actions(
            self, obs_batch: Any, explore: bool = explore
        ) -> tuple[np.ndarray, list[np.ndarray], dict[str, np.ndarray]]:
            return self._act(policy.compute_actions, obs_batch, explore)

        def compute_actions_from_input_dict(
            self, input_dict: dict[str, Any], explore: bool = explore
        ) -> tuple[np.ndarray, list[np.ndarray], dict[str, np.ndarray]]:
            return self._act(policy.compute_actions_from_input_dict, input_dict, explore)

        def _act(self, compute: Any, inputs: Any, explore: bool) -> Any:
            # the index: the same exploration in this process as on evaluation workers
            own: dict[str, Any] = {"rng": self.rng, "worker_index": 0, "num_workers": 0}
            if hasattr(policy, "_network_rng"):
                own["_network_rng"] = self._network_rng
            if self._exploration is not None:
                own["exploration"] = self._exploration
            of_training = {name: getattr(policy, name) for name in own}
            vars(policy).update(own)
            try:
                actions, states, outputs = compute(inputs, explore=explore)
            finally:
                vars(policy).update(of_training)
            return actions, states, {name: outputs[name] for name in viewed & outputs.keys()}

        def get_initial_state(self) -> list[np.ndarray]:
            return policy.get_initial_state()

        def get_weights(self) -> dict[str, np.ndarray]:
            return policy.get_weights()

        def actions_for_env(self, actions: np.ndarray) -> np.ndarray:
            return policy.actions_for_env(actions)

    return EvaluationPolicy
