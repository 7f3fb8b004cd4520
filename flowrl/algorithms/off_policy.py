"""OffPolicyConfig: the settings of the algorithms that learn from replayed experience."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.ops import ReplayActors
from flowrl.policies.policy_spec import specs_of
from flowrl.replay import MultiAgentReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from flowrl.seeding import derive_seed
from flowrl.settings import ConfigError, Count, NotNegative, Positive
from flowrl.trainer.config import AlgorithmConfig, check_folder

ON_ACTORS = ("num_replay_shards", "replay_buffer_shards_colocated_with_driver")


class OffPolicyConfig(AlgorithmConfig):
    """Settings of the algorithms that learn from replayed experience."""

    train_batch_size: Count = 32
    """Rows per train batch, drawn from the replay buffer."""
    rollout_fragment_length: Count | Literal["auto"] = 4
    replay_buffer_capacity: Count = 50_000
    """Rows that the replay buffer holds, of each policy."""
    replay_buffer_dir: str | None = None
    """Folder for files with these rows, of buffers that are larger than memory (a local disk, on
    the machine that has the buffer); None: in memory."""
    replay_mode: Literal["independent", "lockstep"] = "independent"
    """Draw each policy's rows for themselves, or env steps with the rows of all policies."""
    num_replay_shards: Count = 2
    """Actors that share the replay buffer, in plans whose buffer is on actors."""
    replay_buffer_shards_colocated_with_driver: bool = True
    """Keep these actors on the node of the learner, not wherever the cluster has room."""
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

    def check(self) -> None:
        """Refuse what only shows when a run is near; see AlgorithmConfig.check."""
        super().check()
        if self.replay_buffer_dir is not None:
            check_folder(self.replay_buffer_dir, "replay_buffer_dir")

    def new_buffer(
        self, policy_id: str = DEFAULT_POLICY_ID, shard: int = 0, num_shards: int = 1
    ) -> ReplayBuffer:
        """An empty replay buffer for one policy, as these settings say; or a share of it."""
        capacity = math.ceil(self.replay_buffer_capacity / num_shards)
        shared = self.buffer_settings(policy_id, shard)
        try:
            if not self.prioritized_replay:
                return ReplayBuffer(capacity, **shared)
            return PrioritizedReplayBuffer(
                capacity,
                alpha=self.prioritized_replay_alpha,
                beta=self.prioritized_replay_beta,
                eps=self.prioritized_replay_eps,
                **shared,
            )
        except OSError as error:
            raise ConfigError(f"replay_buffer_dir: it cannot be written: {error}") from error

    def buffer_settings(self, policy_id: str, shard: int) -> dict[str, Any]:
        """What all kinds of buffers are given besides their capacity."""
        return {
            "n_step": self.n_step,
            "gamma": self.gamma,
            "seed": derive_seed(self.seed, "replay", policy_id, shard),
            "directory": self.replay_buffer_dir,
        }

    def replay_buffer(self, policies: Collection[str] | None = None) -> MultiAgentReplayBuffer:
        """The replay buffer of a plan: for these policies, or for all that there are.

        Raises:
            ConfigError: settings of buffers on actors; when a policy's first rows come: its own
                settings are of an algorithm that does not replay.
        """
        ids = policies or specs_of(self.policies or {DEFAULT_POLICY_ID: None})
        every = [self, *(self.for_policy(policy_id) for policy_id in ids if self.policies)]
        for own in every:
            for name in ON_ACTORS if isinstance(own, OffPolicyConfig) else ():
                if getattr(own, name) != type(own).model_fields[name].default:
                    raise ConfigError(
                        f"{name} is for plans whose buffer is on actors (flowrl train "
                        "dqn_distributed): leave it out"
                    )
        return self._share_of_buffer(policies)

    def _share_of_buffer(
        self, policies: Collection[str] | None, shard: int = 0, num_shards: int = 1
    ) -> MultiAgentReplayBuffer:
        """All of that buffer, or one of so many parts on actors."""

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
            lambda shard: self._share_of_buffer(policies, shard, self.num_replay_shards),
            self.num_replay_shards,
            self.train_batch_size * len(ids),
            learning_starts=self.learning_starts,
            training_intensity=self.training_intensity,
            seed=self.seed,
            colocated=self.replay_buffer_shards_colocated_with_driver,
            address=self.address,
        )
