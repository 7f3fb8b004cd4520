"""ReplayActors: a replay buffer in shards on Ray actors; its rows do not pass through the driver
when they are stored."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, ClassVar, NamedTuple

import numpy as np

from flowrl.data import Batch, BatchRef
from flowrl.iter import Source, ray_health
from flowrl.iter.errors import add_note
from flowrl.iter.in_process import InProcessActor, fetch
from flowrl.iter.journal import Journal
from flowrl.iter.metrics import MetricsContext, count_bytes_between_nodes, current_metrics
from flowrl.iter.ray_runtime import actor_class, leave_ray, node_id, start_ray
from flowrl.iter.recovery import is_death
from flowrl.iter.waiting import ready_refs
from flowrl.replay import MultiAgentReplayBuffer
from flowrl.replay.multi_agent import loss_rows
from flowrl.replay.replay_ratio import NOTHING_TO_DRAW, ReplayRatio
from flowrl.seeding import random_stream, restore_stream, stream_state
from flowrl.setting_values import check_int
from flowrl.state_schema import Fields, Natural, check_own_state

log = logging.getLogger("flowrl")

Update = tuple[str, np.ndarray, np.ndarray]  # policy id, batch_indexes, priorities
ADDS_IN_FLIGHT = 4  # maximum per shard; their batches stay in the object store
UPDATES_KEPT = 64  # priority updates kept per shard until its next request

ORIGIN = "replay"


class ReplayShard:
    """One shard of a replay buffer; runs on a Ray actor."""

    def __init__(self, make: Callable[[int], MultiAgentReplayBuffer], index: int):
        self.buffer = make(index)
        self._node = node_id()

    def add(self, batch: Batch, node: str | None = None) -> AddReply:
        """Store a batch.

        Args:
            batch: the batch.
            node: id of the node that sent it.
        """
        self.buffer.add(batch)
        bytes_received = 0 if node == self._node else batch.size_bytes()
        return AddReply(len(self.buffer), self.buffer.has_items(), bytes_received, self._node)

    def serve(self, updates: list[Update], batches: int) -> DrawReply:
        """Update priorities, then draw `batches` batches; none if there is nothing to draw.

        Raises:
            Exception: the error of the first update that failed; the other updates are applied, and
                nothing is drawn.
        """
        first_error: Exception | None = None
        for update in updates:
            try:
                self.buffer.update_priorities(*update)
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        has_items = self.buffer.has_items()
        drawn = [self.buffer.sample() for _ in range(batches if has_items else 0)]
        return DrawReply(drawn, len(self.buffer), has_items, self._node)

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the buffer; see MultiAgentReplayBuffer.stats."""
        return self.buffer.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the buffer."""
        return self.buffer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Load the state of the buffer; return the number of rows."""
        self.buffer.load_state_dict(state)
        return len(self.buffer)


class ReplayActors:
    """A replay buffer in shards on Ray actors, which start on first use.

    It sends references to fragments to random shards, and draws batches from the shards in turn. A
    shard whose actor dies is replaced by an empty one; its rows count as `num_replay_rows_lost`.

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
        self.rows = [0] * num_shards
        self._has_items = [False] * num_shards  # as of the last reply of each shard
        self.colocated = colocated
        self.address = address
        self._node: str | None = None
        self._nodes: list[str | None] = [None] * num_shards
        self._handles: list[Any] = []
        self._restarts = [0] * num_shards
        self._pending_adds: list[deque[_PendingAdd]] = [deque() for _ in range(num_shards)]
        self._updates: list[list[Update]] = [[] for _ in range(num_shards)]
        self._in_flight = 0  # batches requested but not received
        self._next_shard = 0  # to draw from
        self._owns_ray = False
        self.journal: Journal | None = None
        self._metrics: MetricsContext | None = None  # of the plan that stores

    # -- actors ------------------------------------------------------------------------------------

    def handles(self) -> list[Any]:
        """Return the actors; start them on the first call."""
        if not self._handles and self._reruns_journal:
            shards = range(self.num_shards)
            self._handles = [InProcessActor(ReplayShard(self.make_shard, i)) for i in shards]
        elif not self._handles:
            self._owns_ray = start_ray(self.address)
            self._node = node_id()
            self._handles = [self._start_shard(index) for index in range(self.num_shards)]
        return self._handles

    @property
    def _reruns_journal(self) -> bool:
        """Whether a recorded run is repeated."""
        return self.journal is not None and self.journal.replays

    def _start_shard(self, index: int) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {}
        if self.colocated and self._node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._node, soft=False)
        return actor_class(ReplayShard).options(**options).remote(self.make_shard, index)

    def _replace_shard(self, index: int, error: BaseException) -> None:
        """Replace a dead shard by an empty one and resend the batches that it had not stored."""
        if self.journal is not None:
            self.journal.end(f"replay shard {index} died")
        log.warning("replay shard %d died and is replaced by an empty one: %s", index, error)
        self._count("num_replay_shard_restarts")
        self._count("num_replay_rows_lost", self.rows[index])
        self.rows[index], self._has_items[index] = 0, False
        self._updates[index].clear()
        self._restarts[index] += 1
        self._handles[index] = self._start_shard(index)
        unstored, self._pending_adds[index] = self._pending_adds[index], deque()
        self._pending_adds[index].extend(self._send_batch(index, *add[1:]) for add in unstored)

    def _count(self, name: str, number: int = 1) -> None:
        """Add to a counter of the plan, also outside of a pull: while a checkpoint is written."""
        metrics = current_metrics() or self._metrics
        if metrics is not None:
            metrics.counters[name] += number

    def stop(self) -> None:
        """Stop the actors."""
        import ray

        if ray.is_initialized() and not self._reruns_journal and not ray_health.is_ray_lost():
            for handle in self._handles:
                ray.kill(handle)
        if self._owns_ray:
            leave_ray()
        self._handles, self._owns_ray = [], False
        self._pending_adds = [deque() for _ in range(self.num_shards)]
        for updates in self._updates:
            updates.clear()
        self._in_flight = 0

    # -- storing -----------------------------------------------------------------------------------

    def can_add(self, alternate: bool = True) -> bool:
        """Return whether storing is due and every shard has room for another batch in flight.

        Args:
            alternate: see ReplayRatio.may_draw.
        """
        if not self.ratio.may_store(self.batch_rows, alternate) and self._may_have_items():
            return False
        if any(len(adds) >= ADDS_IN_FLIGHT for adds in self._pending_adds):
            self._process_stored("room")
        return all(len(adds) < ADDS_IN_FLIGHT for adds in self._pending_adds)

    def waits(self) -> list[Any]:
        """Return the oldest pending reference of each shard that has no room."""
        return [adds[0].ref for adds in self._pending_adds if len(adds) >= ADDS_IN_FLIGHT]

    def add(self, batch: Batch | BatchRef) -> None:
        """Send a batch to a random shard, without waiting until it is stored."""
        self._metrics = current_metrics() or self._metrics
        self.handles()
        index = int(self.rng.integers(self.num_shards))
        ref = batch if isinstance(batch, BatchRef) else BatchRef([batch], 0, {})
        for part, node in zip(ref.parts, ref.nodes, strict=True):
            self._pending_adds[index].append(self._send_batch(index, part, node or self._node))
        self.ratio.note_stored(batch.agent_steps())

    def _send_batch(self, index: int, batch: Any, node: str | None) -> _PendingAdd:
        if self._reruns_journal:
            batch = BatchRef([batch], 0, {}).get()
        ref = self.handles()[index].add.remote(batch, node)
        return _PendingAdd(ref, batch, node)

    def _process_stored(self, purpose: str) -> None:
        """Process the replies of shards that have stored batches.

        Args:
            purpose: why; names the observation in the journal.
        """
        from ray.exceptions import ObjectLostError

        for index in range(self.num_shards):
            adds = self._pending_adds[index]
            while adds and self.is_ready(adds[0].ref, f"stored for {purpose}"):
                try:
                    added: AddReply = fetch(adds[0].ref)
                    self.rows[index], self._has_items[index], bytes_received, node = added
                    self._nodes[index] = node
                    count_bytes_between_nodes(bytes_received)
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
        if not any(self._has_items):
            self._process_stored("draws")
        return any(self._has_items) or any(self._pending_adds)

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
        updates, self._updates[index] = self._updates[index], []
        handle = self.handles()[index]
        source = Source(index, self._restarts[index], origin=ORIGIN)
        return PendingDraw(source, handle.serve.remote(updates, number), number)

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
                self.rows[index], self._has_items[index], self._nodes[index] = rows, has_items, node
        except ObjectLostError as error:
            log.warning("batches of replay shard %d were lost: %s", index, error)
        except Exception as error:
            if not is_death(error):
                raise
            if not self._is_replaced(source):
                self._replace_shard(index, error)
        finally:
            for _ in range(number - len(batches)):
                self.ratio.note_drawn(-self.batch_rows, batches=-1)
        for batch in batches:
            self.ratio.note_drawn(loss_rows(batch) - self.batch_rows, batches=0)
            batch.sources = (source,)
            if node != self._node:
                count_bytes_between_nodes(batch.size_bytes())
        return batches

    def _is_replaced(self, source: Source) -> bool:
        """Return whether the shard that a batch was drawn from has died since."""
        return source.incarnation < self._restarts[source.shard]

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
        shard = source.shard
        self._updates[shard].append((policy_id, batch_indexes, priorities))
        if len(self._updates[shard]) >= UPDATES_KEPT:  # without draws, no request has sent them
            self._send_updates(shard)

    def _send_updates(self, shard: int) -> None:
        updates, self._updates[shard] = self._updates[shard], []
        try:
            fetch(self.handles()[shard].serve.remote(updates, 0))
        except Exception as error:
            if not is_death(error):  # otherwise, the next request replaces the shard
                raise

    # -- statistics and state ----------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of rows, as of the last reply of each shard."""
        return sum(self.rows)

    def stats(self) -> list[dict[str, Any]]:
        """Return the statistics of each shard."""
        return [fetch(handle.stats.remote()) for handle in self.handles()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all shards, after they have stored the batches in flight.

        Pending requests are not part of the state. A shard that has died is replaced by an empty
        one.
        """
        ratio = copy(self.ratio)
        ratio.note_drawn(-self.batch_rows * self._in_flight, batches=-self._in_flight)
        return {
            "shards": [self._shard_state(shard) for shard in range(self.num_shards)],
            "ratio": ratio.state_dict(),
            "rng": stream_state(self.rng),
            "turn": self._next_shard,
            "restarts": list(self._restarts),
        }

    def _shard_state(self, shard: int) -> dict[str, Any]:
        while True:
            while self._pending_adds[shard]:
                if not self._reruns_journal:
                    ray_health.wait([self._pending_adds[shard][0].ref], 1)
                self._process_stored("a checkpoint")
            self._send_updates(shard)
            try:
                state: dict[str, Any] = fetch(self.handles()[shard].state_dict.remote())
            except Exception as error:
                if not is_death(error):
                    raise
                self._replace_shard(shard, error)
                continue
            return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state.

        Raises:
            ValueError: the state has another number of shards, or a buffer does not fit.
        """

        check_own_state(self, state)
        shards = state["shards"]
        if len(shards) != self.num_shards or len(state["restarts"]) != self.num_shards:
            raise ValueError(
                f"cannot load a state of {len(shards)} replay shards for {self.num_shards} shards: "
                "set num_replay_shards to the same number"
            )
        pairs = zip(self.handles(), shards, strict=True)
        refs = [handle.load_state_dict.remote(shard) for handle, shard in pairs]
        rows, errors = [], []
        for ref in refs:
            try:
                rows.append(fetch(ref))
            except Exception as error:  # Ray logs the errors of the others if nothing fetches them
                errors.append(error)
        if errors:
            if isinstance(errors[0], ValueError) and "capacity" in str(errors[0]):
                add_note(errors[0], "replay_buffer_capacity is divided among the replay shards")
            raise errors[0]
        self.rows = rows
        self._has_items = [rows > 0 for rows in self.rows]
        self.ratio.load_state_dict(state["ratio"])
        restore_stream(self.rng, state["rng"])
        self._next_shard = int(state["turn"])
        self._restarts = list(state["restarts"])
        self._in_flight = 0
        for updates in self._updates:
            updates.clear()

    def __repr__(self) -> str:
        return f"ReplayActors(num_shards={self.num_shards}, batch_rows={self.batch_rows})"


class PendingDraw(NamedTuple):
    """A request for batches."""

    source: Source  # of the batches
    ref: Any  # of a DrawReply
    number: int  # of batches


class _PendingAdd(NamedTuple):
    """A batch in flight to a shard."""

    ref: Any  # of an AddReply
    batch: Any  # a batch, or a reference to one
    node: str | None  # id of the node that has the batch


class DrawReply(NamedTuple):
    """A shard's reply to a request for batches."""

    batches: list[Batch]
    rows: int  # in the shard
    has_items: bool  # it has something to draw
    node: str | None  # of the shard


class AddReply(NamedTuple):
    """A shard's reply after it has stored a batch."""

    rows: int  # in the shard
    has_items: bool  # it has something to draw
    bytes_received: int  # from another node
    node: str | None  # of the shard
