"""MultiAgentSampler: sample environments with several agents in columns.

Each policy acts once per step, for all of its agents in all environments. The rows of an
environment whose agents all acted and were observed are stored with those of the other
environments, in one write per policy; agents that join, end or take turns are stored one by one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flowrl.data import MultiAgentBatch
from flowrl.data.sample_batch import AgentID, PolicyID
from flowrl.envs.multi_agent_vector_env import MultiAgentStep, MultiAgentVectorEnv
from flowrl.envs.validation import NUMBERS, copied_info
from flowrl.errors import add_note
from flowrl.sampling.agent_batches import AgentBatches, trajectories_of
from flowrl.sampling.agent_checks import AgentChecks
from flowrl.sampling.agent_episodes import AgentEpisodes
from flowrl.sampling.agent_records import AgentRecords
from flowrl.sampling.agent_state import episodes_state_dict, load_episodes
from flowrl.sampling.agent_views import AgentViews, has_agent_views
from flowrl.sampling.env_sampler import EnvSampler
from flowrl.sampling.episode import EpisodeMetrics, MultiAgentEpisode
from flowrl.sampling.fragment_builder import FragmentBuilder
from flowrl.sampling.ids import IdCounter
from flowrl.sampling.policy_lanes import PolicyLanes
from flowrl.sampling.running_episodes import RunningEpisode, Trajectory
from flowrl.sampling.sampler import EPISODE, warn_without_data
from flowrl.sampling.sampler_worker import SamplerWorker
from flowrl.sampling.segment_postprocessing import SegmentPostprocessing
from flowrl.sampling.worker_config import WorkerConfig
from flowrl.state_schema import Fields, Natural, check_state


@dataclass(slots=True, eq=False)
class _Results:
    """What environments returned for agents of one policy that all acted: lanes, observations,
    rewards, env steps of the episode before this one, and infos."""

    lanes: list[int] = field(default_factory=list)
    observations: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    infos: list[Any] = field(default_factory=list)
    has_infos: bool = False


_STATE: Fields = {
    "next_id": Natural,
    "time": Natural,
    "env_steps": Natural,
    "faulty_episodes": Natural,
}


class _ActingAgents(NamedTuple):
    """Agents of an environment that act next and have the same policy, and their lanes."""

    policy_lanes: PolicyLanes
    agents: list[AgentID]
    lanes: list[int]


class MultiAgentSampler(EnvSampler):
    """Samples fragments of all environments, with a batch of each policy; see EnvSampler.

    Args:
        agent_envs: the environments.
        worker: its policies act and its callbacks are called.
        settings: the sampling settings.
        unroll_ids: the counter of the column `unroll_id`.
        first_id: the first episode id.
    """

    def __init__(
        self,
        agent_envs: MultiAgentVectorEnv,
        worker: SamplerWorker,
        settings: WorkerConfig,
        unroll_ids: IdCounter,
        first_id: int = 0,
    ):
        super().__init__(settings)
        self.agent_envs, self.worker = agent_envs, worker
        self._by_agent = settings.count_steps_by == "agent_steps"
        self._unroll_ids = unroll_ids
        checks = AgentChecks(agent_envs, settings.on_invalid_step, worker.worker_index)
        self._policies, records, self._batches = self._make_storage(checks)
        self._episodes = AgentEpisodes(
            agent_envs,
            worker,
            settings,
            self._policies,
            checks,
            records,
            self._batches,
            first_id,
        )
        self._time = 0  # env steps of each environment
        self._acting: list[list[_ActingAgents]] = []  # by environment

    def _make_storage(
        self, checks: AgentChecks
    ) -> tuple[Mapping[PolicyID, PolicyLanes], AgentRecords, AgentBatches]:
        """Create the storage of rows, the records of episodes and the builder of batches."""
        worker, settings = self.worker, self.settings
        postprocess = SegmentPostprocessing(worker.policy_map, worker.callbacks, worker)
        policies: dict[PolicyID, PolicyLanes] = {}
        agent_views = AgentViews(worker, policies) if has_agent_views(worker.policy_map) else None
        for policy_id, policy in worker.policy_map.items():
            policies[policy_id] = PolicyLanes(policy_id, policy, settings, agent_views)
        if agent_views is not None:
            lookback = max(lanes.columns.lookback for lanes in policies.values())
            for lanes in policies.values():
                lanes.look_back(lookback)
        records = AgentRecords(worker, self.agent_envs, policies, postprocess.is_needed)
        builders = {
            policy_id: FragmentBuilder(
                policy, settings, self._unroll_ids, postprocess.is_needed, self.timings
            )
            for policy_id, policy in worker.policy_map.items()
        }
        return policies, records, AgentBatches(policies, builders, checks, records, postprocess)

    @property
    def faulty_episodes(self) -> int:
        return self._episodes.num_faulty

    def episode(self, episode_id: int) -> MultiAgentEpisode | None:
        return self._episodes.find(episode_id)

    # -- a fragment --------------------------------------------------------------------------------

    def _begin_fragment(self) -> None:
        for lanes in self._policies.values():
            lanes.begin_fragment()

    def _start(self) -> None:
        for lanes in self._policies.values():
            lanes.clear()
        self._batches.clear(self.agent_envs.num_envs)
        self._acting = [[] for _ in range(self.agent_envs.num_envs)]
        self._episodes.start(self.agent_envs.reset())

    def _roll(self, min_steps: int) -> None:
        clock, agent_envs = time.perf_counter, self.agent_envs
        start, acting, stepping = clock(), 0.0, 0.0
        inference_s = self.timings["inference_s"]
        steps = skipped = room = 0
        self._num_ended = self._ended_steps = 0
        self._episodes.changed.update(range(agent_envs.num_envs))
        while True:
            self._raise_if_stopped()
            if not (self._whole or self._by_agent):
                found = steps * agent_envs.num_envs - skipped
            else:
                found = self._steps_found()
                if not found:
                    missing = EPISODE if self._whole else "complete row of an agent"
                    warn_without_data(steps, self.agent_envs.num_envs, missing)
            if found >= min_steps:
                break
            if not room:
                room = min(lanes.ensure_room() for lanes in self._policies.values())
            act_start = clock()
            actions = self._act()
            step_start = clock()
            try:
                results = agent_envs.step(actions)
                stepped = clock()
                self._store(actions, results)
            except Exception as error:
                before = self.env_steps
                add_note(
                    error, f"at step {steps} of a fragment that began after {before} env steps"
                )
                raise
            acting += step_start - act_start
            stepping += stepped - step_start
            skipped += sum(result.skipped for result in results)
            steps, room = steps + 1, room - 1
        values_s = self.timings["inference_s"] - inference_s  # of episodes that ended
        self.timings["env_step_s"] += stepping
        self.timings["inference_s"] += acting
        self.timings["collection_s"] += clock() - start - acting - stepping - values_s

    def _steps_found(self) -> int:
        """Return the steps for the fragment, in the unit of the setting."""
        ended = self._episodes.ended
        self._ended_steps += sum(map(self._num_steps, ended[self._num_ended :]))
        self._num_ended = len(ended)
        running = [] if self._whole else self._episodes.all_running()
        return self._ended_steps + sum(map(self._num_steps, running))

    def _num_steps(self, episode: RunningEpisode) -> int:
        """Return the steps of an episode that are in no fragment, in the unit of the setting."""
        return episode.new_rows if self._by_agent else episode.new_steps

    # -- a step ------------------------------------------------------------------------------------

    def _arrange(self) -> None:
        """Find the agents that act next, in the environments where they have changed."""
        running = self._episodes.running
        for env_index in self._episodes.changed:
            parts: dict[PolicyID, _ActingAgents] = {}
            episode = running[env_index]
            for agent, trajectory in episode.agents.items() if episode is not None else ():
                if trajectory.needs_action:
                    policy_id = trajectory.policy_id
                    if policy_id not in parts:
                        parts[policy_id] = _ActingAgents(self._policies[policy_id], [], [])
                    parts[policy_id].agents.append(agent)
                    parts[policy_id].lanes.append(trajectory.lane)
            self._acting[env_index] = list(parts.values())
        self._episodes.changed.clear()
        waiting: dict[PolicyID, list[Trajectory]] = {pid: [] for pid in self._policies}
        for parts_of_env, episode in zip(self._acting, running, strict=True):
            for policy_lanes, agents, _ in parts_of_env:
                assert episode is not None
                waiting[policy_lanes.policy_id] += [episode.agents[agent] for agent in agents]
        for policy_id, trajectories in waiting.items():
            self._policies[policy_id].set_waiting(trajectories)

    def _act(self) -> list[dict[AgentID, Any]]:
        """Return the actions for the environments, by agent."""
        if self._episodes.changed:
            self._arrange()
        for lanes in self._policies.values():
            lanes.normalize_waiting()
        chosen = {}
        for policy_id, lanes in self._policies.items():
            if not lanes.waiting:
                continue
            try:
                chosen[policy_id] = iter(lanes.act())
            except Exception:
                self._episodes.checks.check_waiting(lanes)
                raise
        actions = []
        for parts in self._acting:
            env_actions: dict[AgentID, Any] = {}
            for policy_lanes, agents, _ in parts:
                for_agents = itertools.islice(chosen[policy_lanes.policy_id], len(agents))
                env_actions.update(zip(agents, for_agents, strict=True))
            actions.append(env_actions)
        return actions

    def _store(self, actions: list[dict[AgentID, Any]], results: list[MultiAgentStep]) -> None:
        """Store what the environments returned, call the callbacks, start and end episodes."""
        self._time += 1
        for lanes in self._policies.values():
            lanes.time = self._time
        episodes = self._episodes
        by_policy = {policy_id: _Results() for policy_id in self._policies}
        for env_index, (sent, step) in enumerate(zip(actions, results, strict=True)):
            if self._is_regular(env_index, sent, step):
                self._gather_regular(env_index, step, by_policy)
                continue
            episodes.changed.add(env_index)
            if episodes.running[env_index] is not None and step.failed is None:
                episodes.store_agents(env_index, sent, step)
        for policy_id, results_of_policy in by_policy.items():
            if results_of_policy.lanes:
                self._store_regular(self._policies[policy_id], results_of_policy)
        if episodes.changed or episodes.follows_steps:
            for env_index, step in enumerate(results):
                if env_index in episodes.changed or episodes.follows_steps:
                    episodes.after_step(env_index, step)

    def _gather_regular(
        self, env_index: int, step: MultiAgentStep, by_policy: dict[PolicyID, _Results]
    ) -> None:
        """Add what a regular step returned to the results of the agents' policies."""
        episode = self._episodes.running[env_index]
        assert episode is not None
        obs, rewards, infos, length = step.obs, step.rewards, step.infos, episode.record.length
        has_infos = any(infos.values())
        for policy_lanes, agents, lanes in self._acting[env_index]:
            results, count = by_policy[policy_lanes.policy_id], len(agents)
            results.lanes += lanes
            results.observations += [obs[agent] for agent in agents]
            results.rewards += [rewards[agent] for agent in agents]
            results.steps += [length] * count
            if has_infos:
                results.has_infos = True
                # an environment may reuse its dicts
                results.infos += [copied_info(infos.get(agent) or {}) for agent in agents]
            else:
                results.infos += [None] * count
        episode.record.length = length + 1
        episode.new_steps += 1
        episode.new_rows += len(obs)

    def _store_regular(self, lanes: PolicyLanes, results: _Results) -> None:
        """Check and store what regular steps returned for the agents of one policy."""
        if not NUMBERS.issuperset(map(type, results.rewards)):  # numpy would convert None and text
            agents = {one.lane: one.agent_id for one in lanes.waiting}
            for lane, reward in zip(results.lanes, results.rewards, strict=True):
                self._episodes.checks.check_reward(int(lanes.envs[lane]), agents[lane], reward)
        observations = lanes.stacked(results.observations)
        if observations is None:
            checks = self._episodes.checks
            observations = checks.stack_and_check(lanes, results.lanes, results.observations)
        infos = results.infos if results.has_infos else None
        lanes.observe_many(results.lanes, observations, results.rewards, results.steps, infos)

    def _is_regular(self, env_index: int, sent: dict[AgentID, Any], step: MultiAgentStep) -> bool:
        """Return whether exactly the agents that acted were observed, and none ended."""
        obs = step.obs
        return (
            bool(sent)
            and obs.keys() == sent.keys() == step.rewards.keys()
            and not any(step.terminateds.values())
            and not any(step.truncateds.values())
        )

    # -- the end of a fragment ---------------------------------------------------------------------

    def _finish(self, min_steps: int) -> MultiAgentBatch:
        episodes = self._episodes
        ended, running = self._take_ended(min_steps), episodes.all_running()
        parts = [] if self._whole else running
        batches = self._batches.take(ended, parts)
        steps = sum(episode.new_steps for episode in (*ended, *parts))
        for episode in parts:
            episode.new_steps = episode.new_rows = 0
        for episode in running:
            episodes.records.update_record(episode)
        self.episodes += map(self._metrics_of, ended)
        since = self._shown_since(running) if episodes.has_agent_views else None
        lookback = max(lanes.columns.lookback for lanes in self._policies.values())
        for policy_id, lanes in self._policies.items():
            past = episodes.past(policy_id)
            lanes.advance(trajectories_of(running, policy_id), past, since)
        if episodes.has_agent_views:
            episodes.forget(ended, lookback)
        self.agent_envs.mark_healthy(set(range(self.agent_envs.num_envs)) - episodes.failed)
        episodes.failed.clear()
        return MultiAgentBatch(batches, steps)

    def _shown_since(self, running: list[RunningEpisode]) -> np.ndarray:
        """Return the first env step of each environment that views of other agents may show from
        rows that are in no fragment."""
        since = np.full(self.agent_envs.num_envs, self._time)
        for episode in running:
            for trajectory in episode.agents.values():
                columns = self._policies[trajectory.policy_id].columns
                row = columns.lookback + trajectory.begin
                env, first = episode.record.env_id, columns["time"][row, trajectory.lane]
                since[env] = min(since[env], first - columns.lookback)
        return since

    def _take_ended(self, min_steps: int) -> list[RunningEpisode]:
        """Return the ended episodes of the fragment; whole ones until they have enough steps."""
        ended, count, steps = self._episodes.ended, 0, 0
        while count < len(ended) and not (self._whole and steps >= min_steps):
            steps += self._num_steps(ended[count])
            count += 1
        self._episodes.ended = ended[count:]
        return ended[:count]

    def _metrics_of(self, episode: RunningEpisode) -> EpisodeMetrics:
        record, returns = episode.record, episode.returns
        by_agent = [
            (str(agent), agent_record.policy_id, returns.get(agent, 0.0))
            for agent, agent_record in record.records.items()
        ]
        return EpisodeMetrics(
            sum(returns.values()),
            record.length,
            record.env_id,
            by_agent if self.worker.is_multi_agent else None,
            *record.metrics(),
        )

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "next_id": self._episodes.ids.next_id,
            "time": self._time,
            "env_steps": self.env_steps,
            "faulty_episodes": self.faulty_episodes,
        }
        batches = self._batches.state_dict()
        if self._has_open_episodes and batches is not None:
            state["open"] = {
                "envs": self.agent_envs.state_dict(),
                "batches": batches,
                "callbacks": self._episodes.records.callbacks_name,
                **episodes_state_dict(self._episodes, self._policies, self._batches),
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> int:
        check_state(state, _STATE, "sampler")
        if "open" in state:
            fields: Fields = {"envs": dict[str, Any], "batches": dict[str, Any], "callbacks": str}
            check_state(state["open"], fields, "sampler/open")
        episodes = self._episodes
        episodes.ids.next_id = state["next_id"]
        self._time = state["time"]
        for lanes in self._policies.values():
            lanes.time = self._time
        self.env_steps, episodes.num_faulty = state["env_steps"], state["faulty_episodes"]
        running, self._has_open_episodes = state.get("open"), False
        if running is None:
            return 0
        self._batches.load_state_dict(running["batches"])
        load_episodes(running, episodes, self._policies, self._batches)
        self._acting = [[] for _ in range(self.agent_envs.num_envs)]
        restarted = self.agent_envs.load_state_dict(running["envs"], episodes.last_observations())
        if restarted and not self._batches.can_drop:  # all start new episodes
            return self.agent_envs.num_envs
        records = episodes.records
        if running["callbacks"] != records.callbacks_name:
            for episode in episodes.all_running():
                if episode.record.env_id not in restarted:
                    records.start_again(episode)
        for env_index, (observations, infos) in restarted.items():
            episodes.restart(env_index, observations, infos)
        self._has_open_episodes = True
        return len(restarted)
