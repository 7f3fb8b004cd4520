"""Find mistakes in a plan without running it: `flowrl check PLAN`, and warnings at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flowrl.iter import Stage
from flowrl.monitoring.plan_rules import operators, replay, settings, training, wiring
from flowrl.monitoring.plan_rules.plan import CheckedPlan, PlanProblem
from flowrl.sampling.worker_set import WorkerSet

RULES: list[Callable[[CheckedPlan], Iterator[PlanProblem]]] = [
    training.nothing_trains,
    training.target_without_update,
    training.unlimited_lag,
    training.replay_for_on_policy,
    training.untrained_workers,
    training.rows_that_nothing_trains,
    training.env_steps_of_selected_rows,
    training.trained_although_frozen,
    wiring.one_report,
    wiring.wrong_order,
    wiring.rounds_larger_than_batches,
    wiring.uncounted_rollouts,
    wiring.rollouts_counted_twice,
    wiring.unused_branch,
    wiring.half_a_queue,
    wiring.unread_child,
    replay.half_a_buffer,
    replay.rows_that_a_buffer_rejects,
    replay.weights_of_one_buffer,
    replay.priorities_not_updated,
    replay.priorities_of_another_buffer,
    operators.no_return,
    operators.in_place_change,
    operators.trains_without_record,
    operators.lost_state,
    settings.unused_settings,
    settings.unused_settings_of_policies,
]


def check_plan(end: Stage, workers: WorkerSet) -> list[PlanProblem]:
    """Return the probable mistakes in a plan.

    Args:
        end: its last stage.
        workers: its WorkerSet.
    """
    plan = CheckedPlan(end, workers)
    return [problem for rule in RULES for problem in rule(plan)]
