"""ActsWithPolicies: the methods of Algorithm that act with its policies."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.errors import ConfigError
from flowrl.policies.policy import Policy
from flowrl.sampling.worker_set import WorkerSet
from flowrl.trainer.other_libraries import with_hints


class ActsWithPolicies:
    """The part of Algorithm that acts with its policies; see Algorithm for the attributes."""

    workers: WorkerSet

    def get_policy(self, policy_id: str | None = None) -> Policy:
        """Return a policy of the local worker.

        In plans with a learner thread, such as `impala`, the policy may learn at any time. Hold
        `workers.local_worker().lock` while its methods are called, or call those of the algorithm.

        Args:
            policy_id: None for the only policy, or the one with the id "default_policy".

        Raises:
            ConfigError: there is no policy with this id, or it is None and none of several
                policies is "default_policy".
            RuntimeError: the algorithm was stopped.
        """
        policies = self.workers.local_worker().policy_map
        if policy_id is None:
            policy_id = next(iter(policies)) if len(policies) == 1 else DEFAULT_POLICY_ID
            if policy_id not in policies:
                raise ConfigError(
                    f"policy_id: there are the policies {list(policies)}: name one, such as "
                    f"policy_id={next(iter(policies))!r}"
                )
        if policy_id not in policies:
            raise ConfigError(f"there is no policy {policy_id!r}, only {list(policies)}")
        return policies[policy_id]

    @with_hints
    def compute_single_action(
        self, observation: Any, explore: bool = False, policy_id: str | None = None
    ) -> Any:
        """Return the action for one observation, as the environment takes it.

        Args:
            observation: as the environment returned it.
            explore: sample the action; False returns the greedy one.
            policy_id: see `get_policy`.

        Raises:
            ConfigError: the observation does not fit the space, or is not finite.
        """
        policy = self.get_policy(policy_id)
        with self.workers.local_worker().lock:  # a learner thread changes the network
            return policy.compute_single_action(observation, explore=explore)

    @with_hints
    def predict(
        self,
        obs: Any,
        state: list[np.ndarray] | None = None,
        *,
        deterministic: bool = True,
        policy_id: str | None = None,
    ) -> tuple[Any, list[np.ndarray] | None]:
        """Return actions for one observation or a batch, as the environment takes them.

        Args:
            obs: one observation as the environment returned it, or a batch of them with shapes
                [B, …]; arrays, numbers or lists of numbers, in the structure of the observation
                space. For Dict spaces also a list of observations.
            state: recurrent state of the previous call, one array per part: [size] for one
                observation, [B, size] for a batch; None starts new episodes.
            deterministic: return greedy actions instead of sampling them.
            policy_id: see `get_policy`.

        Returns:
            one action, or actions [B, …]; and the recurrent state, with shapes as in the argument,
            or None without recurrence.

        Raises:
            ConfigError: an observation is not in the space, the state does not fit, `deterministic`
                is not a bool, the policy needs more than observation and state (use
                `get_policy().session()`), or there is no such policy.
            RuntimeError: the algorithm was stopped.
        """
        policy = self.get_policy(policy_id)
        with self.workers.local_worker().lock:  # a learner thread changes the network
            return policy.predict(obs, state, deterministic=deterministic)
