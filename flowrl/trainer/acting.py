"""ActsWithPolicies: the methods of Algorithm that act with its policies."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.policies.policy import Policy
from flowrl.sampling.worker_set import WorkerSet
from flowrl.settings import ConfigError
from flowrl.trainer.other_libraries import with_hints


class ActsWithPolicies:
    """The part of Algorithm that acts with its policies; see Algorithm for the attributes."""

    workers: WorkerSet

    def get_policy(self, policy_id: str | None = None) -> Policy:
        """Return a policy of the local worker.

        Args:
            policy_id: None for the default policy, or the first one if there is no default policy.

        Raises:
            ConfigError: there is no such policy.
        """
        worker = self.workers.local_worker()
        if policy_id is None:
            return worker.policy
        if policy_id not in worker.policy_map:
            raise ConfigError(f"there is no policy {policy_id!r}, only {list(worker.policy_map)}")
        return worker.policy_map[policy_id]

    @with_hints
    def compute_single_action(
        self, observation: Any, explore: bool = False, policy_id: str | None = None
    ) -> Any:
        """Return the action for one observation, as the environment takes it.

        Args:
            observation: as the environment returned it.
            explore: sample the action instead of taking the most likely one.
            policy_id: see `get_policy`.

        Raises:
            ConfigError: the observation does not fit the space, or is not finite.
        """
        return self.get_policy(policy_id).compute_single_action(observation, explore=explore)

    @with_hints
    def predict(
        self,
        obs: Any,
        state: list[np.ndarray] | None = None,
        deterministic: bool = True,
        policy_id: str | None = None,
    ) -> tuple[Any, list[np.ndarray] | None]:
        """Return actions and the recurrent state; see `Policy.predict` and `get_policy`."""
        return self.get_policy(policy_id).predict(obs, state, deterministic)
