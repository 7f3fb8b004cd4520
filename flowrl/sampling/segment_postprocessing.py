"""SegmentPostprocessing: let policies and callbacks postprocess the rows of each agent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flowrl.data import SampleBatch
from flowrl.data.sample_batch import AgentID, PolicyID
from flowrl.policies.policy import Policy
from flowrl.sampling.callbacks import DefaultCallbacks, call, overrides
from flowrl.sampling.episode import MultiAgentEpisode


def postprocesses_segments(policy: Policy) -> bool:
    """Return whether a policy postprocesses the rows of each segment on its own."""
    return type(policy).postprocess_trajectory is not Policy.postprocess_trajectory


class SegmentPostprocessing:
    """Calls `Policy.postprocess_trajectory` and the callback `on_postprocess_trajectory`.

    Args:
        policies: the policies by id.
        callbacks: the callbacks.
        worker: passed to the callback.

    Attributes:
        is_needed: whether a policy or the callbacks override these methods.
    """

    def __init__(
        self, policies: Mapping[PolicyID, Policy], callbacks: DefaultCallbacks, worker: Any
    ):
        self._policies, self._callbacks, self._worker = policies, callbacks, worker
        self._calls_back = overrides(callbacks, "on_postprocess_trajectory")
        self.is_needed = self._calls_back or any(map(postprocesses_segments, policies.values()))

    def __call__(
        self,
        parts: list[tuple[AgentID, PolicyID, SampleBatch]],
        episode: MultiAgentEpisode | None,
    ) -> list[SampleBatch]:
        """Return the postprocessed rows of agents of one episode.

        Args:
            parts: agent, policy and rows.
            episode: the episode.

        Raises:
            TypeError: a policy did not return a batch.
        """
        policies = self._policies
        batches = {
            agent: (policies[policy_id], batch.without_columns("next_values").read_only_copy())
            for agent, policy_id, batch in parts
        }
        results = []
        for agent, policy_id, batch in parts:
            policy = policies[policy_id]
            others = {a: pair for a, pair in batches.items() if a != agent}
            result = postprocess_segment(policy, batch, others or None, episode)
            if self._calls_back:
                # an agent that returned after its end has two parts; batches has the last one
                own = policy, batch.without_columns("next_values").read_only_copy()
                call(
                    self._callbacks,
                    "on_postprocess_trajectory",
                    worker=self._worker,
                    episode=episode,
                    agent_id=agent,
                    policy_id=policy_id,
                    policies=dict(policies),
                    postprocessed_batch=result,
                    original_batches={**batches, agent: own},
                )
            results.append(result)
        return results


def postprocess_segment(
    policy: Policy,
    batch: SampleBatch,
    others: dict[AgentID, tuple[Policy, SampleBatch]] | None = None,
    episode: MultiAgentEpisode | None = None,
) -> SampleBatch:
    """Return the rows of one agent, postprocessed by its policy.

    Raises:
        TypeError: the policy did not return a batch.
    """
    result = policy.postprocess_trajectory(batch.read_only_copy(), others, episode)
    if not isinstance(result, SampleBatch):
        raise TypeError(
            f"{type(policy).__name__}.postprocess_trajectory() must return the batch, "
            f"it returned a {type(result).__name__}"
        )
    return result.without_columns("next_values").read_only_copy()


def parts_of(batch: SampleBatch, lengths: Iterable[int]) -> list[SampleBatch]:
    """Return consecutive parts of a batch with these numbers of rows."""
    ends = np.cumsum(list(lengths)).tolist()
    return [batch[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
