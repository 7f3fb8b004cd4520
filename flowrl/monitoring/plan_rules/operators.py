"""Rules about the source code of the user's operators."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.iter.stage import walk
from flowrl.iter.stages.unary import Combine, Filter, ForEach
from flowrl.monitoring import operator_source
from flowrl.monitoring.plan_rules.plan import CheckedPlan, PlanProblem
from flowrl.ops.report import StandardMetricsReporting


def no_return(plan: CheckedPlan) -> Iterator[PlanProblem]:
    for stage, operator in plan.operators:
        is_function = isinstance(stage, (ForEach, Filter, Combine))
        if is_function and operator_source.returns_nothing(operator):
            what = {Filter: "whether to keep the item", Combine: "a list of items"}
            kind = next((what[one] for one in what if isinstance(stage, one)), "the item")
            yield PlanProblem(
                "returns_nothing",
                stage.line,
                f"{stage} returns None, because its code has no `return …`: return {kind}",
            )


def in_place_change(plan: CheckedPlan) -> Iterator[PlanProblem]:
    for stage, operator in plan.operators:
        change = operator_source.in_place_change(operator) if operator is not stage else None
        of_results = any(one.name == StandardMetricsReporting.__name__ for one in walk(stage))
        if change is not None and not of_results:  # results may be changed
            yield PlanProblem(
                "changes_its_input",
                stage.line,
                f"{stage} changes its input in place ({change}); other operators may hold the "
                "same item, and shared arrays are read-only: return a changed copy, such as "
                "batch.with_columns(name=new_values)",
            )


def trains_without_record(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Operators of the user with `trains = True` that return the batch, not the item of
    `record_training`."""
    for stage, operator in plan.operators:
        if getattr(operator, "trains", False) and operator_source.returns_its_input(operator):
            yield PlanProblem(
                "trains_without_record",
                stage.line,
                f"{stage} has trains=True, but returns its input, so nothing counts its training: "
                "return record_training(self, batch, {policy_id: {name: number}})",
            )


def lost_state(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Operators of the user that change an attribute and save no state."""
    for stage, operator in plan.operators:
        name = operator_source.accumulated_attribute(operator)
        if name is not None and not hasattr(operator, "state_dict"):
            yield PlanProblem(
                "lost_state",
                stage.line,
                f"{stage} changes {name}, but has no state_dict() and load_state_dict(state): "
                f"{name} is lost when the run is resumed",
            )
