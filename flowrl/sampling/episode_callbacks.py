"""EpisodeCallbacks: record the episodes of single-agent environments and call the callbacks."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.data.fragment_columns import FragmentColumns, value_at
from flowrl.envs.single_agent_adapter import SINGLE_AGENT
from flowrl.envs.validation import ObservationCheck
from flowrl.envs.vector_env import StartInfos, VectorStep
from flowrl.sampling.agent_records import add_rows, note_observation
from flowrl.sampling.callbacks import EPISODE_EVENTS, call_for_episode, name_of, overrides
from flowrl.sampling.episode import MultiAgentEpisode
from flowrl.sampling.sampler_worker import SamplerWorker


class EpisodeCallbacks:
    """Keeps a MultiAgentEpisode for each environment, and passes it to the callbacks.

    An episode is updated from the columns before a callback is called, and by `update_all`.

    Args:
        worker: its callbacks are called.
        base_env: the environments, passed to the callbacks.
        columns: the rows of all environments.
        check: copies final observations.
        episode_ids: id of each environment's episode, [N]; the sampler updates it.
    """

    def __init__(
        self,
        worker: SamplerWorker,
        base_env: Any,
        columns: FragmentColumns,
        check: ObservationCheck,
        episode_ids: np.ndarray,
    ):
        self._worker, self._base_env = worker, base_env
        self._columns, self._check, self._episode_ids = columns, check, episode_ids
        self._policy = worker.policy_map[DEFAULT_POLICY_ID]
        self._running: list[MultiAgentEpisode | None] = [None] * columns.lanes
        self._recorded = [0] * columns.lanes  # first row that is not in the episode's record
        self._row: int | None = None  # the row of the step whose callbacks are called
        self._finished: dict[int, MultiAgentEpisode] = {}
        self._by_id: dict[int, MultiAgentEpisode] = {}
        self._calls = {name for name in EPISODE_EVENTS if overrides(worker.callbacks, name)}

    def start_all(self, infos: StartInfos) -> None:
        """Start an episode in every environment, with the observations of row 0.

        Args:
            infos: that the resets returned.
        """
        self._row = None
        self._running = [None] * len(self._running)
        self._by_id.clear()
        self._finished.clear()
        for env in range(len(self._running)):
            self.start(env, 0, infos)

    def start(
        self, env: int, row: int, infos: StartInfos, length: int = 0, total_reward: float = 0.0
    ) -> None:
        """Start an episode with the observation of a row and the info of the reset.

        Args:
            env: the environment.
            row: the row.
            infos: that the resets returned.
            length, total_reward: of the episode before the row, if it began in another run.
        """
        episode = self._new_episode(env)
        record = episode.agent_record(SINGLE_AGENT)
        episode.length, episode.total_reward = length, total_reward
        record.total_reward = total_reward
        record.alive = True
        record.info = infos.get(env, {})
        note_observation(record, self._observation(row, env), self._policy)
        self._recorded[env] = row
        self._call("on_episode_start", episode)

    def find(self, episode_id: int, rows: int, infos: list[Any]) -> MultiAgentEpisode | None:
        """Return a running episode, updated to `rows` rows of the fragment."""
        episode = self._by_id.get(episode_id)
        if episode is not None:
            # while callbacks of a step run, the rows of other environments end before the step
            self._update(episode.env_id, rows if self._row is None else self._row, infos)
        return episode

    def update_all(self, rows: int, infos: list[Any]) -> None:
        """Update all running episodes to `rows` rows of the fragment."""
        for env, episode in enumerate(self._running):
            if episode is not None:
                self._update(env, rows, infos)

    def advance(self, first: int) -> None:
        """Renumber the rows: row `first` becomes row 0."""
        self._recorded = [row - first for row in self._recorded]

    def _new_episode(self, env: int) -> MultiAgentEpisode:
        worker, episode_id = self._worker, int(self._episode_ids[env])
        episode = MultiAgentEpisode(episode_id, env, worker, worker.policy_for)
        before = self._running[env]
        if before is not None:
            self._by_id.pop(before.episode_id, None)
        self._running[env] = self._by_id[episode_id] = episode
        return episode

    def _observation(self, row: int, env: int) -> Any:
        """Return a copy of the observation of a row, as the environment returned it."""
        return value_at(self._columns["raw_obs"], (self._columns.lookback + row, env))

    def step(
        self, row: int, step: VectorStep, infos: list[Any], soft: Any, waits_for_reset: bool
    ) -> None:
        """Call the callbacks after a step of all environments.

        Args:
            row: the row of the step.
            step: what the environments returned.
            infos: the infos of each row.
            soft: environments that passed a soft horizon.
            waits_for_reset: whether the next step resets the environments whose episode ended.
        """
        envs: Any = range(len(self._running))
        if "on_episode_step" not in self._calls:
            if not (len(step.ended) or len(step.skipped) or step.failed or len(soft)):
                return
            failed_envs = [env for env, _ in step.failed]
            envs = sorted(
                {int(e) for part in (step.ended, step.skipped, failed_envs, soft) for e in part}
            )
        finals = dict(zip(map(int, step.ended), step.final, strict=True))
        skipped, passed = set(map(int, step.skipped)), set(map(int, soft))
        failed = {env for env, _ in step.failed}
        self._row = row
        for env in envs:
            if env in failed:
                self._update(env, row, infos)
                self._fail(env, row + 1, step.start_infos)
            elif env in skipped:
                self.start(env, row + 1, step.start_infos)
            elif env in finals:
                self._update(env, row + 1, infos, self._check.copy(finals[env]))
                self._call_step(env)
                self._end(env)
                if not waits_for_reset:
                    self.start(env, row + 1, step.start_infos)
            else:
                self._update(env, row + 1, infos)
                self._call_step(env)
                if env in passed:
                    self._pass_horizon(env)
        self._row = None

    def _update(self, env: int, rows: int, infos: Any, final: Any = None) -> None:
        """Add the rows before row `rows` to the record of a running episode.

        Args:
            env: the environment.
            rows: number of rows of the fragment.
            infos: the infos by row; those of the last row are read.
            final: the final observation, if the episode has ended.
        """
        episode, first = self._running[env], self._recorded[env]
        if episode is None or first >= rows:
            return
        record = episode.records[SINGLE_AGENT]
        episode.length += rows - first
        add_rows(episode, record, self._columns, env, first, rows)
        step_infos = infos[rows - 1]
        record.info = step_infos[env] if len(step_infos) else {}
        record.alive = final is None
        raw = self._observation(rows, env) if final is None else final
        note_observation(record, raw, self._policy)
        self._recorded[env] = rows

    def _call_step(self, env: int) -> None:
        episode = self._running[env]
        assert episode is not None
        self._call("on_episode_step", episode)

    def _end(self, env: int) -> None:
        episode = self._running[env]
        assert episode is not None
        self._call("on_episode_end", episode)
        self._finished[episode.episode_id] = episode
        del self._by_id[episode.episode_id]
        self._running[env] = None

    def _pass_horizon(self, env: int) -> None:
        """Start another episode at a soft horizon, without a reset."""
        before = self._running[env]
        assert before is not None
        self._end(env)
        episode = self._new_episode(env)  # its first row is the next one
        episode.continue_from(before)
        self._call("on_episode_start", episode)

    def _fail(self, env: int, row: int, infos: StartInfos) -> None:
        """Drop the episode of an environment, and start one with the observation of a row."""
        episode = self._running[env]
        if episode is not None:
            episode.is_faulty = True
            action = value_at(self._columns["actions"], (self._columns.lookback + row - 1, env))
            episode.records[SINGLE_AGENT].action = action
            self._end(env)
            del self._finished[episode.episode_id]
        self.start(env, row, infos)

    def take_metrics(self, episode_id: int) -> tuple[dict[str, float] | None, Any]:
        """Return custom metrics and histogram data of an episode that ended."""
        episode = self._finished.pop(episode_id, None)
        if episode is None:  # it began before callbacks were set
            return None, None
        return episode.metrics()

    def _call(self, name: str, episode: MultiAgentEpisode) -> None:
        if name in self._calls:
            call_for_episode(self._worker, name, self._base_env, episode)

    def state_dict(self) -> dict[str, Any]:
        """Return the running episodes, by environment, and those that are in no fragment yet."""
        return {
            "running": [None if e is None else _state_of(e) for e in self._running],
            "finished": [_state_of(episode) for episode in self._finished.values()],
            "recorded": list(self._recorded),
            "callbacks": name_of(self._worker.callbacks),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Load the result of `state_dict`; return whether its callbacks were of the same class.

        Callbacks of another class have not seen the start of the running episodes.
        """
        self._running = [None if e is None else self._restored(e) for e in state["running"]]
        self._by_id = {e.episode_id: e for e in self._running if e is not None}
        self._recorded = list(state["recorded"])
        finished = map(self._restored, state["finished"])
        self._finished = {episode.episode_id: episode for episode in finished}
        return bool(state["callbacks"] == name_of(self._worker.callbacks))

    def _restored(self, state: dict[str, Any]) -> MultiAgentEpisode:
        worker = self._worker
        episode = MultiAgentEpisode(state["id"], state["env"], worker, worker.policy_for)
        episode.load_state_dict(state["state"])
        return episode


def _state_of(episode: MultiAgentEpisode) -> dict[str, Any]:
    return {"id": episode.episode_id, "env": episode.env_id, "state": episode.state_dict()}
