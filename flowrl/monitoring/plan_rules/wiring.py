"""Rules about how branches are connected: unions, duplicates and queues."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.iter import Stage
from flowrl.iter.gather import Gather
from flowrl.iter.stage import walk
from flowrl.iter.stages.branches import Duplicate, Union
from flowrl.iter.stages.function_stage import is_user_defined
from flowrl.iter.stages.unary import ZipWithSource
from flowrl.monitoring.operator_source import mentions
from flowrl.monitoring.plan_rules.plan import CheckedPlan, PlanProblem
from flowrl.ops.concurrency import DequeueStage, Enqueue
from flowrl.ops.replay import ReplayStage, StoreToReplayBuffer
from flowrl.ops.report import CollectMetrics
from flowrl.ops.rollout import (
    ConcatBatches,
    CountRollouts,
    DropStale,
    SelectExperiences,
    StandardizeFields,
)
from flowrl.ops.train import TrainOneStep
from flowrl.ops.train_on_workers import TrainOnWorkersStage
from flowrl.sampling.replayed_pool import ReplayedPool
from flowrl.sampling.rollout_pool import LocalRolloutPool, RolloutPool

_TAKE_BATCHES = (
    ConcatBatches, SelectExperiences, StandardizeFields, StoreToReplayBuffer, TrainOneStep,
)  # fmt: skip


def one_report(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """A plan that has several StandardMetricsReporting, or does not end in one; an operator of the
    user may report."""
    reports = [stage for stage, _ in plan.stages_with(CollectMetrics)]
    if len(reports) > 1:
        yield PlanProblem(
            "one_report",
            reports[0].line,
            f"the plan has {len(reports)} StandardMetricsReporting, and each would report a part "
            "of the episodes and steps: join the streams first, and report once, at the end",
        )
    if not reports and not is_user_defined(getattr(plan.end, "fn", plan.end)):
        yield PlanProblem(
            "one_report",
            plan.end.line,
            f"the plan ends in {plan.end} and yields no results: end it with "
            "`return StandardMetricsReporting(…, workers, config)`",
        )


def wrong_order(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Operators that take batches, after one that returns something else."""
    reports = {stage for stage, _ in plan.stages_with(CollectMetrics)}
    trainers = {
        stage: type(one).__name__
        for stage, one in plan.stages_with(TrainOneStep)
        if not is_user_defined(one)
    }
    for stage, operator in plan.operators:
        if type(operator) not in _TAKE_BATCHES:  # a subclass may take something else
            continue
        name, parents = type(operator).__name__, stage.parents
        if reports.intersection(walk(stage)):
            yield PlanProblem(
                "wrong_order",
                stage.line,
                f"{name} takes batches, but is chained after StandardMetricsReporting, which "
                f"returns results: chain {name} before it",
            )
        elif len(parents) == 1 and parents[0] in trainers:
            yield PlanProblem(
                "wrong_order",
                stage.line,
                f"{name} takes batches, but is chained after {trainers[parents[0]]}, which returns "
                f"pairs (batch, info): chain {name} before it",
            )


def rollouts_counted_twice(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """CountRollouts after ParallelRollouts or AsyncGradients, which include it."""
    counting = [stage for stage, _ in plan.stages_with(CountRollouts)]
    for stage in counting:
        if any(one in counting for one in walk(stage) if one is not stage):
            yield PlanProblem(
                "rollouts_counted_twice",
                stage.line,
                "the env steps of these rollouts have been counted before: leave CountRollouts "
                'out, or use ParallelRollouts(mode="raw"), which does not count them',
            )


def rounds_larger_than_batches(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """ConcatBatches after rounds of fragments that are much larger than its batches, because
    `rollout_fragment_length` was set."""
    config = plan.workers.config
    is_set = "rollout_fragment_length" in getattr(config, "model_fields_set", ())
    is_automatic = config.rollout_fragment_length == "auto"
    if not is_set or is_automatic or config.batch_mode != "truncate_episodes":
        return
    num_envs = config.num_envs_per_worker * max(plan.workers.num_workers, 1)
    steps = config.fragment_length * num_envs
    for stage, operator in plan.stages_with(ConcatBatches):
        parent = stage.parents[0]
        is_round = parent.title == "ParallelRollouts(mode='bulk_sync')"
        if is_round and steps >= 2 * operator.min_batch_size:
            yield PlanProblem(
                "rounds_larger_than_batches",
                stage.line,
                f"each round of rollouts has {steps:,} env steps (rollout_fragment_length="
                f"{config.fragment_length} in each of {num_envs} environments), so the batches "
                f"have {steps:,} instead of {operator.min_batch_size:,}: reduce "
                "rollout_fragment_length, or leave it out",
            )


def uncounted_rollouts(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Fragments that are gathered from the workers without CountRollouts; an operator of the user
    may count."""
    counting = [stage for stage, _ in plan.stages_with(CountRollouts)]
    counting += [stage for stage in plan.stages if isinstance(stage, TrainOnWorkersStage)]
    counted = {stage for one in counting for stage in walk(one)}
    if any(mentions(operator, "num_env_steps_sampled") for _, operator in plan.operators):
        return
    for stage in plan.stages:
        if not isinstance(stage, Gather) or stage in counted:
            continue
        pools = stage.shards.pools()
        if any(isinstance(pool, (LocalRolloutPool, RolloutPool, ReplayedPool)) for pool in pools):
            yield PlanProblem(
                "uncounted_rollouts",
                stage.line,
                "the env steps and returns of these rollouts are not counted, so a limit on env "
                "steps is never reached: chain .zip_with_source().for_each(CountRollouts(workers)) "
                "after gathering the fragments",
            )


def unused_branch(plan: CheckedPlan) -> Iterator[PlanProblem]:
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


def half_a_queue(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Enqueue without Dequeue, and the reverse."""
    enqueues = plan.stages_with(Enqueue)
    dequeues = [stage for stage in plan.stages if isinstance(stage, DequeueStage)]
    for stage, enqueue in enqueues:
        thread = enqueue.learner_thread
        if thread is not None and not any(one.learner_thread is thread for one in dequeues):
            yield PlanProblem(
                "enqueue_without_dequeue",
                stage.line,
                "Enqueue feeds a learner whose results nothing reads, and which never starts: add "
                "Dequeue(learner) as another branch of Concurrently",
            )
    for dequeue in dequeues:
        if dequeue.learner_thread is not None and not any(
            enqueue.learner_thread is dequeue.learner_thread for _, enqueue in enqueues
        ):
            yield PlanProblem(
                "dequeue_without_enqueue",
                dequeue.line,
                "Dequeue waits for a learner that gets no batches: add a branch with "
                "Enqueue(learner)",
            )


def unread_child(plan: CheckedPlan) -> Iterator[PlanProblem]:
    for duplicate in plan.stages:
        if not isinstance(duplicate, Duplicate):
            continue
        unread = [
            i
            for i, child in enumerate(duplicate.children)
            if child not in plan.stages and duplicate.when_full[i] == "block"
        ]
        if unread:
            yield PlanProblem(
                "unread_duplicate",
                duplicate.line,
                f"child {unread[0]} of duplicate({len(duplicate.children)}) is not part of the "
                "plan, so the plan will fail when its buffer is full: use it, duplicate fewer "
                'times, or set when_full="drop_oldest" for it',
            )
