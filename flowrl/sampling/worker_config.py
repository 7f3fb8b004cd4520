"""WorkerConfig: the settings that rollout workers and the WorkerSet read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SkipValidation, model_validator

from flowrl.envs.atari import AtariSettings
from flowrl.envs.env_factory import VectorizationMode
from flowrl.envs.validation import OnInvalidStep
from flowrl.errors import ConfigError
from flowrl.iter.recovery import Recovery
from flowrl.policies.config import PolicyConfig
from flowrl.policies.policy_spec import specs_of
from flowrl.sampling.callbacks import DefaultCallbacks, check_callbacks_class
from flowrl.sampling.sample_collector import SampleCollector
from flowrl.setting_aliases import canonical_names
from flowrl.settings import (
    Count,
    Folder,
    NonNegative,
    NonNegativeInt,
    Positive,
    check_of_settings,
    setting,
)

DEFAULT_FRAGMENT_LENGTH = 200


def _on_or_off(value: Any) -> Any:
    """True and False switch an optional record on and off."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


class WorkerConfig(PolicyConfig):
    """Settings of workers, and the default settings of their policies."""

    num_workers: NonNegativeInt = setting(0, group="rollouts")
    """Number of workers on Ray actors; 0 samples in this process, without Ray."""
    num_envs_per_worker: Count = setting(1, group="rollouts", in_evaluation=True, le=100_000)
    """Number of environments that each worker steps together; a gymnasium VectorEnv that the
    environment's creator returns keeps its own number if this is 1."""

    env_config: dict[str, Any] = setting({}, group="environment", in_evaluation=True)
    """Passed to the environment's creator; keyword arguments of an id or a class."""
    atari: Annotated[AtariSettings | None, BeforeValidator(_on_or_off)] = setting(
        AtariSettings(), group="environment", in_evaluation=True
    )
    """Preprocessing of Atari games (ids ALE/… and …NoFrameskip-v4); None uses their frames as they
    are. Other environments are not affected."""
    vectorization_mode: VectorizationMode = setting(
        "flowrl", group="environment", in_evaluation=True
    )
    """How a worker steps several environments: one after the other ("flowrl"); at the same time,
    each in its own process, for slow ones ("async"); as a vector environment of Gymnasium
    ("sync": SyncVectorEnv; "vector_entry_point": the environment's own) or of EnvPool
    ("envpool")."""

    rollout_fragment_length: Count | Literal["auto"] = setting("auto", group="rollouts")
    """Env steps of each environment per fragment; "auto" makes one round of all workers one
    train batch."""
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = setting(
        "truncate_episodes", group="rollouts"
    )
    """Sample fragments, which may start and end within episodes; or whole episodes of at least the
    fragment length in total."""
    train_batch_size: Count = 4000
    """Env steps per train batch, at least."""
    count_steps_by: Literal["env_steps", "agent_steps"] = setting("env_steps", group="multi_agent")
    """Unit of `train_batch_size` and, with several agents, of `rollout_fragment_length`:
    "env_steps" counts one step of an environment once, "agent_steps" each agent's row."""
    horizon: Count | None = setting(None, group="rollouts", in_evaluation=True)
    """Env steps after which an episode is truncated; replaces the time limit of a Gymnasium
    environment. Limits inside a multi-agent environment stay."""
    soft_horizon: bool = setting(False, group="rollouts")
    """Start a new episode at the horizon without resetting the environment: no flag is set, and
    recurrent states and views continue. A time limit above the horizon stays, and still truncates
    and resets."""
    no_done_at_end: bool = setting(False, group="rollouts")
    """Do not mark the ends of episodes, so that values are bootstrapped there; environments are
    reset as usual."""
    sample_async: bool = setting(False, group="rollouts")
    """Sample in a thread of the worker, up to two fragments ahead, so that workers do not wait for
    the driver. Not with `env_step_timeout_s`."""
    sample_collector: Annotated[type[SampleCollector] | None, SkipValidation] = setting(
        None, group="rollouts"
    )
    """A SampleCollector class that gets the rows one by one; None samples in columns."""
    on_invalid_step: OnInvalidStep = setting("warn", group="rollouts", in_evaluation=True)
    """What to do with observations and rewards that are not finite or outside their space.
    "raise" raises an error; "drop" drops the episode's rows of this fragment and recreates the
    environment; "replace" replaces non-finite numbers by 0 and clips the others to the space.
    "warn" is like "raise", but keeps finite observations outside the bounds of a Box, with one
    warning per worker."""
    clip_rewards: bool | Positive | None = setting(None, group="rollouts")
    """True learns from the sign of rewards; a number clips rewards to ± this number, after
    `normalize_rewards`. None is True for preprocessed Atari games without `normalize_rewards`,
    otherwise False. Reported returns are sums of unclipped rewards."""
    collect_infos: bool = setting(False, group="rollouts")
    """Build the column `infos` and send it with each fragment; if False, it is built or fetched
    when it is read."""
    explore: bool = setting(True, group="exploration", in_evaluation=True)
    """Whether workers explore while sampling; if False, they act greedily."""

    policies: Annotated[Any, SkipValidation] = setting(None, group="multi_agent")
    """Policy id -> PolicySpec, or a collection of ids; None for one default policy."""
    policy_mapping_fn: Annotated[Callable[..., str] | None, SkipValidation] = setting(
        None, group="multi_agent", in_evaluation=True
    )
    """fn(agent_id, episode, worker, **kwargs) -> policy id, called once per agent and
    episode."""
    policies_to_train: Annotated[Any, SkipValidation] = setting(None, group="multi_agent")
    """Ids of the policies that learn, or fn(policy_id, batch) -> bool; None for all."""
    callbacks_class: Annotated[type[DefaultCallbacks] | None, SkipValidation] = setting(
        None, group="callbacks"
    )
    """A subclass of DefaultCallbacks."""

    output: Folder | None = setting(None, group="offline_data")
    """Folder where sampled experience is written as Parquet files. Rewards are recorded as policies
    learn from them (`clip_rewards`). Not with normalize_observations or normalize_rewards."""
    output_rows_per_file: Count = setting(50_000, group="offline_data")
    """Rows of one policy per file; the last file may have fewer."""

    num_cpus_per_worker: NonNegative = setting(1.0, group="resources")
    """CPUs that Ray reserves per worker; fewer if the cluster has too few. Evaluation workers share
    what the training workers leave, which may be 0."""
    num_gpus_per_worker: NonNegative = setting(0.0, group="resources")
    """GPUs, or fractions of one, that Ray reserves per worker."""
    custom_resources_per_worker: dict[str, Positive] = setting({}, group="resources")
    """Custom cluster resources that each worker takes: name -> amount."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = setting(
        None, group="resources"
    )
    """Reserve resources for all workers together: "PACK" on few nodes and "SPREAD" on many, if
    possible; "STRICT_PACK" and "STRICT_SPREAD" require it (see Ray's placement groups). None places
    each worker wherever there is room."""
    num_threads_per_process: Annotated[Count, Field(le=1024)] | Literal["auto"] | None = setting(
        "auto", group="resources"
    )
    """Threads of torch in this process and on each worker, limited when the algorithm or the worker
    is built; numpy's BLAS then has one. "auto" is 1; for networks with convolutions, this process
    has as many as there are cores that no worker uses, at most OMP_NUM_THREADS. With "auto" and a
    free core, two threads share each large update of SAC, TD3 and DDPG. None changes nothing."""
    address: str | None = setting(None, group="resources")
    """Address of a running Ray cluster ("auto" finds it); "local" starts Ray on this machine; None
    takes that of the environment variable RAY_ADDRESS, or "local" if there is none."""

    recreate_failed_workers: bool = setting(True, group="fault_tolerance")
    """Replace workers whose process died or hangs; if False, the run raises one error and can
    continue with the other workers."""
    num_spare_workers: NonNegativeInt = setting(0, group="fault_tolerance")
    """Number of processes that are started in addition, and become the replacement of a worker that
    dies: a new process needs several seconds to import its packages."""
    wait_for_replaced_workers: bool = setting(False, group="fault_tolerance")
    """Whether the rounds of synchronous plans wait until a dead worker is replaced; if False, they
    continue with the other workers, if there are any, until the new one has started."""
    max_worker_memory_mb: Count | None = setting(None, group="fault_tolerance")
    """Resident memory of a worker's process, in megabytes (2^20 bytes), above which it is replaced
    after its current fragment, for environments that leak memory; None for no limit. Its episodes
    start again."""
    max_num_env_restarts: NonNegativeInt = setting(5, group="fault_tolerance", in_evaluation=True)
    """Consecutive failures of one environment after which its error stops the run; raise it for an
    unreliable simulator. For failures after step 100 of an episode, the limit is 100 times as
    large, except for timeouts and for failures at the same step as the previous one. A completed
    episode resets the counts; a completed fragment, too, unless the next failure is at that
    step."""
    env_step_timeout_s: Positive | None = setting(None, group="fault_tolerance")
    """Seconds that a step of one environment may take. A longer step is a failure of the
    environment, which is created again. The limit interrupts only the main thread, and only calls
    that react to signals; use `sample_timeout_s` for other calls."""
    env_reset_timeout_s: Positive | None = setting(None, group="fault_tolerance")
    """Seconds that a reset of one environment may take; see `env_step_timeout_s`."""
    max_num_worker_restarts: NonNegativeInt = setting(1000, group="fault_tolerance")
    """Restarts of one worker, after which it counts as failed. It also counts as failed after three
    consecutive deaths with the same error."""
    delay_between_worker_restarts_s: NonNegative = setting(0.1, group="fault_tolerance")
    """Seconds before a dead worker is replaced; doubles with each consecutive death, up to
    30."""
    sample_timeout_s: Positive | None = setting(None, group="fault_tolerance")
    """Seconds without a fragment after which a remote worker counts as hanging and is replaced; its
    first fragment may take 60 s longer. None waits without limit."""

    @property
    def fragment_length(self) -> int:
        """`rollout_fragment_length` as an int; 200 for "auto"."""
        length = self.rollout_fragment_length
        return DEFAULT_FRAGMENT_LENGTH if length == "auto" else length

    @property
    def recovery(self) -> Recovery:
        """How workers are replaced, by the settings of the group `fault_tolerance`."""
        return Recovery(
            timeout_s=self.sample_timeout_s,
            max_restarts=self.max_num_worker_restarts,
            backoff_s=self.delay_between_worker_restarts_s,
            rounds_wait_for_replacement=self.wait_for_replaced_workers
            or not self.recreate_failed_workers,
        )

    @classmethod
    def of(cls, config: Any) -> WorkerConfig:
        """Return the settings that workers read in a config.

        Args:
            config: a WorkerConfig, which is returned as it is; another record or a mapping, which
                may also have settings of policies; None for the defaults. In a mapping,
                `rollout_fragment_length` is 200 by default.

        Raises:
            ConfigError: a setting has a wrong type or value.
        """
        if isinstance(config, WorkerConfig):
            return config
        if isinstance(config, PolicyConfig):
            return cls(seed=config.seed, rollout_fragment_length=DEFAULT_FRAGMENT_LENGTH)
        values = canonical_names(dict(config or {}))
        known = {k: v for k, v in values.items() if k in WORKER_SETTINGS or k == "seed"}
        return cls(**{"rollout_fragment_length": DEFAULT_FRAGMENT_LENGTH, **known})

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, values: Any) -> Any:
        """Accept names of other libraries."""
        return canonical_names(values) if isinstance(values, dict) else values

    @check_of_settings
    def _check_resources(self) -> Self:
        gpus = self.num_gpus_per_worker
        if gpus > 1 and gpus != int(gpus):
            raise ValueError(f"num_gpus_per_worker: above 1 only whole numbers, got {gpus:g}")
        if 0 < gpus < MIN_AMOUNT:
            raise ValueError(
                f"num_gpus_per_worker: must be 0 or at least {MIN_AMOUNT}, got {gpus:g}"
            )
        for name, amount in self.custom_resources_per_worker.items():
            if name in ("CPU", "GPU"):
                raise ValueError(
                    f"custom_resources_per_worker: {name} is no custom resource: set "
                    f"num_{name.lower()}s_per_worker"
                )
            if amount < MIN_AMOUNT:
                raise ValueError(
                    f"custom_resources_per_worker: {name}: Ray's smallest amount is {MIN_AMOUNT}, "
                    f"got {amount:g}"
                )
        return self

    @check_of_settings
    def _check_worker_settings(self) -> Self:
        for name in ("num_gpus_per_worker", "custom_resources_per_worker", "placement_strategy"):
            if self.num_spare_workers and getattr(self, name):
                raise ValueError(f"num_spare_workers: not supported with {name}")
        if self.sample_async and (self.env_step_timeout_s or self.env_reset_timeout_s):
            raise ValueError(
                "env_step_timeout_s, env_reset_timeout_s: not supported with sample_async, whose "
                "environments run in another thread: set sample_timeout_s"
            )
        if self.soft_horizon and self.horizon is None:
            raise ValueError("soft_horizon needs a horizon: .rollouts(horizon=…)")
        value = self.sample_collector
        if value is not None and not (
            isinstance(value, type) and issubclass(value, SampleCollector)
        ):
            raise ValueError(
                f"sample_collector: must be a subclass of SampleCollector, got {value!r}"
            )
        continues = SampleCollector.continue_episode
        if value is not None and self.soft_horizon and value.continue_episode is continues:
            raise ValueError(
                f"sample_collector: {value.__name__} has no continue_episode(), which soft_horizon "
                "needs"
            )
        if self.callbacks_class is not None:
            check_callbacks_class(self.callbacks_class)
        ids = list(specs_of(self.policies))
        to_train = self.policies_to_train
        if to_train is not None and not callable(to_train):
            if isinstance(to_train, str) or not hasattr(to_train, "__iter__"):
                raise ValueError(
                    "policies_to_train: must be a collection of policy ids or a function, got "
                    f"{to_train!r}"
                )
            to_train = vars(self)["policies_to_train"] = list(to_train)
            unknown = [policy_id for policy_id in to_train if policy_id not in ids]
            if unknown:
                raise ValueError(
                    f"policies_to_train: there is no policy {unknown[0]!r}, only {ids}"
                )
        return self


MIN_AMOUNT = 0.0001  # of a resource, which Ray counts in this unit
WORKER_SETTINGS = frozenset(WorkerConfig.model_fields) - frozenset(PolicyConfig.model_fields)
"""Names of the settings that configure workers and not policies."""


@contextmanager
def unsendable_setting_named(config: WorkerConfig) -> Iterator[None]:
    """Convert the error of Ray that settings cannot be pickled for a remote worker.

    Raises:
        ConfigError: a setting cannot be pickled; the message names it.
    """
    try:
        yield
    except TypeError:
        from ray import cloudpickle

        for name, value in config.items():
            entries = value.items() if isinstance(value, dict) else ()
            parts = {f"{name}[{key!r}]": part for key, part in entries} or {name: value}
            for part_name, part in parts.items():
                try:
                    cloudpickle.dumps(part)
                except Exception as error:
                    raise ConfigError(
                        f"{part_name} cannot be sent to remote workers: {type(error).__name__}: "
                        f"{error}. Create such an object where it is used, for example in the "
                        "constructor of the environment"
                    ) from None
        raise
