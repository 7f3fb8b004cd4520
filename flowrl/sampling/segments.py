"""Segments: the parts of episodes in a fragment; SegmentTracker: where they begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import optree

from flowrl.state_schema import Fields, Natural, check_state

_SAVED_ARRAYS = ("episode_ids", "resets", "starts")
_STATE: Fields = {
    "next_id": Natural,
    "events": list[list[Any]],
    "finals": list[np.ndarray | list[Any]],
    "rows_closed": Natural,
}


class Event:
    """How a segment ends: what follows its last row.

    Plain integers: arrays are compared with them, and members of an enum take longer to access.
    """

    ENDED = 0  # the end of the episode
    SOFT_HORIZON = 1  # another episode, without a reset of the environment
    DROPPED = 2  # nothing: the segment is in no fragment, because the environment failed or reset
    OPEN = 3  # the end of the fragment

    @staticmethod
    def checked(saved: Any) -> int:
        """Return a saved event.

        Raises:
            ValueError: it is not an event.
        """
        if type(saved) is not int or not Event.ENDED <= saved <= Event.OPEN:
            raise ValueError(f"event: must be an integer from 0 to 3, got {saved!r:.60}")
        return saved


@dataclass
class Segments:
    """S parts of episodes.

    Attributes:
        lanes: lane of each, int64 [S], as the other integers.
        begins, ends: first row, and the row after the last one, [S].
        first_t: env step `t` of the first row, [S]; unused for segments of agents, whose `t` is a
            column.
        rows_before: rows between the environment's reset, or the agent's first observation, and the
            first row, [S].
        episode_ids: [S].
        events: how each ends, see `Event`, [S].
        final_index: index of the final observation among those of the fragment, [S]; -1 if the
            observation after the last row is in the columns.
        continued: whether each may follow the recurrent state at the start of the fragment: it is
            the first one of its lane or, in truncated fragments, only soft horizons are before it,
            bool [S].
        envs: environment of each, [S].
        agents: index of the agent in its episode, [S].
        initial_states: initial states of the segments, arrays [S, …]; None if they are those of the
            lanes.
        is_whole_fragment: whether no episode ended: one open segment per lane that has all rows.
    """

    lanes: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    first_t: np.ndarray
    rows_before: np.ndarray
    episode_ids: np.ndarray
    events: np.ndarray
    final_index: np.ndarray
    continued: np.ndarray
    envs: np.ndarray
    agents: np.ndarray
    initial_states: list[np.ndarray] | None = None
    is_whole_fragment: bool = False

    def __len__(self) -> int:
        return len(self.lanes)

    @property
    def lengths(self) -> np.ndarray:
        """Number of rows of each, [S]."""
        return self.ends - self.begins

    @property
    def in_lane_order(self) -> bool:
        """Whether the segments are sorted by lane and row."""
        order = np.lexsort((self.begins, self.lanes))
        return bool((order == np.arange(len(self))).all())

    def rows(self, every: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return row and segment of all rows, or of every n-th row of each segment."""
        counts = -(-self.lengths // every)
        segment = np.repeat(np.arange(len(self)), counts)
        nth = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.begins[segment] + nth * every, segment

    def acted_rows(self, num_rows: int, num_lanes: int, resets_in_next_step: bool) -> np.ndarray:
        """Return which observations a policy acts on, bool [num_rows + 1, lanes], without those of
        dropped segments and the first one after a failure.

        Args:
            num_rows: number of rows of the fragment.
            num_lanes: number of lanes.
            resets_in_next_step: whether the row after an episode's end only resets.
        """
        acted = np.zeros((num_rows + 1, num_lanes), bool)
        is_dropped = self.events == Event.DROPPED
        kept = self.select(~is_dropped) if is_dropped.any() else self
        row, segment = kept.rows()
        acted[row, kept.lanes[segment]] = True
        is_open = kept.events == Event.OPEN
        acted[kept.ends[is_open], kept.lanes[is_open]] = True
        # final observations, or what follows a failure
        not_acted = self.events == Event.ENDED if resets_in_next_step else is_dropped
        acted[self.ends[not_acted], self.lanes[not_acted]] = False
        return acted

    def select(self, which: np.ndarray) -> Segments:
        """Return some of the segments."""
        arrays = {n: a[which] for n, a in vars(self).items() if isinstance(a, np.ndarray)}
        states = self.initial_states
        return Segments(
            **arrays,
            initial_states=None if states is None else [state[which] for state in states],
        )


class _RecordedEvent(NamedTuple):
    """An event after a row of some environments, with the values of SegmentTracker before it."""

    row: int
    envs: Any
    event: int
    episode_ids: np.ndarray
    resets: np.ndarray
    starts: np.ndarray


def _checked_event(saved: list[Any], num_envs: int, name: str) -> _RecordedEvent:
    """Return a saved event.

    Raises:
        ValueError: it is not an event of these environments.
    """
    if len(saved) != len(_RecordedEvent._fields):
        raise ValueError(f"{name}: must have {len(_RecordedEvent._fields)} entries")
    row, envs, event, *arrays = saved
    if type(row) is not int or row < 0:
        raise ValueError(f"{name}: the row must be an integer of at least 0")
    for array in (envs, *arrays):
        is_array = isinstance(array, np.ndarray) and array.dtype.kind == "i"
        if not is_array or array.shape != np.shape(envs) or array.ndim != 1:
            raise ValueError(f"{name}: must have arrays of integers of equal lengths")
    one = _RecordedEvent(row, envs, Event.checked(event), *arrays)
    is_env = (envs >= 0) & (envs < num_envs)
    if not (is_env & (one.resets <= one.starts) & (one.starts <= row + 1)).all():
        raise ValueError(f"{name}: has environments or rows that do not exist")
    return one


class SegmentTracker:
    """Tracks the episodes of N environments, row by row of their columns.

    Args:
        num_envs: number of environments, N.
        first_id: the first episode id.
        soft_horizon: env steps after which another episode starts without a reset; None: never.
        whole: whether fragments have whole episodes only.

    Attributes:
        episode_ids: id of each environment's episode, [N].
        resets: first row since the reset of each environment, [N]; negative in later fragments.
        starts: first row of each environment's episode, [N]; later than `resets` after a soft
            horizon.
        finals: final observations of the episodes that ended in this fragment, in parts.
        rows_closed: rows of whole episodes that are in no fragment yet.
    """

    def __init__(self, num_envs: int, first_id: int, soft_horizon: int | None, whole: bool):
        self.episode_ids = np.zeros(num_envs, np.int64)
        self.next_id = first_id
        self.resets = np.zeros(num_envs, np.int64)
        self.starts = np.zeros(num_envs, np.int64)
        self._soft_horizon, self._whole = soft_horizon, whole
        # of the segments of a fragment without events
        self._envs = np.arange(num_envs)
        self._all_open = np.full(num_envs, Event.OPEN)
        self._no_finals = np.full(num_envs, -1)
        self._all = np.ones(num_envs, bool)
        self._no_agents = np.zeros(num_envs, np.int64)
        for array in (self._envs, self._all_open, self._no_finals, self._all, self._no_agents):
            array.flags.writeable = False
        self.forget()

    def forget(self) -> None:
        """Forget the events of the fragment."""
        self._events: list[_RecordedEvent] = []
        self.finals: list[Any] = []
        self.rows_closed = 0

    def start(self) -> None:
        """Start an episode in every environment, at row 0."""
        self.forget()
        for name in _SAVED_ARRAYS:
            getattr(self, name)[:] = 0
        self._new_episodes(np.arange(len(self.resets)))

    def _new_episodes(self, envs: Any) -> None:
        first, self.next_id = self.next_id, self.next_id + len(envs)
        self.episode_ids[envs] = np.arange(first, self.next_id)

    def record_ends(self, row: int, ended: Any, finals: Any, skipped: Any, failed: Any) -> Any:
        """Note what followed a row; return the environments that passed a soft horizon.

        Args:
            row: the row of the step.
            ended: indices [k] of the environments whose episode ended.
            finals: their final observations [k, …].
            skipped: indices of the environments that were reset instead of stepped.
            failed: indices of the environments that failed.
        """
        soft: Any = ()
        if self._soft_horizon is not None:
            # "<": a resumed run may have a shorter horizon
            passed = self.starts <= row + 1 - self._soft_horizon
            for envs in (ended, skipped, failed):
                if len(envs):
                    passed[envs] = False
            (soft,) = passed.nonzero()
        if not (len(ended) or len(skipped) or len(failed) or len(soft)):
            return soft
        if len(ended):
            self._end(row, ended, Event.ENDED)
            self.finals.append(finals)
        if len(skipped):  # the next episode started at the end of the last one
            self._record(row, skipped, Event.DROPPED)
        if len(failed):
            self._end(row, failed, Event.DROPPED)
        for envs in (ended, skipped, failed):
            if len(envs):
                self.resets[envs] = self.starts[envs] = row + 1
        if len(soft):
            self._end(row, soft, Event.SOFT_HORIZON)
            self.starts[soft] = row + 1
        return soft

    def _record(self, row: int, envs: Any, event: int) -> None:
        before = self.episode_ids[envs], self.resets[envs], self.starts[envs]
        self._events.append(_RecordedEvent(row, envs, event, *before))

    def _end(self, row: int, envs: Any, event: int) -> None:
        """End the episodes of environments after a row."""
        self._record(row, envs, event)
        if self._whole and event != Event.DROPPED:
            self.rows_closed += int((row + 1 - self.starts[envs]).sum())
        self._new_episodes(envs)

    def segments(self, num_rows: int) -> Segments:
        """Return all segments of the first `num_rows` rows, also empty ones; the last one of each
        environment is open."""
        envs = self._envs
        if not self._events:
            begins = np.maximum(self.starts, 0)
            return Segments(
                envs, begins, np.full(len(envs), num_rows), begins - self.starts,
                begins - self.resets, self.episode_ids.copy(), self._all_open, self._no_finals,
                self._all, envs=envs, agents=self._no_agents, is_whole_fragment=not self._whole,
            )  # fmt: skip
        at_end = self.episode_ids, self.resets, self.starts
        events = [*self._events, _RecordedEvent(num_rows - 1, envs, Event.OPEN, *at_end)]
        counts = [len(one.envs) for one in events]
        lanes = np.concatenate([np.asarray(one.envs, np.int64) for one in events])
        rows = np.repeat([one.row for one in events], counts)
        kinds = np.repeat([one.event for one in events], counts)
        ids = np.concatenate([one.episode_ids for one in events])
        resets = np.concatenate([one.resets for one in events])
        starts = np.concatenate([one.starts for one in events])
        final_index = np.full(len(lanes), -1)
        (ended,) = (kinds == Event.ENDED).nonzero()
        final_index[ended] = np.arange(len(ended))
        order = np.lexsort((rows, lanes))
        lanes, starts, resets = lanes[order], starts[order], resets[order]
        begins = np.maximum(starts, 0)
        is_first = np.ones(len(order), bool)  # segment of its environment
        is_first[1:] = lanes[1:] != lanes[:-1]
        continued = is_first if self._whole else is_first | (resets <= 0)
        return Segments(
            lanes, begins, rows[order] + 1, begins - starts, begins - resets, ids[order],
            kinds[order], final_index[order], continued,
            envs=lanes, agents=np.zeros(len(lanes), np.int64),
        )  # fmt: skip

    def choose(self, segments: Segments, min_steps: int) -> np.ndarray:
        """Return which segments the fragment has, bool [S]; of whole episodes, the first ones to
        end, until they have `min_steps` rows."""
        if segments.is_whole_fragment:
            return self._all
        chosen = (segments.events != Event.DROPPED) & (segments.lengths > 0)
        if self._whole:
            chosen &= segments.events != Event.OPEN
            (index,) = chosen.nonzero()
            index = index[np.lexsort((segments.lanes[index], segments.ends[index]))]
            before = np.cumsum(segments.lengths[index]) - segments.lengths[index]
            chosen[index[before >= min_steps]] = False
        return chosen

    def keep(self, num_rows: int, segments: Segments, chosen: np.ndarray, finals: Any) -> int:
        """Start the next fragment, with the segments that were not chosen; return its first row.

        Args:
            num_rows: number of rows of the fragment.
            segments, chosen: see `choose`.
            finals: final observations of the episodes that ended, [k, …].
        """
        self.forget()
        first = num_rows
        if self._whole:
            first = self._keep_segments(num_rows, segments, chosen, finals)
        self.resets -= first
        self.starts -= first
        return first

    def _keep_segments(
        self, num_rows: int, segments: Segments, chosen: np.ndarray, finals: Any
    ) -> int:
        """Keep the ended episodes that were not chosen for the next fragment; return the first row
        of these episodes and of the open ones."""
        ended = (segments.events != Event.DROPPED) & (segments.events != Event.OPEN)
        (kept,) = (ended & ~chosen).nonzero()
        kept = kept[np.argsort(segments.ends[kept], kind="stable")]
        first = int(min(self.starts.min(), segments.begins[kept].min(initial=num_rows)))
        for index in kept.tolist():
            event, one = int(segments.events[index]), slice(index, index + 1)
            begins = segments.begins[one] - first
            self._events.append(
                _RecordedEvent(
                    int(segments.ends[index]) - 1 - first, segments.lanes[one], event,
                    segments.episode_ids[one], begins - segments.rows_before[one],
                    begins - segments.first_t[one],
                )
            )  # fmt: skip
            if event == Event.ENDED:
                self.finals.append(_slice(finals, int(segments.final_index[index])))
            self.rows_closed += int(segments.lengths[index])
        return first

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state between fragments."""
        return {
            "next_id": self.next_id,
            "events": [
                [one.row, np.array(one.envs), one.event, *map(np.array, one[3:])]
                for one in self._events
            ],
            "finals": list(self.finals),
            "rows_closed": self.rows_closed,
            **{name: getattr(self, name).copy() for name in _SAVED_ARRAYS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        check_state(state, _STATE, "tracker")
        self.next_id = state["next_id"]
        self._events = [
            _checked_event(event, len(self.starts), f"tracker/events/{i}")
            for i, event in enumerate(state["events"])
        ]
        self.finals, self.rows_closed = list(state["finals"]), state["rows_closed"]
        for name in _SAVED_ARRAYS:
            array: np.ndarray = getattr(self, name)
            if state[name].dtype != array.dtype or state[name].shape != array.shape:
                raise ValueError(f"tracker/{name}: must be {array.dtype} of shape {array.shape}")
            array[:] = state[name]

    def restart(self, envs: list[int], row: int, before: Any) -> None:
        """Start new episodes in environments whose state could not be restored.

        Args:
            envs: the environments.
            row: row of the first observations of these episodes.
            before: observations of all environments that the row had, [N, …]. They are the next
                observations of episodes that a soft horizon ended.
        """
        if not envs:
            return
        num_finals = 0
        for i, one in enumerate(self._events):
            is_last = one.event == Event.SOFT_HORIZON and one.row == row - 1
            if is_last and int(one.envs[0]) in envs:
                self._events[i] = one._replace(event=Event.ENDED)
                self.finals.insert(num_finals, _slice(before, int(one.envs[0])))
            num_finals += self._events[i].event == Event.ENDED
        if row:
            self._record(row - 1, np.array(envs), Event.DROPPED)
        self.resets[envs] = self.starts[envs] = row
        self._new_episodes(envs)


def _slice(finals: Any, index: int) -> Any:
    """Return a final observation, as the environments return them: a sequence of one."""
    if isinstance(finals, np.ndarray):
        return finals[index : index + 1]
    return [optree.tree_map(lambda array: array[index], finals)]
