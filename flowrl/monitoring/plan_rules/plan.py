"""A plan as the rules of `flowrl check` read it, and the problems that they find."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from flowrl.iter import Stage
from flowrl.iter.stage import walk
from flowrl.iter.stages.function_stage import is_user_defined
from flowrl.learners.thread import LearnerThread
from flowrl.ops.concurrency import Enqueue
from flowrl.ops.report import operators_of
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


class CheckedPlan:
    """A plan as the rules read it.

    Args:
        end: its last stage.
        workers: its WorkerSet.

    Attributes:
        stages: all stages, end first.
        operators: the stages that call an operator, with the operator.
        policies: the policies by id.
    """

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

    def refers_to(self, value: Any) -> bool:
        """Return whether an operator of the user refers to an object, such as a buffer."""
        own = [operator for _, operator in self.operators if is_user_defined(operator)]
        return any(found is value for operator in own for found in _references(operator))


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
