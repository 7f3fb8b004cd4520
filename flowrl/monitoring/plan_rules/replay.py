"""Rules about replay buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flowrl.iter.gather import Gather
from flowrl.iter.stage import walk
from flowrl.iter.stages.branches import Union
from flowrl.iter.stages.function_stage import is_user_defined
from flowrl.monitoring.plan_rules.plan import CheckedPlan, PlanProblem
from flowrl.ops.replay import ReplayStage, StoreToReplayBuffer, UpdateReplayPriorities
from flowrl.ops.replay_actors import ReplayActors
from flowrl.ops.rollout import SelectExperiences


def half_a_buffer(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Replay without a store, the reverse, and draws that can never begin."""
    stores, draws = plan.stages_with(StoreToReplayBuffer), plan.stages_with(ReplayStage)
    for _, draw in draws:
        buffer = draw.buffer
        is_stored = any(store.buffer is buffer for _, store in stores)
        if not len(buffer) and not is_stored and not plan.refers_to(buffer):
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
        if not is_drawn and not plan.refers_to(store.buffer):
            yield PlanProblem(
                "store_without_replay",
                stage.line,
                "StoreToReplayBuffer fills a buffer that nothing draws from: add a branch with "
                "Replay on the same buffer, or remove the operator",
            )


def rows_that_a_buffer_rejects(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Rows of policies that a buffer does not store, and single rows of recurrent policies."""
    for stage, store in plan.stages_with(StoreToReplayBuffer):
        feeding = set(walk(stage))
        before = [operator for one, operator in plan.operators if one in feeding]
        gathers = [one for one in feeding if isinstance(one, Gather)]
        has_own = any(map(is_user_defined, before))
        if has_own or any(gather.shards.has_steps() for gather in gathers):
            continue  # they may select rows
        selections = [op.policy_ids for op in before if isinstance(op, SelectExperiences)]
        stored = set(plan.policies).intersection(*selections)
        of_buffer = getattr(store.buffer, "policies", None)
        if of_buffer is not None and stored - set(of_buffer):
            yield PlanProblem(
                "rows_of_other_policies",
                stage.line,
                f"StoreToReplayBuffer can receive rows of the policies {sorted(stored)}, but its "
                f"buffer stores {sorted(of_buffer)}: chain SelectExperiences({sorted(of_buffer)}) "
                "before it",
            )
            continue
        for policy_id in sorted(stored):
            buffer = _new_buffer(store.buffer, policy_id)
            is_of_rows = getattr(buffer, "storage_unit", None) == "timesteps"
            if is_of_rows and plan.policies[policy_id].is_recurrent:
                yield PlanProblem(
                    "rows_of_a_recurrent_policy",
                    stage.line,
                    f"StoreToReplayBuffer receives sequences of the recurrent policy "
                    f"{policy_id!r}, but its buffer stores single rows: give the buffer "
                    'storage_unit="sequences", or use a policy without memory',
                )


def weights_of_one_buffer(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Weights for branches that share a buffer, which keeps the ratio between them."""
    for union in plan.stages:
        if not isinstance(union, Union) or not union.has_own_weights:
            continue
        branches = [set(walk(branch)) for branch in union.parents]
        for stage, store in plan.stages_with(StoreToReplayBuffer):
            for _, draw in plan.stages_with(ReplayStage):
                storing = [stage in branch for branch in branches]
                drawing = [draw in branch for branch in branches]
                if draw.buffer is not store.buffer or storing == drawing:
                    continue
                what = "branches that store to a replay buffer and draw from it"
                if not any(storing):
                    what = "the numbers of batches that branches draw from replay buffers"
                yield PlanProblem(
                    "weights_of_one_buffer",
                    union.line,
                    f"round_robin_weights has no effect on {what}, because a buffer keeps its "
                    "ratio of drawn to stored rows: remove the weights, and set "
                    "training_intensity to the drawn rows per stored row",
                )
                return


def _capacity_of(buffer: Any, plan: CheckedPlan) -> int | None:
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


def priorities_not_updated(plan: CheckedPlan) -> Iterator[PlanProblem]:
    updates = [op.buffer for _, op in plan.stages_with(UpdateReplayPriorities)]
    for _, draw in plan.stages_with(ReplayStage):
        is_prioritized = any(
            getattr(_new_buffer(draw.buffer, policy_id), "alpha", 0.0) > 0
            for policy_id in plan.policies
        )
        is_updated = any(buffer is draw.buffer for buffer in updates)
        if is_prioritized and not is_updated and not plan.refers_to(draw.buffer):
            yield PlanProblem(
                "priorities_not_updated",
                draw.line,
                "Replay draws by priorities that are never updated: chain "
                "UpdateReplayPriorities after TrainOneStep, or set prioritized_replay=False",
            )


def priorities_of_another_buffer(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """UpdateReplayPriorities on another buffer than the one that its batches are drawn from."""
    for stage, update in plan.stages_with(UpdateReplayPriorities):
        draws = [one for one in walk(stage) if isinstance(one, ReplayStage)]
        others = [draw for draw in draws if draw.buffer is not update.buffer]
        if others and not plan.refers_to(update.buffer):
            yield PlanProblem(
                "priorities_of_another_buffer",
                stage.line,
                "UpdateReplayPriorities gets batches of another buffer, which Replay, chained at "
                f"{others[0].line}, draws from: chain it to the batches of its own buffer, before "
                "they are merged with others",
            )
