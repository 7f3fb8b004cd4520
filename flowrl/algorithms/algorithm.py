"""Algorithm: the workers, the plan that drives them, and one result at a time."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch

import flowrl
from flowrl.algorithms.config import AlgorithmConfig
from flowrl.algorithms.plans import load_plan, modules_of, plan_path
from flowrl.data import DEFAULT_POLICY_ID
from flowrl.data.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from flowrl.iter import LocalIterator
from flowrl.iter.stage import walk
from flowrl.ops import (
    ApplyGradients,
    ResultDict,
    StandardMetricsReporting,
    TrainingSteps,
    TrainOneStep,
    UpdateTargetNetwork,
    synchronous_parallel_sample,
    train_one_step,
)
from flowrl.policies.config import ConfigError
from flowrl.policies.policy import Policy
from flowrl.policies.policy_spec import PolicySpec, specs_of
from flowrl.policies.saved import describe
from flowrl.sampling.callbacks import call
from flowrl.sampling.episode import EpisodeMetrics
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.worker_set import WorkerSet
from flowrl.seeding import derive_seed

ENDLESS_STEPS = 200_000  # of an evaluation in which no episode ends


class Algorithm:
    """Trains by pulling results from an execution plan.

    A subclass names its `policy_class` and `config_class`. The plan is the file that `config.plan`
    names; a static `execution_plan(workers, config)` of the subclass; or the subclass' own
    `training_step`, called again and again (that of this class, where nothing else is given).

    Args:
        config: settings; a mapping is merged over the defaults.

    Attributes:
        workers: the WorkerSet.
        iteration: results so far.
    """

    policy_class: ClassVar[type[Policy] | None] = None  # None: every policy has its own
    config_class: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    execution_plan: ClassVar[Any] = None

    def __init__(self, config: Any):
        if not isinstance(config, self.config_class):
            config = self.config_class(**dict(config.items()))
        config.check()
        self.config = config
        self.iteration = 0
        self._time_total_s = 0.0
        self._plan: LocalIterator[dict[str, Any]] | None = None
        self.setup(config)

    def setup(self, config: AlgorithmConfig) -> None:
        """Make the WorkerSet (it starts nothing yet) and find the plan."""
        assert config.env is not None
        self.workers = WorkerSet(config.env, self.policy_class, config)
        self._module: Any = None  # of the plan, where it is a file
        steps = type(self).training_step is not Algorithm.training_step
        if steps and self.execution_plan is not None:
            raise ConfigError(
                f"{type(self).__name__} has both a training_step and an execution_plan: one of them"
            )
        if self.execution_plan is not None:
            self._build_plan = self.execution_plan
        elif steps or (config.plan is None and type(config).model_fields["plan"].default is None):
            self._build_plan = self._plan_of_steps
        elif config.plan is None:
            raise ConfigError("plan: no execution plan is set; shipped plans: `flowrl plans`")
        else:
            module = self._module = load_plan(config.plan)
            self._build_plan = module.execution_plan
            if config.num_workers:
                import ray

                for part in modules_of(module):
                    ray.cloudpickle.register_pickle_by_value(part)

    def training_step(self) -> ResultDict:
        """One round of sampling and learning: override it to write an algorithm.

        This one is plain policy gradients': rollouts of all workers until there are
        `train_batch_size` env steps, one training on them, new weights for the workers. Called at
        each `train()`, again until `min_sample_timesteps_per_iteration` and the like hold.

        Returns:
            policy id -> {"learner_stats": …, "num_agent_steps_trained": n}; anything else in it is
            reported in `info`.
        """
        by_agent = self.config.count_steps_by == "agent_steps"
        limit = "max_agent_steps" if by_agent else "max_env_steps"
        train_batch = synchronous_parallel_sample(
            worker_set=self.workers, **{limit: self.config.train_batch_size}
        )
        train_results = train_one_step(self, train_batch)
        self.workers.sync_weights()
        return train_results

    def _plan_of_steps(self, workers: WorkerSet, config: AlgorithmConfig) -> Any:
        return StandardMetricsReporting(TrainingSteps(self), workers, config)

    @property
    def plan(self) -> LocalIterator[dict[str, Any]]:
        """The execution plan, built when first asked for."""
        if self._plan is None:
            self._plan = self._new_plan()
        return self._plan

    def _new_plan(self) -> LocalIterator[dict[str, Any]]:
        plan = self._build_plan(self.workers, self.config)
        if not isinstance(plan, LocalIterator):
            raise ConfigError(
                "plan: execution_plan(workers, config) must return the stream that ends in "
                f"StandardMetricsReporting, it returned a {type(plan).__name__}"
            )
        self._look_at_targets([getattr(stage, "fn", None) for stage in walk(plan.stage)])
        return plan

    def _look_at_targets(self, operators: list[Any]) -> None:
        """Warn of a policy that learns with a target network which nothing moves."""
        if any(isinstance(operator, UpdateTargetNetwork) for operator in operators):
            return
        specs = specs_of(self.config.policies or {DEFAULT_POLICY_ID: None})
        for operator in operators:
            if not isinstance(operator, (TrainOneStep, ApplyGradients)):
                continue
            for policy_id in specs if operator.policies is None else operator.policies:
                own = specs[policy_id]
                made = own.policy_class or getattr(own.config, "policy_class", None)
                if hasattr(made or self.policy_class, "update_target"):
                    warnings.warn(
                        f"policy {policy_id!r} learns with a target network, but nothing in the "
                        "plan moves that: chain UpdateTargetNetwork after TrainOneStep",
                        stacklevel=2,
                    )

    def train(self) -> dict[str, Any]:
        """One result of the plan, with `training_iteration` and times [s]."""
        started = time.perf_counter()
        self.plan.start(self.config.seed)
        try:
            result = next(self.plan)
        except StopIteration:
            raise RuntimeError("the plan has ended: it gives no more results") from None
        if type(result) is not dict or "timesteps_total" not in result:
            raise ConfigError(
                f"plan: it must end in StandardMetricsReporting, it gave a {type(result).__name__}"
            )
        elapsed = time.perf_counter() - started
        self.iteration += 1
        self._time_total_s += elapsed
        whole = {
            "training_iteration": self.iteration,
            **result,
            "time_this_iter_s": elapsed,
            "time_total_s": self._time_total_s,
        }
        call(self.workers.local_worker().callbacks.on_train_result, algorithm=self, result=whole)
        return whole

    def get_policy(self, policy_id: str | None = None) -> Policy:
        """A policy of the local worker; the default one, or the first, if none is named.

        Raises:
            ConfigError: there is no such policy.
        """
        worker = self.workers.local_worker()
        if policy_id is None:
            return worker.policy
        if policy_id not in worker.policy_map:
            raise ConfigError(f"no policy {policy_id!r} here: there are {list(worker.policy_map)}")
        return worker.policy_map[policy_id]

    def compute_single_action(
        self, observation: Any, explore: bool = False, policy_id: str | None = None
    ) -> Any:
        """The action for one observation, as the environment takes it.

        Args:
            policy_id: of the policy that acts; see `get_policy`.

        Raises:
            ValueError: the observation is not finite.
        """
        array = np.asarray(observation)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"the observation is not finite: {array}")
        return self.get_policy(policy_id).compute_single_action(observation, explore=explore)

    def evaluate(
        self, episodes: int | None = None, explore: bool = False, num_envs: int = 1
    ) -> dict[str, Any]:
        """Whole episodes in new environments with the policies as they are; filters are frozen,
        callbacks are not called.

        Args:
            episodes: how many; `evaluation_num_episodes` if None.
            explore: sample actions instead of taking the most likely ones.
            num_envs: environments stepped together; each plays its share, so that short episodes
                are not preferred.

        Returns:
            `episode_reward_mean`, `_min`, `_max`, `_std`, `episode_len_mean`, `episodes`; of
            several agents `policy_reward_mean`, policy id -> mean return of each of its agents.
        """
        count = episodes if episodes is not None else self.config.evaluation_num_episodes
        if count < 1:
            raise ConfigError(f"episodes: at least 1 is needed, got {count}")
        policies = self.workers.local_worker().policy_map
        finished = evaluate_policies(policies, self.config, count, explore, num_envs)
        returns = np.array([episode.episode_return for episode in finished])
        lengths = np.array([episode.episode_length for episode in finished])
        return {
            "episode_reward_mean": float(returns.mean()),
            "episode_reward_min": float(returns.min()),
            "episode_reward_max": float(returns.max()),
            "episode_reward_std": float(returns.std()),
            "episode_len_mean": float(lengths.mean()),
            "policy_reward_mean": _by_policy(finished),
            "episodes": len(finished),
        }

    # -- checkpoints ---------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint holds: the learner, the plan's counters and operators, the clock."""
        return {
            "worker": self.workers.local_worker().get_state(),
            "plan": self.plan.state_dict(),
            "global_vars": dict(self.workers.global_vars),
            "iteration": self.iteration,
            "time_total_s": self._time_total_s,
        }

    def save(self, path: Path | str) -> Path:
        """Write a checkpoint folder, atomically. See `flowrl.data.checkpoint`."""
        policies = self.workers.local_worker().policy_map
        about = {
            "flowrl": flowrl.__version__,
            "torch": torch.__version__,
            "gymnasium": gymnasium.__version__,
            "algorithm": f"{type(self).__module__}:{type(self).__qualname__}",
            "plan": self.config.plan,
            "plan_sha256": self._plan_hash(),
            "policies": {pid: describe(policy) for pid, policy in policies.items()},
        }
        return write_checkpoint(path, self.get_state(), about)

    def _plan_hash(self) -> str | None:
        if self._module is None:
            return None
        return hashlib.sha256(plan_path(self.config.plan).read_bytes()).hexdigest()

    def restore(self, path: Path | str) -> None:
        """Go on from a checkpoint of the same plan and settings.

        Raises:
            CheckpointError: it cannot be read, or is of another plan or network; nothing changed.
        """
        state, manifest = read_checkpoint(path)
        if manifest.get("plan_sha256") != self._plan_hash():
            raise CheckpointError(
                f"{path}: it was written by another plan ({manifest.get('plan')!r}, or an earlier "
                f"text of it, which a run directory keeps as plan.py) than {self.config.plan!r}"
            )
        plan = self._new_plan()  # the one that runs cannot go back
        with _fitting(path):
            iteration, seconds = int(state["iteration"]), float(state["time_total_s"])
            global_vars = dict(state["global_vars"])
            plan.load_state_dict(state["plan"])
            self.workers.local_worker().set_state(state["worker"])
        if self._plan is not None:
            self._plan.stop()
        self._plan = plan
        self.workers.forget_sent()
        self.workers.global_vars.update(global_vars)
        self.iteration, self._time_total_s = iteration, seconds

    def restore_policies(self, path: Path | str) -> None:
        """Take only the policies from a checkpoint, whatever the plan: to play, or to start from.

        Raises:
            CheckpointError: it cannot be read, or is of another network.
        """
        state, _ = read_checkpoint(path)
        with _fitting(path):
            self.workers.local_worker().set_state(state["worker"])
        self.workers.forget_sent()

    def stop(self) -> None:
        """End the workers and whatever the plan owns."""
        if self._plan is not None:
            self._plan.stop()
        self.workers.stop()

    def __enter__(self) -> Algorithm:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


@contextmanager
def _fitting(path: Path | str) -> Iterator[None]:
    """What goes wrong when a state is taken over is the checkpoint's fault."""
    try:
        yield
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{path}: it does not fit these settings: {type(error).__name__}: {error}"
        ) from error


def _by_policy(episodes: list[EpisodeMetrics]) -> dict[str, float]:
    """Mean return of the agents of each policy."""
    returns: dict[str, list[float]] = {}
    for episode in episodes:
        for _, policy_id, value in episode.agent_returns or ():
            returns.setdefault(policy_id, []).append(value)
    return {policy_id: float(np.mean(values)) for policy_id, values in returns.items()}


def evaluate_policies(
    policies: dict[str, Policy],
    config: AlgorithmConfig,
    episodes: int,
    explore: bool,
    num_envs: int,
) -> list[EpisodeMetrics]:
    """Play whole episodes with frozen filters; the first ones of every environment count."""
    assert config.env is not None
    settings = config.updated(
        num_envs_per_worker=min(num_envs, episodes),
        seed=derive_seed(config.seed, "evaluation"),
        rollout_fragment_length=64,
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
    players = {
        policy_id: PolicySpec(
            _player(policy, explore), policy.observation_space, policy.action_space, policy.config
        )
        for policy_id, policy in policies.items()
    }
    worker = RolloutWorker(config.env, players, settings)
    envs = worker.num_envs
    share = [episodes // envs + (i < episodes % envs) for i in range(envs)]
    finished: list[EpisodeMetrics] = []
    try:
        while any(share):
            worker.sample()
            if not finished and worker.env_steps > ENDLESS_STEPS:
                raise RuntimeError(
                    f"no episode ended in {worker.env_steps:,} env steps: give the environment "
                    "a limit (gymnasium.wrappers.TimeLimit)"
                )
            for episode in worker.get_metrics():
                if share[episode.env_id]:
                    share[episode.env_id] -= 1
                    finished.append(episode)
    finally:
        worker.stop()
    return finished


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
