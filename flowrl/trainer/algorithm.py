"""Algorithm: the workers, the plan that drives them, and one result at a time."""

from __future__ import annotations

import hashlib
import inspect
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import optree
import torch
from gymnasium import spaces

import flowrl
from flowrl.data import DEFAULT_POLICY_ID
from flowrl.data.checkpoint import (
    CheckpointError,
    read_checkpoint,
    write_checkpoint,
)
from flowrl.iter import LocalIterator
from flowrl.iter.gather import Gather
from flowrl.iter.stage import walk
from flowrl.ops import (
    ResultDict,
    StandardMetricsReporting,
    TrainingSteps,
    UpdateTargetNetwork,
    synchronous_parallel_sample,
    train_one_step,
)
from flowrl.ops.report import operators_of, training_operators
from flowrl.policies.checkpoint_loading import describe_policy
from flowrl.policies.json_codec import config_to_json
from flowrl.policies.policy import Policy
from flowrl.policies.policy_spec import specs_of
from flowrl.sampling.callbacks import call
from flowrl.sampling.worker_set import WorkerSet
from flowrl.settings import ConfigError
from flowrl.threads import limit_threads
from flowrl.trainer.checkpoint_loading import algorithm_from_checkpoint
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.evaluation import (
    EvaluationWorkers,
    check_evaluation_env,
    evaluate_policies,
    evaluation_settings,
    recorder_for,
    summarize_episodes,
)
from flowrl.trainer.loggers import ResultLoggers
from flowrl.trainer.plan_files import PLAN_MODULE, load_plan, modules_of, plan_path
from flowrl.trainer.video import VideoRecorder

log = logging.getLogger("flowrl")


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
        last_result: the newest one.
    """

    policy_class: ClassVar[type[Policy] | None] = None  # None: every policy has its own
    config_class: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    execution_plan: ClassVar[Any] = None

    def __init__(self, config: Any):
        if not isinstance(config, self.config_class):
            if isinstance(config, AlgorithmConfig) and not set(config.chosen()) <= set(
                self.config_class.model_fields
            ):
                raise ConfigError(
                    f"{type(self).__name__} takes a {self.config_class.__name__}, got a "
                    f"{type(config).__name__}"
                )
            config = self.config_class(**dict(config.items()))
        config.check()
        self.config = config = config.frozen()
        limit_threads(config.num_threads_per_process)
        self.iteration = 0
        self._time_total_s = 0.0
        self._save_s = 0.0
        self.last_result: dict[str, Any] | None = None
        self._plan: LocalIterator[dict[str, Any]] | None = None
        self._evaluation: EvaluationWorkers | None = None
        self._trackers = ResultLoggers(config)
        self._stopped = False
        self.setup(config)

    def setup(self, config: AlgorithmConfig) -> None:
        """Make the WorkerSet (it starts nothing yet) and find the plan."""
        self.workers = WorkerSet(config.env_or_spaces(), self.policy_class, config)
        self._module: Any = None  # of the plan, where it is a file
        self._said_left_out = False
        steps = type(self).training_step is not Algorithm.training_step
        if steps and self.execution_plan is not None:
            raise ConfigError(
                f"{type(self).__name__} has both a training_step and an execution_plan: one of them"
            )
        own = steps or self.execution_plan is not None
        if not own and config.plan is None and not self._may_do_without(config):
            raise ConfigError("plan: no execution plan is set; shipped plans: `flowrl plans`")
        if config.plan is not None and (not own or type(self).__module__.startswith(PLAN_MODULE)):
            self._module = load_plan(config.plan)
        if self.execution_plan is not None:
            self._build_plan = self.execution_plan
        elif own or self._module is None:
            self._build_plan = self._plan_of_steps
        else:
            self._build_plan = self._module.execution_plan
        if self._module is not None and config.num_workers:
            import ray

            for part in modules_of(self._module):
                ray.cloudpickle.register_pickle_by_value(part)

    @staticmethod
    def _may_do_without(config: AlgorithmConfig) -> bool:
        """Whether there is no plan and none is missing: this class has a step of its own."""
        return config.plan is None and type(config).model_fields["plan"].default is None

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
        own: AlgorithmConfig = self.config
        try:
            inspect.signature(self._build_plan).bind(self.workers, own)
        except TypeError as error:
            raise ConfigError(f"plan: execution_plan(workers, config) is needed: {error}") from None
        try:
            plan = self._build_plan(self.workers, own)
        except AttributeError as error:
            if error.obj is not own:
                raise
            raise ConfigError(
                f"plan: {own.plan!r} asks its settings for {error.name!r}, which a "
                f"{type(own).__name__} has not got: it is for another algorithm"
            ) from error
        if not isinstance(plan, LocalIterator):
            raise ConfigError(
                "plan: execution_plan(workers, config) must return the stream that ends in "
                f"StandardMetricsReporting, it returned a {type(plan).__name__}"
            )
        self._warn_of_fixed_targets(plan)
        return plan

    def _warn_of_fixed_targets(self, plan: LocalIterator[Any]) -> None:
        """Warn if a policy learns with a target network that the plan never updates."""
        if any(isinstance(op, UpdateTargetNetwork) for _, op in operators_of(plan.stage)):
            return
        specs = specs_of(self.config.policies or {DEFAULT_POLICY_ID: None})
        for operator in training_operators(plan.stage):
            for policy_id in specs if operator.policies is None else operator.policies:
                spec = specs[policy_id]
                policy_class = spec.policy_class or getattr(spec.config, "policy_class", None)
                if hasattr(policy_class or self.policy_class, "update_target"):
                    warnings.warn(
                        f"policy {policy_id!r} learns with a target network, but the plan never "
                        "updates it: chain UpdateTargetNetwork after TrainOneStep",
                        stacklevel=2,
                    )

    def train(self) -> dict[str, Any]:
        """One result of the plan, with `training_iteration` and times [s]."""
        self._trackers.failed = True
        result = self._train()
        self._trackers.failed = False
        return result

    def _train(self) -> dict[str, Any]:
        if self._stopped:
            raise RuntimeError("this algorithm was stopped: build another one")
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
        if self._save_s:
            whole["timers"]["checkpoint_time_ms"] = 1000 * self._save_s
            self._save_s = 0.0
        self.last_result = whole  # is there whatever becomes of its evaluation
        self._evaluate_if_due(whole)
        call(self.workers.local_worker().callbacks.on_train_result, algorithm=self, result=whole)
        if self.config.log_to:
            self._trackers.write(whole)
        return whole

    def check_evaluation(self) -> None:
        """Refuse evaluations that cannot be: see `check_evaluation_env`."""
        policies = self.workers.local_worker().policy_map
        check_evaluation_env(self.config, policies)

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
        policy = self.get_policy(policy_id)
        nested = isinstance(policy.observation_space, (spaces.Dict, spaces.Tuple))
        leaves: Any = optree.tree_leaves(observation) if nested else [observation]
        for leaf in map(np.asarray, leaves):
            if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                raise ValueError(f"the observation is not finite: {observation}")
        return policy.compute_single_action(observation, explore=explore)

    def evaluate(
        self,
        episodes: int | None = None,
        explore: bool | None = None,
        num_envs: int | None = None,
        timesteps: int | None = None,
        video_dir: Path | str | None = None,
    ) -> dict[str, Any]:
        """Whole episodes in new environments with the policies as they are; filters are frozen,
        callbacks are not called. In this process, with the settings of `evaluation_config`.

        Args:
            episodes: how many; `evaluation_duration` if None.
            explore: sample actions instead of taking the most likely ones; if None as
                `evaluation_config` says, or not.
            num_envs: environments stepped together; each plays its share, so that short episodes
                are not preferred.
            timesteps: env steps instead of episodes; the episodes that ended in them count.
            video_dir: folder for mp4 videos of the first episodes (extra `video`): evaluation-0.mp4
                and so on, `evaluation_video_episodes` of them.

        Returns:
            `episode_reward_mean`, `_min`, `_max`, `_std`, `episode_len_mean`, `episodes`; of
            several agents `policy_reward_mean`, policy id -> mean return of each of its agents.
        """
        config = evaluation_settings(self.config)
        if episodes is not None and timesteps is not None:
            raise ConfigError("evaluate: episodes or timesteps, not both")
        by_steps = timesteps is not None
        if episodes is None and not by_steps:
            by_steps = config.evaluation_duration_unit == "timesteps"
        count = timesteps if timesteps is not None else episodes
        count = config.evaluation_duration if count is None else count
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
            what = "timesteps" if timesteps is not None else "episodes"
            raise ConfigError(f"{what}: a whole number of at least 1 is needed, got {count!r}")
        if num_envs is None:
            num_envs = (
                config.num_envs_per_worker
                if "num_envs_per_worker" in (self.config.evaluation_config)
                else 1
            )
        policies = self.workers.local_worker().policy_map
        explore = self._explores(explore)
        video = recorder_for(config, self.iteration)
        if video_dir is not None:
            video = VideoRecorder(video_dir, "evaluation", config.evaluation_video_episodes)
        with self.workers.local_worker().lock:  # a learner beside the plan has the same networks
            played = evaluate_policies(
                policies, config, count, explore, num_envs, by_steps, video=video
            )
        return summarize_episodes(played, list(policies))

    def _explores(self, explore: bool | None = None) -> bool:
        """Whether an evaluation explores."""
        own = self.config.evaluation_config.get("explore", False)
        return bool(own if explore is None else explore)

    def _evaluate_if_due(self, result: dict[str, Any]) -> None:
        """Put an evaluation into the result, if one is due, or one that was begun is done."""
        config = self.config
        if config.evaluation_interval is None:
            return
        due = self.iteration % config.evaluation_interval == 0
        if not config.evaluation_num_workers:
            if due:
                result["evaluation"] = {**self.evaluate(), "training_iteration": self.iteration}
            return
        if self._evaluation is None:
            settings = evaluation_settings(config)
            self._evaluation = EvaluationWorkers(settings, self.policy_class)
        beside = self._evaluation
        policies = self.workers.local_worker().policy_map
        told = None
        if due and not config.evaluation_parallel_to_training:
            beside.start(policies, self._explores(), self.iteration)
            told = beside.collect()
        elif beside.is_running and (due or beside.is_done()):
            told = beside.collect()
        if told is not None:
            result["evaluation"] = told
        if due and config.evaluation_parallel_to_training:
            beside.start(policies, self._explores(), self.iteration)

    # -- checkpoints ---------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint holds: the learner, the workers' episodes and random streams, the
        plan's counters and operators, the clock."""
        with self.workers.local_worker().lock:  # a learner of its own thread waits
            return self._state()

    def _state(self) -> dict[str, Any]:
        sampling = self.workers.state_dict()
        return {
            "worker": self.workers.local_worker().state_dict(),
            "sampling": sampling,
            "plan": self.plan.state_dict(),
            "in_flight": self._in_flight(sampling),
            "global_vars": dict(self.workers.global_vars),
            "iteration": self.iteration,
            "time_total_s": self._time_total_s,
            "trackers": dict(self._trackers.run_ids),
        }

    def _in_flight(self, sampling: dict[str, Any]) -> int:
        """Env steps that workers have made and that are in no counter and no queue yet: who goes
        on from a checkpoint has lost them."""
        workers = sampling["remote"] or [sampling["local"]]
        made = sum(worker["returned_steps"][0] for worker in workers if worker is not None)
        queued = sum(
            source.tags.get("env_steps", 0)
            for stage in walk(self.plan.stage)
            if isinstance(stage, Gather)
            for source in stage.queued()
        )
        counted = (
            self.plan.metrics.counters["num_env_steps_sampled"]
            - sampling["env_steps_of_removed_workers"]
        )
        return max(0, made - counted - queued)

    def save(self, path: Path | str, **about: Any) -> Path | str:
        """Write a checkpoint: a folder, or a URI that fsspec knows. See `flowrl.data.checkpoint`.

        Settings that are code without an import path (a lambda) are not in it; a warning names
        them.

        Args:
            about: more that the manifest is to say, as JSON.

        Raises:
            OSError: it cannot be written; what was there is untouched.
        """
        started = time.perf_counter()
        policies = self.workers.local_worker().policy_map
        settings, left_out = config_to_json(self.config)
        plans_own = getattr(self._module, "config", None)  # it is there as long as the plan is
        lost = [n for n in left_out if plans_own is None or plans_own.get(n) is not self.config[n]]
        if lost and not self._said_left_out:
            log.warning(
                "a checkpoint cannot hold the settings %s, which are code without an import path: "
                "they must be given again, from_checkpoint(path, config={…})", lost,
            )  # fmt: skip
            self._said_left_out = True
        told = {
            "flowrl": flowrl.__version__,
            "torch": torch.__version__,
            "gymnasium": gymnasium.__version__,
            "algorithm": f"{type(self).__module__}:{type(self).__qualname__}",
            "config": settings,
            "left_out": left_out,
            "plan": self.config.plan,
            "plan_sha256": self._plan_hash(),
            "training_iteration": self.iteration,
            "timesteps_total": self.plan.metrics.counters["num_env_steps_sampled"],
            "policies": {pid: describe_policy(policy) for pid, policy in policies.items()},
            **about,
        }
        written = write_checkpoint(path, self.get_state(), told)
        self._save_s += time.perf_counter() - started
        return written

    @classmethod
    def from_checkpoint(
        cls,
        path: Path | str,
        config: Mapping[str, Any] | None = None,
        trust: bool = False,
    ) -> Algorithm:
        """The algorithm of a checkpoint, ready to train on.

        Args:
            path: of the checkpoint; of a run directory the newest one is taken, of Ray Tune's
                folders the one in it.
            config: settings that are to be others, or that the checkpoint could not hold.
            trust: import code that the checkpoint names and that is not flowrl's: an algorithm, an
                environment or a plan file of one's own. (Not needed for the class that this is
                called of.)

        Raises:
            CheckpointError: it cannot be read, or cannot be made again: a setting is missing that
                it could not hold, code is not trusted, the plan was changed.
            ConfigError: a change is none of a setting.
        """
        return algorithm_from_checkpoint(cls, path, config, trust)

    def _plan_hash(self) -> str | None:
        plan = self.config.plan
        if self._module is None and (plan is None or not plan.endswith(".py")):
            return None
        return hashlib.sha256(plan_path(self.config.plan).read_bytes()).hexdigest()

    def restore(self, path: Path | str, other_plan: bool = False) -> None:
        """Go on from a checkpoint of the same plan and settings.

        Args:
            other_plan: the text of the plan may be another one; its stages must be the same.

        Raises:
            CheckpointError: it cannot be read, or is of another plan or network; nothing changed.
        """
        state, manifest = read_checkpoint(path)
        if manifest.get("plan_sha256") != self._plan_hash() and not other_plan:
            raise CheckpointError(
                f"{path}: it was written by another plan ({manifest.get('plan')!r}, or an earlier "
                f"text of it, which a run directory keeps as plan.py) than {self.config.plan!r}: "
                f"restore(path, other_plan=True), or `flowrl resume RUN_DIR --plan "
                f"{self.config.plan}`, if it is to go on with that"
            )
        plan = self._new_plan()  # the one that runs cannot go back
        running = [] if self._plan is None else list(walk(self._plan.stage))
        learners = [one for stage in running if (one := getattr(stage, "learner", None))]
        learners = [learner for learner in learners if learner.is_alive()]
        for learner in learners:  # they would learn on, with what is taken over
            learner.stop()
        try:
            self._take_over(state, plan, path)
        except BaseException:
            plan.stop()
            for learner in learners:
                learner.start()
            raise
        before, self._plan = self._plan, plan
        if self._evaluation is not None:
            self._evaluation.discard()
        if before is not None:
            before.stop()

    def _take_over(
        self, state: dict[str, Any], plan: LocalIterator[dict[str, Any]], path: Path | str
    ) -> None:
        with _fitting(path):
            iteration, seconds = int(state["iteration"]), float(state["time_total_s"])
            lost = int(state["in_flight"])
            global_vars = dict(state["global_vars"])
            tracked = dict(state.get("trackers", {}))
            plan.load_state_dict(state["plan"])
            for name in ("num_env_steps_sampled", "num_env_steps_dropped") if lost else ():
                plan.metrics.counters[name] += lost
            worker = self.workers.local_worker()
            before = worker.state_dict()
            worker.load_state_dict(state["worker"])
            try:
                self.workers.load_state_dict(state["sampling"])
            except Exception:
                worker.load_state_dict(before)
                raise
            self.workers.global_vars.update(global_vars)
        self.iteration, self._time_total_s = iteration, seconds
        self._trackers.resume_runs(tracked)

    def forget_trackers(self) -> None:
        """Results of a training that goes on from a checkpoint get tracker runs of their own."""
        self._trackers.resume_runs({})

    def restore_policies(self, path: Path | str) -> None:
        """Take only the policies from a checkpoint, whatever the plan: to play, or to start from.

        Raises:
            CheckpointError: it cannot be read, or is of another network.
        """
        state, _ = read_checkpoint(path, "worker")
        with _fitting(path):
            self.workers.local_worker().load_state_dict(state["worker"])
        self.workers.invalidate_weights()

    def stop(self) -> None:
        """End the workers and whatever the plan owns.

        Raises:
            what ending one of them raised; the others have ended all the same.
        """
        self._stopped = True
        with ExitStack() as ending:
            ending.callback(self._trackers.close)
            if self._evaluation is not None:
                ending.callback(self._evaluation.stop)
            ending.callback(self.workers.stop)
            if self._plan is not None:
                ending.callback(self._plan.stop)

    def __enter__(self) -> Algorithm:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._trackers.failed |= kind is not None
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
