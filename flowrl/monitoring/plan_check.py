"""Find mistakes in a plan without running it: `flowrl check PLAN`, and warnings at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from flowrl.iter import Stage
from flowrl.iter.gather import Gather
from flowrl.iter.gather_async import GatherAsync
from flowrl.iter.stage import walk
from flowrl.iter.stages.branches import Duplicate, Union
from flowrl.iter.stages.unary import Combine, Filter, ForEach, ZipWithSource
from flowrl.learners.thread import LearnerThread
from flowrl.monitoring.operator_source import in_place_change, returns_nothing
from flowrl.ops import UpdateTargetNetwork, WriteParquet
from flowrl.ops.concurrency import DequeueStage, Enqueue
from flowrl.ops.gradients import ApplyGradients
from flowrl.ops.replay import ReplayStage, StoreToReplayBuffer, UpdateReplayPriorities
from flowrl.ops.replay_actors import ReplayActors
from flowrl.ops.report import StandardMetricsReporting, operators_of, training_operators
from flowrl.ops.rollout import (
    ConcatBatches,
    CountRollouts,
    DropStale,
    SelectExperiences,
    StandardizeFields,
)
from flowrl.ops.training_step import TrainingStep
from flowrl.policies.policy import Policy
from flowrl.sampling.worker_set import WorkerSet


@dataclass(frozen=True)
class PlanProblem:
    """A probable mistake in a plan.

    Attributes:
        rule: name of the rule that found it.
        line: `file:line` where the operator was chained.
        text: the problem and its remedy.
    """

    rule: str
    line: str
    text: str

    def __str__(self) -> str:
        return f"{self.line}: {self.text}"


class _Plan:
    """A plan as the rules read it."""

    def __init__(self, end: Stage, workers: WorkerSet):
        self.end, self.workers = end, workers
        self.stages = list(walk(end))
        self.operators = list(operators_of(end))
        self.policies: Mapping[str, Policy] = workers.local_worker().policy_map

    def stages_with(self, kind: type) -> list[tuple[Stage, Any]]:
        """Return the stages whose operator has this class, with the operator."""
        return [(stage, op) for stage, op in self.operators if isinstance(op, kind)]

    def trainers(self) -> Iterator[tuple[Stage, Any, set[Stage]]]:
        """Yield each operator that trains, with its stage and the stages that feed it."""
        for stage, operator in self.operators:
            if not getattr(operator, "trains", False):
                continue
            feeding = set(walk(stage))
            if isinstance(operator, LearnerThread):
                for other, enqueue in self.stages_with(Enqueue):
                    if enqueue.queue is operator.inqueue:
                        feeding |= set(walk(other))
            yield stage, operator, feeding

    def trained_by(self, operator: Any) -> list[tuple[str, Policy]]:
        """Return the policies that an operator trains, by id."""
        ids = self.policies if operator.policies is None else operator.policies
        return [(policy_id, self.policies[policy_id]) for policy_id in ids]


def check_plan(end: Stage, workers: WorkerSet) -> list[PlanProblem]:
    """Return the probable mistakes in a plan.

    Args:
        end: its last stage.
        workers: its WorkerSet.
    """
    plan = _Plan(end, workers)
    return [problem for rule in _RULES for problem in rule(plan)]


def _nothing_trains(plan: _Plan) -> Iterator[PlanProblem]:
    """A plan that samples, but has no operator that trains.

    Plans that record experience, do not explore or have no policy that can learn may be meant so.
    """
    rollouts = plan.stages_with(CountRollouts)
    config = plan.workers.config
    can_learn = any(
        type(policy).learn_on_batch is not Policy.learn_on_batch
        for policy in plan.policies.values()
    )
    is_meant = config.output is not None or not config.explore or config.policies_to_train == []
    unknown = plan.stages_with(WriteParquet) or plan.stages_with(TrainingStep)
    if not rollouts or not can_learn or is_meant or unknown or training_operators(plan.end):
        return
    yield PlanProblem(
        "nothing_trains",
        rollouts[0][0].line,
        "the plan samples, but has no operator that trains, so the policies stay as they are: "
        "chain .for_each(TrainOneStep(workers)) before StandardMetricsReporting (an operator of "
        "your own that trains has the attributes trains=True and policies, ids or None for all)",
    )


def _target_without_update(plan: _Plan) -> Iterator[PlanProblem]:
    updates = [op for _, op in plan.stages_with(UpdateTargetNetwork)]
    updated_all = any(op.policies is None for op in updates)
    updated = {policy_id for op in updates for policy_id in op.policies or ()}
    for stage, operator, _ in plan.trainers():
        for policy_id, policy in plan.trained_by(operator):
            if hasattr(policy, "update_target") and not updated_all and policy_id not in updated:
                yield PlanProblem(
                    "target_without_update",
                    stage.line,
                    f"policy {policy_id!r} learns with a target network, but the plan never "
                    "updates it: chain UpdateTargetNetwork after the operator that trains it",
                )


def _unused_branch(plan: _Plan) -> Iterator[PlanProblem]:
    """A branch of Concurrently whose items are dropped, and that has no effect."""
    for union in plan.stages:
        if not isinstance(union, Union):
            continue
        for index, branch in enumerate(union.parents):
            if not union.is_output(index) and not any(map(_may_have_effect, walk(branch))):
                yield PlanProblem(
                    "unused_branch",
                    union.line,
                    f"the items of branch {index} of {union} are dropped, and none of its "
                    "operators stores, queues or trains: add its index to output_indexes, or "
                    "remove the branch",
                )


def _may_have_effect(stage: Stage) -> bool:
    """Return whether a stage may do more than to pass items on: unknown ones may."""
    passes_on = (ConcatBatches, SelectExperiences, StandardizeFields, CountRollouts, DropStale)
    operator = getattr(stage, "fn", None)
    if operator is not None:
        return not isinstance(operator, passes_on)
    return not isinstance(stage, (Gather, ReplayStage, ZipWithSource))


def _is_used_elsewhere(buffer: Any, plan: _Plan) -> bool:
    """Return whether a function of the user refers to a buffer."""
    own = [op for _, op in plan.operators if not type(op).__module__.startswith("flowrl.")]
    return any(found is buffer for operator in own for found in _references(operator))


def _references(operator: Any) -> Iterator[Any]:
    """Yield the objects that a function or the object of an operator refers to."""
    while isinstance(operator, partial):
        yield from (*operator.args, *operator.keywords.values())
        operator = operator.func
    owner = getattr(operator, "__self__", None)
    if owner is not None:
        yield owner
    for holder in (operator, owner):
        yield from getattr(holder, "__dict__", {}).values()
    for cell in getattr(operator, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            value = cell.cell_contents
            yield value
            yield from getattr(value, "__dict__", {}).values()
    code = getattr(operator, "__code__", None)
    scope = getattr(operator, "__globals__", {})
    yield from (scope[name] for name in getattr(code, "co_names", ()) if name in scope)


def _half_a_queue(plan: _Plan) -> Iterator[PlanProblem]:
    """Enqueue without Dequeue, and the reverse."""
    enqueues = plan.stages_with(Enqueue)
    dequeues = [stage for stage in plan.stages if isinstance(stage, DequeueStage)]
    for stage, enqueue in enqueues:
        learner = enqueue.learner
        if learner is not None and not any(one.learner is learner for one in dequeues):
            yield PlanProblem(
                "enqueue_without_dequeue",
                stage.line,
                "Enqueue feeds a learner whose results nothing reads, and which never starts: add "
                "Dequeue(learner) as another branch of Concurrently",
            )
    for dequeue in dequeues:
        if dequeue.learner is not None and not any(
            enqueue.learner is dequeue.learner for _, enqueue in enqueues
        ):
            yield PlanProblem(
                "dequeue_without_enqueue",
                dequeue.line,
                "Dequeue waits for a learner that gets no batches: add a branch with "
                "Enqueue(learner)",
            )


def _half_a_buffer(plan: _Plan) -> Iterator[PlanProblem]:
    """Replay without a store, the reverse, and draws that can never begin."""
    stores, draws = plan.stages_with(StoreToReplayBuffer), plan.stages_with(ReplayStage)
    for _, draw in draws:
        buffer = draw.buffer
        is_stored = any(store.buffer is buffer for _, store in stores)
        if not len(buffer) and not is_stored and not _is_used_elsewhere(buffer, plan):
            yield PlanProblem(
                "replay_without_store",
                draw.line,
                "Replay draws from an empty buffer that the plan never fills: add a branch with "
                "StoreToReplayBuffer on the same buffer, or fill it before",
            )
        ratio, capacity = getattr(buffer, "ratio", None), _capacity_of(buffer, plan)
        if ratio is not None and capacity is not None and ratio.learning_starts > capacity:
            yield PlanProblem(
                "replay_never_ready",
                draw.line,
                f"Replay waits for learning_starts={ratio.learning_starts} rows, but its buffer "
                f"keeps {capacity}: set a smaller learning_starts or a larger "
                "replay_buffer_capacity",
            )
    for stage, store in stores:
        is_drawn = any(draw.buffer is store.buffer for _, draw in draws)
        if not is_drawn and not _is_used_elsewhere(store.buffer, plan):
            yield PlanProblem(
                "store_without_replay",
                stage.line,
                "StoreToReplayBuffer fills a buffer that nothing draws from: add a branch with "
                "Replay on the same buffer, or remove the operator",
            )


def _capacity_of(buffer: Any, plan: _Plan) -> int | None:
    """Return how many rows a buffer can hold; None if unknown."""
    capacities = [
        capacity
        for policy_id in plan.policies
        if (capacity := getattr(_new_buffer(buffer, policy_id), "capacity", None)) is not None
    ]
    return sum(capacities) * getattr(buffer, "num_shards", 1) if capacities else None


def _new_buffer(buffer: Any, policy_id: str) -> Any:
    """Return a new buffer for a policy, made like those of a MultiAgentReplayBuffer, or None."""
    try:
        if isinstance(buffer, ReplayActors):
            buffer = buffer.make_shard(0)
        return buffer.make_buffer(policy_id)
    except Exception:  # another kind of buffer, or this policy does not learn from replay
        return None


def _priorities_not_updated(plan: _Plan) -> Iterator[PlanProblem]:
    updates = [op.buffer for _, op in plan.stages_with(UpdateReplayPriorities)]
    for _, draw in plan.stages_with(ReplayStage):
        is_prioritized = any(
            getattr(_new_buffer(draw.buffer, policy_id), "alpha", 0.0) > 0
            for policy_id in plan.policies
        )
        is_updated = any(buffer is draw.buffer for buffer in updates)
        if is_prioritized and not is_updated and not _is_used_elsewhere(draw.buffer, plan):
            yield PlanProblem(
                "priorities_not_updated",
                draw.line,
                "Replay draws by priorities that are never updated: chain "
                "UpdateReplayPriorities after TrainOneStep, or set prioritized_replay=False",
            )


def _unread_child(plan: _Plan) -> Iterator[PlanProblem]:
    for duplicate in plan.stages:
        if not isinstance(duplicate, Duplicate):
            continue
        unread = [i for i, child in enumerate(duplicate.children) if child not in plan.stages]
        if unread:
            yield PlanProblem(
                "unread_duplicate",
                duplicate.line,
                f"child {unread[0]} of duplicate({len(duplicate.children)}) is not part of the "
                "plan, so the other children will wait for it: use it, or duplicate fewer times",
            )


def _unlimited_lag(plan: _Plan) -> Iterator[PlanProblem]:
    """Asynchronous rollouts for a loss that assumes fragments of the current policy."""
    for _, operator, feeding in plan.trainers():
        if isinstance(operator, ApplyGradients):
            continue  # gradients are computed with the weights that sampled
        on_policy = [
            policy_id
            for policy_id, policy in plan.trained_by(operator)
            if policy.is_on_policy and not getattr(policy.config, "allow_off_policy", False)
        ]
        limited = any(isinstance(getattr(stage, "fn", None), DropStale) for stage in feeding)
        for stage in feeding:
            if not on_policy or limited or not isinstance(stage, GatherAsync):
                continue
            if stage.has_limit or not stage.shards.remote:
                continue
            yield PlanProblem(
                "unlimited_lag",
                stage.line,
                f"policy {on_policy[0]!r} learns on-policy, but asynchronous rollouts may come "
                "from much older weights: set max_policy_lag or limit=StalenessLimit(…) of "
                "ParallelRollouts, or use an algorithm that corrects the lag (IMPALA, APPO)",
            )


def _untrained_workers(plan: _Plan) -> Iterator[PlanProblem]:
    """Workers that sample for a learner of other workers, so that they never get new weights."""
    trained = [getattr(op, "workers", None) for _, op, _ in plan.trainers()]
    learners = [getattr(op, "learner", None) for _, op, _ in plan.trainers()]
    trained += [getattr(learner, "workers", None) for learner in learners]
    known = [workers for workers in trained if workers is not None]
    for stage, rollouts in plan.stages_with(CountRollouts):
        if known and not any(workers is rollouts.workers for workers in known):
            yield PlanProblem(
                "untrained_workers",
                stage.line,
                "these rollouts come from a WorkerSet that no operator trains, so its weights are "
                "never updated: pass the same workers to ParallelRollouts and TrainOneStep",
            )


def _returns_nothing(plan: _Plan) -> Iterator[PlanProblem]:
    for stage, operator in plan.operators:
        if isinstance(stage, (ForEach, Filter, Combine)) and returns_nothing(operator):
            what = {Filter: "whether to keep the item", Combine: "a list of items"}
            kind = next((what[one] for one in what if isinstance(stage, one)), "the item")
            yield PlanProblem(
                "returns_nothing",
                stage.line,
                f"{stage} returns None, because its code has no `return …`: return {kind}",
            )


def _in_place(plan: _Plan) -> Iterator[PlanProblem]:
    for stage, operator in plan.operators:
        change = in_place_change(operator) if operator is not stage else None
        of_results = any(one.name == StandardMetricsReporting.__name__ for one in walk(stage))
        if change is not None and not of_results:  # results may be changed
            yield PlanProblem(
                "changes_its_input",
                stage.line,
                f"{stage} changes its input in place ({change}); other operators may hold the "
                "same item, and shared arrays are read-only: return a changed copy, such as "
                "batch.with_columns(rewards=batch['rewards'] * 0.1)",
            )


_RULES: list[Callable[[_Plan], Iterator[PlanProblem]]] = [
    _nothing_trains, _target_without_update, _unused_branch, _half_a_queue, _half_a_buffer,
    _priorities_not_updated, _unread_child, _unlimited_lag, _untrained_workers,
    _returns_nothing, _in_place,
]  # fmt: skip
