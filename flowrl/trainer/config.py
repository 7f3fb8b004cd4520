"""AlgorithmConfig: all settings of an algorithm in one flat, typed record."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, PrivateAttr, SkipValidation
from pydantic.json_schema import GenerateJsonSchema

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.envs.atari import is_atari
from flowrl.envs.registry import NO_ENV_MESSAGE, env_creator_for
from flowrl.errors import ConfigError
from flowrl.ops.report import ReportingConfig
from flowrl.policies.code_references import PLAN_MODULE
from flowrl.policies.config import PolicyConfig
from flowrl.policies.policy_spec import PolicyMapping, changed_specs, changes_specs, specs_of
from flowrl.seeding import derive_seed
from flowrl.setting_aliases import canonical_names
from flowrl.setting_values import equal, expanded_path, is_search, nearest
from flowrl.settings import (
    Count,
    Folder,
    NonNegativeInt,
    Positive,
    check_of_settings,
    contains_search,
    import_object,
    setting,
)
from flowrl.trainer.fluent import FluentSettings
from flowrl.trainer.loggers import LoggerName, check_loggers
from flowrl.trainer.memory_checks import check_processes, check_rows
from flowrl.trainer.metric_names import check_metric_name
from flowrl.trainer.other_libraries import with_hints
from flowrl.trainer.plan_files import (
    absolute_plan,
    algorithm_in,
    is_plan_file,
    load_plan,
    module_with_config,
    plan_of_module,
    plan_path,
)
from flowrl.trainer.registry import algorithms_with
from flowrl.trainer.video import check_video

Env = str | type | Callable[..., Any]
PlanSource = str | ModuleType | Callable[..., Any]


def _plan(value: Any) -> Any:
    """Convert an imported plan file to its path or name."""
    if isinstance(value, ModuleType):
        return plan_of_module(value)
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str) or callable(value):
        return value
    raise ValueError("must be a name, the path of a plan file, a module or a function")


def _canonical(value: Any) -> Any:
    """Rename settings that are given by an alias."""
    return canonical_names(value) if isinstance(value, dict) else value


def _as_list(value: Any) -> Any:
    """Put a single name into a list."""
    return [value] if isinstance(value, str) else value


# settings that name folders
FOLDERS = ("output", "input_", "evaluation_video_dir", "replay_buffer_dir")

PlanSetting = Annotated[str | Callable[..., Any] | None, SkipValidation, BeforeValidator(_plan)]
"""Type of the setting `plan`."""


class AlgorithmConfig(FluentSettings, ReportingConfig):
    """Settings of an algorithm. Fluent methods set them in groups and return the config.

    The settings of workers are declared in WorkerConfig, those of policies in PolicyConfig, and
    those of StandardMetricsReporting in ReportingConfig.

    Raises (from every method and assignment):
        ConfigError: a name is unknown (the message suggests the nearest), or a type or range is
            wrong.
    """

    algorithm: ClassVar[str] = "flowrl.trainer.algorithm:Algorithm"
    """Import path of the algorithm's class."""
    samples: ClassVar[bool] = True
    """Whether training samples episodes; False for algorithms that learn from recorded data."""

    env: Annotated[Env | None, SkipValidation] = setting(
        None, group="environment", in_evaluation=True
    )
    """Environment: a gymnasium id, a registered name, a class, an environment (copies of it are
    stepped, never itself, each with its own random numbers), or a function, which may take an
    EnvContext or `env_config` as keyword arguments."""

    plan: PlanSetting = None
    """Execution plan: the name of a shipped plan, the path of a plan file, an imported plan file,
    or a function (workers, config) -> plan."""

    evaluation_interval: Count | None = setting(None, group="evaluation")
    """Iterations between evaluations; None evaluates only when `evaluate()` is called."""
    evaluation_duration: Count = setting(10, group="evaluation")
    """Length of an evaluation, in `evaluation_duration_unit`."""
    evaluation_duration_unit: Literal["episodes", "timesteps"] = setting(
        "episodes", group="evaluation"
    )
    """Whole episodes; or a minimum of env steps, after which the running episodes are played to
    their end. If no episode ends in 200,000 steps of each environment, the evaluation stops with a
    warning and reports `num_unfinished_episodes`: set `horizon` for an environment without a time
    limit."""
    evaluation_num_workers: NonNegativeInt = setting(0, group="evaluation")
    """Number of Ray actors that share an evaluation; 0 evaluates in this process."""
    evaluation_timeout_s: Positive | None = setting(None, group="evaluation")
    """Seconds after which an evaluation on actors is stopped, with a warning, and its workers are
    replaced. The clock starts when all evaluation workers have started, at most 60 s after the
    start of the evaluation. None waits without limit."""
    evaluation_parallel_to_training: bool = setting(False, group="evaluation")
    """Continue training during an evaluation. The result of the iteration in which it finishes
    contains it; the next evaluation waits for it. At the end of a run, `learn()` and `flowrl
    train` wait for the last one, unless a metric of an evaluation ended the run."""
    evaluation_config: Annotated[dict[str, Any], BeforeValidator(_canonical)] = setting(
        {}, group="evaluation"
    )
    """Settings that differ in evaluations, such as env, env_config or explore (False by default);
    settings that evaluations do not use are rejected."""

    evaluation_video_dir: Folder | None = setting(None, group="evaluation")
    """Folder for mp4 videos of the first episodes of each evaluation, on the machine that
    evaluates; needs the extra `video`."""
    evaluation_video_episodes: Count = setting(1, group="evaluation")
    """Episodes recorded per evaluation, from its first environment."""

    checkpoint_frequency: NonNegativeInt = setting(0, group="checkpointing")
    """Iterations between checkpoints of a run; 0 uses `checkpoint_every_s` only."""
    checkpoint_every_s: Positive | None = setting(60.0, group="checkpointing")
    """Approximate seconds between checkpoints of a run; None uses `checkpoint_frequency` only.
    A run always writes a checkpoint at its end."""
    checkpoint_num_to_keep: Count = setting(2, group="checkpointing")
    """Number of newest checkpoints that a run keeps."""
    checkpoint_score_attribute: str | None = setting(None, group="checkpointing")
    """Metric of the results, such as episode_reward_mean; the checkpoint with its best value is
    also kept. With a metric of evaluations, such as evaluation/episode_reward_mean, a run writes a
    checkpoint after each evaluation."""
    checkpoint_score_order: Literal["max", "min"] = setting("max", group="checkpointing")
    """Whether the best checkpoint has the largest ("max") or the smallest ("min")
    `checkpoint_score_attribute`."""

    log_to: Annotated[list[LoggerName], BeforeValidator(_as_list)] = setting([], group="reporting")
    """Experiment loggers that receive every result: wandb, mlflow (extras of these names)."""
    log_config: dict[str, dict[str, Any]] = setting({}, group="reporting")
    """Logger -> its settings: those of wandb.init (project, name, mode, …); of mlflow
    tracking_uri, experiment_name, run_name, tags."""

    # shared by copies: tells whether a config was made from the one in a plan file
    _plan_token: str = PrivateAttr(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if "build" in vars(cls):
            cls.build = with_hints(cls.build)  # type: ignore[method-assign]

    # -- use -----------------------------------------------------------------------------------

    def env_or_spaces(self) -> Any:
        """Return the value from which workers create environments; None if it is not set."""
        return self.env

    def updated(self, **changes: Any) -> Self:
        """Return a validated copy with changes; a dict updates a nested record key by key.

        `policies={"cat": {"config": {"lr": 1e-4}}}` changes only these settings of one policy.
        """
        changes = self.canonical(changes)
        if self.policies is not None and changes_specs(changes.get("policies")):
            changes["policies"] = changed_specs(self.policies, changes["policies"])
        copied = super().updated(**changes)
        copied._plan_token = self._plan_token
        return copied

    def first_ineffective(self, names: Iterable[str]) -> str | None:
        """Return the first of these settings that has no effect because every policy has a config
        of its own; None if there is none."""
        specs = {} if self.policies is None else specs_of(self.policies)
        if not specs or not all(isinstance(s.config, PolicyConfig) for s in specs.values()):
            return None
        # plans pass the last two to their operators
        of_run = {"seed", "total_timesteps", "num_sgd_iter", "sgd_minibatch_size"}
        own = PolicyConfig.model_fields.keys() - of_run
        return next((name for name in names if name in own), None)

    def check_changes(self, before: Mapping[str, Any]) -> None:
        """Check that changed settings have an effect.

        Args:
            before: their values before the change.

        Raises:
            ConfigError: every policy has a config of its own.
        """
        name = self.first_ineffective(n for n, value in before.items() if not equal(value, self[n]))
        if name is not None:
            own = f"{{'config': {{{name!r}: …}}}}"
            policies = ", ".join(f"{policy_id!r}: {own}" for policy_id in specs_of(self.policies))
            raise ConfigError(
                f"{name}: every policy of this plan has its own settings: policies={{{policies}}}"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return a config with values as `to_dict` returns them, and this class's defaults.

        Raises:
            ConfigError: a name is unknown, or a type or range is wrong.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"from_dict: values must be a mapping, got {type(values).__name__}")
        return cls(**canonical_names(dict(values)))

    @classmethod
    def _hint_elsewhere(cls, name: str) -> str:
        if name in ("stop", "run_dir", "progress"):
            return f" It is an argument of learn(): algorithm.learn({name}=…)."
        return super()._hint_elsewhere(name) or algorithms_with(name)

    def validate(self) -> Self:  # type: ignore[override]
        """Check all settings, the environment and the plan file, without starting anything.

        Returns:
            the config itself.

        Raises:
            ConfigError: the first problem found.
        """
        type(self)(**self.to_dict())
        self.check()
        return self

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return a JSON schema of the settings, with descriptions and defaults."""
        return cls.model_json_schema(schema_generator=_Schema)

    def for_policy(self, policy_id: str) -> Any:
        """Return the settings of one policy: those of its PolicySpec merged over these.

        For a policy class of another algorithm, return a config of that algorithm, with the values
        that are set here.

        Raises:
            ConfigError: there is no such policy.
        """
        if self.policies is None and policy_id == DEFAULT_POLICY_ID:
            return self
        specs = specs_of(self.policies)
        if policy_id not in specs:
            raise ConfigError(f"no policy {policy_id!r}.{nearest(policy_id, list(specs))}")
        config = specs[policy_id].config
        if isinstance(config, PolicyConfig):
            changes: dict[str, Any] = {}
            if config.seed is None and self.seed is not None:
                changes["seed"] = derive_seed(self.seed, "policy", policy_id)
            if self.total_timesteps is not None:
                changes["total_timesteps"] = self.total_timesteps
            return config.updated(**changes) if changes else config
        policy_class = specs[policy_id].policy_class
        config = config or {}
        if policy_class is None or isinstance(self, policy_class.config_class):
            return self.updated(**config)
        if issubclass(policy_class.config_class, AlgorithmConfig):
            return policy_class.config_from(self).updated(**config)
        known = type(self).model_fields
        return self.updated(**{name: value for name, value in config.items() if name in known})

    def _uses_microbatches(self) -> bool:
        """Return whether a policy splits its minibatches (`microbatch_size`)."""
        for spec in specs_of(self.policies).values():
            has_settings = isinstance(spec.config, (Mapping, PolicyConfig))
            settings: Any = spec.config if has_settings else {}
            size = settings.get("microbatch_size", self.microbatch_size)
            if size and not is_search(size):
                return True
        return False

    @property
    def policy_class(self) -> Any:
        """The policy class of this config's algorithm; None if the algorithm has none."""
        return getattr(self._algorithm_class(), "policy_class", None)

    def _algorithm_class(self) -> Any:
        return import_object(self.algorithm)

    @check_of_settings
    def _check_combinations(self) -> Self:
        if self.evaluation_parallel_to_training and not self.evaluation_num_workers:
            raise ValueError(
                "evaluation_parallel_to_training needs evaluation workers: "
                ".evaluation(evaluation_num_workers=1)"
            )
        if self.evaluation_timeout_s is not None and not self.evaluation_num_workers:
            raise ValueError(
                "evaluation_timeout_s needs evaluation workers: set evaluation_num_workers, or "
                "limit calls of the environment by env_step_timeout_s"
            )
        if self.evaluation_parallel_to_training and self.evaluation_interval is None:
            raise ValueError("evaluation_parallel_to_training needs an evaluation_interval")
        score = self.checkpoint_score_attribute or ""
        if self.evaluation_parallel_to_training and score.startswith("evaluation/"):
            raise ValueError(
                "checkpoint_score_attribute: with evaluation_parallel_to_training, the score of an "
                "evaluation arrives when the policy has changed: leave one of them out"
            )
        if self.checkpoint_score_attribute is None and self.checkpoint_score_order != "max":
            raise ValueError("checkpoint_score_order needs a checkpoint_score_attribute")
        rows, units = self.rows_per_train_batch(), ""
        if rows > self.train_batch_size:
            units = f", with at most {rows} rows,"
        elif rows < self.train_batch_size:
            units = f", with {rows} rows of each worker,"
        if self.sgd_minibatch_size > rows:
            raise ValueError(
                f"train_batch_size={self.train_batch_size}{units} is smaller than "
                f"sgd_minibatch_size={self.sgd_minibatch_size}: set sgd_minibatch_size to at most "
                f"{rows}"
            )
        return self

    def rows_per_train_batch(self) -> int:
        """Return the rows of one policy that one process learns from per train batch; an upper
        bound if `train_batch_size` counts env steps."""
        return self.train_batch_size

    def check(self) -> None:
        """Check what a run needs: an environment, an existing plan, known metrics, writable
        folders, and no search spaces.

        Raises:
            ConfigError: the first problem found.
        """
        self.check_no_search()
        for policy_id, spec in specs_of(self.policies).items():
            if contains_search(spec.config):
                raise ConfigError(
                    f"policies: the config of {policy_id!r} has a search space of Ray Tune, which "
                    "draws no values within a PolicySpec"
                )
        if self.env_or_spaces() is None:
            raise ConfigError(
                'env: no environment is set: PPO("CartPole-v1") or PPOConfig(env="CartPole-v1") in '
                "Python, --env CartPole-v1 on the command line"
            )
        check_processes(self)
        check_rows(self)
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
            overrides = canonical_names(self.evaluation_config)
            mode = overrides.get("vectorization_mode", self.vectorization_mode)
            check_video("evaluation_video_dir", mode)
            if not self.evaluation_num_workers:
                check_folder(self.evaluation_video_dir, "evaluation_video_dir")
        if isinstance(self.plan, str):
            plan_path(self.plan)
        PolicyMapping(self.policy_mapping_fn, list(specs_of(self.policies)))

    def check_belongs_to_plan(self) -> None:
        """Check that the `config` of a plan file is not used with the algorithm's default plan.

        Raises:
            ConfigError: it is, and no other plan was chosen explicitly.
        """
        if "plan" in self.model_fields_set:
            return
        module = module_with_config(
            lambda config: (
                isinstance(config, AlgorithmConfig) and config._plan_token == self._plan_token
            )
        )
        if module is not None and module.__name__ != f"{PLAN_MODULE}{self.plan}":
            name = module.__name__
            plan = "execution_plan" if name == "__main__" else name
            raise ConfigError(
                f"plan: this config belongs to the execution_plan of the module {name}, but its "
                f"plan is {self.plan!r}: build it with config.build(plan={plan}), with "
                f"Algorithm.from_plan(…), or with .updated(plan={self.plan!r}).build() if you want "
                "that plan"
            )

    def evaluation_overrides(self) -> dict[str, Any]:
        """Return the settings of `evaluation_config` without `explore`, under their own names."""
        overrides = canonical_names(self.evaluation_config)
        overrides.pop("explore", None)
        if "horizon" in overrides:  # a soft one would not end the episodes
            overrides.setdefault("soft_horizon", False)
        return overrides

    def _check_evaluation(self) -> None:
        overrides = canonical_names(self.evaluation_config)
        allowed = [info.name for info in self.describe() if info.in_evaluation]
        unknown = [name for name in overrides if name not in allowed]
        if unknown:
            known = unknown[0] in type(self).model_fields
            hint = "" if known else self.hint(unknown[0], allowed)
            what = "evaluations do not use the setting" if known else "unknown setting"
            raise ConfigError(
                f"evaluation_config: {what} {unknown[0]!r}.{hint} Allowed: {', '.join(allowed)}"
            )
        try:
            env_creator_for(self.updated(**self.evaluation_overrides()).env_or_spaces())
        except ConfigError as error:
            raise ConfigError(f"evaluation_config: {error}") from None
        if not isinstance(self.evaluation_config.get("explore", False), bool):
            raise ConfigError("evaluation_config: explore must be True or False")

    def completed(self) -> Self:
        """Return a copy with a drawn seed if none is set, so that the run can be repeated; absolute
        paths, because the run may be resumed in another folder; and the frame stack of Atari
        games."""
        changes: dict[str, Any] = {}
        if self.seed is None:
            changes["seed"] = secrets.randbits(31)
        changes |= absolute_folders(self)
        if is_plan_file(self.plan):
            changes["plan"] = absolute_plan(str(self.plan))
        stack = self.atari.frame_stack if self.atari is not None and is_atari(self.env) else 1
        if stack > 1 and self.model.num_framestacks == 1 and self.model.custom_model is None:
            changes["model"] = self.model.updated(num_framestacks=stack)
        return self.updated(**changes) if changes else self

    def check_input(self) -> None:
        """Check that the recorded experience of an offline algorithm can be opened."""

    @with_hints
    def build(self, plan: PlanSource | None = None) -> Any:
        """Return the algorithm, ready to train.

        Args:
            plan: replaces the setting `plan`; None keeps it.

        Raises:
            ConfigError: the settings cannot work; nothing was started.
        """
        return self._build(plan)

    def _build(self, plan: PlanSource | None) -> Any:
        """Implement `build`, which subclasses override only to narrow its return type."""
        config = self.updated() if plan is None else self.updated(plan=plan)
        return config.build_as(None)

    def build_as(self, algorithm: Any) -> Any:
        """Return the algorithm as an instance of another Algorithm class.

        Args:
            algorithm: the class; None uses the class of the plan file, or of this config.
        """
        self.check()
        if algorithm is None and is_plan_file(self.plan):
            algorithm = algorithm_in(load_plan(str(self.plan)))
        return (algorithm or self._algorithm_class())(self)


def absolute_folders(config: Any, start: str = "") -> dict[str, str]:
    """Return the settings of a config that name folders, as absolute paths.

    Args:
        config: an AlgorithmConfig, or its settings by name.
        start: the folder in which relative paths begin; "" is the current one.
    """
    folders = {name: config.get(name) for name in FOLDERS}
    return {
        name: str(Path(start, expanded_path(folder)).absolute())
        for name, folder in folders.items()
        if folder is not None and not str(folder).startswith("minari:") and "://" not in str(folder)
    }


def check_folder(folder: str, setting: str = "output") -> None:
    """Check that files can be written to a folder; nothing is created.

    Raises:
        ConfigError: the path is a URI or a file, or the folder cannot be created.
    """
    if "://" in folder:
        raise ConfigError(f"{setting}: must be a folder on this machine, got {folder}")
    path = expanded_path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(
            f"{setting}: {folder} cannot be written: {existing} is not a writable folder"
        )


def check_device_of_workers(config: AlgorithmConfig, algorithm: str) -> None:
    """Check that remote workers which learn have the device of the setting `device`.

    Args:
        config: the settings.
        algorithm: name of the algorithm, for the message.

    Raises:
        ValueError: they have no GPU.
    """
    has_gpus = bool(config.num_gpus_per_worker)
    if config.num_workers and not has_gpus and config.device not in ("auto", "cpu"):
        raise ValueError(
            f"device={config.device!r} needs num_gpus_per_worker above 0: with {algorithm}, the "
            "workers learn"
        )


class _Schema(GenerateJsonSchema):
    """Generate a schema that accepts any value for settings without a JSON type, such as code."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
        return {}

    def encode_default(self, dft: Any) -> Any:
        return dft.to_dict() if hasattr(dft, "to_dict") else super().encode_default(dft)
