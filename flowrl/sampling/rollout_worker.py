"""RolloutWorker: environments and a copy of each policy, in process or as a Ray actor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from flowrl.data import DEFAULT_POLICY_ID, MultiAgentBatch, SampleBatch
from flowrl.policies.policy import Policy
from flowrl.sampling.collector import (
    IDS_PER_INCARNATION,
    IDS_PER_WORKER,
    ColumnarCollector,
    EpisodeMetrics,
)
from flowrl.sampling.envs import EnvCreator, env_creator_for, make_stepper
from flowrl.seeding import derive_seed, random_stream, restore_stream, stream_state

T = TypeVar("T")

DEFAULT_FRAGMENT_LENGTH = 200

# Settings in a plain mapping that are the worker's or the set's, not the policy's.
WORKER_SETTINGS = {
    "address",
    "collect_infos",
    "delay_between_worker_restarts_s",
    "env_config",
    "max_num_worker_restarts",
    "num_cpus_per_worker",
    "num_envs_per_worker",
    "num_workers",
    "recreate_failed_workers",
    "rollout_fragment_length",
    "sample_timeout_s",
    "train_batch_size",
    "vectorization_mode",
}


def _for_policy(policy_class: type[Policy], given: Any) -> Any:
    """The settings that the policy's record takes."""
    if isinstance(given, policy_class.config_class):
        return given
    known = policy_class.config_class.model_fields
    return {k: v for k, v in given.items() if k in known or k not in WORKER_SETTINGS}


class RolloutWorker:
    """Samples fragments with its policy, and learns from batches.

    Args:
        env_creator: from an EnvContext to a gymnasium Env or VectorEnv; an env id works, too.
        policy_spec: the policy's class.
        policy_config: its settings, a mapping or a record. Of an algorithm's settings the worker
            reads `rollout_fragment_length` (200 where it is absent or "auto"),
            `num_envs_per_worker`, `env_config`, `seed`, `vectorization_mode`, `collect_infos`.
        worker_index: 0 in process, 1 … num_workers on actors.
        num_workers: how many workers there are on actors.
        fragment_length: env steps of each environment per `sample()`, if not the settings'.
        incarnation: how many workers before this one had this index and died; its random streams
            and episode ids are its own.

    Attributes:
        policy_map: policy id -> Policy.
    """

    def __init__(
        self,
        env_creator: EnvCreator | str,
        policy_spec: type[Policy],
        policy_config: Any = None,
        worker_index: int = 0,
        num_workers: int = 0,
        fragment_length: int | None = None,
        incarnation: int = 0,
    ):
        given = policy_config if policy_config is not None else {}
        self.worker_index = worker_index
        self._seed = given.get("seed")
        if incarnation:
            self._seed = derive_seed(self._seed, "incarnation", incarnation)
        self._first_id = worker_index * IDS_PER_WORKER + incarnation * IDS_PER_INCARNATION
        self._stepper = make_stepper(
            env_creator_for(env_creator),
            given.get("env_config") or {},
            given.get("num_envs_per_worker", 1),
            worker_index,
            num_workers,
            self._seed,
            given.get("vectorization_mode", "flowrl"),
        )
        spaces = self._stepper.observation_space, self._stepper.action_space
        policy = policy_spec(*spaces, _for_policy(policy_spec, given))
        policy.rng = random_stream(self._seed, "actions", worker_index)
        self.policy_map: dict[str, Policy] = {DEFAULT_POLICY_ID: policy}
        length = fragment_length or given.get("rollout_fragment_length", DEFAULT_FRAGMENT_LENGTH)
        self._length = DEFAULT_FRAGMENT_LENGTH if length == "auto" else int(length)
        self._collect_infos = bool(given.get("collect_infos", False))
        self._collector: ColumnarCollector | None = None
        self._reported_steps = 0

    @property
    def num_envs(self) -> int:
        """Environments that this worker steps together."""
        return self._stepper.num_envs

    @property
    def env_steps(self) -> int:
        """Env steps sampled so far."""
        return 0 if self._collector is None else self._collector.env_steps

    @property
    def policy(self) -> Policy:
        """The default policy."""
        return self.policy_map[DEFAULT_POLICY_ID]

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Policy:
        """The policy of this id; KeyError if there is none."""
        return self.policy_map[policy_id]

    # -- sampling ------------------------------------------------------------------------------

    def sample(self) -> SampleBatch:
        """One fragment of experience; the environments are made and reset at the first call.

        Raises:
            whatever the environment raises, noting worker, sub-environment and step. The
            fragment is dropped and the next call starts new episodes.
        """
        if self._collector is None:
            self._collector = ColumnarCollector(
                self._stepper, self.policy, self._length, self._first_id, self._collect_infos
            )
        try:
            return self._collector.collect()
        except Exception as error:
            error.add_note(f"while worker {self.worker_index} was sampling")
            if isinstance(error, StopIteration):
                raise RuntimeError("the environment raised StopIteration") from error
            raise

    def items(self) -> Iterator[SampleBatch]:
        """Endless fragments; an exception does not end them."""
        return iter(self.sample, None)

    def get_metrics(self) -> list[EpisodeMetrics]:
        """The episodes finished since the last call."""
        if self._collector is None:
            return []
        episodes, self._collector.episodes = self._collector.episodes, []
        return episodes

    def reply_tags(self) -> dict[str, Any]:
        """What rides along with a fragment: steps, episodes, timings, what the filters saw."""
        if self._collector is None:
            return {}
        steps = self._collector.env_steps
        sampled, self._reported_steps = steps - self._reported_steps, steps
        return {
            "env_steps": sampled,
            "agent_steps": sampled,
            "weights_version": self.policy.version,
            "episodes": [tuple(episode) for episode in self.get_metrics()],
            "timings": dict(self._collector.timings),
            "filters": {pid: p.take_fresh_filters() for pid, p in self.policy_map.items()},
        }

    # -- learning ------------------------------------------------------------------------------

    def learn_on_batch(self, batch: SampleBatch | MultiAgentBatch) -> dict[str, dict[str, float]]:
        """One update of every policy in the batch; statistics by policy id."""
        return {
            policy_id: self.policy_map[policy_id].learn_on_batch(rows)
            for policy_id, rows in batch.policy_batches.items()
        }

    def compute_gradients(self, batch: SampleBatch) -> tuple[np.ndarray, dict[str, float]]:
        """The default policy's gradient on a batch, and statistics. Changes nothing."""
        return self.policy.compute_gradients(batch)  # type: ignore[attr-defined]

    def apply_gradients(self, gradients: np.ndarray) -> None:
        """One optimizer step of the default policy."""
        self.policy.apply_gradients(gradients)  # type: ignore[attr-defined]

    def get_weights(self) -> dict[str, dict[str, np.ndarray]]:
        """Copies of the weights by policy id."""
        return {policy_id: policy.get_weights() for policy_id, policy in self.policy_map.items()}

    def set_weights(
        self,
        weights: dict[str, dict[str, np.ndarray]],
        versions: dict[str, int] | None = None,
        filters: dict[str, Any] | None = None,
        global_vars: dict[str, Any] | None = None,
    ) -> None:
        """Take over weights by policy id, with their versions, filters and the step count."""
        for policy_id, own in weights.items():
            policy = self.policy_map[policy_id]
            policy.set_weights(own)
            if filters:
                policy.set_filter_state(filters[policy_id])
            if versions:
                policy.version = versions[policy_id]
            if global_vars:
                policy.on_global_var_update(global_vars)

    # -- the rest ------------------------------------------------------------------------------

    def apply(self, fn: Callable[..., T], *args: Any) -> T:
        """fn(this worker, *args), where the worker is."""
        return fn(self, *args)

    def get_state(self) -> dict[str, Any]:
        """The policies' states and the worker's random stream."""
        states = {policy_id: policy.get_state() for policy_id, policy in self.policy_map.items()}
        return {"policies": states, "rng": stream_state(self.policy.rng)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_state` gave."""
        for policy_id, own in state["policies"].items():
            self.policy_map[policy_id].set_state(own)
        restore_stream(self.policy.rng, state["rng"])

    def stop(self) -> None:
        """Close the environments."""
        self._stepper.close()
