"""AlgorithmConfig: one flat, typed record of settings, with the fluent groups users know."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import SkipValidation, model_validator
from pydantic.json_schema import GenerateJsonSchema

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.envs.registry import NO_ENV_MESSAGE, env_creator_for
from flowrl.policies.config import PolicyConfig
from flowrl.policies.policy_spec import PolicyMapping, multi_agent_settings, specs_of
from flowrl.sampling.callbacks import DefaultCallbacks
from flowrl.sampling.sample_collector import SampleCollector
from flowrl.seeding import derive_seed
from flowrl.setting_aliases import canonical_names
from flowrl.settings import (
    ConfigError,
    Count,
    NotNegative,
    Positive,
    imported,
    nearest,
    setting,
)
from flowrl.trainer.fluent import FluentSettings
from flowrl.trainer.loggers import LoggerName, check_loggers
from flowrl.trainer.metric_names import check_metric_name
from flowrl.trainer.plan_files import algorithm_in, load_plan, plan_path
from flowrl.trainer.video import check_video

log = logging.getLogger("flowrl")

Env = str | type | Callable[..., Any]
BatchMode = Literal["truncate_episodes", "complete_episodes"]


class AlgorithmConfig(FluentSettings):
    """The settings of an algorithm. Fluent methods set them in groups and return the config.

    Raises (from every method and assignment):
        ConfigError: an unknown name (the nearest is offered), a wrong type or range.
    """

    algorithm: ClassVar[str] = "flowrl.trainer.algorithm:Algorithm"
    """Import path of the algorithm's class."""
    samples: ClassVar[bool] = True
    """Whether there are episodes in training: not where all experience was recorded before."""

    env: Annotated[Env | None, SkipValidation] = setting(
        None, group="environment", in_evaluation=True
    )
    """Environment: a gymnasium id, a registered name, a class, or a function of an
    EnvContext."""
    env_config: dict[str, Any] = setting({}, group="environment", in_evaluation=True)
    """Passed to the environment's creator; keyword arguments of an id or a class."""
    vectorization_mode: Literal["flowrl", "sync", "async", "vector_entry_point", "envpool"] = (
        setting("flowrl", group="environment", in_evaluation=True)
    )
    """How a worker steps several environments: by flowrl, by gymnasium, or by EnvPool."""

    num_workers: int = setting(0, group="rollouts", ge=0)
    """Number of workers on Ray actors; 0 samples in this process, without Ray."""
    num_envs_per_worker: Count = setting(1, group="rollouts", in_evaluation=True)
    """Number of environments that each worker steps together."""
    rollout_fragment_length: Count | Literal["auto"] = setting("auto", group="rollouts")
    """Env steps of each environment per fragment; "auto" makes one round of all workers one
    train batch."""
    batch_mode: BatchMode = setting("truncate_episodes", group="rollouts")
    """Sample fragments of an exact length, which may start and end within episodes; or whole
    episodes of at least that total length."""
    horizon: Count | None = setting(None, group="rollouts", in_evaluation=True)
    """Env steps after which an episode is truncated; replaces the environment's own limit."""
    soft_horizon: bool = setting(False, group="rollouts")
    """Start a new episode at the horizon without resetting the environment: no flag is set, and
    recurrent states and views continue."""
    no_done_at_end: bool = setting(False, group="rollouts")
    """Do not mark the ends of episodes, so that values are bootstrapped there; environments are
    reset as usual."""
    sample_async: bool = setting(False, group="rollouts")
    """Sample ahead in a thread of the worker, up to two fragments."""
    sample_collector: Annotated[type | None, SkipValidation] = setting(None, group="rollouts")
    """A custom SampleCollector class, which collects row by row; None uses flowrl's."""
    on_invalid_step: Literal["raise", "drop", "replace"] = setting(
        "raise", group="rollouts", in_evaluation=True
    )
    """What to do with observations and rewards that are not finite or outside their space:
    raise an error; drop the episode's rows of this fragment and recreate the environment; or
    replace non-finite numbers by 0 and clip the others to the space."""
    collect_infos: bool = setting(False, group="rollouts")
    """Store the environments' infos in the column `infos`."""

    plan: str | None = None
    """Execution plan: the name of a shipped plan, or the path of a plan file."""
    train_batch_size: Count = 4000
    """Env steps per train batch, at least."""
    count_steps_by: Literal["env_steps", "agent_steps"] = setting("env_steps", group="multi_agent")
    """Unit of the train batch size, and of the fragment length with several agents."""
    policies: Annotated[Any, SkipValidation] = setting(None, group="multi_agent")
    """Policy id -> PolicySpec, or a collection of ids; None for one default policy."""
    policy_mapping_fn: Annotated[Callable[..., str] | None, SkipValidation] = setting(
        None, group="multi_agent", in_evaluation=True
    )
    """fn(agent_id, episode, worker, **kwargs) -> policy id, called once per agent and
    episode."""
    policies_to_train: Annotated[Any, SkipValidation] = setting(None, group="multi_agent")
    """Ids of the policies that learn, or fn(policy_id, batch) -> bool; None for all."""
    callbacks_class: Annotated[type | None, SkipValidation] = setting(None, group="callbacks")
    """A subclass of DefaultCallbacks."""
    explore: bool = setting(True, group="exploration", in_evaluation=True)
    """Whether workers explore while sampling; if False, they take the best actions."""

    output: str | None = setting(None, group="offline_data")
    """Folder where sampled experience is written as Parquet files."""
    output_rows_per_file: Count = setting(50_000, group="offline_data")
    """Rows of one policy per file; the last file may have fewer."""

    evaluation_interval: Count | None = setting(None, group="evaluation")
    """Iterations between evaluations; None evaluates only when `evaluate()` is called."""
    evaluation_duration: Count = setting(10, group="evaluation")
    """Length of an evaluation, in `evaluation_duration_unit`."""
    evaluation_duration_unit: Literal["episodes", "timesteps"] = setting(
        "episodes", group="evaluation"
    )
    """Whole episodes; or a minimum of env steps, where only finished episodes count."""
    evaluation_num_workers: int = setting(0, group="evaluation", ge=0)
    """Number of Ray actors that share an evaluation; 0 evaluates in this process."""
    evaluation_parallel_to_training: bool = setting(False, group="evaluation")
    """Continue training during an evaluation; a result includes the latest finished
    evaluation."""
    evaluation_config: dict[str, Any] = setting({}, group="evaluation")
    """Settings of evaluations that differ, such as env, env_config or explore (False by default);
    a setting that evaluations do not use is refused."""

    evaluation_video_dir: str | None = setting(None, group="evaluation")
    """Folder for mp4 videos of the first episodes of each evaluation, on the machine that
    evaluates; needs the extra `video`."""
    evaluation_video_episodes: Count = setting(1, group="evaluation")
    """Episodes recorded per evaluation, from its first environment."""

    checkpoint_frequency: int = setting(0, group="checkpointing", ge=0)
    """Iterations between checkpoints of a run; 0 uses `checkpoint_every_s` only."""
    checkpoint_every_s: Positive | None = setting(60.0, group="checkpointing")
    """Approximate seconds between checkpoints of a run; None uses `checkpoint_frequency` only.
    A run always writes one at its end."""
    checkpoint_num_to_keep: Count = setting(2, group="checkpointing")
    """Number of newest checkpoints that a run keeps."""
    checkpoint_score_attribute: str | None = setting(None, group="checkpointing")
    """Metric of the results, such as episode_reward_mean; the checkpoint with its best value is
    also kept."""
    checkpoint_score_order: Literal["max", "min"] = setting("max", group="checkpointing")
    """Whether the largest or the smallest value is the best."""

    num_cpus_per_worker: NotNegative = setting(1.0, group="resources")
    """CPUs that Ray reserves per worker; fewer if the cluster has fewer."""
    num_gpus_per_worker: NotNegative = setting(0.0, group="resources")
    """GPUs, or fractions of one, that Ray reserves per worker."""
    custom_resources_per_worker: dict[str, Positive] = setting({}, group="resources")
    """Custom cluster resources that each worker takes: name -> amount."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = setting(
        None, group="resources"
    )
    """Reserve resources for all workers together, on few nodes or on many (see Ray's placement
    groups). None places each worker wherever there is room."""
    num_threads_per_process: Count | None = setting(1, group="resources")
    """Threads of torch and of numpy's BLAS in this process and on each worker, limited when the
    algorithm or the worker is built. None changes nothing."""
    address: str | None = setting(None, group="resources")
    """Address of a running Ray cluster ("auto" finds it); None starts Ray on this machine."""

    recreate_failed_workers: bool = setting(True, group="fault_tolerance")
    """Replace workers whose process died or hangs; if False, the run raises one error and can
    continue with the other workers."""
    max_num_env_restarts: int = setting(5, group="fault_tolerance", in_evaluation=True, ge=0)
    """Consecutive failures of one environment after which its error stops the run."""
    max_num_worker_restarts: int = setting(1000, group="fault_tolerance", ge=0)
    """Restarts of one worker, after which it counts as failed."""
    delay_between_worker_restarts_s: NotNegative = setting(0.1, group="fault_tolerance")
    """Seconds before a dead worker is replaced; doubles with each consecutive death, up to
    30."""
    sample_timeout_s: Positive | None = setting(None, group="fault_tolerance")
    """Seconds without a fragment after which a worker counts as hanging and is replaced."""

    min_time_s_per_iteration: NotNegative | None = setting(None, group="reporting")
    """Minimum seconds between reports; None reports by steps only, so that seeded runs
    repeat."""
    min_sample_timesteps_per_iteration: int = setting(0, group="reporting", ge=0)
    """Env steps between two reports, at least."""
    metrics_num_episodes_for_smoothing: int = setting(100, group="reporting", ge=1, le=1_000_000)
    """Number of last episodes that reported means are taken over."""
    log_to: list[LoggerName] = setting([], group="reporting")
    """Experiment trackers that receive every result: wandb, mlflow (extras of these names)."""
    log_config: dict[str, dict[str, Any]] = setting({}, group="reporting")
    """Tracker -> its settings: those of wandb.init (project, name, mode, …); of mlflow
    tracking_uri, experiment_name, run_name, tags."""

    # -- use -----------------------------------------------------------------------------------

    def env_or_spaces(self) -> Any:
        """Return what workers create their environments from; None if it is not set."""
        return self.env

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A config from plain values, as `to_dict` gives them; of this class, with its defaults.

        Raises:
            ConfigError: an unknown name, a wrong type or range.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"from_dict: a mapping is needed, got {type(values).__name__}")
        return cls(**canonical_names(dict(values)))

    def validate(self) -> Self:  # type: ignore[override]
        """Check everything that can be known before a run: every setting, the environment, the
        plan file; nothing is started.

        Raises:
            ConfigError: the first thing that cannot work.
        """
        type(self)(**self.to_dict())
        self.check()
        return self

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """A JSON schema of the settings, with their descriptions and defaults."""
        return cls.model_json_schema(schema_generator=_Schema)

    def for_policy(self, policy_id: str) -> Any:
        """The settings of one policy: its own ones over these.

        Raises:
            ConfigError: there is no such policy.
        """
        if self.policies is None and policy_id == DEFAULT_POLICY_ID:
            return self
        specs = specs_of(self.policies or {DEFAULT_POLICY_ID: None})
        if policy_id not in specs:
            raise ConfigError(f"no policy {policy_id!r}.{nearest(policy_id, list(specs))}")
        own = specs[policy_id].config
        if isinstance(own, PolicyConfig):
            seed = derive_seed(self.seed, "policy", policy_id)
            return own if own.seed is not None or seed is None else own.updated(seed=seed)
        return self.updated(**own) if own else self

    @property
    def policy_class(self) -> Any:
        """The policy class of this config's algorithm; None where it is not said."""
        return getattr(self._algorithm_class(), "policy_class", None)

    def _algorithm_class(self) -> Any:
        return imported(self.algorithm)

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, values: Any) -> Any:
        """Settings under the names that plain mappings have for them."""
        if not isinstance(values, dict):
            return values
        values = canonical_names(values)
        if isinstance(values.get("evaluation_config"), dict):
            values["evaluation_config"] = canonical_names(values["evaluation_config"])
        if isinstance(values.get("log_to"), str):
            values["log_to"] = [values["log_to"]]
        if not values.pop("_use_trajectory_view_api", True):
            raise ValueError("_use_trajectory_view_api: there is no other way any more")
        if "multiagent" in values:
            shared = multi_agent_settings(values)
            del values["multiagent"]
            values |= {name: value for name, value in shared.items() if value is not None}
        return values

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.soft_horizon and self.horizon is None:
            raise ValueError("soft_horizon needs a horizon: .rollouts(horizon=…)")
        for name, base in (
            ("sample_collector", SampleCollector),
            ("callbacks_class", DefaultCallbacks),
        ):
            own = getattr(self, name)
            if own is not None and not (isinstance(own, type) and issubclass(own, base)):
                raise ValueError(f"{name}: a subclass of {base.__name__} is needed, got {own!r}")
        if self.policies is not None:
            specs_of(self.policies)
        ids = list(specs_of(self.policies or {DEFAULT_POLICY_ID: None}))
        wanted = self.policies_to_train
        if wanted is not None and not callable(wanted):
            if isinstance(wanted, str) or not hasattr(wanted, "__iter__"):
                raise ValueError(
                    f"policies_to_train: a collection of policy ids or a function, got {wanted!r}"
                )
            wanted = vars(self)["policies_to_train"] = list(wanted)
            unknown = [policy_id for policy_id in wanted if policy_id not in ids]
            if unknown:
                raise ValueError(
                    f"policies_to_train: there is no policy {unknown[0]!r}, only {ids}"
                )
        if self.evaluation_parallel_to_training and not self.evaluation_num_workers:
            raise ValueError(
                "evaluation_parallel_to_training needs workers to evaluate: "
                ".evaluation(evaluation_num_workers=1)"
            )
        if self.evaluation_parallel_to_training and self.evaluation_interval is None:
            raise ValueError("evaluation_parallel_to_training needs an evaluation_interval")
        if self.checkpoint_score_attribute is None and self.checkpoint_score_order != "max":
            raise ValueError("checkpoint_score_order needs a checkpoint_score_attribute")
        if self.sgd_minibatch_size > self.train_batch_size:
            raise ValueError(
                f"sgd_minibatch_size={self.sgd_minibatch_size} is larger than "
                f"train_batch_size={self.train_batch_size}: make it at most that"
            )
        return self

    def check(self) -> None:
        """Refuse what only shows when a run is near: a missing or unknown environment, metrics
        that no result has, search spaces that nobody searches.

        Raises:
            ConfigError
        """
        self.check_no_search()
        if self.env_or_spaces() is None:
            raise ConfigError('env: no environment is set: .environment(env="CartPole-v1")')
        env_creator_for(self.env_or_spaces())
        if self.env is None and self.evaluation_interval and "env" not in self.evaluation_config:
            raise ConfigError(f"evaluation_interval: {NO_ENV_MESSAGE}")
        if self.evaluation_config:
            self._check_evaluation()
        if self.checkpoint_score_attribute is not None:
            check_metric_name(self.checkpoint_score_attribute, self, "checkpoint_score_attribute")
        check_loggers(self.log_to, self.log_config)
        if self.output is not None:
            check_folder(self.output)
        if self.evaluation_video_dir is not None:
            own = canonical_names(self.evaluation_config)
            mode = own.get("vectorization_mode", self.vectorization_mode)
            check_video("evaluation_video_dir", mode)
        if self.plan is not None:
            plan_path(self.plan)
        PolicyMapping(
            self.policy_mapping_fn, list(specs_of(self.policies or {DEFAULT_POLICY_ID: None}))
        )

    def _check_evaluation(self) -> None:
        own = canonical_names(self.evaluation_config)
        allowed = [info.name for info in self.describe() if info.in_evaluation]
        unknown = [name for name in own if name not in allowed]
        if unknown:
            hint = nearest(unknown[0], allowed)
            what = "unknown setting" if unknown[0] not in type(self).model_fields else "it takes no"
            raise ConfigError(
                f"evaluation_config: {what} {unknown[0]!r}.{hint} It takes {', '.join(allowed)}"
            )
        own.pop("explore", None)
        try:
            env_creator_for(self.updated(**own).env_or_spaces())
        except ConfigError as error:
            raise ConfigError(f"evaluation_config: {error}") from None
        if not isinstance(self.evaluation_config.get("explore", False), bool):
            raise ConfigError("evaluation_config: explore is True or False")

    def build(self, plan: str | None = None) -> Any:
        """The algorithm, ready to train. `plan` overrides the setting.

        Raises:
            ConfigError: settings that cannot work; nothing was started.
        """
        config = self.updated() if plan is None else self.updated(plan=plan)
        return config.build_as(None)

    def build_as(self, algorithm: Any) -> Any:
        """The same, as an Algorithm class of one's own (None: that of this config)."""
        self.check()
        config, made = self, algorithm
        if made is None and config.plan is not None and config.plan.endswith(".py"):
            made = algorithm_in(load_plan(config.plan))
        return (made or self._algorithm_class())(config)


def check_folder(output: str, setting: str = "output") -> None:
    """Refuse a folder that files cannot be written to; nothing is made.

    Raises:
        ConfigError: it is a URI, a file, or cannot be made.
    """
    if "://" in output:
        raise ConfigError(f"{setting}: a folder of this machine is needed, got {output}")
    path = Path(output).absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(
            f"{setting}: {output} cannot be written: {there} is no folder to write in"
        )


class _Schema(GenerateJsonSchema):
    """Settings that are code have no JSON type: anything goes in the schema."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
        return {}

    def encode_default(self, dft: Any) -> Any:
        return dft.to_dict() if hasattr(dft, "to_dict") else super().encode_default(dft)
