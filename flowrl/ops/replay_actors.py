"""ReplayActors: a replay buffer in shards on Ray actors, filled without passing the driver."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from flowrl.data import BatchRef, MultiAgentBatch, SampleBatch
from flowrl.iter import Source, _get_shared_metrics
from flowrl.iter.ray_runtime import leave_ray, node_id, start_ray
from flowrl.replay import MultiAgentReplayBuffer
from flowrl.replay.multi_agent import loss_rows
from flowrl.replay.replay_ratio import ReplayRatio
from flowrl.seeding import random_stream, restore_stream, stream_state

log = logging.getLogger("flowrl")

Batch = SampleBatch | MultiAgentBatch
Update = tuple[str, np.ndarray, np.ndarray]  # policy id, batch_indexes, priorities
ADDS_IN_FLIGHT = 4  # of each shard: what it has not stored yet is held in the object store
UPDATES_KEPT = 64  # of each shard, for its next request

ORIGIN = "replay"


class ReplayShard:
    """What runs on the actor of one shard."""

    def __init__(self, make: Callable[[int], MultiAgentReplayBuffer], index: int):
        self._make = lambda: make(index)
        self.buffer = self._make()
        self._seen: set[int] = set()
        self._node = node_id()

    def add(self, batch: Batch, number: int, node: str | None = None) -> Added:
        """Store a batch of a node, once."""
        if number not in self._seen:
            self._seen.add(number)
            self._seen.discard(number - 10_000)
            self.buffer.add(batch)
        came = 0 if node == self._node else batch.size_bytes()
        return Added(len(self.buffer), came, self._node)

    def serve(self, updates: list[Update], batches: int) -> Served:
        """Take over priorities, then draw; no batches while there are no rows.

        Raises:
            what the first update that fails raises; the others are made, nothing is drawn.
        """
        failed: Exception | None = None
        for update in updates:
            try:
                self.buffer.update_priorities(*update)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
        rows = len(self.buffer)
        drawn = [self.buffer.sample() for _ in range(batches if rows else 0)]
        return Served(drawn, rows, self._node)

    def stats(self) -> dict[str, Any]:
        """See MultiAgentReplayBuffer.stats."""
        return self.buffer.stats()

    def state_dict(self) -> dict[str, Any]:
        """Of the buffer."""
        return self.buffer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Of the buffer; the rows that there are then. Numbers of batches begin anew."""
        self.buffer.load_state_dict(state)
        self._seen.clear()
        return len(self.buffer)


class ReplayActors:
    """Shards of a replay buffer on Ray actors, made when they are first used.

    A fragment goes to a shard drawn at random, by reference; batches are drawn from the shards in
    turn. A shard whose actor dies is made again, empty; its rows count as `num_replay_rows_lost`.

    Args:
        make: shard number -> its MultiAgentReplayBuffer; what that says of the ratio is not asked.
        num_shards: actors.
        batch_rows: rows of a drawn batch, about: what it has is counted when it comes.
        learning_starts, training_intensity: of all shards together; see ReplayRatio.
        seed: of the choice of shards.
        colocated: on the node of the process that learns; else where there is room.
        address: of the Ray cluster, where this process is in none yet.

    Raises:
        ValueError: fewer than one shard; see ReplayRatio.
    """

    def __init__(
        self,
        make: Callable[[int], MultiAgentReplayBuffer],
        num_shards: int,
        batch_rows: int,
        *,
        learning_starts: int = 0,
        training_intensity: float | None = None,
        seed: int | None = None,
        colocated: bool = True,
        address: str | None = None,
    ):
        for name, value in (("num_shards", num_shards), ("batch_rows", batch_rows)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is a whole number from 1, got {value!r}")
        self._make = make
        self.num_shards = num_shards
        self.batch_rows = batch_rows
        self.ratio = ReplayRatio(learning_starts, training_intensity)
        self.rng = random_stream(seed, "replay", "shards")
        self.rows = [0] * num_shards
        self.colocated = colocated
        self.address = address
        self._node: str | None = None
        self._nodes: list[str | None] = [None] * num_shards
        self._handles: list[Any] = []
        self._adds: list[deque[_Add]] = [deque() for _ in range(num_shards)]
        self._updates: list[list[Update]] = [[] for _ in range(num_shards)]
        self._in_flight = 0  # batches that were asked for
        self._number = 0
        self._turn = 0
        self._owns_ray = False

    # -- actors ------------------------------------------------------------------------------------

    def handles(self) -> list[Any]:
        """The actors, made when first asked for."""
        if not self._handles:
            self._owns_ray = start_ray(self.address)
            self._node = node_id()
            self._handles = [self._new(index) for index in range(self.num_shards)]
        return self._handles

    def _new(self, index: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where: dict[str, Any] = {}
        if self.colocated and self._node is not None:
            where["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._node, soft=False)
        actor = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, **where)(ReplayShard)
        return actor.remote(self._make, index)

    def _died(self, index: int, error: BaseException) -> None:
        """Make a shard anew. What it has not stored yet goes to the new one."""
        log.warning("replay shard %d died and is made again, empty: %s", index, error)
        metrics = _get_shared_metrics()
        metrics.counters["num_replay_shard_restarts"] += 1
        metrics.counters["num_replay_rows_lost"] += self.rows[index]
        self.rows[index] = 0
        self._updates[index].clear()
        self._handles[index] = self._new(index)
        waiting, self._adds[index] = self._adds[index], deque()
        self._adds[index].extend(self._sent(index, *add[1:]) for add in waiting)

    def stop(self) -> None:
        """End the actors."""
        import ray

        if ray.is_initialized():
            for handle in self._handles:
                ray.kill(handle)
        if self._owns_ray:
            leave_ray()
        self._handles, self._owns_ray = [], False
        self._adds = [deque() for _ in range(self.num_shards)]
        for updates in self._updates:
            updates.clear()
        self._in_flight = 0

    # -- storing -----------------------------------------------------------------------------------

    def can_add(self) -> bool:
        """Whether it is time to store, and no shard is behind with storing."""
        if self.can_draw():
            return False
        if any(len(adds) >= ADDS_IN_FLIGHT for adds in self._adds):
            self._collect()
        return all(len(adds) < ADDS_IN_FLIGHT for adds in self._adds)

    def waits(self) -> list[Any]:
        """References of what shards are behind with."""
        return [adds[0].ref for adds in self._adds if len(adds) >= ADDS_IN_FLIGHT]

    def add(self, batch: Batch | BatchRef) -> None:
        """Send a batch to a shard; it is not waited for."""
        self.handles()
        index = int(self.rng.integers(self.num_shards))
        ref = batch if isinstance(batch, BatchRef) else BatchRef([batch], 0, {})
        for part, node in zip(ref.parts, ref.nodes, strict=True):
            self._number += 1
            self._adds[index].append(self._sent(index, part, self._number, node or self._node))
        self.ratio.note_stored(batch.agent_steps())

    def _sent(self, index: int, given: Any, number: int, node: str | None) -> _Add:
        ref = self.handles()[index].add.remote(given, number, node)
        return _Add(ref, given, number, node)

    def _collect(self) -> None:
        """Take note of what has been stored."""
        import ray
        from ray.exceptions import ObjectLostError, RayActorError

        for index in range(self.num_shards):
            adds = self._adds[index]
            while adds and ray.wait([adds[0].ref], timeout=0, fetch_local=False)[0]:
                try:
                    self.rows[index], came, self._nodes[index] = ray.get(adds[0].ref)
                    _count_bytes(came)
                except RayActorError as error:
                    self._died(index, error)
                    break
                except ObjectLostError as error:  # with the worker that had sampled it
                    log.warning("a fragment was lost before it was stored: %s", error)
                    _get_shared_metrics().counters["num_replay_fragments_lost"] += 1
                except Exception:
                    adds.popleft()
                    raise
                adds.popleft()

    # -- drawing -----------------------------------------------------------------------------------

    def can_draw(self) -> bool:
        """Whether it is time to ask for a batch."""
        return self.ratio.may_draw(self.batch_rows)

    def ask(self, most: int = 1) -> PendingRequest:
        """Ask the shard whose turn it is for batches: as many as are due, up to `most`. It is told
        the priorities that have come for it first."""
        index, self._turn = self._turn, (self._turn + 1) % self.num_shards
        number = 0
        while number < most and self.can_draw():
            self.ratio.note_drawn(self.batch_rows)
            number += 1
        self._in_flight += number
        updates, self._updates[index] = self._updates[index], []
        handle = self.handles()[index]
        return PendingRequest(index, handle.serve.remote(updates, number), number, handle)

    def taken(self, asked: PendingRequest) -> list[Batch]:
        """What a shard that was asked gave; nothing if it has no rows or is no more.

        Raises:
            what it raised.
        """
        import ray
        from ray.exceptions import RayActorError

        index, ref, number, handle = asked
        self._in_flight -= number
        batches: list[Batch] = []
        try:
            batches, self.rows[index], self._nodes[index] = ray.get(ref)
        except RayActorError as error:
            if handle is self._handles[index]:  # another request has not said so before
                self._died(index, error)
        finally:
            for _ in range(number - len(batches)):
                self.ratio.note_drawn(-self.batch_rows, batches=-1)
        for batch in batches:
            self.ratio.note_drawn(loss_rows(batch) - self.batch_rows, batches=0)
            batch.sources = (Source(index, origin=ORIGIN),)
            if self._nodes[index] != self._node:
                _count_bytes(batch.size_bytes())
        return batches

    def update_priorities(
        self, shard: int, policy_id: str, batch_indexes: np.ndarray, priorities: np.ndarray
    ) -> None:
        """Priorities for the shard whose rows they are of; it is told with its next request."""
        self._updates[shard].append((policy_id, batch_indexes, priorities))
        if len(self._updates[shard]) >= UPDATES_KEPT:  # nothing is drawn just now
            self._send_updates(shard)

    def _send_updates(self, shard: int) -> None:
        import ray
        from ray.exceptions import RayActorError

        updates, self._updates[shard] = self._updates[shard], []
        with contextlib.suppress(RayActorError):  # the shard is made again when it is asked
            ray.get(self.handles()[shard].serve.remote(updates, 0))

    # -- the rest ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Rows that are there, as far as it is known."""
        return sum(self.rows)

    def stats(self) -> list[dict[str, Any]]:
        """Each shard's figures."""
        import ray

        told: list[dict[str, Any]] = ray.get([handle.stats.remote() for handle in self.handles()])
        return told

    def state_dict(self) -> dict[str, Any]:
        """All shards; what is on its way to them is waited for, what is asked of them is not. One
        that has died is made again, empty."""
        ratio = copy(self.ratio)
        for _ in range(self._in_flight):
            ratio.note_drawn(-self.batch_rows, batches=-1)
        return {
            "shards": [self._state_of(shard) for shard in range(self.num_shards)],
            "ratio": ratio.state_dict(),
            "rng": stream_state(self.rng),
            "number": self._number,
            "turn": self._turn,
        }

    def _state_of(self, shard: int) -> dict[str, Any]:
        import ray
        from ray.exceptions import RayActorError

        while True:
            while self._adds[shard]:
                ray.wait([self._adds[shard][0].ref], fetch_local=False)
                self._collect()
            self._send_updates(shard)
            try:
                state: dict[str, Any] = ray.get(self.handles()[shard].state_dict.remote())
            except RayActorError as error:
                self._died(shard, error)
                continue
            return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: it is of another number of shards; a buffer does not fit.
        """
        import ray

        shards = state["shards"]
        if len(shards) != self.num_shards:
            raise ValueError(f"a state of {len(shards)} replay shards for {self.num_shards}")
        pairs = zip(self.handles(), shards, strict=True)
        self.rows = ray.get([handle.load_state_dict.remote(own) for handle, own in pairs])
        self.ratio.load_state_dict(state["ratio"])
        restore_stream(self.rng, state["rng"])
        self._number, self._turn = int(state["number"]), int(state["turn"])
        self._in_flight = 0
        for updates in self._updates:
            updates.clear()

    def __repr__(self) -> str:
        return f"ReplayActors(num_shards={self.num_shards}, batch_rows={self.batch_rows})"


class PendingRequest(NamedTuple):
    """A request for batches."""

    shard: int
    ref: Any
    number: int
    handle: Any


class _Add(NamedTuple):
    """A batch on its way to a shard."""

    ref: Any
    given: Any
    number: int
    node: str | None


class Served(NamedTuple):
    """What a shard gives when it is asked for batches."""

    batches: list[Batch]
    rows: int  # that there are
    node: str | None


class Added(NamedTuple):
    """What a shard tells of a batch that it has stored."""

    rows: int  # that there are
    came: int  # bytes, from another node
    node: str | None


def _count_bytes(number: int) -> None:
    if number:
        _get_shared_metrics().counters["num_bytes_between_nodes"] += number
