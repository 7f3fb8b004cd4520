"""AlgorithmConfig: one flat, typed record of settings, with the fluent groups users know."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, SkipValidation, model_validator

from flowrl.data import (
    DEFAULT_POLICY_ID,
    MultiAgentReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
)
from flowrl.ops import ReplayActors
from flowrl.policies.config import (
    ConfigError,
    Count,
    Fraction,
    ModelConfig,
    NotNegative,
    PolicyConfig,
    Positive,
    Schedule,
    imported,
    nearest,
)
from flowrl.policies.policy_spec import PolicyMapping, multi_agent_settings, specs_of
from flowrl.sampling.callbacks import DefaultCallbacks
from flowrl.sampling.envs import env_creator_for
from flowrl.sampling.sample_collector import SampleCollector
from flowrl.seeding import derive_seed

Env = str | type | Callable[..., Any]
BatchMode = Literal["truncate_episodes", "complete_episodes"]


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
    on_bad_values: Literal["raise", "drop", "replace"] = "raise"
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

    evaluation_num_episodes: Count = 10
    """Episodes of one evaluation."""

    num_cpus_per_worker: NotNegative = 1.0
    """CPUs that Ray reserves per worker; less where the machine has not got as many."""
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
        vars(self).update({name: getattr(changed, name) for name in values})  # checked together
        self.model_fields_set.update(values)
        return self

    def environment(self, env: Env | None = None, **settings: Any) -> Self:
        """env, env_config, vectorization_mode."""
        return self._set("environment", {**({} if env is None else {"env": env}), **settings})

    def rollouts(self, **settings: Any) -> Self:
        """num_workers, num_envs_per_worker, rollout_fragment_length, batch_mode, horizon,
        soft_horizon, no_done_at_end, sample_async, sample_collector, on_bad_values, collect_infos,
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

    def evaluation(self, **settings: Any) -> Self:
        """evaluation_num_episodes."""
        return self._set("evaluation", settings)

    def resources(self, **settings: Any) -> Self:
        """num_cpus_per_worker, address."""
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
        metrics_num_episodes_for_smoothing."""
        return self._set("reporting", settings)

    def debugging(self, **settings: Any) -> Self:
        """seed."""
        return self._set("debugging", settings)

    # -- use -----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values; code (an env creator) as it is."""
        return {k: v.to_dict() if hasattr(v, "to_dict") else v for k, v in self.items()}

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
        values = dict(values)
        if values.get("batch_mode") == "truncated_episodes":
            values["batch_mode"] = "truncate_episodes"
        if "callbacks" in values:
            values["callbacks_class"] = values.pop("callbacks")
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
        PolicyMapping(
            self.policy_mapping_fn, list(specs_of(self.policies or {DEFAULT_POLICY_ID: None}))
        )

    def build(self, plan: str | None = None) -> Any:
        """The algorithm, ready to train. `plan` overrides the setting.

        Raises:
            ConfigError: settings that cannot work; nothing was started.
        """
        config = self.updated() if plan is None else self.updated(plan=plan)
        config.check()
        return self._algorithm_class()(config)


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
        "on_bad_values",
        "collect_infos",
        "normalize_observations",
        "normalize_rewards",
        "normalize_actions",
        "clip_actions",
    },
    "multi_agent": {"policies", "policy_mapping_fn", "policies_to_train", "count_steps_by"},
    "callbacks": {"callbacks_class"},
    "evaluation": {"evaluation_num_episodes"},
    "resources": {"num_cpus_per_worker", "address"},
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
    entropy_coeff: Schedule = 0.0
    """Weight of the entropy bonus: a number, or a schedule over env steps."""
    vf_loss_coeff: Schedule = 0.5
    """Weight of the value loss: a number, or a schedule over env steps."""
    learn_from_replay: bool = False
    """Take batches from a replay buffer, too, though the loss is for the policy's own, new ones."""


class OffPolicyConfig(AlgorithmConfig):
    """Settings of the algorithms that learn from replayed experience."""

    train_batch_size: Count = 32
    """Rows per train batch, drawn from the replay buffer."""
    rollout_fragment_length: Count | Literal["auto"] = 4
    replay_buffer_capacity: Count = 50_000
    """Rows that the replay buffer holds, of each policy."""
    replay_mode: Literal["independent", "lockstep"] = "independent"
    """Draw each policy's rows for themselves, or env steps with the rows of all policies."""
    num_replay_shards: Count = 2
    """Actors that share the replay buffer, in plans whose buffer is on actors."""
    learning_starts: int = Field(default=1000, ge=0)
    """Rows stored before learning begins."""
    training_intensity: Positive | None = None
    """Rows trained on for each row sampled; None trains on one batch for each round of rollouts."""
    n_step: Count = 1
    """Steps of reward before a target's value."""
    prioritized_replay: bool = False
    """Draw rows by their last TD error, not uniformly."""
    prioritized_replay_alpha: NotNegative = 0.6
    """How much: 0 is uniform."""
    prioritized_replay_beta: NotNegative | list[tuple[int, NotNegative]] = 0.4
    """How far importance weights make up for it: a number, or points [(rows stored, value), …]."""
    prioritized_replay_eps: NotNegative = 1e-6
    """Added to TD errors, so that every row has a chance."""
    min_sample_timesteps_per_iteration: int = Field(default=1000, ge=0)

    @model_validator(mode="after")
    def _replay(self) -> Self:
        for name in ("train_batch_size", "learning_starts"):
            if self.replay_buffer_capacity < getattr(self, name):
                raise ValueError(
                    f"replay_buffer_capacity={self.replay_buffer_capacity} is less than "
                    f"{name}={getattr(self, name)}: make it at least that"
                )
        beta = self.prioritized_replay_beta
        if isinstance(beta, list):
            steps = [step for step, _ in beta]
            if not beta or sorted(set(steps)) != steps:
                raise ValueError(
                    f"prioritized_replay_beta: points [(rows stored, value), …] in rising order "
                    f"are needed, got {beta}"
                )
        if self.replay_mode == "lockstep" and self.prioritized_replay:
            raise ValueError('replay_mode="lockstep" draws uniformly: leave prioritized_replay out')
        for name in ("alpha", "beta", "eps"):
            name = f"prioritized_replay_{name}"
            changed = getattr(self, name) != type(self).model_fields[name].default
            if changed and not self.prioritized_replay:
                raise ValueError(f"{name} needs prioritized_replay=True")
        return self

    def new_buffer(
        self, policy_id: str = DEFAULT_POLICY_ID, shard: int = 0, num_shards: int = 1
    ) -> ReplayBuffer:
        """An empty replay buffer for one policy, as these settings say; or a share of it."""
        capacity = math.ceil(self.replay_buffer_capacity / num_shards)
        shared: dict[str, Any] = {
            "n_step": self.n_step,
            "gamma": self.gamma,
            "seed": derive_seed(self.seed, "replay", policy_id, shard),
        }
        if not self.prioritized_replay:
            return ReplayBuffer(capacity, **shared)
        return PrioritizedReplayBuffer(
            capacity,
            alpha=self.prioritized_replay_alpha,
            beta=self.prioritized_replay_beta,
            eps=self.prioritized_replay_eps,
            **shared,
        )

    def replay_buffer(
        self, policies: Collection[str] | None = None, shard: int = 0, num_shards: int = 1
    ) -> MultiAgentReplayBuffer:
        """The replay buffer of a plan: for these policies, or for all that there are.

        Raises (when a policy's first rows come):
            ConfigError: the policy's own settings are of an algorithm that does not replay.
        """

        def make(policy_id: str) -> ReplayBuffer:
            own = self.for_policy(policy_id) if self.policies is not None else self
            if not isinstance(own, OffPolicyConfig):
                raise ConfigError(
                    f"policy {policy_id!r} has a {type(own).__name__}, which does not learn from "
                    "replay: leave its rows out (SelectExperiences)"
                )
            for name in (
                "train_batch_size",
                "learning_starts",
                "training_intensity",
                "replay_mode",
            ):
                if name in own.model_fields_set and getattr(own, name) != getattr(self, name):
                    raise ConfigError(
                        f"policy {policy_id!r} has {name}={getattr(own, name)!r}, but it is drawn "
                        f"together with others, with {getattr(self, name)!r}: give it a buffer of "
                        f"its own (config.for_policy({policy_id!r}).replay_buffer([{policy_id!r}]))"
                    )
            return own.new_buffer(policy_id, shard, num_shards)

        return MultiAgentReplayBuffer(
            make,
            replay_batch_size=self.train_batch_size,
            learning_starts=self.learning_starts,
            training_intensity=self.training_intensity,
            policies=policies,
            mode=self.replay_mode,
        )

    def replay_actors(self, policies: Collection[str] | None = None) -> ReplayActors:
        """The replay buffer of a plan in `num_replay_shards` shards on actors."""
        ids = policies or specs_of(self.policies or {DEFAULT_POLICY_ID: None})
        return ReplayActors(
            lambda shard: self.replay_buffer(policies, shard, self.num_replay_shards),
            self.num_replay_shards,
            self.train_batch_size * len(ids),
            learning_starts=self.learning_starts,
            training_intensity=self.training_intensity,
            seed=self.seed,
        )
