"""ReplayActors: a replay buffer in shards on Ray actors; its rows do not pass through the driver
when they are stored."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from flowrl.data import Batch, BatchRef
from flowrl.data.sequences import count_loss_rows
from flowrl.errors import add_note
from flowrl.iter import Source, ray_health
from flowrl.iter.in_process import InProcessActor, fetch
from flowrl.iter.journal import Journal
from flowrl.iter.metrics import MetricsContext, count_bytes_between_nodes, current_metrics
from flowrl.iter.ray_runtime import actor_class, leave_ray, node_id, start_ray
from flowrl.iter.recovery import is_death
from flowrl.iter.waiting import ready_refs
from flowrl.ops.replay_shard import AddReply, ReplayShard, Update
from flowrl.replay import MultiAgentReplayBuffer
from flowrl.replay.replay_ratio import NOTHING_TO_DRAW, ReplayRatio
from flowrl.seeding import random_stream, restore_stream, stream_state
from flowrl.setting_values import check_int
from flowrl.state_schema import Fields, Natural, check_own_state

log = logging.getLogger("flowrl")

ADDS_IN_FLIGHT = 4  # maximum per shard; their batches stay in the object store
UPDATES_KEPT = 64  # priority updates kept per shard until its next request
MAX_DEATHS = 3  # of a shard that stores and returns nothing in between

REPLAY_ORIGIN = "replay"


@dataclass
class ShardRecord:
    """What the driver knows of one shard.

    Attributes:
        actor: the actor of the shard; None before it is started.
        rows: number of rows, as of its last reply.
        has_items: whether it has anything to draw, as of its last reply.
        node: id of its node, as of its last reply.
        restarts: how often its actor was replaced.
        deaths: how often it died since it last stored or returned rows.
        pending_adds: batches that it has not stored yet, the oldest first.
        updates: priority updates that the next request sends.
    """

    actor: Any = None
    rows: int = 0
    has_items: bool = False
    node: str | None = None
    restarts: int = 0
    deaths: int = 0
    pending_adds: deque[_PendingAdd] = field(default_factory=deque)
    updates: list[Update] = field(default_factory=list)


class ReplayActors:
    """A replay buffer in shards on Ray actors, which start on first use.

    It sends references to fragments to random shards, and draws batches from the shards in turn. A
    shard whose actor dies is replaced by an empty one; its rows count as `num_replay_rows_lost`. A
    shard that dies three times without storing or returning rows in between is an error.

    Args:
        make: shard number -> new MultiAgentReplayBuffer, whose own replay ratio is ignored.
        num_shards: number of actors.
        batch_rows: maximum rows of a batch; the replay ratio counts them until the batch arrives.
        learning_starts, training_intensity: see ReplayRatio; for all shards together.
        seed: seed of the random choice of shards; None seeds from the operating system.
        colocated: place the actors on the node of this process; if False, on any node.
        address: address of the Ray cluster, used if this process is not connected to one.

    Attributes:
        journal: the plan's journal; if it repeats a recorded run, the shards are in this process.

    Raises:
        ValueError: num_shards or batch_rows is below 1; see ReplayRatio.
    """

    state_fields: ClassVar[Fields] = {
        "shards": list[Any],
        "ratio": dict[str, Any],
        "rng": dict[str, Any],
        "turn": Natural,
        "restarts": list[Natural],
    }

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
        check_int("num_shards", num_shards)
        check_int("batch_rows", batch_rows)
        self.make_shard = make
        self.num_shards = num_shards
        self.batch_rows = batch_rows
        self.ratio = ReplayRatio(learning_starts, training_intensity)
        self.rng = random_stream(seed, "replay", "shards")
        self.shards = [ShardRecord() for _ in range(num_shards)]
        self.colocated = colocated
        self.address = address
        self._node: str | None = None
        self._has_started = False
        self._in_flight = 0  # batches requested but not received
        self._next_shard = 0  # to draw from
        self._owns_ray = False
        self.journal: Journal | None = None
        self._metrics: MetricsContext | None = None  # of the plan that stores

    # -- actors ------------------------------------------------------------------------------------

    def started_shards(self) -> list[ShardRecord]:
        """Return the shards; start their actors on the first call."""
        if self._has_started:
            return self.shards
        if not self._reruns_journal:
            self._owns_ray = start_ray(self.address) or self._owns_ray  # an attempt may have failed
            self._node = node_id()
        for index, shard in enumerate(self.shards):
            shard.actor = self._start_actor(index)
        self._has_started = True
        return self.shards

    @property
    def _reruns_journal(self) -> bool:
        """Whether a recorded run is repeated."""
        return self.journal is not None and self.journal.replays

    def _start_actor(self, index: int) -> Any:
        """Start the actor of a shard; in a rerun of a recorded run, it is in this process."""
        if self._reruns_journal:
            return InProcessActor(ReplayShard(self.make_shard, index))
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {}
        if self.colocated and self._node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._node, soft=False)
        return actor_class(ReplayShard).options(**options).remote(self.make_shard, index)

    def _replace_shard(self, index: int, error: BaseException) -> None:
        """Replace a dead shard by an empty one and resend the batches that it had not stored.

        Raises:
            RuntimeError: it has died too often.
        """
        if self.journal is not None:
            self.journal.end(f"replay actor {index} died")
        shard = self.shards[index]
        with contextlib.suppress(Exception):  # of the batches that it had not stored
            while shard.pending_adds and ready_refs([shard.pending_adds[0].ref]):
                self._note_stored(shard)
        shard.deaths += 1
        if shard.deaths >= MAX_DEATHS:
            raise RuntimeError(
                f"replay actor {index} died {shard.deaths} times without storing or returning rows "
                "in between; the last cause is above. If it lacks memory, reduce "
                "replay_buffer_capacity, or keep the rows in files (replay_buffer_dir)"
            ) from error
        log.warning("replay actor %d died and is replaced by an empty one: %s", index, error)
        self._count("num_replay_shard_restarts")
        self._count("num_replay_rows_lost", shard.rows)
        self.shards[index] = ShardRecord(
            self._start_actor(index), restarts=shard.restarts + 1, deaths=shard.deaths
        )
        for add in shard.pending_adds:
            self._send_batch(index, add.batch, add.node)

    def _count(self, name: str, number: int = 1) -> None:
        """Add to a counter of the plan, also outside of a pull: while a checkpoint is written."""
        metrics = current_metrics() or self._metrics
        if metrics is not None:
            metrics.counters[name] += number

    def stop(self) -> None:
        """Stop the actors."""
        import ray

        if ray.is_initialized() and not self._reruns_journal and not ray_health.is_ray_lost():
            for shard in self.shards:
                if shard.actor is not None:
                    ray.kill(shard.actor)
        if self._owns_ray:
            leave_ray()
        self._has_started = self._owns_ray = False
        for shard in self.shards:
            shard.actor = None
            shard.pending_adds.clear()
            shard.updates.clear()
        self._in_flight = 0

    # -- storing -----------------------------------------------------------------------------------

    def can_add(self, alternate: bool = True) -> bool:
        """Return whether storing is due and every shard has room for another batch in flight.

        Args:
            alternate: see ReplayRatio.may_draw.
        """
        if not self.ratio.may_store(self.batch_rows, alternate) and self._may_have_items():
            return False
        if self._full_shards():
            self._process_stored("room")
        return not self._full_shards()

    def _full_shards(self) -> list[ShardRecord]:
        """Return the shards that have no room for another batch in flight."""
        return [shard for shard in self.shards if len(shard.pending_adds) >= ADDS_IN_FLIGHT]

    def waits(self, alternate: bool = True) -> list[Any]:
        """Return the oldest pending reference of each shard that has no room; none if a draw comes
        first.

        Args:
            alternate: see ReplayRatio.may_draw.
        """
        # not `_may_have_items`: the journal records its observations, and calls of `waits` vary
        may_store = self.ratio.may_store(self.batch_rows, alternate)
        if not may_store and any(shard.has_items for shard in self.shards):
            return []
        return [shard.pending_adds[0].ref for shard in self._full_shards()]

    def add(self, batch: Batch | BatchRef) -> None:
        """Send a batch to a random shard, without waiting until it is stored."""
        self._metrics = current_metrics() or self._metrics
        self.started_shards()
        index = int(self.rng.integers(self.num_shards))
        ref = batch if isinstance(batch, BatchRef) else BatchRef([batch], 0, {})
        for part, node in zip(ref.parts, ref.nodes, strict=True):
            self._send_batch(index, part, node or self._node)
        self.ratio.note_stored(batch.agent_steps())

    def _send_batch(self, index: int, batch: Any, node: str | None) -> None:
        if self._reruns_journal:
            batch = BatchRef([batch], 0, {}).get()
        shard = self.shards[index]
        ray_health.check_ray()
        shard.pending_adds.append(_PendingAdd(shard.actor.add.remote(batch, node), batch, node))

    def _process_stored(self, purpose: str) -> None:
        """Process the replies of shards that have stored batches.

        Args:
            purpose: why; names the observation in the journal.
        """
        from ray.exceptions import ObjectLostError

        for index, shard in enumerate(self.shards):
            adds = shard.pending_adds
            while adds and self.is_ready(adds[0].ref, f"stored for {purpose}"):
                try:
                    self._note_stored(shard)
                    continue
                except ObjectLostError as error:  # its worker died
                    log.warning("a fragment was lost before it was stored: %s", error)
                    self._count("num_replay_fragments_lost")
                except Exception as error:
                    if is_death(error):
                        self._replace_shard(index, error)
                        break
                    adds.popleft()
                    raise
                adds.popleft()

    def _note_stored(self, shard: ShardRecord) -> None:
        """Process the reply to a shard's oldest pending batch; raise its error."""
        added: AddReply = fetch(shard.pending_adds[0].ref)
        shard.rows, shard.has_items, bytes_received, shard.node = added
        shard.pending_adds.popleft()
        shard.deaths = 0
        count_bytes_between_nodes(bytes_received)

    def is_ready(self, ref: Any, name: str) -> bool:
        """Return whether a shard has replied.

        Args:
            ref: of the reply.
            name: of the observation in the journal, if a plan is being pulled.
        """
        ready = self._reruns_journal or bool(ready_refs([ref]))
        if self.journal is None or current_metrics() is None:
            return ready
        return bool(self.journal.plan_log.observe(name, ready))

    # -- drawing -----------------------------------------------------------------------------------

    def can_sample(self, alternate: bool = True) -> bool:
        """Return whether a draw is due; see ReplayRatio.may_draw."""
        return self.ratio.may_draw(self.batch_rows, alternate) and self._may_have_items()

    def _may_have_items(self) -> bool:
        """Return False if all shards have replied that there is nothing to draw."""
        if not any(shard.has_items for shard in self.shards):
            self._process_stored("draws")
        return any(shard.has_items or shard.pending_adds for shard in self.shards)

    def missing_stores(self) -> str:
        """Return what must be stored before the next draw."""
        if self.ratio.is_learning and not self._may_have_items():
            return NOTHING_TO_DRAW
        return self.ratio.missing_stores(self.batch_rows)

    def missing_draws(self) -> str:
        """Return how many batches must be drawn before the next one is stored."""
        return self.ratio.missing_draws(self.batch_rows)

    def request_batches(self, most: int = 1, alternate: bool = True) -> PendingDraw:
        """Request the batches that are due, at most `most`, from the next shard.

        The request also carries the priorities for this shard, which it applies first.
        """
        index = self._next_shard
        self._next_shard = (index + 1) % self.num_shards
        number = 0
        while number < most and self.can_sample(alternate):
            self.ratio.note_drawn(self.batch_rows)
            number += 1
        self._in_flight += number
        shard = self.started_shards()[index]
        updates, shard.updates = shard.updates, []
        source = Source(index, shard.restarts, origin=REPLAY_ORIGIN)
        return PendingDraw(source, shard.actor.serve.remote(updates, number), number)

    def receive_batches(self, request: PendingDraw) -> list[Batch]:
        """Return the batches of a finished request; none if the shard is empty or has died.

        Raises:
            Exception: the shard's error.
        """
        from ray.exceptions import ObjectLostError

        source, ref, number = request
        index = source.shard
        self._in_flight -= number
        batches: list[Batch] = []
        node = None
        try:
            batches, rows, has_items, node = fetch(ref)
            if not self._is_replaced(source):
                shard = self.shards[index]
                shard.rows, shard.has_items, shard.node = rows, has_items, node
                shard.deaths = 0 if batches else shard.deaths
        except ObjectLostError as error:
            log.warning("batches of replay actor %d were lost: %s", index, error)
        except Exception as error:
            if not is_death(error):
                raise
            if not self._is_replaced(source):
                self._replace_shard(index, error)
        finally:
            for _ in range(number - len(batches)):
                self.ratio.note_drawn(-self.batch_rows, batches=-1)
        for batch in batches:
            self.ratio.note_drawn(count_loss_rows(batch) - self.batch_rows, batches=0)
            batch.sources = (source,)
            if node != self._node:
                count_bytes_between_nodes(batch.size_bytes())
        return batches

    def _is_replaced(self, source: Source) -> bool:
        """Return whether the shard that a batch was drawn from has died since."""
        return source.incarnation < self.shards[source.shard].restarts

    def update_priorities(
        self, source: Source, policy_id: str, batch_indexes: np.ndarray, priorities: np.ndarray
    ) -> None:
        """Set priorities of rows of a shard; they are sent with the next request to it.

        Priorities for a shard that has died since are dropped.

        Args:
            source: the source of the batch with the rows.
            policy_id: the policy of the rows.
            batch_indexes, priorities: see ReplayBuffer.update_priorities.
        """
        if self._is_replaced(source):
            return
        shard = self.started_shards()[source.shard]
        shard.updates.append((policy_id, batch_indexes, priorities))
        if len(shard.updates) >= UPDATES_KEPT:  # without draws, no request has sent them
            self._send_updates(shard)

    def _send_updates(self, shard: ShardRecord) -> None:
        updates, shard.updates = shard.updates, []
        try:
            fetch(shard.actor.serve.remote(updates, 0))
        except Exception as error:
            if not is_death(error):  # otherwise, the next request replaces the shard
                raise

    # -- statistics and state ----------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of rows, as of the last reply of each shard."""
        return sum(shard.rows for shard in self.shards)

    def stats(self) -> list[dict[str, Any]]:
        """Return the statistics of each shard."""
        return [fetch(shard.actor.stats.remote()) for shard in self.started_shards()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all shards, after they have stored the batches in flight.

        Pending requests are not part of the state. A shard that has died is replaced by an empty
        one.
        """
        ratio = copy(self.ratio)
        ratio.note_drawn(-self.batch_rows * self._in_flight, batches=-self._in_flight)
        return {
            "shards": [self._shard_state(index) for index in range(self.num_shards)],
            "ratio": ratio.state_dict(),
            "rng": stream_state(self.rng),
            "turn": self._next_shard,
            "restarts": [shard.restarts for shard in self.shards],
        }

    def _shard_state(self, index: int) -> dict[str, Any]:
        while True:
            while pending := self.started_shards()[index].pending_adds:
                if not self._reruns_journal:
                    ray_health.wait([pending[0].ref], 1)
                self._process_stored("a checkpoint")
            shard = self.shards[index]
            self._send_updates(shard)
            try:
                state: dict[str, Any] = fetch(shard.actor.state_dict.remote())
            except Exception as error:
                if not is_death(error):
                    raise
                self._replace_shard(index, error)
                continue
            return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state.

        Raises:
            ValueError: the state has another number of shards, or a buffer does not fit.
        """
        check_own_state(self, state)
        states = state["shards"]
        if len(states) != self.num_shards or len(state["restarts"]) != self.num_shards:
            raise ValueError(
                f"cannot load a state of {len(states)} replay actors for {self.num_shards}: "
                "set num_replay_shards to the same number"
            )
        pairs = zip(self.started_shards(), states, strict=True)
        refs = [shard.actor.load_state_dict.remote(saved) for shard, saved in pairs]
        rows, errors = [], []
        for ref in refs:
            try:
                rows.append(fetch(ref))
            except Exception as error:  # Ray logs the errors of the others if nothing fetches them
                errors.append(error)
        if errors:
            if isinstance(errors[0], ValueError) and "capacity" in str(errors[0]):
                add_note(errors[0], "replay_buffer_capacity is divided among the replay actors")
            raise errors[0]
        restarts = state["restarts"]
        for shard, number, count in zip(self.shards, rows, restarts, strict=True):
            shard.rows, shard.has_items, shard.restarts = number, number > 0, count
            shard.updates.clear()
        self.ratio.load_state_dict(state["ratio"])
        restore_stream(self.rng, state["rng"])
        self._next_shard = int(state["turn"])
        self._in_flight = 0

    def __repr__(self) -> str:
        return f"ReplayActors(num_shards={self.num_shards}, batch_rows={self.batch_rows})"


class PendingDraw(NamedTuple):
    """A request for batches."""

    source: Source  # of the batches
    ref: Any  # of a DrawReply
    num_batches: int


class _PendingAdd(NamedTuple):
    """A batch in flight to a shard."""

    ref: Any  # of an AddReply
    batch: Any  # a batch, or a reference to one
    node: str | None  # id of the node that has the batch
