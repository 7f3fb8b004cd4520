"""RolloutWorker: environments and a copy of each policy, in process or as a Ray actor."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces

from flowrl.data import DEFAULT_POLICY_ID, MultiAgentBatch, SampleBatch
from flowrl.data.sample_batch import PolicyID
from flowrl.envs.registry import EnvContext, EnvCreator
from flowrl.errors import add_note
from flowrl.iter.ray_runtime import node_id
from flowrl.policies.learning.epochs import checked_numbers
from flowrl.policies.policy import Policy
from flowrl.policies.policy_spec import (
    PolicyMapping,
    check_policies_exist,
    is_policy_to_train,
    specs_of,
)
from flowrl.process_usage import process_usage
from flowrl.sampling.callbacks import (
    SAMPLING_EVENTS,
    DefaultCallbacks,
    call,
    callback_seconds,
    overrides,
)
from flowrl.sampling.environments import WorkerEnvironments
from flowrl.sampling.episode import EpisodeMetrics, MultiAgentEpisode
from flowrl.sampling.fragment_sampler import FragmentSampler
from flowrl.sampling.ids import IdCounter, first_id
from flowrl.sampling.policy_map import build_policy_map
from flowrl.sampling.sampler import SamplerInput
from flowrl.sampling.worker_config import WorkerConfig
from flowrl.seeding import derive_seed
from flowrl.settings import adjusted
from flowrl.threads import limit_threads

T = TypeVar("T")


class RolloutWorker:
    """Samples fragments with its policies, and learns from batches.

    Rows are sampled in columns, all environments at once; a custom collector gets them one by one.

    Args:
        env_creator: function from an EnvContext to a gymnasium Env or VectorEnv or a MultiAgentEnv,
            or an environment id.
        policy_spec: class of the policies whose spec names none (see the setting `policies`), or a
            mapping from policy id to PolicySpec.
        policy_config: settings of the worker (see WorkerConfig) and of its policies, a mapping or a
            record. A `rollout_fragment_length` of "auto" means 200.
        worker_index: 0 in process, 1 ... num_workers on actors.
        num_workers: number of workers on actors.
        steps_per_fragment: env steps of all environments per `sample()`, rounded up to a multiple
            of their number; replaces a `rollout_fragment_length` of "auto".
        restart_count: number of failed workers with this index before this one; selects separate
            random streams and episode ids.

    Attributes:
        policy_map: policy id -> Policy.
        callbacks: the DefaultCallbacks.
        is_multi_agent: whether the environment has several agents, or there are policies besides
            the default one.
        possible_agents: ids of the agents that may appear.
        no_done_at_end: the setting.
        clip_rewards: the setting; None is resolved to True or False.
        lock: held while a fragment is sampled, and while policies learn or change, because a
            sampler and a learner may run in threads.
    """

    def __init__(
        self,
        env_creator: EnvCreator | str,
        policy_spec: type[Policy] | Mapping[str, Any] | None,
        policy_config: Any = None,
        worker_index: int = 0,
        num_workers: int = 0,
        restart_count: int = 0,
        steps_per_fragment: int | None = None,
    ):
        self.config = config = WorkerConfig.of(policy_config)
        if worker_index or config.num_threads_per_process != "auto":  # else the algorithm does it
            limit_threads(config.num_threads_per_process)
        self.worker_index = worker_index
        self.restart_count = restart_count
        self._num_workers = num_workers
        self._seed = config.seed
        if restart_count:
            self._seed = derive_seed(self._seed, "incarnation", restart_count)
        self.no_done_at_end = config.no_done_at_end
        self.callbacks: DefaultCallbacks = (config.callbacks_class or DefaultCallbacks)()
        self._envs = WorkerEnvironments(
            env_creator, config, worker_index, num_workers, self._seed, self._on_env_created
        )
        try:
            if config.rollout_fragment_length == "auto" and steps_per_fragment is not None:
                length = math.ceil(steps_per_fragment / self.num_envs)
                self.config = config = adjusted(config, rollout_fragment_length=length)
            if config.clip_rewards is None:
                clips = self._envs.is_atari and not config.normalize_rewards
                self.config = config = adjusted(config, clip_rewards=clips)
            self.clip_rewards = config.clip_rewards
            self.possible_agents = self._envs.agent_envs.possible_agents
            self.policy_map = self._build_policies(policy_spec, policy_config or {})
            self._seed_policies()
            self.policy_for = PolicyMapping(config.policy_mapping_fn, list(self.policy_map), self)
            single = self._envs.vector_env is not None and list(self.policy_map) == [
                DEFAULT_POLICY_ID
            ]
            self.is_multi_agent = not single
            self.lock = threading.RLock()
            ids = first_id(worker_index, restart_count)
            self._sampling = FragmentSampler(self, self._envs, config, ids)
        except BaseException:
            with suppress(Exception):  # the error of the construction is raised
                self._envs.close()
            raise
        self._node = node_id() if worker_index else None
        self._weights_s = 0.0  # loading weights
        self._num_fragments = self._num_bytes = 0  # returned by `sample`
        self._sampled_at = 0.0, 0.0  # start and end of the last fragment [s since 1970]
        self._first_sampled_at = 0.0  # start of the first one
        process_usage()  # starts to measure this process

    # -- environments --------------------------------------------------------------------------

    def _on_env_created(self, env: Any, context: EnvContext) -> None:
        call(
            self.callbacks,
            "on_sub_environment_created",
            worker=self,
            sub_environment=env,
            env_context=context,
        )

    def space_of(self, agent_id: Any, column: str) -> spaces.Space:
        """Return the environment's space of an agent's `obs` or `actions`."""
        return self._envs.space_of(agent_id, column)

    @property
    def num_envs(self) -> int:
        """Number of environments that this worker steps together."""
        return self._envs.agent_envs.num_envs

    def foreach_env(self, fn: Callable[[Any], T]) -> list[T]:
        """Return fn(environment) for each environment.

        Environments that do not exist yet are created first. With `vectorization_mode="async"`, the
        function runs in the process of the environment, on a copy of what it refers to.

        Args:
            fn: gets the environment with its wrappers; a gymnasium VectorEnv is the only argument.
        """
        with self.lock:
            return self._envs.agent_envs.foreach_env(fn)

    # -- policies ------------------------------------------------------------------------------

    def _build_policies(self, policy_spec: Any, policy_config: Any) -> dict[str, Policy]:
        default_class = None
        if policy_spec is None or isinstance(policy_spec, type):
            default_class = policy_spec
            policy_spec = self.config.policies
        specs = specs_of(policy_spec)
        mapping = PolicyMapping(self.config.policy_mapping_fn, list(specs), self)
        num_gpus = self.config.num_gpus_per_worker if self.worker_index else None
        envs = self._envs.agent_envs
        return build_policy_map(specs, default_class, policy_config, envs, mapping, num_gpus)

    def _seed_policies(self) -> None:
        """Set each policy's worker index, number of workers and random stream."""
        for policy_id, policy in self.policy_map.items():
            key = () if policy_id == DEFAULT_POLICY_ID else (policy_id,)
            policy.seed_acting(self._seed, self.worker_index, *key)
            policy.worker_index, policy.num_workers = self.worker_index, self._num_workers

    @property
    def policy(self) -> Policy:
        """The default policy, or the first one if no policy has the default id."""
        first = next(iter(self.policy_map))
        return self.policy_map.get(DEFAULT_POLICY_ID, self.policy_map[first])

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Policy:
        """Return the policy with this id.

        Raises:
            KeyError: there is no such policy.
        """
        check_policies_exist(self.policy_map, [policy_id])
        return self.policy_map[policy_id]

    def is_policy_to_train(self, policy_id: str, batch: Any = None) -> bool:
        """Return whether a policy learns, by the setting `policies_to_train`."""
        return is_policy_to_train(self.config.policies_to_train, policy_id, batch)

    # -- sampling ------------------------------------------------------------------------------

    @property
    def env_steps(self) -> int:
        """Env steps returned by `sample()` so far."""
        return self._sampling.env_steps

    @property
    def sampler(self) -> SamplerInput:
        """The source of this worker's samples; created on the first access."""
        return self._sampling.sampler

    @property
    def unroll_ids(self) -> IdCounter:
        """Counter for the column `unroll_id`."""
        return self._sampling.unroll_ids

    def sample(self) -> SampleBatch | MultiAgentBatch:
        """Return one fragment; the first call resets the environments.

        With `batch_mode="complete_episodes"`, returns whole episodes with at least
        `rollout_fragment_length` x number of environments steps.

        Raises:
            Exception: an error of a policy, a callback or an environment (the latter only after
                `max_num_env_restarts` failures), with a note of worker, sub-environment and step.
                Rows not returned yet are dropped, except for complete episodes with
                `sample_async`, and the next call starts new episodes; after an error of
                `on_sample_end`, it continues the running ones.
        """
        started = time.time()
        try:
            samples = self._sampling.sample()
            if overrides(self.callbacks, "on_sample_end"):
                call(self.callbacks, "on_sample_end", worker=self, samples=samples)
        except Exception as error:
            add_note(error, f"while worker {self.worker_index} was sampling")
            if isinstance(error, StopIteration):
                raise RuntimeError("StopIteration was raised while sampling") from error
            raise
        self._sampling.count(samples)
        self._num_fragments += 1
        self._num_bytes += samples.size_bytes()
        self._sampled_at = started, time.time()
        self._first_sampled_at = self._first_sampled_at or started
        return samples

    def episode(self, episode_id: int) -> MultiAgentEpisode | None:
        """Return the record of a running episode; None if no callback of episodes is overridden."""
        return self._sampling.episode(episode_id)

    def items(self) -> Iterator[SampleBatch | MultiAgentBatch]:
        """Return an endless iterator of fragments, which continues after an exception."""
        return iter(self.sample, None)

    def get_metrics(self) -> list[EpisodeMetrics]:
        """Return the episodes that finished since the last call."""
        return self._sampling.get_metrics()

    def reply_tags(self) -> dict[str, Any]:
        """Return the metadata of the last fragment: steps, episodes, filter updates, and what this
        worker has used so far."""
        tags = self._sampling.reply_tags()
        if not tags:
            return {}
        return {
            **tags,
            "timings": {**tags["timings"], "weights_s": self._weights_s},
            "callback_s": {
                name: seconds
                for name, seconds in callback_seconds(self.callbacks).items()
                if name in SAMPLING_EVENTS
            },
            "usage": process_usage().read(),
            "sampled": {
                "fragments": self._num_fragments,
                "env_steps": self.env_steps,
                "num_bytes": self._num_bytes,
                "since": self._first_sampled_at,
            },
            "sampled_at": self._sampled_at,
            "node": self._node,
        }

    @property
    def num_faulty_episodes(self) -> int:
        """Number of episodes that a failure of their environment ended; results leave them out."""
        return self._sampling.num_faulty_episodes

    # -- learning ------------------------------------------------------------------------------

    def on_learn_on_batch(
        self, policy: Policy, rows: SampleBatch, result: dict[str, float]
    ) -> None:
        """Call the callback before a policy learns; entries of `result` are reported."""
        if overrides(self.callbacks, "on_learn_on_batch"):
            call(
                self.callbacks, "on_learn_on_batch", policy=policy, train_batch=rows, result=result
            )
            result |= checked_numbers(
                result, f"{type(self.callbacks).__name__}.on_learn_on_batch() added to result"
            )

    def learn_on_batch(self, batch: SampleBatch | MultiAgentBatch) -> dict[str, dict[str, float]]:
        """Update every policy in the batch, regardless of `policies_to_train`; return statistics by
        policy id.

        Raises:
            KeyError: there is no such policy; no policy is updated.
        """
        check_policies_exist(self.policy_map, batch.policy_batches)
        with self.lock:
            return {
                policy_id: self.policy_map[policy_id].learn_on_batch(rows)
                for policy_id, rows in batch.policy_batches.items()
            }

    def compute_gradients(self, batch: SampleBatch) -> tuple[np.ndarray, dict[str, float]]:
        """Return the default policy's gradient on a batch, and statistics; changes nothing."""
        with self.lock:
            return self.policy.compute_gradients(batch)

    def apply_gradients(self, gradients: np.ndarray) -> None:
        """Take one optimizer step of the default policy."""
        with self.lock:
            self.policy.apply_gradients(gradients)

    def get_weights(self) -> dict[str, dict[str, np.ndarray]]:
        """Return copies of the weights by policy id."""
        return {policy_id: policy.get_weights() for policy_id, policy in self.policy_map.items()}

    def set_weights(
        self,
        weights: dict[str, dict[str, np.ndarray]],
        versions: dict[str, int] | None = None,
        filters: dict[str, Any] | None = None,
        global_vars: dict[str, Any] | None = None,
    ) -> None:
        """Set weights by policy id, and optionally versions, filter states and what schedules
        depend on (see Policy.on_global_var_update).

        An asynchronous sampler finishes its item first: one item has one version.

        Raises:
            KeyError: there is no such policy; no policy changes.
        """
        check_policies_exist(self.policy_map, weights)
        started = time.perf_counter()
        with self.lock:
            for policy_id, policy_weights in weights.items():
                policy = self.policy_map[policy_id]
                policy.set_weights(policy_weights)
                if filters:
                    policy.load_filter_state_dict(filters[policy_id])
                if versions:
                    policy.version = versions[policy_id]
            if global_vars:
                for policy in self.policy_map.values():
                    policy.on_global_var_update(global_vars)
        self._weights_s += time.perf_counter() - started

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the policies' states, including their random streams."""
        with self.lock:
            policies = {pid: policy.get_state() for pid, policy in self.policy_map.items()}
        return {"policies": policies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`.

        Raises:
            ValueError: it has other policy ids, or does not fit a policy; nothing is changed.
        """
        states = state["policies"]
        _check_policy_ids(states, self.policy_map)
        with self.lock:
            before = {pid: policy.get_state() for pid, policy in self.policy_map.items()}
            try:
                for policy_id, policy_state in states.items():
                    self.policy_map[policy_id].set_state(policy_state)
            except Exception:
                for policy_id, policy_state in before.items():
                    self.policy_map[policy_id].set_state(policy_state)
                raise

    def sampling_state_dict(self) -> dict[str, Any]:
        """Return random streams, environments and running episodes, as far as they can be saved.

        Weights and filters are part of `state_dict`. Items that an asynchronous sampler has ready
        are not included.
        """
        with self.lock:
            policies = {pid: policy.acting_state_dict() for pid, policy in self.policy_map.items()}
            return {**self._sampling.state_dict(), "policies": policies}

    @staticmethod
    def env_steps_in(state: dict[str, Any]) -> int:
        """Return the env steps that `sample()` had returned in a sampling state."""
        return int(state["returned_steps"][0])

    @staticmethod
    def versions_in(state: dict[str, Any]) -> dict[str, int]:
        """Return the versions of the policies in a sampling state, by policy id."""
        return {policy_id: policy["version"] for policy_id, policy in state["policies"].items()}

    def load_sampling_state_dict(self, state: dict[str, Any]) -> int:
        """Load the result of `sampling_state_dict`.

        Returns:
            number of episodes that could not be resumed; new episodes replace them.

        Raises:
            KeyError, ValueError: it belongs to other policies, settings or environments.
        """
        self.check_sampling_state(state)
        self._sampling.stop_sampler()
        with self.lock:
            restarted = self._sampling.load_state_dict(state)
            for policy_id, policy_state in state["policies"].items():
                self.policy_map[policy_id].load_acting_state_dict(policy_state)
            return restarted

    def check_sampling_state(self, state: dict[str, Any]) -> None:
        """Raise if `load_sampling_state_dict` could not load a state; changes nothing.

        Raises:
            KeyError, ValueError: entries are missing, or it belongs to other policies, environments
                or settings.
        """
        _check_acting_states(state["policies"], self.policy_map)
        self._sampling.check_state(state)

    # -- control -------------------------------------------------------------------------------

    def apply(self, fn: Callable[..., T], *args: Any) -> T:
        """Call fn(worker, *args) in the worker's process, and return the result."""
        return fn(self, *args)

    def stop(self) -> None:
        """Stop sampling and close the environments; see FragmentSampler.stop."""
        self._sampling.stop()


def _check_policy_ids(loaded: Iterable[PolicyID], policy_map: Mapping[PolicyID, Policy]) -> None:
    """Raise ValueError if a state does not have exactly the worker's policies."""
    if set(loaded) != set(policy_map):
        raise ValueError(
            f"the state has the policies {sorted(loaded)}, this worker {sorted(policy_map)}"
        )


def _check_acting_states(
    states: Mapping[PolicyID, Mapping[str, Any]], policy_map: Mapping[PolicyID, Policy]
) -> None:
    """Raise KeyError or ValueError if a policy or an entry of its acting state is missing."""
    _check_policy_ids(states, policy_map)
    for policy_id, state in states.items():
        for key in policy_map[policy_id].acting_state_dict():
            if key not in state:
                raise KeyError(f"{policy_id}/{key}")
