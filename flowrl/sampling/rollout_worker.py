"""RolloutWorker: environments and a copy of each policy, in process or as a Ray actor."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces

from flowrl.data import DEFAULT_POLICY_ID, MultiAgentBatch, SampleBatch
from flowrl.data.indexed_columns import IndexedColumn
from flowrl.data.lazy_columns import LazyColumn
from flowrl.envs.multi_agent_vector_env import AgentSlots, MultiAgentSlots, SingleAgentSlots
from flowrl.envs.registry import EnvCreator, env_creator_for
from flowrl.envs.restarting_envs import EnvSlots
from flowrl.envs.validation import RESERVED
from flowrl.envs.vector_env import Stepper, WorkerEnvs
from flowrl.iter.shards import node_id
from flowrl.policies.policy import Policy
from flowrl.policies.policy_spec import (
    PolicyMapping,
    PolicySpec,
    is_policy_to_train,
    multi_agent_settings,
    specs_of,
)
from flowrl.sampling.callbacks import DefaultCallbacks, call, overrides
from flowrl.sampling.columnar import ColumnarCollector
from flowrl.sampling.episode import (
    IDS_PER_INCARNATION,
    IDS_PER_WORKER,
    EpisodeMetrics,
    Ids,
    MultiAgentEpisode,
)
from flowrl.sampling.policy_setup import policy_class_and_config
from flowrl.sampling.row_sampler import AgentLoop
from flowrl.sampling.sampler import AsyncSampler, SampleResult, SamplerInput, SyncSampler
from flowrl.sampling.sampling_settings import SamplingSettings
from flowrl.seeding import derive_seed, random_stream
from flowrl.settings import ConfigError

T = TypeVar("T")

EPISODE_EVENTS = (
    "on_episode_start",
    "on_episode_step",
    "on_episode_end",
    "on_postprocess_trajectory",
)


class RolloutWorker:
    """Samples fragments with its policies, and learns from batches.

    One agent with array observations is sampled in columns, all environments at once; everything
    else (several agents, whole episodes, callbacks of episodes, recurrent policies, nested spaces,
    a collector of one's own) row by row, which is slower and gives the same rows.

    Args:
        env_creator: from an EnvContext to a gymnasium Env or VectorEnv, or a MultiAgentEnv; an env
            id works, too.
        policy_spec: the class of policies that do not say theirs (see the setting `policies`); or
            a mapping from policy id to PolicySpec.
        policy_config: settings, a mapping or a record. Of an algorithm's settings the worker reads
            `rollout_fragment_length` (200 where it is absent or "auto"), `num_envs_per_worker`,
            `env_config`, `seed`, `batch_mode`, `horizon`, `callbacks_class`,
            `policy_mapping_fn` and what else is about sampling.
        worker_index: 0 in process, 1 … num_workers on actors.
        num_workers: how many workers there are on actors.
        fragment_length: env steps of each environment per `sample()`, if not the settings'.
        incarnation: how many workers before this one had this index and died; its random streams
            and episode ids are its own.

    Attributes:
        policy_map: policy id -> Policy.
        callbacks: the DefaultCallbacks.
        is_multi_agent: whether the environment speaks of several agents, or there are policies
            besides the default one.
        possible_agents: ids of the agents that may come.
        unroll_ids: where the column `unroll_id` comes from.
        hides_ends: `no_done_at_end`.
        lock: held while an item is made, and while policies learn or change: a sampler that samples
            ahead and a learner may have threads of their own.
    """

    def __init__(
        self,
        env_creator: EnvCreator | str,
        policy_spec: type[Policy] | Mapping[str, Any] | None,
        policy_config: Any = None,
        worker_index: int = 0,
        num_workers: int = 0,
        fragment_length: int | None = None,
        incarnation: int = 0,
    ):
        given = policy_config if policy_config is not None else {}
        self.config = given
        self.worker_index = worker_index
        self._num_workers = num_workers
        self._incarnation = incarnation
        self._seed = given.get("seed")
        if incarnation:
            self._seed = derive_seed(self._seed, "incarnation", incarnation)
        self._first_id = worker_index * IDS_PER_WORKER + incarnation * IDS_PER_INCARNATION
        self.unroll_ids = Ids(self._first_id)
        self._shared = multi_agent_settings(given)
        self._settings = SamplingSettings.of(given, fragment_length, self._shared["count_steps_by"])
        self.hides_ends = self._settings.no_done_at_end
        self.callbacks: DefaultCallbacks = (given.get("callbacks_class") or DefaultCallbacks)()
        self._envs = WorkerEnvs(
            env_creator_for(env_creator),
            given.get("env_config") or {},
            given.get("num_envs_per_worker", 1),
            worker_index,
            num_workers,
            self._seed,
            given.get("vectorization_mode", "flowrl"),
            self._settings.horizon,
            self._settings.soft_horizon,
            self._settings.max_env_restarts,
            self._announce,
        )
        self._open_envs()
        self.possible_agents = self._agents.possible_agents
        self.policy_map = self._make_policies(policy_spec, given)
        mapping_fn = self._shared["policy_mapping_fn"]
        self.policy_for = PolicyMapping(mapping_fn, list(self.policy_map), self)
        single = self._stepper is not None and list(self.policy_map) == [DEFAULT_POLICY_ID]
        self.is_multi_agent = not single
        self._sample_async = bool(given.get("sample_async", False))
        self.lock = threading.RLock()
        self._source: ColumnarCollector | AgentLoop | None = None
        self._sampler: SamplerInput | None = None
        self._read: dict[str, set[str] | None] = {}
        self._asked_for = {"infos"} if given.get("collect_infos", False) else set()
        self._episodes_ready: list[Any] = []
        self._node = node_id() if worker_index else None
        self._given_steps = [0, 0]
        self._reported_steps = [0, 0]

    def _announce(self, vector_index: int, env: Any) -> None:
        call(
            self.callbacks.on_sub_environment_created,
            worker=self,
            sub_environment=env,
            env_context=self._envs.context(vector_index),
        )

    def _open_envs(self) -> None:
        opened = self._envs.open()
        self._stepper: Stepper | None = None
        if isinstance(opened, EnvSlots):
            horizon = None if self._settings.soft_horizon else self._settings.horizon
            self._agents: AgentSlots = MultiAgentSlots(opened, horizon)
        else:
            self._stepper = opened
            self._agents = SingleAgentSlots(opened)

    # -- policies ------------------------------------------------------------------------------

    def _make_policies(self, policy_spec: Any, given: Any) -> dict[str, Policy]:
        """The policies by id, each with its own random stream."""
        default = None
        if policy_spec is None or isinstance(policy_spec, type):
            default = policy_spec
            specs = specs_of(self._shared["policies"] or {DEFAULT_POLICY_ID: None})
        else:
            specs = specs_of(policy_spec)
        mapping = PolicyMapping(self._shared["policy_mapping_fn"], list(specs), self)
        made = {}
        for policy_id, spec in specs.items():
            own = self._spaces_for(policy_id, spec, mapping, len(specs))
            try:
                policy_class, config = policy_class_and_config(policy_id, spec, default, given)
                policy = policy_class(*own, config)
            except ConfigError as error:
                if len(specs) > 1:
                    error.add_note(f"the settings of policy {policy_id!r}")
                raise
            purpose = () if policy_id == DEFAULT_POLICY_ID else (policy_id,)
            policy.rng = random_stream(self._seed, "actions", self.worker_index, *purpose)
            policy.worker_index, policy.num_workers = self.worker_index, self._num_workers
            made[policy_id] = policy
        return made

    def _spaces_for(
        self, policy_id: str, spec: PolicySpec, mapping: PolicyMapping, policies: int
    ) -> tuple[spaces.Space, spaces.Space]:
        if spec.observation_space is not None and spec.action_space is not None:
            return spec.observation_space, spec.action_space
        agents = list(self.possible_agents)
        own = []
        if policies == 1:
            own = agents
        else:
            # a mapping that draws lots, or looks at the episode, cannot be asked beforehand
            with contextlib.suppress(Exception):
                own = [agent for agent in agents if mapping(agent) == policy_id]
        for agent in own or agents or [None]:
            return (
                spec.observation_space or self._agents.observation_space(agent),
                spec.action_space or self._agents.action_space(agent),
            )
        raise AssertionError

    def space_of(self, agent_id: Any, column: str) -> spaces.Space:
        """The space of an agent's `obs` or `actions`, as the environment says it."""
        if column == "obs":
            return self._agents.observation_space(agent_id)
        return self._agents.action_space(agent_id)

    @property
    def num_envs(self) -> int:
        """Environments that this worker steps together."""
        return self._agents.num_envs

    @property
    def env_steps(self) -> int:
        """Env steps given so far."""
        return self._given_steps[0]

    @property
    def policy(self) -> Policy:
        """The default policy; the first one where none is called so."""
        first = next(iter(self.policy_map))
        return self.policy_map.get(DEFAULT_POLICY_ID, self.policy_map[first])

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Policy:
        """The policy of this id; KeyError if there is none."""
        return self.policy_map[policy_id]

    def is_policy_to_train(self, policy_id: str, batch: Any = None) -> bool:
        """Whether a policy is to learn, by the setting `policies_to_train`."""
        return is_policy_to_train(self._shared["policies_to_train"], policy_id, batch)

    # -- sampling ------------------------------------------------------------------------------

    @property
    def sampler(self) -> SamplerInput:
        """What this worker's samples come from; made when first asked for."""
        if self._sampler is None:
            kind = AsyncSampler if self._sample_async else SyncSampler
            self._sampler = kind(self._collect)
        return self._sampler

    def _collect(self) -> SampleResult:
        """One item, and what is to be told of it; in the sampler's thread, if it has one."""
        with self.lock:
            if self._source is None:
                self._source = self._make_source()
            batch = self._with_what_is_read(self._source.collect())
            episodes, self._source.episodes = self._source.episodes, []
            fresh = {pid: policy.take_fresh_filters() for pid, policy in self.policy_map.items()}
            return SampleResult(
                batch,
                episodes,
                {pid: policy.version for pid, policy in self.policy_map.items()},
                {p: f for p, f in fresh.items() if f},
            )

    def _with_what_is_read(self, batch: SampleBatch | MultiAgentBatch) -> Any:
        """The batch with what policies read in full; on an actor the rest stays there until
        somebody asks for it."""
        ray: Any = sys.modules.get("ray") if self.worker_index else None
        away = ray is not None and ray.is_initialized() and self.config.get("output") is None
        made = {}
        for policy_id, rows in batch.policy_batches.items():
            if rows.count and policy_id not in self._read:
                self._read[policy_id] = self._try_reading(policy_id, rows)
            read = self._read.get(policy_id)
            columns: dict[str, Any] = {}
            for name, column in rows.stored():
                wanted = name in RESERVED - {"infos"} or name.startswith("state_in_")
                wanted |= name != "infos" and (read is None or not away)
                if wanted or (read is not None and name in read):
                    if isinstance(column, IndexedColumn) and column.unread:
                        column = np.asarray(column)
                elif away and isinstance(column, (np.ndarray, IndexedColumn)):
                    if not isinstance(column, IndexedColumn) or not column.unread:
                        array = np.asarray(column)
                        unread = LazyColumn(name, partial(_given, array), array.shape, array.dtype)
                        column = IndexedColumn(unread, np.arange(len(array)))
                    column = column.left_behind(ray.put, ray.get)
                columns[name] = column
            made[policy_id] = SampleBatch._of(columns, like=rows)
        if isinstance(batch, SampleBatch):
            return made[DEFAULT_POLICY_ID]
        return batch.with_batches(made)

    def _try_reading(self, policy_id: str, rows: SampleBatch) -> set[str] | None:
        """The columns that a policy reads of its first rows, or asks for by a view."""
        policy = self.policy_map[policy_id]
        read = policy.columns_read(rows)
        if read is None and not self.config.get("collect_infos", False):
            return None
        views = {n for n, view in policy.view_requirements.items() if view.used_for_training}
        return (set(rows) if read is None else read) | views | self._asked_for

    def _make_source(self) -> ColumnarCollector | AgentLoop:
        settings = self._settings
        if self._needs_rows() or self._stepper is None:
            return AgentLoop(self._agents, self, settings, self._first_id)
        return ColumnarCollector(self._stepper, self.policy, settings, self._first_id)

    def _needs_rows(self) -> bool:
        """Whether the columnar way cannot give what is asked for."""
        if self.is_multi_agent or self._settings.batch_mode == "complete_episodes":
            return True
        if self.config.get("sample_collector") is not None:
            return True
        policy = self.policy
        nested = any(
            space.shape is None or space.dtype is None
            for space in (policy.observation_space, policy.action_space)
        )
        views = policy.view_requirements.values()
        apart = any(view.agents is not None or view.batch_repeat_value > 1 for view in views)
        return nested or apart or policy.is_recurrent or overrides(self.callbacks, *EPISODE_EVENTS)

    def sample(self) -> SampleBatch | MultiAgentBatch:
        """One fragment of experience; the environments are made and reset at the first call.

        With `batch_mode="complete_episodes"` as many whole episodes as have at least
        `rollout_fragment_length` x number of environments steps.

        Raises:
            whatever the environment raises too often, and a policy or callback raises at all,
            noting worker, sub-environment and step. What was not given yet is dropped and the
            next call starts new episodes.
        """
        try:
            samples = self._sample_enough()
            if overrides(self.callbacks, "on_sample_end"):
                call(self.callbacks.on_sample_end, worker=self, samples=samples)
        except Exception as error:
            error.add_note(f"while worker {self.worker_index} was sampling")
            if isinstance(error, StopIteration):
                raise RuntimeError("the environment raised StopIteration") from error
            raise
        self._given_steps[0] += samples.env_steps()
        self._given_steps[1] += samples.agent_steps()
        return samples

    def _sample_enough(self) -> SampleBatch | MultiAgentBatch:
        sampler = self.sampler
        if self._settings.batch_mode == "truncate_episodes":
            return sampler.get_data()
        by_agent = self._settings.count_steps_by == "agent_steps"
        items = self._episodes_ready  # those before an error are given with the next ones
        wanted = self._settings.length * self.num_envs
        while sum(i.agent_steps() if by_agent else i.env_steps() for i in items) < wanted:
            items.append(sampler.get_data())
        self._episodes_ready = []
        return items[0] if len(items) == 1 else SampleBatch.concat_samples(items)

    def shaped(self, batch: MultiAgentBatch) -> SampleBatch | MultiAgentBatch:
        """A batch as this worker gives it: of its only policy, or by policy id."""
        if self.is_multi_agent:
            return batch
        return batch.policy_batches.get(DEFAULT_POLICY_ID, SampleBatch())

    def episode(self, episode_id: int) -> MultiAgentEpisode | None:
        """The record of a running episode, where rows are collected one by one."""
        return self._source.episode(episode_id) if isinstance(self._source, AgentLoop) else None

    def items(self) -> Iterator[SampleBatch | MultiAgentBatch]:
        """Endless fragments; an exception does not end them."""
        return iter(self.sample, None)

    def get_metrics(self) -> list[EpisodeMetrics]:
        """The episodes finished since the last call."""
        return [] if self._sampler is None else self._sampler.get_metrics()

    def reply_tags(self) -> dict[str, Any]:
        """What rides along with a fragment: steps, episodes, timings, what the filters saw."""
        if self._sampler is None or self._source is None:
            return {}
        filters, self._sampler.fresh_filters = self._sampler.fresh_filters, []
        new = [
            now - told for now, told in zip(self._given_steps, self._reported_steps, strict=True)
        ]
        self._reported_steps = list(self._given_steps)
        return {
            "env_steps": new[0],
            "agent_steps": new[1],
            "weights_versions": self._sampler.weights_versions,
            "episodes": [tuple(episode) for episode in self.get_metrics()],
            "timings": dict(self._source.timings),
            "filters": filters,
            "faulty_episodes": self._source.faulty_episodes,
            "env_restarts": self._agents.num_restarts,
            "node": self._node,
        }

    # -- learning ------------------------------------------------------------------------------

    def on_learn_on_batch(self, policy: Policy, rows: SampleBatch, told: dict[str, float]) -> None:
        """Tell the callbacks that a policy is about to learn; what they put into `told` is
        reported."""
        call(self.callbacks.on_learn_on_batch, policy=policy, train_batch=rows, result=told)

    def learn_on_batch(self, batch: SampleBatch | MultiAgentBatch) -> dict[str, dict[str, float]]:
        """One update of every policy in the batch; statistics by policy id."""
        with self.lock:
            return {
                policy_id: self.policy_map[policy_id].learn_on_batch(rows)
                for policy_id, rows in batch.policy_batches.items()
            }

    def compute_gradients(self, batch: SampleBatch) -> tuple[np.ndarray, dict[str, float]]:
        """The default policy's gradient on a batch, and statistics. Changes nothing."""
        return self.policy.compute_gradients(batch)

    def apply_gradients(self, gradients: np.ndarray) -> None:
        """One optimizer step of the default policy."""
        with self.lock:
            self.policy.apply_gradients(gradients)

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
        """Take over weights by policy id, with their versions, filters and the step count.

        A sampler that samples ahead finishes its item first: no item is by two versions.
        """
        with self.lock:
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
        """The policies' states, with their random streams."""
        with self.lock:
            policies = {pid: policy.get_state() for pid, policy in self.policy_map.items()}
        return {"policies": policies}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_state` gave.

        Raises:
            ValueError: it is of other policies, or does not fit one; nothing is changed.
        """
        given = state["policies"]
        if set(given) != set(self.policy_map):
            raise ValueError(
                f"a state of the policies {sorted(given)}, but here are {sorted(self.policy_map)}"
            )
        with self.lock:
            before = {pid: policy.get_state() for pid, policy in self.policy_map.items()}
            try:
                for policy_id, own in given.items():
                    self.policy_map[policy_id].set_state(own)
            except Exception:
                for policy_id, own in before.items():
                    self.policy_map[policy_id].set_state(own)
                raise

    def get_sampling_state(self) -> dict[str, Any]:
        """What the next samples depend on besides the policies' weights and filters: random
        streams, the environments and the episodes in progress, as far as they can be said.

        What a sampler has ahead is not in it.
        """
        with self.lock:
            rows = isinstance(self._source, AgentLoop)
            given = list(self._given_steps)
            if self._sample_async and self._source is not None:
                given[0] = self._source.env_steps  # with what lies ahead, which is lost
            return {
                "num_envs": self.num_envs,
                "incarnation": self._incarnation,
                "policies": {pid: p.get_acting_state() for pid, p in self.policy_map.items()},
                "source": None if self._source is None else self._source.get_state(),
                "way": "rows" if rows else "columns",
                "next_unroll": self.unroll_ids.following,
                "given_steps": given,
                "reported_steps": list(self._reported_steps),
                "episodes_ready": list(self._episodes_ready),
            }

    def set_sampling_state(self, state: dict[str, Any]) -> int:
        """Go on where another worker was.

        Returns:
            how many of its episodes could not be gone on with: others begin in their place.

        Raises:
            KeyError, ValueError: it is of other policies, settings or environments.
        """
        self.check_sampling_state(state)
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None
        with self.lock:
            before, self.unroll_ids = self.unroll_ids, Ids(state["next_unroll"])
            source, anew = None, 0
            try:
                if state["source"] is None and self._source is not None:
                    self._reopen()
                elif state["source"] is not None:
                    source = self._make_source()
                    if isinstance(source, AgentLoop) != (state["way"] == "rows"):
                        raise ValueError(
                            f"a state of sampling by {state['way']}, which is not done here"
                        )
                    anew = source.set_state(state["source"])
            except Exception:
                self.unroll_ids = before
                raise
            self._source = source
            for policy_id, own in state["policies"].items():
                self.policy_map[policy_id].set_acting_state(own)
            self._given_steps = list(state["given_steps"])
            self._reported_steps = list(state["reported_steps"])
            self._episodes_ready = list(state["episodes_ready"])
            return anew

    def check_sampling_state(self, state: dict[str, Any]) -> None:
        """Refuse what `set_sampling_state` could not take, before anything is changed.

        Raises:
            KeyError, ValueError: parts are missing; it is of other policies or environments, or of
                the other way to sample.
        """
        for part in ("next_unroll", "given_steps", "reported_steps", "episodes_ready", "way"):
            if part not in state:
                raise KeyError(part)
        if set(state["policies"]) != set(self.policy_map):
            raise ValueError(
                f"a state of the policies {sorted(state['policies'])}, but here are "
                f"{sorted(self.policy_map)}"
            )
        for policy_id, own in state["policies"].items():
            for part in self.policy_map[policy_id].get_acting_state():
                if part not in own:
                    raise KeyError(f"{policy_id}/{part}")
        if state["num_envs"] != self.num_envs:
            raise ValueError(
                f"a state of {state['num_envs']} environments, not {self.num_envs} "
                "(num_envs_per_worker)"
            )
        if state["source"] is not None:
            rows = self._needs_rows() or self._stepper is None
            if rows != (state["way"] == "rows"):
                raise ValueError(f"a state of sampling by {state['way']}, which is not done here")
            envs = (state["source"].get("open") or {}).get("envs") or {"journals": (), "own": ()}
            if "resets" not in envs and not {"journals", "own"} <= set(envs):
                raise KeyError("journals")

    def restart(self) -> None:
        """Begin as when this worker was made: new environments, the first random streams."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None
        with self.lock:
            self._source = None
            self._reopen()
            for policy_id, policy in self.policy_map.items():
                purpose = () if policy_id == DEFAULT_POLICY_ID else (policy_id,)
                policy.rng = random_stream(self._seed, "actions", self.worker_index, *purpose)
            self.unroll_ids = Ids(self._first_id)
            self._given_steps, self._reported_steps = [0, 0], [0, 0]
            self._episodes_ready = []

    def _reopen(self) -> None:
        """New environments, whose first episodes are those of a new worker."""
        self._agents.close()
        self._open_envs()

    def stop(self) -> None:
        """Sample no more; close the environments."""
        if self._sampler is not None:
            self._sampler.stop()
        self._agents.close()


def _given(array: np.ndarray) -> np.ndarray:
    return array
