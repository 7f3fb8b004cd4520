"""Rules about settings that were changed, but that neither the plan nor its policies read."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from types import FunctionType
from typing import Any

from flowrl.iter.stages.function_stage import is_user_defined
from flowrl.learners.thread import LearnerThread
from flowrl.monitoring.plan_rules.plan import CheckedPlan, PlanProblem
from flowrl.ops.training_step import TrainingStepsStage
from flowrl.policies.config import PolicyConfig
from flowrl.policies.policy_spec import specs_of
from flowrl.setting_aliases import canonical_names
from flowrl.setting_values import equal

_OF_PLANS = ("num_sgd_iter", "sgd_minibatch_size")  # all algorithms have them, few plans read them


def unused_settings(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Settings of an algorithm that no source code reads.

    The rule searches the functions that build the plan, the functions and config methods that they
    use, and the modules of the plan's policies, learners and user-defined operators.
    """
    config = plan.workers.config
    differences = config.diff()
    changed = [name for name in _settings_of_algorithm(config) if name in differences]
    if not changed:
        return
    lines = _lines_of(plan)
    try:
        read = {name for file in lines for name in _read_at(file, lines[file])}
    except (OSError, SyntaxError, tokenize.TokenError):  # written in a shell, or edited since
        return
    read |= _read_by_methods(read, type(config)) | _read_by_operators(plan)
    unread = [name for name in changed if name not in read]
    for module in _modules(plan):
        if not unread:
            return
        unread = [name for name in unread if name not in _read_in_module(module)]
    policies = sorted({type(policy).__name__ for policy in plan.policies.values()})
    for name in unread:
        yield PlanProblem(
            "unused_setting",
            _line_that_sets(name, lines) or plan.end.line,
            f"{name}={config[name]!r} has no effect: neither the plan nor "
            f"{' and '.join(policies)} reads it: leave it out, or use config.{name} in the plan",
        )


def unused_settings_of_policies(plan: CheckedPlan) -> Iterator[PlanProblem]:
    """Settings in the config of a PolicySpec that differ from those of the run, although the plan
    reads only the settings of the run.

    The rule searches the same places as `unused_settings`, except for attributes of the second
    argument of the plan function, which has the settings of the run.
    """
    config, lines = plan.workers.config, _lines_of(plan)
    changed = {}
    for policy_id, spec in specs_of(config.policies).items():
        policy = plan.policies.get(policy_id)
        if policy is not None and isinstance(policy.config, PolicyConfig):
            own = {*_settings_of_algorithm(policy.config), *_settings_of_run(policy.config)}
            given = sorted(_settings_in(spec.config) & own)
            names = [name for name in given if policy.config[name] != config.get(name)]
            if names:
                changed[policy_id] = names
    if not changed:
        return
    try:
        read = {name for file in lines for name in _read_at(file, lines[file], plan.end.line)}
        from_config = {name for file in lines for name in _read_at(file, lines[file])} - read
    except (OSError, SyntaxError, tokenize.TokenError):  # written in a shell, or edited since
        return
    by_operators = _read_by_operators(plan)
    # a replay buffer takes the settings of each policy's buffer from the config of the policy
    has_buffer = not from_config.isdisjoint({"replay_buffer", "replay_actors"})
    for policy_id, names in changed.items():
        policy = plan.policies[policy_id]
        found = set(read)
        for cls in type(policy).__mro__:
            found |= _read_in_module(cls.__module__, with_settings=False)
        of_config = {name for name in found if not hasattr(policy, name)}
        of_config |= {"new_buffer"} if has_buffer else set()
        found |= _read_by_methods(of_config, type(policy.config)) | by_operators
        # replay buffers and policies may read train_batch_size
        of_run = set(_settings_of_run(policy.config)) - {"train_batch_size"}
        for name in names:
            if name in (read if name in of_run else found):
                continue
            advice = "the run has one value for all policies. Set it in the config of the run"
            if name not in of_run:
                advice = (
                    "the operators of the plan use one value for all policies. Set it in the "
                    "config of the run, if the plan passes it on, or pass "
                    f'config.for_policy("{policy_id}").{name} to the operator'
                )
            yield PlanProblem(
                "unused_setting_of_policy",
                plan.end.line,
                f"policies: {name}={policy.config[name]!r} in the config of {policy_id!r} has no "
                f"effect: {advice}",
            )


def _settings_in(config: Any) -> set[str]:
    """Return the names of the settings that the config of a PolicySpec contains.

    Settings with their default value do not count: `from_dict(config.to_dict())` sets all of them.
    """
    if isinstance(config, PolicyConfig):
        fields = type(config).model_fields
        return {
            name
            for name in config.model_fields_set
            if not equal(config[name], fields[name].get_default(call_default_factory=True))
        }
    return set(canonical_names(dict(config))) if isinstance(config, Mapping) else set()


def _settings_of_algorithm(config: Any) -> Iterator[str]:
    """Yield the settings that were set explicitly and that not every plan uses."""
    for name in sorted(config.model_fields_set):
        if name in _OF_PLANS or _module_of(name, config).startswith("flowrl.algorithms."):
            yield name


def _settings_of_run(config: Any) -> Iterator[str]:
    """Yield the settings of the workers and of the run that were set explicitly."""
    for name in sorted(config.model_fields_set):
        if _module_of(name, config) in ("flowrl.sampling.worker_config", "flowrl.trainer.config"):
            yield name


def _module_of(name: str, config: Any) -> str:
    """Return the module of the class that declares a setting."""
    classes = [cls for cls in type(config).__mro__ if name in getattr(cls, "model_fields", {})]
    return classes[-1].__module__


def _lines_of(plan: CheckedPlan) -> dict[str, set[int]]:
    """Return the lines where the stages of a plan were chained, by file."""
    lines: dict[str, set[int]] = {}
    for stage in plan.stages:
        file, _, number = stage.line.rpartition(":")
        lines.setdefault(file, set()).add(int(number))
    return lines


def _read_at(file: str, lines: set[int], plan_line: str = "") -> frozenset[str]:
    """Return the names that the outermost functions at some lines of a file read, the functions
    that they use, and the modules from which they import names.

    Args:
        file, lines: the file and its lines.
        plan_line: `file:line` in a plan function, whose second argument is the config of the run:
            names that are read from it are left out.

    Raises:
        OSError: the file has no text.
        SyntaxError: the text is not Python.
    """
    text = "".join(linecache.getlines(file))
    if not text:
        raise OSError(f"{file} has no text")
    plan_file, _, number = plan_line.rpartition(":")
    line = int(number) if plan_file == file else 0
    read, modules = _read_by_functions(text, frozenset(lines), line)
    return read.union(*map(_read_in_module, modules))


@lru_cache(maxsize=200)
def _read_by_functions(
    text: str, lines: frozenset[int], plan_line: int
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that the outermost functions at some lines of a text, and the functions that
    they use, read, and the modules outside of flowrl from which they import names."""
    statements = _parsed(text).body
    functions: list[ast.stmt] = [
        statement for statement in statements if any(_contains(statement, line) for line in lines)
    ]
    definitions = {
        statement.name: statement
        for statement in statements
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef))
    }
    module_of = dict(_imported_names(statements))
    read: set[str] = set()
    modules: set[str] = set()
    for function in functions:  # grows
        config = ""
        if isinstance(function, ast.FunctionDef) and _contains(function, plan_line):
            config = function.args.args[1].arg if len(function.args.args) > 1 else ""
        read |= _names_read(function, config)
        for name in {one.id for one in ast.walk(function) if isinstance(one, ast.Name)}:
            if name in definitions and definitions[name] not in functions:
                functions.append(definitions[name])
            elif not module_of.get(name, "flowrl").startswith("flowrl"):
                modules.add(module_of[name])
    return frozenset(read), frozenset(modules)


def _contains(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or 0)


def _imported_names(statements: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield (name, module) of each name that a file imports."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield alias.asname or alias.name, alias.name
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
            for alias in statement.names:
                yield alias.asname or alias.name, statement.module


@lru_cache(maxsize=4)  # trees are large
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


@lru_cache(maxsize=200)
def _read_in_text(text: str, without: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the names that a text reads, see `_names_read`, without some of its classes."""
    found: set[str] = set()
    for statement in _parsed(text).body:
        if not (isinstance(statement, ast.ClassDef) and statement.name in without):
            found |= _names_read(statement)
    return frozenset(found)


def _names_read(node: ast.AST, but_of: str = "") -> set[str]:
    """Return the attributes that the code reads, except for those of the name `but_of`, and its
    strings except for keys of dicts."""
    found: set[str] = set()
    keys: set[int] = set()
    for part in ast.walk(node):  # a dict comes before its keys
        if isinstance(part, ast.Dict):
            keys.update(id(key) for key in part.keys)
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load):
            if not (isinstance(part.value, ast.Name) and part.value.id == but_of):
                found.add(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.add("" if id(part) in keys else part.value)
    return found


def _read_by_methods(names: set[str], config_class: type) -> set[str]:
    """Return the names that the methods and properties in `names` of a config read, directly or
    through other methods and properties."""
    found: set[str] = set()
    done: set[str] = set()
    remaining = set(names)
    while remaining:
        name = remaining.pop()
        done.add(name)
        for parent in config_class.__mro__:
            member = vars(parent).get(name)
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType):
                try:
                    text = textwrap.dedent(inspect.getsource(function))
                except OSError:  # it was typed, or read from a pipe
                    continue
                read = _read_in_text(text)
                found |= read
                remaining |= read - done
                if "super()" not in text:  # it replaces the method of the base class
                    break
    return found


def _read_by_operators(plan: CheckedPlan) -> set[str]:
    """Return the settings of `_OF_PLANS` that training operators take from each policy, because
    they were created without these arguments, or that `train_one_step` takes."""
    if any(isinstance(stage, TrainingStepsStage) for stage in plan.stages):
        return set(_OF_PLANS)
    operators = [operator for _, operator in plan.operators]
    learners = [getattr(one, "learner", getattr(one, "learn", None)) for one in operators]
    return {name for name in _OF_PLANS for one in learners if getattr(one, name, 0) is None}


def _modules(plan: CheckedPlan) -> list[str]:
    """Return the names of the modules of a plan's policies, learners and user-defined operators;
    the module of a class comes before the modules of its bases.

    flowrl's other operators read no config: plans pass values to them.
    """
    readers: list[Any] = list(plan.policies.values())
    for _, operator in plan.operators:
        if isinstance(operator, LearnerThread):
            readers += [operator, *vars(operator).values()]
        elif is_user_defined(operator):
            readers.append(operator)
    modules = (cls.__module__ for reader in readers for cls in type(reader).__mro__)
    return list(dict.fromkeys(modules))


def _read_in_module(module: str, with_settings: bool = True) -> frozenset[str]:
    """Return the names that a module reads, or that it reads outside of its classes of settings;
    none for modules in C."""
    try:
        names = vars(sys.modules[module])
        text = inspect.getsource(sys.modules[module])
    except (OSError, KeyError, TypeError):
        return frozenset()
    settings = [
        name
        for name, value in names.items()
        if isinstance(value, type) and issubclass(value, PolicyConfig)
    ]
    return _read_in_text(text, frozenset(() if with_settings else settings))


def _line_that_sets(name: str, files: Iterable[str]) -> str | None:
    """Return `file:line` where a plan file sets a setting."""
    for file in files:
        for number, line in enumerate(linecache.getlines(file), start=1):
            if re.search(rf"\b{name}=|[\"']{name}[\"']:", line):
                return f"{file}:{number}"
    return None
