"""PlanBuilder: build and check the execution plan of an algorithm."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from flowrl import ops
from flowrl.errors import ConfigError
from flowrl.iter import LocalIterator
from flowrl.iter.ray_runtime import pickle_by_value
from flowrl.sampling.worker_set import WorkerSet
from flowrl.setting_values import equal_code, nearest
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.memory_checks import PROCESSES
from flowrl.trainer.plan_files import load_plan, modules_of, plan_path

Plan = LocalIterator[dict[str, Any]]
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


class PlanBuilder:
    """Builds plans from the setting `plan`, or from an algorithm's own function.

    Args:
        config: the algorithm's settings.
        execution_plan: the algorithm's function (workers, config) -> plan; None uses the function
            in the plan file, or the function that is the setting `plan`.
        in_plan_file: whether the algorithm is defined in the plan file.

    Attributes:
        module: the module of the plan file; None if no plan file is used.
        sha256: hash of the plan file's text; None without a plan file.

    Raises:
        ConfigError: the plan file does not exist or fails, or the config belongs to another one.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        execution_plan: Callable[..., Any] | None,
        in_plan_file: bool,
    ):
        plan: Any = config.plan
        if execution_plan is None:
            config.check_belongs_to_plan()
        self.module: ModuleType | None = None
        if isinstance(plan, str) and (execution_plan is None or in_plan_file):
            self.module = load_plan(plan)
        elif execution_plan is None:
            execution_plan = plan
        self._config = config
        # read now, because the file may change while the algorithm trains
        self.sha256: str | None = None
        if isinstance(plan, str) and (self.module is not None or plan.endswith(".py")):
            self.sha256 = hashlib.sha256(plan_path(plan).read_bytes()).hexdigest()
        self._execution_plan = execution_plan or getattr(self.module, "execution_plan", None)
        module = self.module
        if module is None and any(config.get(name) for name in PROCESSES):
            module = sys.modules.get(getattr(self._execution_plan, "__module__", ""))
        if module is not None and getattr(module, "__file__", None) is not None:
            pickle_by_value(modules_of(module))  # other processes may be unable to import them

    def build(self, workers: WorkerSet) -> Plan:
        """Return a new plan.

        Args:
            workers: passed to the function.

        Raises:
            ConfigError: the function has other parameters, uses settings that the config lacks,
                passes invalid arguments to an operator (the message has the line of the plan), or
                does not return a LocalIterator.
        """
        function, config = self._execution_plan, self._config
        assert function is not None
        try:
            inspect.signature(function).bind(workers, config)
        except TypeError as error:
            raise ConfigError(
                f"plan: the function must be execution_plan(workers, config): {error}"
            ) from None
        try:
            plan = function(workers, config)
        except AttributeError as error:
            if error.obj is not config:
                raise ConfigError(f"plan: {_line_of(error)}: AttributeError: {error}") from error
            hint = nearest(str(error.name), list(type(config).model_fields))
            raise ConfigError(
                f"plan: {_line_of(error)}: {type(config).__name__} has no setting {error.name!r}."
                f"{hint or ' The plan may be for another algorithm.'}"
            ) from error
        except (ValueError, TypeError) as error:
            hint = _hint_of_arguments(error)
            raise ConfigError(f"plan: {_line_of(error)}: {error}{hint}") from error
        if not isinstance(plan, LocalIterator):
            hint = ": write `return StandardMetricsReporting(…)`" if plan is None else ""
            raise ConfigError(
                "plan: execution_plan(workers, config) must return the iterator of "
                f"StandardMetricsReporting, got {type(plan).__name__}{hint}"
            )
        return plan

    def is_set_by_plan_file(self, name: str) -> bool:
        """Return whether a setting, such as `model.custom_model`, has the value of the plan file's
        own `config`.

        The config may come from an earlier execution of the file.
        """
        of_plan: Any = getattr(self.module, "config", None)
        value: Any = self._config
        for part in name.split("."):
            if not hasattr(of_plan, "get"):
                return False
            of_plan, value = of_plan.get(part), value[part]
        return equal_code(of_plan, value)


def _hint_of_arguments(error: Exception) -> str:
    """Return a sentence with the arguments of the operator that got an unknown one, or ""."""
    found = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    operator = None if found is None else getattr(ops, found[1], None)
    if found is None or operator is None:
        return ""
    names = list(inspect.signature(operator).parameters)
    return f".{nearest(found[2], names)} Its arguments are {', '.join(names)}"


def _line_of(error: Exception) -> str:
    """Return the file and line of the innermost code outside of flowrl that led to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not f.filename.startswith((_PACKAGE, "<"))] or frames
    return f"{Path(outside[-1].filename).name}, line {outside[-1].lineno}"
