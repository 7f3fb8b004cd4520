"""AgentLoop: steps environments of agents, row by row, into a SampleCollector.

The general way to sample: several agents and policies, whole episodes, callbacks at every step,
recurrent policies, nested observations, collectors of one's own. All agents that one policy acts
for, in all environments, are one call of it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import optree

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.data.multi_agent_batch import AgentID, EpisodeID, PolicyID
from flowrl.envs.multi_agent_vector_env import AgentSlots, SlotStep
from flowrl.envs.validation import (
    LARGEST_REWARD,
    BadValueError,
    ObservationCheck,
    check_columns,
    check_reward,
    odd_actions,
)
from flowrl.policies.policy import Policy
from flowrl.sampling.callbacks import call, overrides
from flowrl.sampling.episode import AgentRecord, EpisodeMetrics, Ids, MultiAgentEpisode
from flowrl.sampling.sample_collector import SampleCollector
from flowrl.sampling.sampling_settings import TIMINGS, SamplingSettings
from flowrl.settings import ConfigError

if TYPE_CHECKING:
    from flowrl.sampling.rollout_worker import RolloutWorker

log = logging.getLogger("flowrl")

ENDLESS_STEPS = 10_000  # env steps without what was asked for, after which that is said
AGENTS_REMEMBERED = 10_000  # whose first observations were checked


class AgentLoop:
    """Steps all environments of a worker together and collects the rows of their agents.

    An exception leaves the loop usable: what was not given yet is dropped, and the next call starts
    new episodes.

    Args:
        slots: the environments.
        worker: its policies act, its callbacks are called.
        settings: of sampling.
        first_id: the first episode id.
    """

    def __init__(
        self,
        slots: AgentSlots,
        worker: RolloutWorker,
        settings: SamplingSettings,
        first_id: int = 0,
    ):
        self.slots = slots
        self.worker = worker
        self.settings = settings
        self.episodes: list[EpisodeMetrics] = []
        self.env_steps = self.agent_steps = self.faulty_episodes = 0
        self.timings = dict.fromkeys(TIMINGS, 0.0)
        self._policies: dict[PolicyID, Policy] = worker.policy_map
        self._complete = settings.batch_mode == "complete_episodes"
        self._how: dict[str, Any] = {} if settings.explore else {"explore": False}
        self._ids = Ids(first_id)
        self._open = False
        self._collectors: list[SampleCollector] = []
        self._running: list[MultiAgentEpisode | None] = [None] * slots.num_envs
        self._by_id: dict[EpisodeID, MultiAgentEpisode] = {}
        # by policy, and by collector, who waits for an action, in the collector's order
        self._waiting: dict[PolicyID, list[list[tuple[int, AgentID]]]] = {}
        self._finished: deque[tuple[MultiAgentBatch, EpisodeMetrics]] = deque()
        self._checks: dict[AgentID, ObservationCheck] = {}
        self._latest_check: ObservationCheck | None = None
        self._checked: set[tuple[Any, AgentID]] = set()
        self._seen: dict[PolicyID, list[tuple[EpisodeID, np.ndarray]]] = {}
        self._failed: set[int] = set()
        self._dropped = [0] * slots.num_envs  # episodes in a row that gave what cannot be used
        self._warned: set[str] = set()
        callbacks = worker.callbacks
        self._calls = {
            name: getattr(callbacks, name)
            for name in ("on_episode_start", "on_episode_step", "on_episode_end")
            if overrides(callbacks, name)
        }
        if settings.soft_horizon:
            self._needs("continue_episode", "soft_horizon")

    def _needs(self, method: str, setting: str) -> None:
        own = getattr(self.settings.sample_collector, method)
        if own is getattr(SampleCollector, method):
            name = self.settings.sample_collector.__name__
            raise ConfigError(f"sample_collector: {name} has no {method}(), for {setting}")

    # -- a fragment --------------------------------------------------------------------------------

    def collect(self) -> SampleBatch | MultiAgentBatch:
        """A fragment; one whole episode in the mode `complete_episodes`."""
        started = time.perf_counter()
        if not self._open:
            self._start()
        self._open = False  # until the fragment is whole
        batch = self._collect_episode() if self._complete else self._collect_fragment()
        self._open = True
        self._update_filters()
        well = set(range(self.slots.num_envs)) - self._failed
        self.slots.settle(well)
        for slot in well:
            self._dropped[slot] = 0
        self._failed.clear()
        self.env_steps += batch.env_steps()
        self.agent_steps += batch.agent_steps()
        self.timings["sample_s"] += time.perf_counter() - started
        return self.worker.shaped(batch)

    def _collect_fragment(self) -> MultiAgentBatch:
        settings, collector = self.settings, self._collectors[0]
        steps = 0
        if settings.count_steps_by == "env_steps":
            for steps in range(settings.length):
                self._advance(steps)
        else:
            wanted = settings.length * self.slots.num_envs
            while collector.total_agent_steps() < wanted:
                self._advance(steps)
                steps += 1
                self._look_out_for_nothing(steps, collector.total_agent_steps(), "row of an agent")
                if steps > ENDLESS_STEPS and not collector.total_agent_steps():
                    raise RuntimeError(
                        f"nobody acted in {steps} steps of every environment, so there are no "
                        'agent steps to count: use count_steps_by="env_steps"'
                    )
        return self._batch_of(collector)

    def _collect_episode(self) -> MultiAgentBatch:
        steps = 0
        while not self._finished:
            self._advance(steps)
            steps += 1
            self._look_out_for_nothing(steps, 0, "finished episode")
        batch, told = self._finished.popleft()
        self.episodes.append(told)
        return batch

    def _look_out_for_nothing(self, steps: int, found: int, what: str) -> None:
        envs = self.slots.num_envs
        if not found and (steps - 1) * envs < ENDLESS_STEPS <= steps * envs:
            log.warning("%d env steps without a %s; they are all kept", ENDLESS_STEPS, what)

    def _batch_of(self, collector: SampleCollector) -> MultiAgentBatch:
        started = time.perf_counter()
        batch = collector.get_multi_agent_batch_and_reset()
        self.timings["postprocess_s"] += time.perf_counter() - started
        return batch

    def _start(self) -> None:
        """Begin an episode everywhere, with empty collectors."""
        count = self.slots.num_envs if self._complete else 1
        self._collectors = [self._new_collector() for _ in range(count)]
        self._forget()
        for slot, (observations, infos) in enumerate(self.slots.reset()):
            self._begin(slot, observations, infos, count=False)

    def _new_collector(self) -> SampleCollector:
        settings = self.settings
        made: SampleCollector = settings.sample_collector(
            self._policies,
            callbacks=self.worker.callbacks,
            worker=self.worker,
            multiple_episodes_in_batch=not self._complete,
            rollout_fragment_length=settings.length,
            count_steps_by=settings.count_steps_by,
        )
        return made

    def _forget(self) -> None:
        self._waiting = {pid: [[] for _ in self._collectors] for pid in self._policies}
        self._by_id.clear()
        self._finished.clear()
        self._checked.clear()
        self._seen.clear()

    # -- state -------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """What the next fragment depends on besides the policies."""
        state: dict[str, Any] = {
            "next_id": self._ids.following,
            "env_steps": self.env_steps,
            "agent_steps": self.agent_steps,
            "faulty_episodes": self.faulty_episodes,
        }
        collectors = [collector.get_state() for collector in self._collectors]
        if self._open and None not in collectors:
            state["open"] = {
                "envs": self.slots.get_state(),
                "collectors": collectors,
                "running": [
                    None if episode is None else [episode.episode_id, episode.get_state()]
                    for episode in self._running
                ],
                "waiting": self._waiting,
                "finished": [(batch, list(told)) for batch, told in self._finished],
                "dropped": list(self._dropped),
            }
        return state

    def set_state(self, state: dict[str, Any]) -> int:
        """Go on where another loop was.

        Returns:
            how many episodes could not be gone on with: others begin in their place.

        Raises:
            KeyError, ValueError: it is not a state of such environments.
        """
        self._ids = Ids(state["next_id"])
        self.env_steps, self.agent_steps = state["env_steps"], state["agent_steps"]
        self.faulty_episodes = state["faulty_episodes"]
        going_on, self._open = state.get("open"), False
        if going_on is None:
            return 0
        if len(going_on["running"]) != self.slots.num_envs:
            raise ValueError(
                f"a state of {len(going_on['running'])} environments, not {self.slots.num_envs}"
            )
        self._collectors = [self._new_collector() for _ in going_on["collectors"]]
        self._forget()
        for collector, own in zip(self._collectors, going_on["collectors"], strict=True):
            collector.set_state(own)
        self._waiting = going_on["waiting"]
        self._finished.extend((b, EpisodeMetrics(*told)) for b, told in going_on["finished"])
        self._dropped = list(going_on["dropped"])
        for slot, saved in enumerate(going_on["running"]):
            self._running[slot] = None
            if saved is not None:
                worker = self.worker
                episode = MultiAgentEpisode(saved[0], slot, worker, worker.policy_for)
                episode.set_state(saved[1])
                self._running[slot] = self._by_id[episode.episode_id] = episode
        seen = [
            {}
            if episode is None
            else {a: r.raw_obs for a, r in episode.records.items() if r.raw_obs is not None}
            for episode in self._running
        ]
        anew = self.slots.set_state(going_on["envs"], seen)
        for slot, (observations, infos) in anew.items():
            gone = self._running[slot]
            if gone is not None:
                self._collectors[slot if self._complete else 0].drop_episode(gone.episode_id)
                del self._by_id[gone.episode_id]
            for by_collector in self._waiting.values():
                by_collector[:] = [[w for w in who if w[0] != slot] for who in by_collector]
            self._begin(slot, observations, infos, count=False)
        self._open = True
        return len(anew)

    def episode(self, episode_id: EpisodeID) -> MultiAgentEpisode | None:
        """The record of a running episode."""
        return self._by_id.get(episode_id)

    # -- a step ------------------------------------------------------------------------------------

    def _advance(self, step: int) -> None:
        """Act wherever somebody waits, step every environment, take in what it gave."""
        clock = time.perf_counter
        began = clock()
        actions = self._act()
        acted = clock()
        try:
            results = self.slots.step(actions)
        except Exception as error:
            error.add_note(f"at step {step} of a fragment, {self.env_steps} env steps sampled")
            raise
        stepped = clock()
        self.timings["inference_s"] += acted - began
        self.timings["env_step_s"] += stepped - acted
        self._take_together(results)
        earlier = self.timings["postprocess_s"]  # of episodes that end in this step
        for slot, result in enumerate(results):
            try:
                self._take(slot, result)
            except Exception as error:
                error.add_note(f"at step {step} of a fragment, in sub-environment {slot}")
                raise
        postprocessed = self.timings["postprocess_s"] - earlier
        self.timings["collection_s"] += clock() - stepped - postprocessed

    def _act(self) -> list[dict[AgentID, Any]]:
        """Actions as the environments take them, by agent."""
        actions: list[dict[AgentID, Any]] = [{} for _ in range(self.slots.num_envs)]
        for policy_id, by_collector in self._waiting.items():
            policy = self._policies[policy_id]
            parts, who = [], []
            for collector, waiting in zip(self._collectors, by_collector, strict=True):
                if waiting:
                    parts.append(collector.get_inference_input_dict(policy))
                    who += waiting
                    waiting.clear()
            if not who:
                continue
            inputs: Any = parts[0]
            if len(parts) > 1:
                inputs = optree.tree_map(lambda *leaves: np.concatenate(leaves), *parts)  # type: ignore[arg-type]
            chosen, states, extra = policy.compute_actions_from_input_dict(inputs, **self._how)
            columns = {name: _rows(value) for name, value in extra.items()}
            columns |= {f"state_out_{i}": _rows(state) for i, state in enumerate(states)}
            check_columns(policy_id, extra, len(who))
            self._check_actions(policy_id, policy, chosen, who)
            to_env: Any = policy.actions_for_env(chosen)
            if to_env is chosen:  # an environment may write into what it is given
                stored: Any = chosen
                to_env = optree.tree_map(np.copy, stored)
            own, given = _rows(chosen), _rows(to_env, numbers=True)
            extras: Any = zip(*columns.values(), strict=True) if columns else [()] * len(who)
            for (slot, agent), action, extra_row, to_give in zip(
                who, own, extras, given, strict=True
            ):
                record = self._running[slot].records[agent]  # type: ignore[union-attr]
                record.action = action
                record.extra = dict(zip(columns, extra_row, strict=True))
                actions[slot][agent] = to_give
        return actions

    def _check_actions(
        self, policy_id: PolicyID, policy: Policy, chosen: Any, who: list[tuple[int, AgentID]]
    ) -> None:
        count = len(optree.tree_leaves(chosen)[0])
        if count != len(who):
            raise ValueError(f"policy {policy_id!r} gave {count} actions for {len(who)} agents")
        odd = odd_actions(policy.action_space, chosen)
        if odd is not None:
            slot, agent = who[odd]
            raise ValueError(
                f"policy {policy_id!r} gave the action {_rows(chosen)[odd]!r} for agent {agent!r} "
                f"of sub-environment {slot}; its action space is {policy.action_space}"
            )

    # -- what an environment gave ------------------------------------------------------------------

    def _take(self, slot: int, step: SlotStep) -> None:
        episode = self._running[slot]
        if episode is None:  # a vector environment was busy with the reset
            assert step.start is not None
            self._begin(slot, step.start, step.start_infos)
            return
        if step.failed is None:
            step = self._checked_step(slot, episode, step)
        if step.failed is not None:
            self._drop(slot, episode, step)
            return
        collector = self._collectors[slot if self._complete else 0]
        t = episode.length
        collector.env_stepped(episode.episode_id, t)
        episode.length += 1
        terminated = bool(step.terminateds["__all__"])
        truncated = bool(step.truncateds["__all__"])
        over = terminated or truncated
        self._credit(episode, step)
        if over and not step.obs and not any(r.alive for r in episode.records.values()):
            self._warn("an episode ended in which nobody was there")
        for agent, obs in step.obs.items():
            own_end = bool(step.terminateds.get(agent)), bool(step.truncateds.get(agent))
            ends = own_end if any(own_end) else (terminated, truncated)
            self._observe(slot, episode, collector, agent, obs, step.infos.get(agent), ends)
        for agent, record in episode.records.items():
            if not record.alive or agent in step.obs:
                continue
            own_end = bool(step.terminateds.get(agent)), bool(step.truncateds.get(agent))
            if over or any(own_end):
                # its end was not observed: the last observation stands for the final one
                ends = own_end if any(own_end) else (terminated, truncated)
                self._complete_row(
                    slot, episode, collector, agent, record, record.obs, step.infos.get(agent), ends
                )
        self._call("on_episode_step", slot, episode)
        if over:
            self._end(slot, episode, collector, step)
        elif self.settings.soft_horizon and episode.length == self.settings.horizon:
            self._pass_horizon(slot, episode, collector)

    def _take_together(self, results: list[SlotStep]) -> None:
        """Copy the array observations of a step that look right, and look at their numbers, all of
        one space at once; what is found odd, new or nested is left to `_checked_step`."""
        groups: dict[int, tuple[ObservationCheck, list[Any], list[tuple[SlotStep, AgentID]]]] = {}
        checks, seen = self._checks, self._checked
        for slot, step in enumerate(results):
            for agent, obs in step.obs.items():
                check = checks.get(agent)
                if check is None or (slot, agent) not in seen or not check.looks_right(obs):
                    continue
                group = groups.get(id(check))
                if group is None:
                    group = groups[id(check)] = (check, [], [])
                group[1].append(obs)
                group[2].append((step, agent))
        for check, observations, whose in groups.values():
            taken = np.array(observations)
            if check.fits(taken):
                taken.flags.writeable = False  # stored, and callbacks are given it
                for (step, agent), row in zip(whose, taken, strict=True):
                    step.taken[agent] = row

    def _check_of(self, agent: AgentID) -> ObservationCheck:
        """The check of an agent's observations, which agents of one space have in common."""
        check = self._checks.get(agent)
        if check is None:
            if len(self._checks) >= AGENTS_REMEMBERED:
                self._checks.clear()
                self._checked.clear()
            space = self.slots.observation_space(agent)
            check = self._latest_check
            if check is None or check.space != space:
                check = self._latest_check = ObservationCheck(space)
            self._checks[agent] = check
        return check

    def _checked_step(self, slot: int, episode: MultiAgentEpisode, step: SlotStep) -> SlotStep:
        """The step with arrays of our own, normalised nowhere yet; a failed one if it gave what
        cannot be used."""
        mode = self.settings.on_invalid_step
        problem = None
        given, step.obs = step.obs, {}  # the environment's own dicts are not ours to change
        step.rewards = dict(step.rewards)
        for agent, obs in given.items():
            if agent in step.taken:
                step.obs[agent] = step.taken[agent]
                continue
            taken = self._taken(slot, agent, obs)
            check = self._checks[agent]
            if not check.fits(taken):
                problem = problem or (agent, check.describe(taken), "obs")
                taken = check.repaired(taken) if mode == "replace" else taken
            step.obs[agent] = taken
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
                problem = problem or (agent, "a reward that is not finite", "rewards")
                step.rewards[agent] = 0.0
        if problem is None or mode == "replace":
            return step
        agent, what, field = problem
        error = BadValueError(
            f"sub-environment {slot} gave agent {agent!r} {what} ({field}), at step "
            f"{episode.length} of its episode"
        )
        if mode == "raise":
            raise error
        self._dropped[slot] += 1
        if self._dropped[slot] > self.settings.max_env_restarts:
            error.add_note(f"so did {self._dropped[slot]} episodes of it in a row")
            raise error
        return self.slots.restart(slot, error)

    def _taken(self, slot: int, agent: AgentID, obs: Any) -> Any:
        """The observation, copied; the first one of each agent is compared with its space."""
        check = self._check_of(agent)
        try:
            if (slot, agent) not in self._checked or not check.looks_right(obs):
                check.first(obs)
                self._checked.add((slot, agent))
            taken = check.taken(obs)
        except ConfigError as error:
            error.add_note(f"given for agent {agent!r} by sub-environment {slot}")
            raise
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise ConfigError(
                f"env: an observation of agent {agent!r} does not fit the space {check.space}: "
                f"{error}"
            ) from error
        if check.is_array:
            taken.flags.writeable = False  # it is stored, and callbacks are given it
        return taken

    def _credit(self, episode: MultiAgentEpisode, step: SlotStep) -> None:
        """Rewards count for each agent's last action, whenever they come."""
        for agent, reward in step.rewards.items():
            record = episode.records.get(agent)
            if record is None or not record.alive:
                if reward:
                    self._warn(
                        "a reward for an agent that has not been observed, or not since its end, "
                        "is dropped (agent %r)",
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
        """An agent is observed: its row is complete, or it has just come."""
        record = episode.records.get(agent)
        if record is None:
            record = episode.record(agent)
            self._check_policy(agent, record)
        if not record.alive and any(ends):
            return  # gone before it could act
        final = any(ends)
        policy = self._policies[record.policy_id]
        normalize = policy.observation_filter
        obs = raw
        if normalize is not None:
            obs = normalize(raw[None])[0]
            obs.flags.writeable = False
        if normalize is not None and not final:
            self._seen.setdefault(record.policy_id, []).append((episode.episode_id, raw))
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
            own = getattr(self.slots, f"{kind}_space")(agent)
            policys = getattr(policy, f"{kind}_space")
            # the bounds of observations may differ, actions must be what the agent takes
            near = own.shape == policys.shape and type(own) is type(policys)
            nested = own.shape is None or own.dtype is None
            if own != policys and (kind == "action" or nested or not near):
                raise ConfigError(
                    f"agent {agent!r} is mapped to policy {record.policy_id!r}, whose {kind} "
                    f"space {policys} is not the agent's, {own}"
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

    def _begin(
        self, slot: int, observations: dict[AgentID, Any], infos: Any, count: bool = True
    ) -> None:
        """An episode begins with these observations."""
        observations, infos = self._checked_start(slot, observations, infos)
        episode = MultiAgentEpisode(next(self._ids), slot, self.worker, self.worker.policy_for)
        self._running[slot] = self._by_id[episode.episode_id] = episode
        collector = self._collectors[slot if self._complete else 0]
        for agent, obs in observations.items():
            self._observe(
                slot, episode, collector, agent, obs, (infos or {}).get(agent), (False, False)
            )
        if not count:
            self._forget_seen(episode)
        self._call("on_episode_start", slot, episode)

    def _checked_start(
        self, slot: int, observations: dict[AgentID, Any], infos: Any
    ) -> tuple[dict[AgentID, Any], Any]:
        """First observations that can be used: repaired, or another episode's, as the settings
        say."""
        mode = self.settings.on_invalid_step
        while True:
            taken = {agent: self._taken(slot, agent, obs) for agent, obs in observations.items()}
            odd = [agent for agent, obs in taken.items() if not self._checks[agent].fits(obs)]
            if not odd:
                return taken, infos
            if mode == "replace":
                return {a: self._checks[a].repaired(obs) for a, obs in taken.items()}, infos
            what = self._checks[odd[0]].describe(taken[odd[0]])
            error = BadValueError(
                f"sub-environment {slot} gave agent {odd[0]!r} {what} (obs) at its reset"
            )
            if mode == "raise":
                raise error
            again = self.slots.restart(slot, error)
            assert again.start is not None
            observations, infos = again.start, again.start_infos

    def _end(
        self, slot: int, episode: MultiAgentEpisode, collector: SampleCollector, step: SlotStep
    ) -> None:
        """The environment says that the episode is over."""
        started = time.perf_counter()
        self._dropped[slot] = 0
        collector.postprocess_trajectories_so_far(episode)
        collector.check_missing_dones(episode.episode_id)
        self.timings["postprocess_s"] += time.perf_counter() - started
        self._call("on_episode_end", slot, episode)
        self._tell(episode, collector)
        self._running[slot] = None
        if step.start is not None:
            self._begin(slot, step.start, step.start_infos)

    def _pass_horizon(
        self, slot: int, episode: MultiAgentEpisode, collector: SampleCollector
    ) -> None:
        """A soft horizon: another episode begins, nothing is reset."""
        following = MultiAgentEpisode(next(self._ids), slot, self.worker, self.worker.policy_for)
        collector.continue_episode(episode, following.episode_id)
        self._call("on_episode_end", slot, episode)
        self._tell(episode, collector)
        following.take_over(episode)
        self._running[slot] = self._by_id[following.episode_id] = following
        self._call("on_episode_start", slot, following)

    def _drop(self, slot: int, episode: MultiAgentEpisode, step: SlotStep) -> None:
        """The environment broke, another has taken its place."""
        assert step.failed is not None and step.start is not None
        own = type(self._collectors[0]).drop_episode
        if own is SampleCollector.drop_episode:
            raise step.failed
        self._failed.add(slot)
        self.faulty_episodes += 1
        episode.is_faulty = True
        self._collectors[slot if self._complete else 0].drop_episode(episode.episode_id)
        self._checked = {pair for pair in self._checked if pair[0] != slot}
        self._forget_seen(episode)
        self._call("on_episode_end", slot, episode)
        del self._by_id[episode.episode_id]
        self._begin(slot, step.start, step.start_infos, count=False)

    def _forget_seen(self, episode: MultiAgentEpisode) -> None:
        """The filters are not to learn from what an episode gave so far."""
        for policy_id, rows in self._seen.items():
            self._seen[policy_id] = [row for row in rows if row[0] != episode.episode_id]

    def _tell(self, episode: MultiAgentEpisode, collector: SampleCollector) -> None:
        """What is reported of a finished episode; its rows, where an item is one."""
        returns = [
            (str(agent), record.policy_id, float(record.total_reward))
            for agent, record in episode.records.items()
        ]
        told = EpisodeMetrics(
            float(episode.total_reward),
            episode.length,
            episode.env_id,
            returns if self.worker.is_multi_agent else None,
            dict(episode.custom_metrics) or None,
            {name: list(values) for name, values in episode.hist_data.items()} or None,
        )
        if self._complete:
            self._finished.append((self._batch_of(collector), told))
        else:
            self.episodes.append(told)
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
        for policy_id, rows in self._seen.items():
            filter_ = self._policies[policy_id].observation_filter
            assert filter_ is not None
            filter_.new_stats.update(np.array([raw for _, raw in rows]))
        self._seen.clear()

    def _warn(self, text: str, *values: Any) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text, *values)


def _rows(value: Any, numbers: bool = False) -> list[Any]:
    """The rows of an array, or of a nest of arrays; as Python numbers if asked for."""
    if isinstance(value, np.ndarray):
        return value.tolist() if numbers and value.ndim == 1 else list(value)
    if isinstance(value, (dict, tuple)):
        nest: Any = value
        count = len(optree.tree_leaves(nest)[0])
        return [optree.tree_map(lambda leaf, i=i: leaf[i], nest) for i in range(count)]
    return list(value)
