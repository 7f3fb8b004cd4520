"""Rules about operators that train: their policies, targets and weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flowrl.iter.gather_async import GatherAsync
from flowrl.iter.stage import Stage
from flowrl.iter.stages.function_stage import is_user_defined
from flowrl.monitoring.plan_rules.plan import CheckedPlan, PlanProblem
from flowrl.ops import (
    ConcatBatches,
    SelectExperiences,
    TrainOneStep,
    UpdateTargetNetwork,
    WriteParquet,
)
from flowrl.ops.gradients import ApplyGradients
from flowrl.ops.replay import ReplayStage, SimpleReplayBuffer
from flowrl.ops.report import training_operators
from flowrl.ops.rollout import CountRollouts, DropStale
from flowrl.ops.training_step import TrainingStepsStage
from flowrl.policies.policy import Policy


def nothing_trains(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """A plan that samples, but has no operator that trains.

    No problem is reported for plans that record experience, do not explore, or have no policy that
    can learn.
    """
    rollouts = plan.stages_with(CountRollouts)
    config = plan.workers.config
    can_learn = any(
        type(policy).learn_on_batch is not Policy.learn_on_batch
        for policy in plan.policies.values()
    )
    is_meant = config.output is not None or not config.explore or config.policies_to_train == []
    unknown = plan.stages_with(WriteParquet) or plan.stages_with(TrainingStepsStage)
    if not rollouts or not can_learn or is_meant or unknown or training_operators(plan.end):
        return
    yield PlanProblem(
        "nothing_trains",
        rollouts[0][0].line,
        "the plan samples, but has no operator that trains, so the policies stay as they are: "
        "chain .for_each(TrainOneStep(workers)) before StandardMetricsReporting (an operator of "
        "your own that trains has the attributes trains=True and policies, ids or None for all)",
    )


def target_without_update(plan: CheckedPlan) -> Iterator[PlanProblem]:
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


def unlimited_lag(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Asynchronous rollouts for a loss that assumes fragments of the current policy."""
    for _, operator, feeding in plan.trainers():
        if isinstance(operator, ApplyGradients):
            continue  # gradients are computed with the weights that sampled
        on_policy = _on_policy(plan, operator)
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


def replay_for_on_policy(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Replayed rows for policies whose learners accept only rows of the current policy."""
    for _, operator, feeding in plan.trainers():
        on_policy = _on_policy(plan, operator)
        if len(on_policy) < len(plan.trained_by(operator)) or isinstance(operator, ApplyGradients):
            continue  # the buffer may have only the rows of the other policies
        if is_user_defined(operator) and not hasattr(operator, "learner"):
            continue  # its loss may be off-policy
        for stage in feeding:
            if isinstance(stage, ReplayStage) and not isinstance(stage.buffer, SimpleReplayBuffer):
                yield PlanProblem(
                    "replay_for_on_policy",
                    stage.line,
                    f"policy {on_policy[0]!r} learns on-policy, and its learner does not accept "
                    "rows of a replay buffer: train it with the rollouts, set "
                    "allow_off_policy=True, or use an off-policy algorithm",
                )


def rows_that_nothing_trains(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Selected rows of other policies than those that an operator trains."""
    for stage, operator in plan.stages_with(TrainOneStep):
        trained = set(plan.policies if operator.policies is None else operator.policies)
        selected = _selected(plan, stage)
        if not trained & selected:
            yield PlanProblem(
                "rows_that_nothing_trains",
                stage.line,
                f"{operator!r} trains {sorted(trained)}, but SelectExperiences keeps only rows of "
                f"{sorted(selected)}: name the same policies in both",
            )


def env_steps_of_selected_rows(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Train batches that are filled by env steps, although rows of some policies are left out."""
    for stage, operator in plan.stages_with(ConcatBatches):
        by_env_steps = operator.count_steps_by == "env_steps" and operator.min_batch_size > 1
        if by_env_steps and set(plan.policies) - _selected(plan, stage):
            yield PlanProblem(
                "env_steps_of_selected_rows",
                stage.line,
                "ConcatBatches counts the env steps of all policies, but SelectExperiences leaves "
                "out rows of some, so batches may have fewer rows than min_batch_size: set "
                'count_steps_by="agent_steps"',
            )


def _selected(plan: CheckedPlan, stage: Stage) -> set[str]:
    """Return the policies whose rows SelectExperiences operators before a stage keep; all if
    branches are joined before it, or operators of the user may add rows."""
    operators, selected = dict(plan.operators), set(plan.policies)
    while len(stage.parents) == 1:
        (stage,) = stage.parents
        operator = operators.get(stage)
        if operator is not None and is_user_defined(operator):
            return set(plan.policies)
        if isinstance(operator, SelectExperiences):
            selected &= set(operator.policy_ids)
    return selected if not stage.parents else set(plan.policies)


def _on_policy(plan: CheckedPlan, operator: Any) -> list[str]:
    """Return the policies that an operator trains and that learn only on-policy."""
    return [
        policy_id
        for policy_id, policy in plan.trained_by(operator)
        if policy.is_on_policy and not getattr(policy.config, "allow_off_policy", False)
    ]


def untrained_workers(plan: CheckedPlan) -> Iterator[PlanProblem]:
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


def trained_although_frozen(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Operators that name policies which `policies_to_train` leaves out."""
    to_train = plan.workers.config.policies_to_train
    if to_train is None or callable(to_train):
        return
    for stage, operator, _ in plan.trainers():
        frozen = sorted(set(operator.policies or ()) - set(to_train))
        if frozen:
            yield PlanProblem(
                "trained_although_frozen",
                stage.line,
                f"{operator!r} trains {frozen[0]!r}, which policies_to_train leaves out: the "
                "operator decides. Remove the id from the operator, or add it to policies_to_train",
            )
