"""OffPolicyConfig: the settings of the algorithms that learn from a replay buffer."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.errors import ConfigError
from flowrl.ops import ReplayActors
from flowrl.policies.policy_spec import specs_of
from flowrl.policies.schedules import LinearSchedule, env_step
from flowrl.replay import MultiAgentReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from flowrl.replay.multi_agent import check_stored_policies
from flowrl.seeding import derive_seed
from flowrl.settings import (
    Count,
    Folder,
    NonNegative,
    NonNegativeInt,
    Positive,
    check_of_settings,
)
from flowrl.trainer.config import AlgorithmConfig, check_folder

SHARED_SETTINGS = ("train_batch_size", "learning_starts", "training_intensity", "replay_mode")
REPLAY_ACTOR_SETTINGS = ("num_replay_shards", "replay_buffer_shards_colocated_with_driver")


class OffPolicyConfig(AlgorithmConfig):
    """Settings of the algorithms that learn from a replay buffer."""

    train_batch_size: Count = 32
    """Rows per train batch, drawn from the replay buffer."""
    rollout_fragment_length: Count | Literal["auto"] = 4
    replay_buffer_capacity: Count = 50_000
    """Capacity of the replay buffer, in rows per policy."""
    replay_buffer_dir: Folder | None = None
    """Folder for memory-mapped files with the rows of the buffer, on a local disk of the machine
    that has the buffer; for buffers larger than memory. None keeps the rows in memory."""
    replay_mode: Literal["independent", "lockstep"] = "independent"
    """Draw the rows of each policy independently, or draw env steps with the rows of all policies.
    If an action of an agent lasts several env steps, its row belongs to the last of them."""
    num_replay_shards: NonNegativeInt = 2
    """Number of Ray actors that share the replay buffer, in plans with replay actors; 0 keeps the
    buffer in the process of the plan."""
    replay_buffer_shards_colocated_with_driver: bool = True
    """Place the replay actors on the node of the driver; if False, on any node."""
    learning_starts: NonNegativeInt = 1000
    """Rows stored before training begins."""
    training_intensity: Annotated[Positive, Field(le=10_000)] | None = None
    """Rows trained on per row stored after `learning_starts`; None trains on one batch per stored
    batch. Rows of policies that do not learn (`policies_to_train`) are stored and drawn, too: they
    count as rows stored and as rows trained on, unless the plan leaves them out with
    SelectExperiences."""
    n_step: Count = 1
    """Number of rewards in a target before the value of the next state (n-step returns)."""
    prioritized_replay: bool = False
    """Draw rows by their last TD error (prioritized experience replay, Schaul et al. 2016, arXiv
    1511.05952); if False, uniformly."""
    prioritized_replay_alpha: NonNegative = 0.6
    """Prioritization exponent alpha; 0 draws uniformly."""
    prioritized_replay_beta: LinearSchedule = 0.4
    """Exponent beta of the importance weights: a number, or points [(rows stored, value), …]; 1
    corrects the bias of prioritization fully. Rows may be percentages of `total_timesteps`."""
    prioritized_replay_eps: NonNegative = 1e-6
    """Added to absolute TD errors, so that every row can be drawn."""
    min_sample_timesteps_per_iteration: NonNegativeInt = 1000

    @check_of_settings
    def _check_replay_settings(self) -> Self:
        for name in ("train_batch_size", "learning_starts"):
            if self.replay_buffer_capacity < getattr(self, name):
                raise ValueError(
                    f"replay_buffer_capacity={self.replay_buffer_capacity} is less than "
                    f"{name}={getattr(self, name)}: increase the capacity"
                )
        if self.replay_mode == "lockstep" and self.prioritized_replay:
            raise ValueError('replay_mode="lockstep" draws uniformly: set prioritized_replay=False')
        self._require(
            self.prioritized_replay, "prioritized_replay=True",
            "prioritized_replay_alpha", "prioritized_replay_beta", "prioritized_replay_eps",
        )  # fmt: skip
        return self

    def check(self) -> None:
        """Check the settings that depend on this machine; see AlgorithmConfig.check."""
        super().check()
        if self.replay_buffer_dir is not None:
            check_folder(self.replay_buffer_dir, "replay_buffer_dir")

    def new_buffer(
        self, policy_id: str = DEFAULT_POLICY_ID, shard: int = 0, num_shards: int = 1
    ) -> ReplayBuffer:
        """Create an empty replay buffer for one policy, or one shard of it.

        Args:
            policy_id: the policy whose rows are stored.
            shard: index of the shard, from 0.
            num_shards: number of shards; each has 1 / num_shards of the capacity.

        Raises:
            ConfigError: files cannot be written to `replay_buffer_dir`.
        """
        capacity = math.ceil(self.replay_buffer_capacity / num_shards)
        links = "consecutive" if self.normalize_observations else "equal"
        if num_shards > 1:
            links = "never"
        settings = {**self.buffer_settings(policy_id, shard), "links": links}
        try:
            if not self.prioritized_replay:
                return ReplayBuffer(capacity, **settings)
            return PrioritizedReplayBuffer(
                capacity,
                alpha=self.prioritized_replay_alpha,
                beta=self._beta(num_shards),
                eps=self.prioritized_replay_eps,
                **settings,
            )
        except OSError as error:
            raise ConfigError(f"replay_buffer_dir: it cannot be written: {error}") from error

    def _beta(self, num_shards: int) -> float | list[tuple[float, float]]:
        """Return `prioritized_replay_beta` with percentages replaced by rows, for a shard that
        stores one of `num_shards` equal parts of the rows."""
        beta = self.prioritized_replay_beta
        if not isinstance(beta, list):
            return beta
        return [(env_step(step, self.total_timesteps) / num_shards, value) for step, value in beta]

    def buffer_settings(self, policy_id: str, shard: int) -> dict[str, Any]:
        """Return the arguments of a ReplayBuffer, without its capacity."""
        return {
            "n_step": self.n_step,
            "gamma": self.gamma,
            "seed": derive_seed(self.seed, "replay", policy_id, shard),
            "directory": self.replay_buffer_dir,
        }

    def replay_buffer(self, policies: Collection[str] | None = None) -> MultiAgentReplayBuffer:
        """Create the replay buffer of a plan.

        Args:
            policies: ids of the policies whose rows are stored; None for all policies.

        Raises:
            TypeError: `policies` is neither a collection of ids nor None.
            ValueError: `policies` is empty.
            ConfigError: a setting that only replay actors use is set. Later, when the first rows of
                a policy are stored: its algorithm does not learn from replay, or it has another
                value of a setting of the common buffer.
        """
        check_stored_policies(policies)
        ids = policies or specs_of(self.policies)
        configs = [self, *(self.for_policy(policy_id) for policy_id in ids if self.policies)]
        for config in configs:
            if not isinstance(config, OffPolicyConfig):
                continue
            for name in REPLAY_ACTOR_SETTINGS:
                value = getattr(config, name)
                in_process = name == "num_replay_shards" and value == 0
                if value != type(config).model_fields[name].default and not in_process:
                    raise ConfigError(
                        f"{name} is for plans whose buffer is on actors (flowrl train "
                        "dqn_distributed): leave it out"
                    )
        return self._new_multi_agent_buffer(policies)

    def _new_multi_agent_buffer(
        self, policies: Collection[str] | None, shard: int = 0, num_shards: int = 1
    ) -> MultiAgentReplayBuffer:
        """Create the replay buffer of a plan, or one shard of it."""

        def make(policy_id: str) -> ReplayBuffer:
            config = self.for_policy(policy_id) if self.policies is not None else self
            if not isinstance(config, OffPolicyConfig):
                raise ConfigError(
                    f"policy {policy_id!r} has a {type(config).__name__}, which does not learn "
                    "from replay: leave its rows out (SelectExperiences)"
                )
            for name in SHARED_SETTINGS:
                value, common_value = getattr(config, name), getattr(self, name)
                if name in config.model_fields_set and value != common_value:
                    raise ConfigError(
                        f"policy {policy_id!r} has {name}={value!r}, but the replay buffer that it "
                        f"shares with other policies has {common_value!r}: create a separate "
                        f"buffer (config.for_policy({policy_id!r}).replay_buffer([{policy_id!r}]))"
                    )
            return config.new_buffer(policy_id, shard, num_shards)

        return MultiAgentReplayBuffer(
            make,
            replay_batch_size=self.train_batch_size,
            learning_starts=self.learning_starts,
            training_intensity=self.training_intensity,
            policies=policies,
            mode=self.replay_mode,
        )

    def replay_actors(
        self, policies: Collection[str] | None = None
    ) -> ReplayActors | MultiAgentReplayBuffer:
        """Create the replay buffer of a plan as `num_replay_shards` shards on Ray actors, or in
        this process if there are none.

        Raises:
            TypeError, ConfigError: see `replay_buffer`; or a setting needs actors.
        """
        if self.num_replay_shards == 0:
            if not self.replay_buffer_shards_colocated_with_driver:
                raise ConfigError(
                    "replay_buffer_shards_colocated_with_driver=False needs num_replay_shards of "
                    "at least 1: leave it out"
                )
            return self._new_multi_agent_buffer(policies)
        check_stored_policies(policies)
        ids = policies or specs_of(self.policies)
        return ReplayActors(
            lambda shard: self._new_multi_agent_buffer(policies, shard, self.num_replay_shards),
            self.num_replay_shards,
            self.rows_per_train_batch() * len(ids),
            learning_starts=self.learning_starts,
            training_intensity=self.training_intensity,
            seed=self.seed,
            colocated=self.replay_buffer_shards_colocated_with_driver,
            address=self.address,
        )
