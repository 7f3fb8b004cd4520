"""Algorithm: trains policies by pulling results from an execution plan."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, Self, get_args

from flowrl.errors import ConfigError, with_message
from flowrl.iter.ray_health import check_ray
from flowrl.monitoring.diagnosis import Diagnosis
from flowrl.monitoring.monitor import Monitor
from flowrl.ops import (
    ResultDict,
    StandardMetricsReporting,
    TrainingSteps,
    synchronous_parallel_sample,
    train_one_step,
)
from flowrl.policies.code_references import PLAN_MODULE
from flowrl.policies.learning.epochs import checked_numbers
from flowrl.policies.models.encoders import has_convolutions
from flowrl.policies.policy import Policy
from flowrl.policies.policy_spec import check_policy_classes
from flowrl.sampling.callbacks import call
from flowrl.sampling.worker_set import WorkerSet
from flowrl.setting_values import warn_of_misspelled_members
from flowrl.threads import allow_background_calls, limit_threads, limit_torch_again, num_free_cores
from flowrl.trainer.acting import ActsWithPolicies
from flowrl.trainer.checkpointing import Checkpointing
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.evaluator import Evaluator
from flowrl.trainer.loggers import ResultLoggers
from flowrl.trainer.metric_names import NamedMetrics
from flowrl.trainer.operator_times import OperatorTimes
from flowrl.trainer.other_libraries import OtherLibrariesNames, with_hints
from flowrl.trainer.plan_building import Plan, PlanBuilder
from flowrl.trainer.plan_files import (
    algorithm_in,
    has_plan_function,
    is_plan_file,
    load_plan,
    plan_of_module,
)
from flowrl.trainer.plan_settings import plan_config
from flowrl.trainer.runs.learn import learn
from flowrl.trainer.runs.training_loop import Display
from flowrl.trainer.start_checks import check_schedules, check_start, warn_of_unused_policies

log = logging.getLogger("flowrl")


PolicyClass = type[Policy] | None


class Algorithm(ActsWithPolicies, Checkpointing, OtherLibrariesNames):
    """Trains by pulling results from an execution plan.

    A subclass sets `policy_class` and `config_class`. The plan is the first of these that exists:
    the subclass's static method `execution_plan(workers, config)`, its method `training_step`, the
    file of the setting `plan` (the shipped plan if that file defines only the class), the
    `training_step` of this class. Ray Tune needs the class of the same name in `flowrl.tune`.

    Example:
        >>> PPO("CartPole-v1", seed=1).learn(total_timesteps=100_000)  # doctest: +SKIP

    Attributes:
        config: the settings, read-only.
        workers: the WorkerSet.
        iteration: number of results so far.
        last_result: the latest result; None before the first `train()`, also after a checkpoint
            was loaded.
        env_steps: env steps so far.
        run_dir: the run directory, or None.
    """

    policy_class: ClassVar[PolicyClass] = None  # None: each PolicySpec has its own
    config_class: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    execution_plan: ClassVar[Any] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        warn_of_misspelled_members(cls)

    @with_hints
    def __init__(self, env_or_config: Any = None, **settings: Any):
        """Build the algorithm; nothing is sampled before the first `train()`.

        Args:
            env_or_config: an environment (see the setting `env`; of an environment object, only
                copies are stepped); an AlgorithmConfig; or a mapping of settings that differ from
                the defaults. From a config of a base class, only explicitly set values are used.
            settings: settings of `config_class`, which replace those of `env_or_config`.

        Raises:
            ConfigError: the settings are invalid, or there is no plan.
        """
        try:
            config = self._config_from(env_or_config, settings)
        except ConfigError as error:
            given = env_or_config if isinstance(env_or_config, Mapping) else {}
            hint = self._hint_at_config_class({**given, **settings})
            raise with_message(error, f"{type(self).__name__}: {error}{hint}") from None
        config.check()
        self.config = config = config.completed().frozen()
        limit_threads(config.num_threads_per_process)
        self.iteration = 0
        self.last_result: dict[str, Any] | None = None
        self.run_dir: Path | None = None
        self._time_total_s = 0.0
        self._save_s = 0.0  # seconds spent on checkpoints since the last result
        self._plan: Plan | None = None
        self._loggers = ResultLoggers(config)
        self._operator_times = OperatorTimes()
        self._monitor: Monitor | None = None
        self._warned_about_left_out = False
        self._stopped = False
        # whether a second thread may share the work; None before the first `train()`
        self._allows_background_calls: bool | None = None
        threads = config.num_threads_per_process
        self._num_torch_threads = 1 if threads == "auto" else threads
        self._is_checked, self._checked_total = False, None
        self.setup(config)

    def _use_free_cores(self) -> bool:
        """Use the cores that no worker uses for convolutions, if the threads are "auto".

        Returns:
            whether there is a free core for another thread that shares the work.
        """
        if self.config.num_threads_per_process != "auto":
            return False
        num_free = num_free_cores(self.workers.num_workers)
        policies = self.workers.local_worker().policy_map.values()
        if any(has_convolutions(getattr(policy, "model", None)) for policy in policies):
            limit_threads(num_free)
            self._num_torch_threads = num_free
            return False
        return num_free > 1

    def __repr__(self) -> str:
        env = getattr(self.config.env, "__qualname__", None) or repr(self.config.env)
        name = type(self).__name__
        return f"{name}(env={env}, iteration={self.iteration}, env_steps={self.env_steps})"

    @classmethod
    def _hint_at_config_class(cls, settings: Mapping[str, Any]) -> str:
        """Return a hint if only the config class of the policy has one of these settings."""
        of_policy = getattr(cls.policy_class, "config_class", None)
        known = getattr(of_policy, "model_fields", {}).keys() - cls.config_class.model_fields.keys()
        if of_policy is None or known.isdisjoint(settings):
            return ""
        return f" Set config_class = {of_policy.__name__} on {cls.__name__}: its policy has it"

    @classmethod
    def _config_from(cls, config: Any, settings: Mapping[str, Any]) -> AlgorithmConfig:
        """Return a record of `config_class`; see the arguments of `__init__`."""
        if isinstance(config, cls.config_class):
            return config.updated(**settings) if settings else config
        values = {} if config is None else config
        if not isinstance(values, (AlgorithmConfig, Mapping)):
            if not (isinstance(values, (str, type)) or callable(values) or hasattr(values, "step")):
                raise ConfigError(
                    f"the argument must be of the class {cls.config_class.__name__}, a mapping of "
                    f"settings or an environment, got {config!r}"
                )
            if "env" in settings:
                raise ConfigError(
                    f"two environments are given, {config!r} and env={settings['env']!r}: give one"
                )
            values = {"env": values}
        if isinstance(values, AlgorithmConfig) and not issubclass(cls.config_class, type(values)):
            raise ConfigError(
                f"the config must be of the class {cls.config_class.__name__}, got "
                f"{type(config).__name__}"
            )
        values = values.explicit_settings() if isinstance(values, AlgorithmConfig) else dict(values)
        return cls.config_class.from_dict({**values, **settings})

    @classmethod
    def from_plan(
        cls,
        plan: str | Path | ModuleType | Callable[..., Any],
        config: AlgorithmConfig | Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Self:
        """Return the algorithm of an execution plan.

        Args:
            plan: the name of a shipped plan, the path of a plan file, an imported plan file, or a
                function (workers, config) -> plan.
            config: the settings; None uses the `config` of the plan file. A mapping has settings
                that replace those of the plan file.
            settings: settings that replace those of the config.

        Raises:
            ConfigError: the plan cannot be loaded or has no config, or a setting is invalid.
        """
        plan = str(plan) if isinstance(plan, Path) else plan
        if not isinstance(config, AlgorithmConfig):
            settings = {**(config or {}), **settings}
            if isinstance(plan, ModuleType):
                plan = plan_of_module(plan)
            if not isinstance(plan, str):
                if not callable(plan):
                    raise ConfigError(
                        "from_plan: the plan is a name, a path, a module or a function, got "
                        f"{plan!r}"
                    )
                name = getattr(plan, "__qualname__", repr(plan))
                raise ConfigError(f"from_plan: pass a config with the function {name}")
            base = plan_config(plan, settings.get("env"))
        else:
            base = config
        changed = base.updated(**settings)
        changed.check_changes({name: base[name] for name in changed.canonical(settings)})
        algorithm = changed.build(plan=plan)
        if not isinstance(algorithm, cls):
            algorithm.stop()
            raise ConfigError(
                f"from_plan: the plan belongs to {type(algorithm).__name__}, not to {cls.__name__}"
            )
        return algorithm

    def setup(self, config: AlgorithmConfig) -> None:
        """Create the WorkerSet, which starts no worker yet, and find the plan."""
        check_policy_classes(config.policies, self.policy_class, type(self).__name__)
        self.workers = WorkerSet(config.env_or_spaces(), self.policy_class, config)
        self._evaluator = Evaluator(config, self.workers, self.policy_class)
        in_plan_file = type(self).__module__.startswith(PLAN_MODULE)
        self._plan_builder = PlanBuilder(config, self._plan_function(config), in_plan_file)

    def _plan_function(self, config: AlgorithmConfig) -> Callable[..., Any] | None:
        """Return the function that builds the plan, in the order of the class's docstring; None for
        that of the file of the setting `plan`.

        Raises:
            ConfigError: the class has a plan and a training_step, there is no plan, or the file
                defines another algorithm.
        """
        function, cls = self.execution_plan, type(self)
        overrides_step = cls.training_step is not Algorithm.training_step
        if overrides_step and function is not None:
            raise ConfigError(
                f"{cls.__name__} has a training_step and an execution_plan: define only one"
            )
        if function is not None:
            return function
        shipped, plan = type(config).model_fields["plan"].default, config.plan
        if overrides_step or (plan is None and shipped is None):
            return self._plan_of_steps
        if plan is None:
            raise ConfigError("plan: no execution plan is set; shipped plans: `flowrl plans`")
        if not is_plan_file(plan) or shipped is None:
            return None
        module: Any = load_plan(str(plan))
        if has_plan_function(module):
            return None
        name = algorithm_in(module).__qualname__  # the file defines only the class
        if name not in [base.__qualname__ for base in cls.__mro__]:
            raise ConfigError(
                f"plan: {plan} has no function execution_plan: it defines the algorithm {name}, "
                f"but this algorithm is {cls.__name__}"
            )
        shipped_plan: Callable[..., Any] = load_plan(shipped).execution_plan
        return shipped_plan

    def training_step(self) -> ResultDict:
        """Sample and learn once; override this method to write an algorithm without a plan.

        The default is a policy gradient step: it samples `train_batch_size` steps with all workers,
        trains on them, and sends the new weights to the workers. `train()` repeats it until the
        minimum steps and seconds of an iteration have passed.

        Returns:
            policy id -> {"learner_stats": …, "num_agent_steps_trained": n}; other entries are
            reported in `info`.
        """
        by_agent, size = self.config.count_steps_by == "agent_steps", self.config.train_batch_size
        train_batch = synchronous_parallel_sample(
            worker_set=self.workers,
            max_env_steps=None if by_agent else size,
            max_agent_steps=size if by_agent else None,
        )
        train_results = train_one_step(self, train_batch)
        self.workers.sync_weights()
        return train_results

    def _plan_of_steps(self, workers: WorkerSet, config: AlgorithmConfig) -> Any:
        return StandardMetricsReporting(TrainingSteps(self), workers, config)

    @property
    def plan(self) -> Plan:
        """The execution plan; built on the first access."""
        if self._plan is None:
            self._plan = self._plan_builder.build(self.workers)
        return self._plan

    @property
    def env_steps(self) -> int:
        """Env steps of the training so far, including those before a loaded checkpoint."""
        if self._plan is None:
            return 0
        return int(self._plan.metrics.counters["num_env_steps_sampled"])

    # -- training ------------------------------------------------------------------------------

    @with_hints
    def train(self) -> dict[str, Any]:
        """Return the next result of the plan, with `training_iteration` and times [s].

        Raises:
            ConfigError: the plan or its settings cannot start, or the plan does not end in
                StandardMetricsReporting.
            RuntimeError: the algorithm was stopped, or the plan has ended.
            Exception: the error of an operator, an environment or a callback, with a note that says
                where in the plan it was raised.
        """
        try:
            result = self._train()
        except BaseException:
            self._loggers.failed = True
            raise
        self._loggers.failed = False
        return result

    def _train(self) -> dict[str, Any]:
        self._check_not_stopped()
        check_ray()
        started = time.perf_counter()
        self._prepare_training()
        plan_result = self._next_of_plan()
        result = self._result_of(plan_result, time.perf_counter() - started)
        self.last_result = result  # set even if the evaluation fails
        with self.monitor.working():
            self._finish_iteration(result)
        return result

    def _finish_iteration(self, result: dict[str, Any]) -> None:
        """Evaluate if it is due, call `on_train_result` and write the result to the loggers."""
        evaluation = self._evaluator.evaluate_if_due(self.iteration, self.evaluate)
        if evaluation is not None:
            result["evaluation"] = evaluation
        callbacks = self.workers.local_worker().callbacks
        numbers = [name for name, value in result.items() if isinstance(value, Real)]
        call(callbacks, "on_train_result", algorithm=self, result=result)
        replaced = {name: result[name] for name in numbers if name in result}
        checked_numbers(
            replaced, f"{type(callbacks).__name__}.on_train_result() replaced in result"
        )
        if self.config.log_to:
            self._loggers.write(result)

    def _prepare_training(self) -> None:
        """Check the plan, and start the plan, the loggers and the monitor if they do not run."""
        self.check_start()
        if self._allows_background_calls is None:
            self._allows_background_calls = self._use_free_cores()
        allow_background_calls(self._allows_background_calls)
        limit_torch_again(self._num_torch_threads)
        if self.config.log_to:
            self._loggers.start()
        self.plan.start(self.config.seed)
        # another stream of the workers may have advanced it
        self.workers.global_vars["timestep"] = self.env_steps
        if self.config.monitor:
            self.monitor.start()

    def _next_of_plan(self) -> dict[str, Any]:
        """Return the next result of the plan."""
        try:
            with self.monitor.pulling():
                plan_result = next(self.plan)
        except StopIteration:
            raise RuntimeError(
                "the plan has ended, because a source of it has no more items (such as recorded "
                "experience that is read once): build a new algorithm to train again"
            ) from None
        if type(plan_result) is not dict or "timesteps_total" not in plan_result:
            raise ConfigError(
                "plan: it must end in StandardMetricsReporting, but it yielded a "
                f"{type(plan_result).__name__}"
            )
        return plan_result

    def _result_of(self, plan_result: dict[str, Any], elapsed: float) -> dict[str, Any]:
        """Return the result of an iteration: that of the plan, with times [s] and the diagnosis.

        Args:
            plan_result: the result of the plan.
            elapsed: duration of the iteration [s].
        """
        self.iteration += 1
        self._time_total_s += elapsed
        result = NamedMetrics(
            {
                "training_iteration": self.iteration,
                **plan_result,
                "time_this_iter_s": elapsed,
                "time_total_s": self._time_total_s,
            }
        )
        operator_s = self._operator_times.since_last(self.plan)
        result["timers"] |= {
            "env_steps_per_s": plan_result["timesteps_this_iter"] / elapsed,
            "operators": {f"{name}_s": seconds for name, seconds in operator_s.items()},
        }
        if self.iteration == 1 and self.config.samples:
            policy_ids: Any = self.workers.local_worker().policy_map
            to_train = self.config.policies_to_train
            if to_train is not None and not callable(to_train):  # others may be in reserve
                policy_ids = [policy_id for policy_id in policy_ids if policy_id in to_train]
            warn_of_unused_policies(self.plan.metrics.counters, policy_ids)
        self.monitor.update(result)
        result["diagnosis"] = self.diagnose().text
        if self._save_s:
            result["timers"]["checkpoint_time_ms"] = 1000 * self._save_s
            self._save_s = 0.0
        return result

    def finish_evaluation(self) -> dict[str, Any] | None:
        """Wait for the evaluation that runs parallel to training, add its metrics to the last
        result as `evaluation`, and return them; see `evaluation_parallel_to_training`.

        `learn()` and `flowrl train` call it at the end of a run. An earlier evaluation in the last
        result is replaced; `on_train_result` is not called again.

        Returns:
            the metrics; None if no evaluation was running, or its worker died.

        Raises:
            Exception: the evaluation failed.
        """
        evaluation = self._evaluator.finish()
        if evaluation is not None and self.last_result is not None:
            self.last_result["evaluation"] = evaluation
            if self.config.log_to:
                names = ("training_iteration", "timesteps_total", "evaluation")
                self._loggers.write({name: self.last_result[name] for name in names})
        return evaluation

    @with_hints
    def learn(
        self,
        total_timesteps: float | None = None,
        *,
        stop: Mapping[str, float] | None = None,
        run_dir: Path | str | None = "auto",
        progress: bool | Literal["live", "line"] = True,
    ) -> Self:
        """Train until a limit is reached, as `flowrl train` does, and return the algorithm.

        Ctrl-C, SIGTERM and SIGHUP save a checkpoint before they end the training.

        Args:
            total_timesteps: env steps of the whole training, those before this call included;
                schedules in percent follow them. 1e5 is 100,000.
            stop: further limits: metric (its path `a/b/c` in a result) -> minimum, or
                "METRIC<=" -> maximum. Without any limit, a run that continues keeps its own
                limits, and a new one has the environment's reward threshold and the config's
                `total_timesteps`, or 500,000. With a schedule in percent and no limit on env steps,
                it also ends at that of the last call, else that of the config, else at 500,000.
            run_dir: folder for config, results (CSV, JSON, TensorBoard) and checkpoints. "auto"
                continues in the algorithm's run directory, or creates one in runs/. None writes
                nothing.
            progress: show the progress: "live" on a terminal, with operators, workers and the
                diagnosis; "line" as a table with a row every few seconds. True chooses "live" if
                standard output is a terminal.

        Raises:
            ConfigError: an argument is invalid, or the run directory contains another run.
            RuntimeError: the algorithm was stopped.
            KeyboardInterrupt: the training was interrupted.
        """
        command = [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]
        self._check_not_stopped()
        displays: dict[Any, Any] = {True: "auto", False: "none"}
        display = displays.get(progress, progress)
        if display not in get_args(Display):
            raise ConfigError(f'learn: progress is a bool, "live" or "line", got {progress!r}')
        learn(self, total_timesteps, stop, run_dir, command, display)
        return self

    def check_start(self) -> None:
        """Check that training can start, and warn of probable mistakes; `train()` calls it first.

        Raises:
            ConfigError: see `flowrl.trainer.start_checks.check_start`.
        """
        total = self.workers.global_vars["total_timesteps"]
        if not self._is_checked:
            check_start(self.config, self.workers, self.plan.stage)
        elif total != self._checked_total:
            check_schedules(self.config, total)
        self._is_checked, self._checked_total = True, total

    @property
    def monitor(self) -> Monitor:
        """Measures the plan while it runs, unless the setting `monitor` is off."""
        if self._monitor is None:
            settings = set(type(self.config).model_fields)
            self._monitor = Monitor(self.plan, self.workers, settings)
        return self._monitor

    def diagnose(self) -> Diagnosis:
        """Return what limited the training in its last ten seconds.

        `str(diagnosis)` is a sentence that names the operator, the cause, its share and a remedy;
        `diagnosis.findings` has further ones, the most important first. Each result has the
        sentence as `diagnosis`. There are no findings if the setting `monitor` is off.
        """
        return self.monitor.diagnosis

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: save() it and load it with "
            "from_checkpoint(), or send its config"
        )

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise RuntimeError("this algorithm was stopped: build a new one")

    # -- evaluation ----------------------------------------------------------------------------

    @with_hints
    def evaluate(
        self,
        episodes: int | None = None,
        explore: bool | None = None,
        num_envs: int | None = None,
        timesteps: int | None = None,
        video_dir: Path | str | None = None,
        seed: int | None = None,
    ) -> dict[str, Any]:
        """Play whole episodes in new environments in this process, and return metrics.

        Uses the settings of `evaluation_config`. Observation filters are not updated and callbacks
        are not called. Calls with the same seed play the same episodes if the policies have not
        changed and the environments are deterministic.

        Args:
            episodes: number of episodes; None for `evaluation_duration`.
            explore: sample actions; False takes greedy ones; None for the value in
                `evaluation_config`, False by default.
            num_envs: environments stepped together; each plays an equal share of the episodes. None
                for `num_envs_per_worker` of `evaluation_config`, or 1.
            timesteps: minimum env steps, instead of `episodes`; then the running episodes are
                played to their end.
            video_dir: folder for mp4 videos of the first `evaluation_video_episodes` episodes,
                named evaluation-<iteration>-0.mp4, … (needs the extra `video`).
            seed: seed of the episodes; None for the setting `seed`, which is drawn if it was not
                set.

        Returns:
            `episode_reward_mean`, `_min`, `_max`, `_std`, `episode_len_mean` [env steps],
            `episodes`, `num_faulty_episodes`, the number of those that were dropped because their
            environment failed, `num_unfinished_episodes`, the number of those that did not end (no
            episode ended in 200,000 env steps of each environment), and `policy_reward_mean`:
            policy id -> mean return per agent. NaN without an episode.

        Raises:
            ConfigError: an argument is invalid, or there is no environment.
            RuntimeError: the algorithm was stopped.
        """
        with nullcontext() if self._monitor is None else self._monitor.working():
            return self._evaluator.evaluate(
                self.iteration, episodes, explore, num_envs, timesteps, video_dir, seed
            )

    # -- end -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the plan, the workers, evaluations and loggers.

        Raises:
            Exception: one of them failed to stop; the others are still stopped.
        """
        self._stopped = True
        with ExitStack() as cleanup:
            cleanup.callback(self._loggers.close)
            cleanup.callback(self._evaluator.stop)
            cleanup.callback(self.workers.stop)
            if self._plan is not None:
                cleanup.callback(self._plan.stop)
            if self._monitor is not None:
                cleanup.callback(self._monitor.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._loggers.failed |= kind is not None
        self.stop()
