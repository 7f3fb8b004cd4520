"""RowSampler: steps environments row by row into a SampleCollector.

Samples several agents and policies, and into collectors of users. A policy is called once per step,
with all its agents of all environments.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

import numpy as np
import optree

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.data.types import AgentID, EpisodeID, PolicyID
from flowrl.envs.multi_agent_vector_env import MultiAgentStep, MultiAgentVectorEnv
from flowrl.envs.single_agent_adapter import SingleAgentAdapter
from flowrl.envs.validation import (
    LARGEST_REWARD,
    OUTSIDE_WARNING,
    ObservationCheck,
    check_extra_columns,
    check_reward,
    first_invalid_action,
    invalid_step_error,
)
from flowrl.policies.policy import Policy
from flowrl.sampling.callback_worker import CallbackWorker
from flowrl.sampling.callbacks import call, overrides
from flowrl.sampling.episode import AgentRecord, EpisodeMetrics, MultiAgentEpisode
from flowrl.sampling.ids import IdCounter
from flowrl.sampling.list_collector import SimpleListCollector
from flowrl.sampling.sample_collector import SampleCollector
from flowrl.sampling.sampler import TIMINGS
from flowrl.sampling.worker_config import WorkerConfig
from flowrl.settings import ConfigError

log = logging.getLogger("flowrl")

MAX_STEPS_WITHOUT_DATA = 10_000  # env steps without a row or an episode, before a warning
MAX_CACHED_AGENTS = 10_000  # agents whose first observations are checked


class RowSampler:
    """Steps all environments of a worker together and collects the rows of their agents.

    After an exception it can be used again: rows not returned yet are dropped, and the next call
    starts new episodes.

    Args:
        slots: the environments.
        worker: its policies act and its callbacks are called.
        settings: the sampling settings.
        first_id: the first episode id.
    """

    def __init__(
        self,
        slots: MultiAgentVectorEnv,
        worker: CallbackWorker,
        settings: WorkerConfig,
        first_id: int = 0,
    ):
        self.slots = slots
        self.worker = worker
        self.settings = settings
        self._collector_class = settings.sample_collector or SimpleListCollector
        self.episodes: list[EpisodeMetrics] = []
        self.env_steps = self.agent_steps = self.faulty_episodes = 0
        self.timings = dict.fromkeys(TIMINGS, 0.0)
        self._policies: dict[PolicyID, Policy] = worker.policy_map
        self._complete = settings.batch_mode == "complete_episodes"
        self._action_options: dict[str, Any] = {} if settings.explore else {"explore": False}
        self._ids = IdCounter(first_id)
        self._open = False
        self._num_resets = 0  # steps of this fragment that only reset an environment
        self._collectors: list[SampleCollector] = []
        self._running: list[MultiAgentEpisode | None] = [None] * slots.num_envs
        self._by_id: dict[EpisodeID, MultiAgentEpisode] = {}
        # agents that need an action: by policy and collector, in the collector's order
        self._waiting: dict[PolicyID, list[list[tuple[int, AgentID]]]] = {}
        self._finished: deque[tuple[MultiAgentBatch, EpisodeMetrics]] = deque()
        self._checks: dict[AgentID, ObservationCheck] = {}
        self._latest_check: ObservationCheck | None = None
        self._checked: set[tuple[Any, AgentID]] = set()
        self._filter_rows: dict[PolicyID, list[tuple[EpisodeID, np.ndarray]]] = {}
        self._failed_slots: set[int] = set()
        self._dropped = [0] * slots.num_envs  # consecutive episodes dropped for invalid values
        self._warned: set[str] = set()
        callbacks = worker.callbacks
        self._calls = {
            name: getattr(callbacks, name)
            for name in ("on_episode_start", "on_episode_step", "on_episode_end")
            if overrides(callbacks, name)
        }
        if settings.soft_horizon:
            self._require_method("continue_episode", "soft_horizon")

    def _require_method(self, method: str, setting: str) -> None:
        if getattr(self._collector_class, method) is getattr(SampleCollector, method):
            name = self._collector_class.__name__
            raise ConfigError(f"sample_collector: {name} has no {method}(), for {setting}")

    # -- a fragment --------------------------------------------------------------------------------

    def collect(self) -> SampleBatch | MultiAgentBatch:
        """Return a fragment, or one whole episode with `batch_mode="complete_episodes"`."""
        started = time.perf_counter()
        if not self._open:
            self._start()
        self._open = False  # until the fragment is complete
        batch = self._collect_episode() if self._complete else self._collect_fragment()
        self._open = True
        self._update_filters()
        healthy = set(range(self.slots.num_envs)) - self._failed_slots
        self.slots.mark_healthy(healthy)
        for slot in healthy:
            self._dropped[slot] = 0
        self._failed_slots.clear()
        self.env_steps += batch.env_steps()
        self.agent_steps += batch.agent_steps()
        self.timings["sample_s"] += time.perf_counter() - started
        return self.worker.to_sample(batch)

    def _collect_fragment(self) -> MultiAgentBatch:
        settings, collector = self.settings, self._collectors[0]
        steps = self._num_resets = 0
        min_rows = settings.fragment_length * self.slots.num_envs
        if settings.count_steps_by == "env_steps":
            while steps * self.slots.num_envs - self._num_resets < min_rows:
                self._advance(steps)
                steps += 1
        else:
            while collector.total_agent_steps() < min_rows:
                self._advance(steps)
                steps += 1
                self._warn_without_data(steps, collector.total_agent_steps(), "row of an agent")
                if steps > MAX_STEPS_WITHOUT_DATA and not collector.total_agent_steps():
                    raise RuntimeError(
                        f"no agent acted in {steps} steps of every environment, so there are no "
                        'agent steps to count: use count_steps_by="env_steps"'
                    )
        return self._pop_batch(collector)

    def _collect_episode(self) -> MultiAgentBatch:
        steps = 0
        while not self._finished:
            self._advance(steps)
            steps += 1
            self._warn_without_data(steps, 0, "finished episode")
        batch, metrics = self._finished.popleft()
        self.episodes.append(metrics)
        return batch

    def _warn_without_data(self, steps: int, found: int, what: str) -> None:
        envs = self.slots.num_envs
        if not found and (steps - 1) * envs < MAX_STEPS_WITHOUT_DATA <= steps * envs:
            log.warning(
                "%d env steps without a %s; all of them stay in memory",
                MAX_STEPS_WITHOUT_DATA,
                what,
            )

    def _pop_batch(self, collector: SampleCollector) -> MultiAgentBatch:
        started = time.perf_counter()
        batch = collector.get_multi_agent_batch_and_reset()
        self.timings["postprocess_s"] += time.perf_counter() - started
        return batch

    def _start(self) -> None:
        """Start an episode in every environment, with empty collectors."""
        count = self.slots.num_envs if self._complete else 1
        self._collectors = [self._new_collector() for _ in range(count)]
        self._clear()
        for slot, (observations, infos) in enumerate(self.slots.reset()):
            self._begin_episode(slot, observations, infos, count=False)

    def _new_collector(self) -> SampleCollector:
        settings = self.settings
        collector: SampleCollector = self._collector_class(
            self._policies,
            callbacks=self.worker.callbacks,
            worker=self.worker,
            multiple_episodes_in_batch=not self._complete,
            rollout_fragment_length=settings.fragment_length,
            count_steps_by=settings.count_steps_by,
        )
        return collector

    def _clear(self) -> None:
        self._waiting = {pid: [[] for _ in self._collectors] for pid in self._policies}
        self._by_id.clear()
        self._finished.clear()
        self._checked.clear()
        self._filter_rows.clear()

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of environments, episodes and counters, without the policies."""
        state: dict[str, Any] = {
            "next_id": self._ids.next_id,
            "env_steps": self.env_steps,
            "agent_steps": self.agent_steps,
            "faulty_episodes": self.faulty_episodes,
        }
        collectors = [collector.state_dict() for collector in self._collectors]
        if self._open and None not in collectors:
            state["open"] = {
                "envs": self.slots.state_dict(),
                "collectors": collectors,
                "running": [
                    None if episode is None else [episode.episode_id, episode.state_dict()]
                    for episode in self._running
                ],
                "waiting": self._waiting,
                "finished": [(batch, list(metrics)) for batch, metrics in self._finished],
                "dropped": list(self._dropped),
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Load the result of `state_dict`.

        Returns:
            Number of episodes that could not be resumed; new episodes replace them.

        Raises:
            KeyError, ValueError: the state belongs to other environments.
        """
        self._ids = IdCounter(state["next_id"])
        self.env_steps, self.agent_steps = state["env_steps"], state["agent_steps"]
        self.faulty_episodes = state["faulty_episodes"]
        running, self._open = state.get("open"), False
        if running is None:
            return 0
        if len(running["running"]) != self.slots.num_envs:
            raise ValueError(
                f"the state has {len(running['running'])} environments, this sampler "
                f"{self.slots.num_envs}"
            )
        self._collectors = [self._new_collector() for _ in running["collectors"]]
        self._clear()
        for collector, saved in zip(self._collectors, running["collectors"], strict=True):
            collector.load_state_dict(saved)
        self._waiting = running["waiting"]
        self._finished.extend((b, EpisodeMetrics(*values)) for b, values in running["finished"])
        self._dropped = list(running["dropped"])
        for slot, saved in enumerate(running["running"]):
            self._running[slot] = None
            if saved is not None:
                worker = self.worker
                episode = MultiAgentEpisode(saved[0], slot, worker, worker.policy_for)
                episode.load_state_dict(saved[1])
                self._running[slot] = self._by_id[episode.episode_id] = episode
        observed = [
            {}
            if episode is None
            else {a: r.raw_obs for a, r in episode.records.items() if r.raw_obs is not None}
            for episode in self._running
        ]
        restarted = self.slots.load_state_dict(running["envs"], observed)
        for slot, (observations, infos) in restarted.items():
            lost = self._running[slot]
            if lost is not None:
                self._collectors[slot if self._complete else 0].drop_episode(lost.episode_id)
                del self._by_id[lost.episode_id]
            for by_collector in self._waiting.values():
                by_collector[:] = [[w for w in waiting if w[0] != slot] for waiting in by_collector]
            self._begin_episode(slot, observations, infos, count=False)
        self._open = True
        return len(restarted)

    def episode(self, episode_id: EpisodeID) -> MultiAgentEpisode | None:
        """Return the record of a running episode."""
        return self._by_id.get(episode_id)

    # -- a step ------------------------------------------------------------------------------------

    def _advance(self, step: int) -> None:
        """Compute the actions that are needed, step every environment, store the results."""
        clock = time.perf_counter
        start = clock()
        actions = self._act()
        acted = clock()
        try:
            results = self.slots.step(actions)
        except Exception as error:
            error.add_note(f"at step {step} of a fragment, {self.env_steps} env steps sampled")
            raise
        stepped = clock()
        self.timings["inference_s"] += acted - start
        self.timings["env_step_s"] += stepped - acted
        self._copy_observations(results)
        earlier = self.timings["postprocess_s"]  # of episodes that end in this step
        for slot, result in enumerate(results):
            try:
                self._store_step(slot, result)
            except Exception as error:
                error.add_note(f"at step {step} of a fragment, in sub-environment {slot}")
                raise
        postprocessed = self.timings["postprocess_s"] - earlier
        self.timings["collection_s"] += clock() - stepped - postprocessed

    def _act(self) -> list[dict[AgentID, Any]]:
        """Return the actions for the environments, by agent."""
        actions: list[dict[AgentID, Any]] = [{} for _ in range(self.slots.num_envs)]
        for policy_id, by_collector in self._waiting.items():
            policy = self._policies[policy_id]
            parts, agents = [], []
            for collector, waiting in zip(self._collectors, by_collector, strict=True):
                if waiting:
                    parts.append(collector.get_inference_input_dict(policy))
                    agents += waiting
                    waiting.clear()
            if not agents:
                continue
            inputs: Any = parts[0]
            if len(parts) > 1:
                inputs = optree.tree_map(lambda *leaves: np.concatenate(leaves), *parts)  # type: ignore[arg-type]
            chosen, states, extra = policy.compute_actions_from_input_dict(
                inputs, **self._action_options
            )
            columns = {name: _rows(value) for name, value in extra.items()}
            columns |= {f"state_out_{i}": _rows(state) for i, state in enumerate(states)}
            check_extra_columns(f"policy {policy_id!r}", extra, len(agents))
            self._check_actions(policy_id, policy, chosen, agents)
            to_env: Any = policy.actions_for_env(chosen)
            if to_env is chosen:  # an environment may write into its action
                stored: Any = chosen
                to_env = optree.tree_map(np.copy, stored)
            extras: Any = zip(*columns.values(), strict=True) if columns else [()] * len(agents)
            for (slot, agent), action, extra_row, env_action in zip(
                agents, _rows(chosen), extras, _rows(to_env, numbers=True), strict=True
            ):
                record = self._running[slot].records[agent]  # type: ignore[union-attr]
                record.action = action
                record.extra = dict(zip(columns, extra_row, strict=True))
                actions[slot][agent] = env_action
        return actions

    def _check_actions(
        self, policy_id: PolicyID, policy: Policy, chosen: Any, agents: list[tuple[int, AgentID]]
    ) -> None:
        count = len(optree.tree_leaves(chosen)[0])
        if count != len(agents):
            raise ValueError(
                f"policy {policy_id!r} returned {count} actions for {len(agents)} agents"
            )
        invalid = first_invalid_action(policy.action_space, chosen)
        if invalid is not None:
            slot, agent = agents[invalid]
            raise ValueError(
                f"policy {policy_id!r} returned the action {_rows(chosen)[invalid]!r} for agent "
                f"{agent!r} of sub-environment {slot}; its action space is {policy.action_space}"
            )

    # -- results of environments -------------------------------------------------------------------

    def _store_step(self, slot: int, step: MultiAgentStep) -> None:
        episode = self._running[slot]
        if episode is None:  # this step of a vector environment was the reset
            assert step.start is not None
            self._num_resets += 1
            self._begin_episode(slot, step.start, step.start_infos)
            return
        if step.failed is None:
            step = self._checked_step(slot, episode, step)
        if step.failed is not None:
            self._drop_episode(slot, episode, step)
            return
        collector = self._collectors[slot if self._complete else 0]
        t = episode.length
        collector.env_stepped(episode.episode_id, t)
        episode.length += 1
        terminated = bool(step.terminateds["__all__"])
        truncated = bool(step.truncateds["__all__"])
        over = terminated or truncated
        self._add_rewards(episode, step)
        if over and not step.obs and not any(r.alive for r in episode.records.values()):
            self._warn("an episode ended without any agent")
        for agent, obs in step.obs.items():
            agent_ends = bool(step.terminateds.get(agent)), bool(step.truncateds.get(agent))
            ends = agent_ends if any(agent_ends) else (terminated, truncated)
            self._observe(slot, episode, collector, agent, obs, step.infos.get(agent), ends)
        for agent, record in episode.records.items():
            if not record.alive or agent in step.obs:
                continue
            agent_ends = bool(step.terminateds.get(agent)), bool(step.truncateds.get(agent))
            if over or any(agent_ends):
                # no final observation was returned: use the latest one
                ends = agent_ends if any(agent_ends) else (terminated, truncated)
                self._complete_row(
                    slot, episode, collector, agent, record, record.obs, step.infos.get(agent), ends
                )
        self._call("on_episode_step", slot, episode)
        if over:
            self._end_episode(slot, episode, collector, step)
        elif self.settings.soft_horizon and episode.length == self.settings.horizon:
            self._pass_horizon(slot, episode, collector)

    def _copy_observations(self, results: list[MultiAgentStep]) -> None:
        """Copy and check the array observations of a step, all of one space at once.

        Observations that are invalid, new or nested are left to `_checked_step`.
        """
        groups: dict[
            int, tuple[ObservationCheck, list[Any], list[tuple[MultiAgentStep, AgentID]]]
        ] = {}
        checks, checked = self._checks, self._checked
        for slot, step in enumerate(results):
            for agent, obs in step.obs.items():
                check = checks.get(agent)
                if (
                    check is None
                    or not check.is_array
                    or (slot, agent) not in checked
                    or not check.matches_shape_and_dtype(obs)
                ):
                    continue
                group = groups.get(id(check))
                if group is None:
                    group = groups[id(check)] = (check, [], [])
                group[1].append(obs)
                group[2].append((step, agent))
        for check, observations, keys in groups.values():
            copied = np.array(observations)
            if check.in_bounds(copied):
                copied.flags.writeable = False  # stored, and passed to callbacks
                for (step, agent), row in zip(keys, copied, strict=True):
                    step.taken[agent] = row

    def _check_of(self, agent: AgentID) -> ObservationCheck:
        """Return the check of an agent's observations; agents with equal spaces share it."""
        check = self._checks.get(agent)
        if check is None:
            if len(self._checks) >= MAX_CACHED_AGENTS:
                self._checks.clear()
                self._checked.clear()
            space = self.slots.observation_space(agent)
            check = self._latest_check
            if check is None or check.space != space:
                check = self._latest_check = ObservationCheck(space)
            self._checks[agent] = check
        return check

    def _checked_step(
        self, slot: int, episode: MultiAgentEpisode, step: MultiAgentStep
    ) -> MultiAgentStep:
        """Return the step with copied, unnormalized observations; a failed step if a value is
        invalid."""
        mode = self.settings.on_invalid_step
        problem = None
        returned, step.obs = step.obs, {}  # the environment's dicts must not be changed
        step.rewards = dict(step.rewards)
        for agent, obs in returned.items():
            if agent in step.taken:
                step.obs[agent] = step.taken[agent]
                continue
            copied = self._copy_checked(slot, agent, obs)
            check = self._checks[agent]
            if not self._accepts(slot, check, copied):
                problem = problem or (agent, check.describe_problem(copied), "obs")
                copied = check.repair(copied) if mode == "replace" else copied
            step.obs[agent] = copied
        for agent, reward in step.rewards.items():
            if ("reward", agent) not in self._checked:
                check_reward(reward)
                self._checked.add(("reward", agent))
            try:
                finite = bool(-LARGEST_REWARD <= reward <= LARGEST_REWARD)
            except (TypeError, ValueError):
                finite = False
                check_reward(reward)
            if not finite:
                problem = problem or (agent, f"a reward that is not finite: {reward}", "rewards")
                step.rewards[agent] = 0.0
        if problem is None or mode == "replace":
            return step
        agent, what, field = problem
        error = invalid_step_error(
            f"sub-environment {slot} returned{self._for_agent(agent)} {what} ({field}), at step "
            f"{episode.length} of its episode"
        )
        if mode in ("warn", "raise"):
            raise error
        self._dropped[slot] += 1
        if self._dropped[slot] > self.settings.max_num_env_restarts:
            error.add_note(
                f"{self._dropped[slot]} consecutive episodes of it were dropped for this"
            )
            raise error
        return self.slots.restart(slot, error)

    def _for_agent(self, agent: AgentID) -> str:
        """Return the agent's name for a message; "" if the environment has no agents' names."""
        return "" if isinstance(self.slots, SingleAgentAdapter) else f" for agent {agent!r}"

    def _accepts(self, slot: int, check: ObservationCheck, obs: Any) -> bool:
        """Return whether an observation can be stored; warn of the first one outside its space."""
        if check.in_bounds(obs):
            return True
        if self.settings.on_invalid_step != "warn" or not check.is_usable(obs):
            return False
        self._warn(OUTSIDE_WARNING, self.worker.worker_index, slot, check.describe_problem(obs))
        return True

    def _copy_checked(self, slot: int, agent: AgentID, obs: Any) -> Any:
        """Return a copy of the observation; check the first one of each agent against its space."""
        check = self._check_of(agent)
        try:
            if (slot, agent) not in self._checked or not check.matches_shape_and_dtype(obs):
                check.check_structure(obs)
                self._checked.add((slot, agent))
            copied = check.copy(obs)
        except ConfigError as error:
            error.add_note(f"returned{self._for_agent(agent)} by sub-environment {slot}")
            raise
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise ConfigError(
                f"env: an observation of agent {agent!r} does not fit the space {check.space}: "
                f"{error}"
            ) from error
        if check.is_array:
            copied.flags.writeable = False  # stored, and passed to callbacks
        return copied

    def _add_rewards(self, episode: MultiAgentEpisode, step: MultiAgentStep) -> None:
        """Add rewards to each agent's latest action, also in later steps."""
        for agent, reward in step.rewards.items():
            record = episode.records.get(agent)
            if record is None or not record.alive:
                if reward:
                    self._warn(
                        "dropped the reward of agent %r: it has no observation yet, or none since "
                        "its end",
                        agent,
                    )
                continue
            record.pending_reward += reward
            record.total_reward += reward
            episode.total_reward += reward

    def _observe(
        self,
        slot: int,
        episode: MultiAgentEpisode,
        collector: SampleCollector,
        agent: AgentID,
        raw: Any,
        info: dict[str, Any] | None,
        ends: tuple[bool, bool],
    ) -> None:
        """Store an agent's observation: complete its row, or start its trajectory."""
        known = episode.records.get(agent)
        if (known is None or not known.alive) and any(ends):
            return  # ended before its first action
        record = episode.record(agent)
        self._check_policy(agent, record)
        final = any(ends)
        policy = self._policies[record.policy_id]
        normalize = policy.observation_filter
        obs = raw
        if normalize is not None:
            obs = normalize(raw[None])[0]
            obs.flags.writeable = False
        if normalize is not None and not final:
            self._filter_rows.setdefault(record.policy_id, []).append((episode.episode_id, raw))
        record.raw_obs = raw
        if record.alive:
            self._complete_row(slot, episode, collector, agent, record, obs, info, ends)
        else:
            record.alive, record.obs, record.info = True, obs, info or {}
            collector.add_init_obs(episode.episode_id, agent, record.policy_id, obs)
        if not final:
            index = slot if self._complete else 0
            self._waiting[record.policy_id][index].append((slot, agent))

    def _check_policy(self, agent: AgentID, record: AgentRecord) -> None:
        if ("policy", (agent, record.policy_id)) in self._checked:
            return
        self._checked.add(("policy", (agent, record.policy_id)))
        policy = self._policies[record.policy_id]
        for kind in ("observation", "action"):
            agent_space = getattr(self.slots, f"{kind}_space")(agent)
            policy_space = getattr(policy, f"{kind}_space")
            # the bounds of observations may differ, actions must fit exactly
            similar = agent_space.shape == policy_space.shape and (
                type(agent_space) is type(policy_space)
            )
            nested = agent_space.shape is None or agent_space.dtype is None
            if agent_space != policy_space and (kind == "action" or nested or not similar):
                raise ConfigError(
                    f"agent {agent!r} is mapped to policy {record.policy_id!r}, whose {kind} "
                    f"space {policy_space} differs from the agent's, {agent_space}"
                )

    def _complete_row(
        self,
        slot: int,
        episode: MultiAgentEpisode,
        collector: SampleCollector,
        agent: AgentID,
        record: AgentRecord,
        obs: Any,
        info: dict[str, Any] | None,
        ends: tuple[bool, bool],
    ) -> None:
        terminated, truncated = ends
        values = {
            "actions": record.action,
            "rewards": record.pending_reward,
            "new_obs": obs,
            "terminateds": terminated,
            "truncateds": truncated,
            "t": episode.length - 1,
            "env_id": slot,
            "agent_index": record.agent_index,
            "infos": info or {},
            **record.extra,
        }
        collector.add_action_reward_next_obs(episode.episode_id, agent, record.policy_id, values)
        record.prev_action, record.last_action = record.last_action, record.action
        record.prev_reward, record.last_reward = record.last_reward, record.pending_reward
        record.action, record.pending_reward = None, 0.0
        record.obs, record.info = obs, info or {}
        record.alive = not (terminated or truncated)

    # -- episodes ----------------------------------------------------------------------------------

    def _begin_episode(
        self, slot: int, observations: dict[AgentID, Any], infos: Any, count: bool = True
    ) -> None:
        """Start an episode with these observations."""
        observations, infos = self._checked_start(slot, observations, infos)
        episode = MultiAgentEpisode(next(self._ids), slot, self.worker, self.worker.policy_for)
        self._running[slot] = self._by_id[episode.episode_id] = episode
        collector = self._collectors[slot if self._complete else 0]
        for agent, obs in observations.items():
            self._observe(
                slot, episode, collector, agent, obs, (infos or {}).get(agent), (False, False)
            )
        if not count:
            self._drop_filter_rows(episode)
        self._call("on_episode_start", slot, episode)

    def _checked_start(
        self, slot: int, observations: dict[AgentID, Any], infos: Any
    ) -> tuple[dict[AgentID, Any], Any]:
        """Return valid first observations: repaired, or those of another episode, by the setting
        `on_invalid_step`."""
        mode = self.settings.on_invalid_step
        while True:
            copied = {a: self._copy_checked(slot, a, obs) for a, obs in observations.items()}
            invalid = [
                agent
                for agent, obs in copied.items()
                if not self._accepts(slot, self._checks[agent], obs)
            ]
            if not invalid:
                return copied, infos
            if mode == "replace":
                return {a: self._checks[a].repair(obs) for a, obs in copied.items()}, infos
            agent = invalid[0]
            what = self._checks[agent].describe_problem(copied[agent])
            error = invalid_step_error(
                f"sub-environment {slot} returned{self._for_agent(agent)} {what} (obs) at its reset"
            )
            if mode in ("warn", "raise"):
                raise error
            restarted = self.slots.restart(slot, error)
            assert restarted.start is not None
            observations, infos = restarted.start, restarted.start_infos

    def _end_episode(
        self,
        slot: int,
        episode: MultiAgentEpisode,
        collector: SampleCollector,
        step: MultiAgentStep,
    ) -> None:
        """Finish an episode that its environment ended."""
        started = time.perf_counter()
        self._dropped[slot] = 0
        collector.postprocess_trajectories_so_far(episode)
        collector.check_missing_dones(episode.episode_id)
        self.timings["postprocess_s"] += time.perf_counter() - started
        self._call("on_episode_end", slot, episode)
        self._report(episode, collector)
        self._running[slot] = None
        if step.start is not None:
            self._begin_episode(slot, step.start, step.start_infos)

    def _pass_horizon(
        self, slot: int, episode: MultiAgentEpisode, collector: SampleCollector
    ) -> None:
        """Start another episode at a soft horizon, without a reset."""
        next_episode = MultiAgentEpisode(next(self._ids), slot, self.worker, self.worker.policy_for)
        collector.continue_episode(episode, next_episode.episode_id)
        self._call("on_episode_end", slot, episode)
        self._report(episode, collector)
        next_episode.continue_from(episode)
        self._running[slot] = self._by_id[next_episode.episode_id] = next_episode
        self._call("on_episode_start", slot, next_episode)

    def _drop_episode(self, slot: int, episode: MultiAgentEpisode, step: MultiAgentStep) -> None:
        """Drop the episode of a failed environment, and start one in the environment that replaces
        it."""
        assert step.failed is not None and step.start is not None
        if type(self._collectors[0]).drop_episode is SampleCollector.drop_episode:
            raise step.failed
        self._failed_slots.add(slot)
        self.faulty_episodes += 1
        episode.is_faulty = True
        self._collectors[slot if self._complete else 0].drop_episode(episode.episode_id)
        self._checked = {pair for pair in self._checked if pair[0] != slot}
        self._drop_filter_rows(episode)
        self._call("on_episode_end", slot, episode)
        del self._by_id[episode.episode_id]
        self._begin_episode(slot, step.start, step.start_infos, count=False)

    def _drop_filter_rows(self, episode: MultiAgentEpisode) -> None:
        """Remove an episode's observations from the pending filter updates."""
        for policy_id, rows in self._filter_rows.items():
            self._filter_rows[policy_id] = [row for row in rows if row[0] != episode.episode_id]

    def _report(self, episode: MultiAgentEpisode, collector: SampleCollector) -> None:
        """Report a finished episode; in complete_episodes mode together with its rows."""
        returns = [
            (str(agent), record.policy_id, float(record.total_reward))
            for agent, record in episode.records.items()
        ]
        metrics = EpisodeMetrics(
            float(episode.total_reward),
            episode.length,
            episode.env_id,
            returns if self.worker.is_multi_agent else None,
            *episode.metrics(),
        )
        if self._complete:
            self._finished.append((self._pop_batch(collector), metrics))
        else:
            self.episodes.append(metrics)
        del self._by_id[episode.episode_id]

    def _call(self, name: str, slot: int, episode: MultiAgentEpisode) -> None:
        method = self._calls.get(name)
        if method is None:
            return
        call(
            method,
            worker=self.worker,
            base_env=self.slots,
            policies=dict(self._policies),
            episode=episode,
            env_index=slot,
        )

    def _update_filters(self) -> None:
        for policy_id, rows in self._filter_rows.items():
            filter_ = self._policies[policy_id].observation_filter
            assert filter_ is not None
            filter_.new_stats.update(np.array([raw for _, raw in rows]))
        self._filter_rows.clear()

    def _warn(self, text: str, *values: Any) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text, *values)


def _rows(value: Any, numbers: bool = False) -> list[Any]:
    """Return the rows of an array or of nested arrays; optionally as Python numbers."""
    if isinstance(value, np.ndarray):
        return value.tolist() if numbers and value.ndim == 1 else list(value)
    if isinstance(value, (dict, tuple)):
        nest: Any = value
        count = len(optree.tree_leaves(nest)[0])
        return [optree.tree_map(lambda leaf, i=i: leaf[i], nest) for i in range(count)]
    return list(value)
