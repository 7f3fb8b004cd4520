"""AlgorithmConfig: one flat, typed record of settings, with the fluent groups users know."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, SkipValidation, model_validator
from pydantic.json_schema import GenerateJsonSchema

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.envs.registry import NO_ENVIRONMENT, env_creator_for
from flowrl.policies.config import ModelConfig, PolicyConfig
from flowrl.policies.policy_spec import PolicyMapping, multi_agent_settings, specs_of
from flowrl.policies.schedules import Schedule
from flowrl.sampling.callbacks import DefaultCallbacks
from flowrl.sampling.sample_collector import SampleCollector
from flowrl.seeding import derive_seed
from flowrl.setting_aliases import canonical_names
from flowrl.settings import ConfigError, Count, Fraction, NotNegative, Positive, imported, nearest
from flowrl.trainer.loggers import LoggerName, check_loggers
from flowrl.trainer.metric_names import check_metric_name
from flowrl.trainer.plan_files import algorithm_in, load_plan, plan_path
from flowrl.trainer.video import check_video

log = logging.getLogger("flowrl")

Env = str | type | Callable[..., Any]
BatchMode = Literal["truncate_episodes", "complete_episodes"]


class AlgorithmConfig(PolicyConfig):
    """The settings of an algorithm. Fluent methods set them in groups and return the config.

    Raises (from every method and assignment):
        ConfigError: an unknown name (the nearest is offered), a wrong type or range.
    """

    algorithm: ClassVar[str] = "flowrl.trainer.algorithm:Algorithm"
    """Import path of the algorithm's class."""
    samples: ClassVar[bool] = True
    """Whether there are episodes in training: not where all experience was recorded before."""

    env: Annotated[Env | None, SkipValidation] = None
    """Environment: an id of gymnasium's, a registered name, a class, or a creator."""
    env_config: dict[str, Any] = {}
    """Given to the environment's creator; keyword arguments for an id or a class."""
    vectorization_mode: Literal["flowrl", "sync", "async", "vector_entry_point", "envpool"] = (
        "flowrl"
    )
    """How a worker steps several environments: flowrl's own way, one of gymnasium's, or EnvPool."""

    num_workers: int = Field(default=0, ge=0)
    """Workers on Ray actors; 0 samples in this process, without Ray."""
    num_envs_per_worker: Count = 1
    """Environments that each worker steps together."""
    rollout_fragment_length: Count | Literal["auto"] = "auto"
    """Env steps of each environment per fragment; "auto" makes one round of all workers a train
    batch."""
    batch_mode: BatchMode = "truncate_episodes"
    """Fragments of an exact length, which may begin and end within episodes; or whole episodes, as
    many as have at least that length."""
    horizon: Count | None = None
    """Env steps after which an episode is truncated; an environment's own limit is set to it."""
    soft_horizon: bool = False
    """At the horizon another episode begins without a reset: no flag is set, states and windows
    reach back."""
    no_done_at_end: bool = False
    """No row says that its episode ended, so values are bootstrapped there; environments are
    reset as always."""
    sample_async: bool = False
    """Workers sample ahead in a thread, up to two fragments."""
    sample_collector: Annotated[type | None, SkipValidation] = None
    """A SampleCollector class of one's own, for rows one by one; None takes flowrl's."""
    on_invalid_step: Literal["raise", "drop", "replace"] = "raise"
    """Observations and rewards that are not finite, or outside their space: stop; drop the
    episode's rows since the fragment's start and make the environment anew; or put 0 for what is
    not finite and clip the rest into the space."""
    collect_infos: bool = False
    """Record the environments' infos in the column `infos`."""

    plan: str | None = None
    """Execution plan: the name of a shipped one or the path of a plan file."""
    train_batch_size: Count = 4000
    """Env steps per train batch, at least."""
    count_steps_by: Literal["env_steps", "agent_steps"] = "env_steps"
    """Unit of the train batch size, and of fragments of several agents."""
    policies: Annotated[Any, SkipValidation] = None
    """Policy id -> PolicySpec, or a collection of ids; None is the default policy alone."""
    policy_mapping_fn: Annotated[Callable[..., str] | None, SkipValidation] = None
    """fn(agent_id, episode, worker, **kwargs) -> policy id, asked once per agent and episode."""
    policies_to_train: Annotated[Any, SkipValidation] = None
    """Ids of the policies that learn, or fn(policy_id, batch) -> bool; None for all."""
    callbacks_class: Annotated[type | None, SkipValidation] = None
    """A DefaultCallbacks class of one's own."""
    explore: bool = True
    """Whether workers explore while they sample; if not, they take the best actions."""

    output: str | None = None
    """Folder into which all sampled experience is written, as Parquet files."""
    output_rows_per_file: Count = 50_000
    """Rows of a policy in each of those files; the last has what is left at the end."""

    evaluation_interval: Count | None = None
    """Iterations between two evaluations; None: only when `evaluate()` is called."""
    evaluation_duration: Count = 10
    """Length of one evaluation, in the unit below."""
    evaluation_duration_unit: Literal["episodes", "timesteps"] = "episodes"
    """Whole episodes; or env steps, at least, of which the episodes that ended count."""
    evaluation_num_workers: int = Field(default=0, ge=0)
    """Ray actors that share an evaluation; 0 evaluates in this process."""
    evaluation_parallel_to_training: bool = False
    """Train on while the actors evaluate; a result has the evaluation that was done by then."""
    evaluation_config: dict[str, Any] = {}
    """Settings that are others in evaluations: env, env_config, explore (False), horizon,
    max_num_env_restarts, num_envs_per_worker, on_invalid_step, policy_mapping_fn,
    vectorization_mode."""

    evaluation_video_dir: str | None = None
    """Folder for mp4 videos of the first episodes of each evaluation (extra video); on the machine
    that evaluates."""
    evaluation_video_episodes: Count = 1
    """Episodes of an evaluation that are recorded, of its first environment."""

    checkpoint_frequency: int = Field(default=0, ge=0)
    """Iterations between two checkpoints of a run; 0 goes by seconds alone."""
    checkpoint_every_s: Positive | None = 60.0
    """Seconds between two checkpoints of a run, about; None goes by iterations alone. A run leaves
    one at its end in any case."""
    checkpoint_num_to_keep: Count = 2
    """Newest checkpoints of a run that are kept."""
    checkpoint_score_attribute: str | None = None
    """A metric of the results, such as episode_reward_mean: the checkpoint that has the best one is
    kept besides."""
    checkpoint_score_order: Literal["max", "min"] = "max"
    """Whether the largest or the smallest is the best."""

    num_cpus_per_worker: NotNegative = 1.0
    """CPUs that Ray reserves per worker; less where the cluster has not got as many."""
    num_gpus_per_worker: NotNegative = 0.0
    """GPUs, or shares of one, that Ray reserves per worker."""
    custom_resources_per_worker: dict[str, Positive] = {}
    """What else of a cluster's resources each worker takes: name -> amount."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = None
    """Reserve the places of all workers together: on few nodes, or on many (see Ray's placement
    groups). None puts each where there is room."""
    address: str | None = None
    """Address of a running Ray cluster ("auto" finds it); None starts Ray on this machine."""

    recreate_failed_workers: bool = True
    """Replace a worker whose process died or hangs; if not, the run goes on with the others after
    one error."""
    max_num_env_restarts: int = Field(default=5, ge=0)
    """Of one environment that raises, in a row, before its error stops the run."""
    max_num_worker_restarts: int = Field(default=1000, ge=0)
    """Of one worker; after that it has failed for good."""
    delay_between_worker_restarts_s: NotNegative = 0.1
    """Seconds until a dead worker is made again; doubled at each death in a row, up to 30."""
    sample_timeout_s: Positive | None = None
    """A worker that gives no fragment for so many seconds counts as hanging and is replaced."""

    min_time_s_per_iteration: NotNegative | None = None
    """Seconds between two reports, at least; None reports by steps alone, so that runs repeat."""
    min_sample_timesteps_per_iteration: int = Field(default=0, ge=0)
    """Env steps between two reports, at least."""
    metrics_num_episodes_for_smoothing: int = Field(default=100, ge=1, le=1_000_000)
    """Episodes that the reported means are over, the last ones."""
    log_to: list[LoggerName] = []
    """Experiment trackers that get every result: wandb, mlflow (extras of these names)."""
    log_config: dict[str, dict[str, Any]] = {}
    """Tracker -> its settings: those of wandb.init (project, name, mode, …); of mlflow
    tracking_uri, experiment_name, run_name, tags."""

    # -- fluent groups -------------------------------------------------------------------------

    @classmethod
    def spelled(cls, values: dict[str, Any]) -> dict[str, Any]:
        return canonical_names(values)

    def _set(self, group: str, values: dict[str, Any]) -> Self:
        self._check_not_frozen()
        values = canonical_names(values)
        known = _GROUPS[group] if group != "training" else _training_fields(type(self))
        for name in values:
            if name not in known:
                place = next((g for g, names in _GROUPS.items() if name in names), None)
                place = place or ("training" if name in type(self).model_fields else None)
                hint = f" It belongs to .{place}()." if place else nearest(name, sorted(known))
                if name in ModelConfig.model_fields:
                    hint = f' It is the network\'s: .training(model={{"{name}": …}}).'
                raise ConfigError(f".{group}() has no setting {name!r}.{hint}")
        changed = self.updated(**values)
        vars(self).update({name: getattr(changed, name) for name in values})  # checked together
        self.model_fields_set.update(values)
        return self

    def environment(self, env: Env | None = None, **settings: Any) -> Self:
        """env, env_config, vectorization_mode."""
        return self._set("environment", {**({} if env is None else {"env": env}), **settings})

    def env_or_spaces(self) -> Any:
        """What workers make their environments of; None if it is not set."""
        return self.env

    def rollouts(self, **settings: Any) -> Self:
        """num_workers, num_envs_per_worker, rollout_fragment_length, batch_mode, horizon,
        soft_horizon, no_done_at_end, sample_async, sample_collector, on_invalid_step, collect_infos,
        and how observations, rewards and actions are normalised."""
        return self._set("rollouts", settings)

    def rollout(self, **settings: Any) -> Self:
        """Another name of `rollouts`."""
        return self.rollouts(**settings)

    def training(self, **settings: Any) -> Self:
        """plan, train_batch_size, gamma, lr, model, and the algorithm's own settings."""
        return self._set("training", settings)

    def multi_agent(self, **settings: Any) -> Self:
        """policies, policy_mapping_fn, policies_to_train, count_steps_by."""
        return self._set("multi_agent", settings)

    def exploration(self, **settings: Any) -> Self:
        """explore, exploration_config."""
        return self._set("exploration", settings)

    def evaluation(self, **settings: Any) -> Self:
        """evaluation_interval, evaluation_duration, evaluation_duration_unit,
        evaluation_num_workers, evaluation_parallel_to_training, evaluation_config,
        evaluation_video_dir, evaluation_video_episodes."""
        return self._set("evaluation", settings)

    def offline_data(self, **settings: Any) -> Self:
        """output, output_rows_per_file."""
        return self._set("offline_data", settings)

    def framework(self, framework: str = "torch", **settings: Any) -> Self:
        """device, precision, compile. The framework is torch."""
        return self._set("framework", {"framework": framework, **settings})

    def checkpointing(self, **settings: Any) -> Self:
        """checkpoint_frequency, checkpoint_every_s, checkpoint_num_to_keep,
        checkpoint_score_attribute, checkpoint_score_order."""
        return self._set("checkpointing", settings)

    def resources(self, **settings: Any) -> Self:
        """num_cpus_per_worker, num_gpus_per_worker, custom_resources_per_worker,
        placement_strategy, address."""
        return self._set("resources", settings)

    def fault_tolerance(self, **settings: Any) -> Self:
        """recreate_failed_workers, max_num_worker_restarts, delay_between_worker_restarts_s,
        sample_timeout_s, max_num_env_restarts."""
        return self._set("fault_tolerance", settings)

    def callbacks(self, callbacks_class: type) -> Self:
        """A DefaultCallbacks class of one's own."""
        return self._set("callbacks", {"callbacks_class": callbacks_class})

    def reporting(self, **settings: Any) -> Self:
        """min_time_s_per_iteration, min_sample_timesteps_per_iteration,
        metrics_num_episodes_for_smoothing, log_to, log_config."""
        return self._set("reporting", settings)

    def debugging(self, **settings: Any) -> Self:
        """seed."""
        return self._set("debugging", settings)

    # -- use -----------------------------------------------------------------------------------

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
            raise ConfigError(f"evaluation_interval: {NO_ENVIRONMENT}")
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
        unknown = [name for name in own if name not in IN_EVALUATION]
        if unknown:
            hint = nearest(unknown[0], list(IN_EVALUATION))
            what = "unknown setting" if unknown[0] not in type(self).model_fields else "it takes no"
            raise ConfigError(
                f"evaluation_config: {what} {unknown[0]!r}.{hint} It takes "
                f"{', '.join(IN_EVALUATION)}"
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


IN_EVALUATION = (
    "env",
    "env_config",
    "explore",
    "horizon",
    "max_num_env_restarts",
    "num_envs_per_worker",
    "on_invalid_step",
    "policy_mapping_fn",
    "vectorization_mode",
)
"""What `evaluation_config` may say."""

_GROUPS: dict[str, set[str]] = {
    "environment": {"env", "env_config", "vectorization_mode"},
    "rollouts": {
        "num_workers",
        "num_envs_per_worker",
        "rollout_fragment_length",
        "batch_mode",
        "horizon",
        "soft_horizon",
        "no_done_at_end",
        "sample_async",
        "sample_collector",
        "on_invalid_step",
        "collect_infos",
        "normalize_observations",
        "normalize_rewards",
        "normalize_actions",
        "clip_actions",
    },
    "multi_agent": {"policies", "policy_mapping_fn", "policies_to_train", "count_steps_by"},
    "callbacks": {"callbacks_class"},
    "exploration": {"explore", "exploration_config"},
    "evaluation": {
        "evaluation_interval",
        "evaluation_duration",
        "evaluation_duration_unit",
        "evaluation_num_workers",
        "evaluation_parallel_to_training",
        "evaluation_config",
        "evaluation_video_dir",
        "evaluation_video_episodes",
    },
    "offline_data": {"output", "output_rows_per_file"},
    "framework": {"device", "precision", "compile"},
    "checkpointing": {
        "checkpoint_frequency",
        "checkpoint_every_s",
        "checkpoint_num_to_keep",
        "checkpoint_score_attribute",
        "checkpoint_score_order",
    },
    "resources": {
        "num_cpus_per_worker",
        "num_gpus_per_worker",
        "custom_resources_per_worker",
        "placement_strategy",
        "address",
    },
    "fault_tolerance": {
        "recreate_failed_workers",
        "max_num_env_restarts",
        "max_num_worker_restarts",
        "delay_between_worker_restarts_s",
        "sample_timeout_s",
    },
    "reporting": {
        "min_time_s_per_iteration",
        "min_sample_timesteps_per_iteration",
        "metrics_num_episodes_for_smoothing",
        "log_to",
        "log_config",
    },
    "debugging": {"seed"},
}


def _training_fields(cls: type[AlgorithmConfig]) -> set[str]:
    return set(cls.model_fields).difference(*_GROUPS.values())


class _Schema(GenerateJsonSchema):
    """Settings that are code have no JSON type: anything goes in the schema."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
        return {}

    def encode_default(self, dft: Any) -> Any:
        return dft.to_dict() if hasattr(dft, "to_dict") else super().encode_default(dft)


class OnPolicyConfig(AlgorithmConfig):
    """Settings that the on-policy algorithms share."""

    use_gae: bool = True
    """Generalized advantage estimation; without, advantages are returns minus values."""
    lambda_: Fraction = 0.95
    """GAE's lambda: 0 trusts the values, 1 the returns."""
    entropy_coeff: Schedule = 0.0
    """Weight of the entropy bonus: a number, or a schedule over env steps."""
    vf_loss_coeff: Schedule = 0.5
    """Weight of the value loss: a number, or a schedule over env steps."""
    standardize_advantages: bool = False
    """Advantages of each minibatch to mean 0, standard deviation 1."""
    allow_off_policy: bool = False
    """Take batches from a replay buffer, too, though the loss is for the policy's own, new ones."""
