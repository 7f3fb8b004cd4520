"""Save and load the running episodes of a MultiAgentSampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from flowrl.data.sample_batch import PolicyID
from flowrl.data.serialization import savable_info, with_savable_infos
from flowrl.sampling.agent_batches import AgentBatches, Postprocessed
from flowrl.sampling.agent_episodes import AgentEpisodes
from flowrl.sampling.policy_lanes import PolicyLanes
from flowrl.sampling.running_episodes import RunningEpisode, Segment, Trajectory
from flowrl.sampling.segments import Event

# fields of saved states that are copied as they are; another field needs another checkpoint FORMAT
_TRAJECTORY = [f.name for f in fields(Trajectory) if f.name not in ("episode", "check")]
_SEGMENT = [f.name for f in fields(Segment) if f.name not in ("trajectory", "episode", "event")]


def episodes_state_dict(
    episodes: AgentEpisodes, policies: Mapping[PolicyID, PolicyLanes], batches: AgentBatches
) -> dict[str, Any]:
    """Return the episodes and their rows, between fragments, in types of
    `flowrl.data.serialization`."""
    running = episodes.all_running()
    saved = [*running, *episodes.ended]
    found: dict[int, Trajectory] = {}
    for episode in saved:
        episodes.records.update_record(episode)
        past = [t for trajectories in episode.history.values() for t in trajectories]
        found |= {id(trajectory): trajectory for trajectory in (*episode.agents.values(), *past)}
    for lanes in policies.values():
        found |= {id(segment.trajectory): segment.trajectory for segment in lanes.segments}
    numbers = {key: number for number, key in enumerate(found)}
    episode_numbers = {id(episode): number for number, episode in enumerate(saved)}
    return {
        "episodes": [
            {
                "id": episode.record.episode_id,
                "env": episode.record.env_id,
                "record": episode.record.state_dict(),
                "returns": dict(episode.returns),
                "new": [episode.new_steps, episode.new_rows],
                "history": [
                    [agent, [numbers[id(t)] for t in past]]
                    for agent, past in episode.history.items()
                ],
                "agents": [[agent, numbers[id(t)]] for agent, t in episode.agents.items()],
            }
            for episode in saved
        ],
        "num_running": len(running),
        "trajectories": [
            {name: getattr(trajectory, name) for name in _TRAJECTORY}
            # the episode of a past trajectory may be in a fragment already
            | {"episode": episode_numbers.get(id(trajectory.episode))}
            for trajectory in found.values()
        ],
        "ready": [
            [
                episode_numbers[id(part.episode)],
                list(part.order),
                part.policy_id,
                with_savable_infos(part.rows),
            ]
            for part in batches.ready
        ],
        "policies": {
            policy_id: _lanes_state_dict(lanes)
            | {
                "segments": [
                    {name: getattr(segment, name) for name in _SEGMENT}
                    | {
                        "trajectory": numbers[id(segment.trajectory)],
                        "episode": episode_numbers[id(segment.episode)],
                        "event": int(segment.event),
                    }
                    for segment in lanes.segments
                ]
            }
            for policy_id, lanes in policies.items()
        },
    }


def _lanes_state_dict(lanes: PolicyLanes) -> dict[str, Any]:
    columns = lanes.columns.state_dict(int(lanes.current_rows.max(initial=0)))
    infos = columns["rows"].pop("infos", None)
    return {
        "columns": columns,
        "rows": lanes.current_rows.copy(),
        "envs": lanes.envs.copy(),
        "free": {env: list(free) for env, free in lanes.free.items()},
        "waits": lanes.waits.copy(),
        "states": lanes.states.state_dict(),
        "infos": None
        if infos is None
        else [[savable_info(info or {}) for info in row] for row in infos],
    }


def load_episodes(
    state: dict[str, Any],
    episodes: AgentEpisodes,
    policies: Mapping[PolicyID, PolicyLanes],
    batches: AgentBatches,
) -> None:
    """Load the result of `episodes_state_dict`.

    Raises:
        KeyError, ValueError: it belongs to other policies.
    """
    loaded = []
    for saved in state["episodes"]:
        episode = RunningEpisode(episodes.new_record(saved["env"], saved["id"]))
        episode.record.load_state_dict(saved["record"])
        episode.returns = dict(saved["returns"])
        episode.new_steps, episode.new_rows = saved["new"]
        loaded.append(episode)
    for policy_id, saved in state["policies"].items():
        _load_lanes(policies[policy_id], saved)
    trajectories = []
    for saved in state["trajectories"]:
        number = saved["episode"]  # None: the episode is in a fragment already
        of_episode: Any = None if number is None else loaded[number]
        check = episodes.check_of(saved["agent_id"])
        values = {name: saved[name] for name in _TRAJECTORY}
        trajectories.append(Trajectory(**values, episode=of_episode, check=check))
    for episode, saved in zip(loaded, state["episodes"], strict=True):
        episode.agents = {agent: trajectories[number] for agent, number in saved["agents"]}
        episode.history = {
            agent: [trajectories[number] for number in past] for agent, past in saved["history"]
        }
    for policy_id, policy_state in state["policies"].items():
        for saved in policy_state["segments"]:
            segment = Segment(
                trajectory=trajectories[saved["trajectory"]],
                episode=loaded[saved["episode"]],
                event=Event.checked(saved["event"]),
                **{name: saved[name] for name in _SEGMENT},
            )
            policies[policy_id].segments.append(segment)
    batches.ready = [
        Postprocessed(loaded[number], tuple(order), policy_id, rows)
        for number, order, policy_id, rows in state["ready"]
    ]
    episodes.running = [None] * len(episodes.running)
    for episode in loaded[: state["num_running"]]:
        episodes.running[episode.record.env_id] = episode
    episodes.ended = loaded[state["num_running"] :]
    batches.restored(episodes.all_running())


def _load_lanes(lanes: PolicyLanes, state: dict[str, Any]) -> None:
    lanes.add_lanes(state["envs"][len(lanes.envs) :].tolist())
    lanes.columns.load_state_dict(state["columns"])
    lanes.current_rows, lanes.envs = np.array(state["rows"]), np.array(state["envs"])
    lanes.free = {env: list(free) for env, free in state["free"].items()}
    lanes.states.load_state_dict(state["states"])
    lanes.segments = []
    lanes.waits = np.array(state["waits"])
    if state["infos"] is not None:
        column = lanes.columns.allocate("infos", (), np.dtype(object))
        for row, infos in enumerate(state["infos"]):
            column[row, : len(infos)] = infos
    lanes.restore_lookback()  # the views may read more rows now; this moves all columns
