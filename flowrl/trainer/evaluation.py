"""Evaluation: whole episodes in environments of their own, in this process or on actors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.envs.registry import NO_ENV_MESSAGE, EnvContext
from flowrl.policies.policy import Policy
from flowrl.policies.policy_spec import PolicySpec
from flowrl.sampling.episode import EpisodeMetrics
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.worker_set import WorkerSet
from flowrl.seeding import derive_seed
from flowrl.settings import ConfigError
from flowrl.trainer.video import Recording, check_renders

if TYPE_CHECKING:
    from flowrl.trainer.config import AlgorithmConfig

log = logging.getLogger("flowrl")

ENDLESS_STEPS = 200_000  # of an evaluation in which no episode ends


def check_env(config: AlgorithmConfig) -> None:
    """Refuse to evaluate where there are only the spaces of recorded experience.

    Raises:
        ConfigError
    """
    if config.env is None:
        raise ConfigError(NO_ENV_MESSAGE)


def evaluate_policies(
    policies: dict[str, Policy],
    config: AlgorithmConfig,
    duration: int,
    explore: bool,
    num_envs: int,
    by_steps: bool = False,
    part: int = 0,
    video: Recording | None = None,
) -> list[EpisodeMetrics]:
    """Play whole episodes with frozen filters; the first ones of every environment count.

    Args:
        duration: episodes; `by_steps` env steps at least, of which the episodes that ended count.
        part: of several evaluations beside each other, each with episodes of its own.
        video: records the first environment's first episodes; closed at the end.
    """
    check_env(config)
    purpose = ("evaluation", part) if part else ("evaluation",)
    envs = min(num_envs, duration)
    settings = config.updated(
        num_envs_per_worker=envs,
        seed=derive_seed(config.seed, *purpose),
        rollout_fragment_length=min(64, -(-duration // envs)) if by_steps else 64,
        batch_mode="truncate_episodes",
        count_steps_by="env_steps",
        horizon=None if config.soft_horizon else config.horizon,
        soft_horizon=False,
        sample_async=False,
        sample_collector=None,
        callbacks_class=None,
        normalize_rewards=False,
        explore=explore,
        collect_infos=False,
        policies=None,
        policies_to_train=None,
    )
    players = {
        policy_id: PolicySpec(
            _player(policy, explore), policy.observation_space, policy.action_space, policy.config
        )
        for policy_id, policy in policies.items()
    }
    env: Any = config.env
    if video is not None:
        env = video.creator(env)
        if settings.vectorization_mode == "vector_entry_point":  # which renders nothing
            settings = settings.updated(vectorization_mode="flowrl")
    worker = RolloutWorker(env, players, settings)
    envs = worker.num_envs
    share = [duration // envs + (i < duration % envs) for i in range(envs)]
    if video is not None and not by_steps:
        video.episodes = min(video.episodes, share[0])
    finished: list[EpisodeMetrics] = []
    try:
        while worker.env_steps < duration if by_steps else any(share):
            worker.sample()
            if not finished and worker.env_steps > ENDLESS_STEPS and not by_steps:
                raise RuntimeError(
                    f"no episode ended in {worker.env_steps:,} env steps: give the environment "
                    "a limit (gymnasium.wrappers.TimeLimit)"
                )
            for episode in worker.get_metrics():
                if share[episode.env_id] or by_steps:
                    share[episode.env_id] -= 1
                    finished.append(episode)
    finally:
        if video is not None:
            video.close()
        worker.stop()
    return finished


def summary(episodes: list[EpisodeMetrics], policies: Sequence[str] = ()) -> dict[str, Any]:
    """What is told of an evaluation; NaN where no episode ended.

    Args:
        policies: those that there are; where it is one, its returns are the episodes'.
    """
    returns = np.array([episode.episode_return for episode in episodes] or [np.nan])
    lengths = np.array([float(episode.episode_length) for episode in episodes] or [np.nan])
    by_policy: dict[str, list[float]] = {}
    for episode in episodes:
        for _, policy_id, value in episode.agent_returns or ():
            by_policy.setdefault(policy_id, []).append(value)
    if len(policies) == 1 and not by_policy:
        by_policy = {policies[0]: returns.tolist()}
    return {
        "episode_reward_mean": float(returns.mean()),
        "episode_reward_min": float(returns.min()),
        "episode_reward_max": float(returns.max()),
        "episode_reward_std": float(returns.std()),
        "episode_len_mean": float(lengths.mean()),
        "policy_reward_mean": {p: float(np.mean(values)) for p, values in by_policy.items()},
        "episodes": len(episodes),
    }


class EvaluationWorkers:
    """Evaluations on actors: `evaluation_num_workers` of them, which share the episodes.

    Args:
        config: the algorithm's settings, with those of `evaluation_config` over them.
        policy_class: of the policies that do not say theirs.
    """

    def __init__(self, config: AlgorithmConfig, policy_class: type[Policy] | None):
        check_env(config)
        self._config = config
        plain = config.updated(
            num_workers=config.evaluation_num_workers, num_envs_per_worker=1, sample_async=False
        )
        self._workers = WorkerSet(config.env_or_spaces(), policy_class, plain)
        self._running: list[Any] = []
        self._policies: list[str] = []
        self._iteration = 0

    @property
    def is_running(self) -> bool:
        """Whether an evaluation was begun and not taken."""
        return bool(self._running)

    def begin(self, policies: dict[str, Policy], explore: bool, iteration: int) -> None:
        """Let all workers play with these policies as they are now; returns at once."""
        weights = {pid: policy.get_weights() for pid, policy in policies.items()}
        filters = {pid: policy.filter_state() for pid, policy in policies.items()}
        told = {"timestep": max(policy.timestep for policy in policies.values())}
        workers = self._workers.remote_workers()
        config, count = self._config, len(workers)
        share = [config.evaluation_duration // count] * count
        for i in range(config.evaluation_duration % count):
            share[i] += 1
        self._iteration = iteration
        self._policies = list(policies)
        told_all = weights, filters, told, iteration
        self._running = [
            worker.apply.remote(_play, told_all, config, duration, explore, part)
            for part, (worker, duration) in enumerate(zip(workers, share, strict=True))
            if duration
        ]

    def is_done(self) -> bool:
        """Whether an evaluation that was begun can be taken without waiting."""
        import ray

        ready, _ = ray.wait(self._running, num_returns=len(self._running), timeout=0)
        return len(ready) == len(self._running)

    def take(self) -> dict[str, Any] | None:
        """The evaluation that was begun, waited for; `training_iteration` is the policies'. None
        where a worker died, which is made again: the evaluation is lost.

        Raises:
            what a worker raised; that it died, where dead workers are not to be made again.
        """
        import ray

        running, self._running = self._running, []
        try:
            played = ray.get(running)
        except ray.exceptions.RayActorError as error:
            self._workers.stop()
            if not self._config.recreate_failed_workers:
                raise
            log.warning("an evaluation is lost, as a worker of it died: %r", error)
            return None
        episodes = [EpisodeMetrics(*one) for part in played for one in part]
        return {**summary(episodes, self._policies), "training_iteration": self._iteration}

    def forget(self) -> None:
        """Let go of an evaluation that was begun: the run is another one now."""
        self._running = []

    def stop(self) -> None:
        """End the workers."""
        self._running = []
        self._workers.stop()


def _play(
    worker: RolloutWorker, payload: tuple[Any, ...], config: Any, duration: int, explore: bool,
    part: int,
) -> list[tuple[Any, ...]]:  # fmt: skip
    weights, filters, told, iteration = payload
    worker.set_weights(weights, None, filters, told)
    by_steps = config.evaluation_duration_unit == "timesteps"
    envs = config.num_envs_per_worker
    video = None if part else recording_of(config, iteration)
    played = evaluate_policies(
        worker.policy_map, config, duration, explore, envs, by_steps, part, video
    )
    return [tuple(episode) for episode in played]


def recording_of(config: AlgorithmConfig, iteration: int) -> Recording | None:
    """The recording of an evaluation, if there is to be one."""
    folder = config.evaluation_video_dir
    if folder is None:
        return None
    return Recording(folder, f"iteration-{iteration:06d}", config.evaluation_video_episodes)


def check_evaluation_env(config: AlgorithmConfig, policies: dict[str, Policy]) -> None:
    """Refuse an environment of `evaluation_config` that cannot be made, or that the policies
    cannot act in, and one that renders nothing for a video; it is made once, and closed.

    Raises:
        ConfigError: see above.
    """
    settings = evaluation_settings(config).updated(num_envs_per_worker=1, callbacks_class=None)
    if config.evaluation_video_dir is not None:
        check_env(settings)
        check_renders(settings.env, EnvContext(dict(settings.env_config)))
    if not {"env", "env_config"} & set(config.evaluation_config):
        return
    players = {
        pid: PolicySpec(_player(policy, False), config=policy.config)
        for pid, policy in policies.items()
    }
    check_env(settings)
    try:
        worker = RolloutWorker(settings.env_or_spaces(), players, settings)
    except Exception as error:
        raise ConfigError(f"evaluation_config: its environment cannot be made: {error}") from error
    try:
        for policy_id, policy in policies.items():
            other = worker.policy_map[policy_id]
            for kind in ("observation_space", "action_space"):
                mine, theirs = getattr(policy, kind), getattr(other, kind)
                if type(mine) is not type(theirs) or mine.shape != theirs.shape:
                    raise ConfigError(
                        f"evaluation_config: its environment has the {kind} {theirs}, policy "
                        f"{policy_id!r} has {mine}"
                    )
    finally:
        worker.stop()


def evaluation_settings(config: AlgorithmConfig) -> AlgorithmConfig:
    """The settings with `evaluation_config` over them.

    Raises:
        ConfigError: an unknown setting in it.
    """
    own = {k: v for k, v in config.evaluation_config.items() if k != "explore"}
    try:
        return config.updated(**own)
    except ConfigError as error:
        raise ConfigError(f"evaluation_config: {error}") from None


def _player(policy: Policy, explore: bool) -> type[Policy]:
    """A policy class that acts as `policy` does, records nothing and learns nothing."""

    class Player(Policy):
        config_class = type(policy.config)

        def __init__(self, observation_space: Any, action_space: Any, config: Any):
            super().__init__(observation_space, action_space, config)
            self.reward_scaler = None
            self.view_requirements = dict(policy.view_requirements)
            if self.observation_filter is not None and policy.observation_filter is not None:
                self.observation_filter.load_state_dict(policy.observation_filter.state_dict())

        def compute_actions(
            self, obs_batch: Any, explore: bool = explore
        ) -> tuple[np.ndarray, list[np.ndarray], dict[str, np.ndarray]]:
            return self._played(policy.compute_actions, obs_batch, explore)

        def compute_actions_from_input_dict(
            self, input_dict: dict[str, Any], explore: bool = explore
        ) -> tuple[np.ndarray, list[np.ndarray], dict[str, np.ndarray]]:
            return self._played(policy.compute_actions_from_input_dict, input_dict, explore)

        def _played(self, act: Any, inputs: Any, explore: bool) -> Any:
            kept, policy.rng = policy.rng, self.rng
            try:
                actions, states, _ = act(inputs, explore=explore)
            finally:
                policy.rng = kept
            return actions, states, {}

        def get_initial_state(self) -> list[np.ndarray]:
            return policy.get_initial_state()

        def actions_for_env(self, actions: np.ndarray) -> np.ndarray:
            return policy.actions_for_env(actions)

    return Player
