"""AlgorithmConfig: one flat, typed record of settings, with the fluent groups users know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, SkipValidation, model_validator

from flowrl.policies.config import (
    ConfigError,
    Count,
    Fraction,
    ModelConfig,
    NotNegative,
    PolicyConfig,
    Positive,
    nearest,
)
from flowrl.sampling.envs import env_creator_for

Env = str | type | Callable[..., Any]


class AlgorithmConfig(PolicyConfig):
    """The settings of an algorithm. Fluent methods set them in groups and return the config.

    Raises (from every method and assignment):
        ConfigError: an unknown name (the nearest is offered), a wrong type or range.
    """

    algorithm: ClassVar[str] = "flowrl.algorithms.algorithm:Algorithm"
    """Import path of the algorithm's class."""

    env: Annotated[Env | None, SkipValidation] = None
    """Environment: an id of gymnasium's, a registered name, a class, or a creator."""
    env_config: dict[str, Any] = {}
    """Given to the environment's creator; keyword arguments for an id or a class."""
    vectorization_mode: Literal["flowrl", "sync", "async", "vector_entry_point"] = "flowrl"
    """How a worker steps several environments: flowrl's own way, or one of gymnasium's."""

    num_workers: int = Field(default=0, ge=0)
    """Workers on Ray actors; 0 samples in this process, without Ray."""
    num_envs_per_worker: Count = 1
    """Environments that each worker steps together."""
    rollout_fragment_length: Count | Literal["auto"] = "auto"
    """Env steps of each environment per fragment; "auto" makes one round of all workers a train
    batch."""
    collect_infos: bool = False
    """Record the environments' infos in the column `infos`."""

    plan: str | None = None
    """Execution plan: the name of a shipped one or the path of a plan file."""
    train_batch_size: Count = 4000
    """Env steps per train batch, at least."""
    count_steps_by: Literal["env_steps", "agent_steps"] = "env_steps"
    """Unit of the train batch size."""

    evaluation_num_episodes: Count = 10
    """Episodes of one evaluation."""

    num_cpus_per_worker: NotNegative = 1.0
    """CPUs that Ray reserves per worker; less where the machine has not got as many."""
    address: str | None = None
    """Address of a running Ray cluster ("auto" finds it); None starts Ray on this machine."""

    recreate_failed_workers: bool = True
    """Replace a worker whose process died or hangs; if not, the run goes on with the others after
    one error."""
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

    # -- fluent groups -------------------------------------------------------------------------

    def _set(self, group: str, values: dict[str, Any]) -> Self:
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
        for name in values:
            setattr(self, name, getattr(changed, name))
        return self

    def environment(self, env: Env | None = None, **settings: Any) -> Self:
        """env, env_config, vectorization_mode."""
        return self._set("environment", {**({} if env is None else {"env": env}), **settings})

    def rollouts(self, **settings: Any) -> Self:
        """num_workers, num_envs_per_worker, rollout_fragment_length, collect_infos, and how
        observations, rewards and actions are normalised."""
        return self._set("rollouts", settings)

    def training(self, **settings: Any) -> Self:
        """plan, train_batch_size, gamma, lr, model, and the algorithm's own settings."""
        return self._set("training", settings)

    def multi_agent(self, **settings: Any) -> Self:
        """count_steps_by."""
        return self._set("multi_agent", settings)

    def evaluation(self, **settings: Any) -> Self:
        """evaluation_num_episodes."""
        return self._set("evaluation", settings)

    def resources(self, **settings: Any) -> Self:
        """num_cpus_per_worker, address."""
        return self._set("resources", settings)

    def fault_tolerance(self, **settings: Any) -> Self:
        """recreate_failed_workers, max_num_worker_restarts, delay_between_worker_restarts_s,
        sample_timeout_s."""
        return self._set("fault_tolerance", settings)

    def reporting(self, **settings: Any) -> Self:
        """min_time_s_per_iteration, min_sample_timesteps_per_iteration,
        metrics_num_episodes_for_smoothing."""
        return self._set("reporting", settings)

    def debugging(self, **settings: Any) -> Self:
        """seed."""
        return self._set("debugging", settings)

    # -- use -----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values; code (an env creator) as it is."""
        return {k: v.to_dict() if hasattr(v, "to_dict") else v for k, v in self.items()}

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.sgd_minibatch_size > self.train_batch_size:
            raise ValueError(
                f"sgd_minibatch_size={self.sgd_minibatch_size} is larger than "
                f"train_batch_size={self.train_batch_size}: make it at most that"
            )
        return self

    def check(self) -> None:
        """Refuse what only shows when a run is near: a missing or unknown environment.

        Raises:
            ConfigError
        """
        if self.env is None:
            raise ConfigError('env: no environment is set: .environment(env="CartPole-v1")')
        env_creator_for(self.env)

    def build(self, plan: str | None = None) -> Any:
        """The algorithm, ready to train. `plan` overrides the setting.

        Raises:
            ConfigError: settings that cannot work; nothing was started.
        """
        from importlib import import_module

        module, name = self.algorithm.split(":")
        config = self.updated() if plan is None else self.updated(plan=plan)
        config.check()
        return getattr(import_module(module), name)(config)


_GROUPS: dict[str, set[str]] = {
    "environment": {"env", "env_config", "vectorization_mode"},
    "rollouts": {
        "num_workers",
        "num_envs_per_worker",
        "rollout_fragment_length",
        "collect_infos",
        "normalize_observations",
        "normalize_rewards",
        "normalize_actions",
        "clip_actions",
    },
    "multi_agent": {"count_steps_by"},
    "evaluation": {"evaluation_num_episodes"},
    "resources": {"num_cpus_per_worker", "address"},
    "fault_tolerance": {
        "recreate_failed_workers",
        "max_num_worker_restarts",
        "delay_between_worker_restarts_s",
        "sample_timeout_s",
    },
    "reporting": {
        "min_time_s_per_iteration",
        "min_sample_timesteps_per_iteration",
        "metrics_num_episodes_for_smoothing",
    },
    "debugging": {"seed"},
}


def _training_fields(cls: type[AlgorithmConfig]) -> set[str]:
    return set(cls.model_fields).difference(*_GROUPS.values())


class OnPolicyConfig(AlgorithmConfig):
    """Settings that the on-policy algorithms share."""

    use_gae: bool = True
    """Generalized advantage estimation; without, advantages are returns minus values."""
    lambda_: Fraction = 0.95
    """GAE's lambda: 0 trusts the values, 1 the returns."""
    entropy_coeff: NotNegative = 0.0
    """Weight of the entropy bonus."""
    vf_loss_coeff: NotNegative = 0.5
    """Weight of the value loss."""
