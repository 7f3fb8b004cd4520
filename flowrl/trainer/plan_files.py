"""Plan files: found by short name or path, loaded, listed. Listing imports nothing of them."""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from flowrl.settings import ConfigError, nearest

PLAN_MODULE = "flowrl_plan_"  # what the modules of plan files are called, and their stem
_PACKAGE = Path(__file__).resolve().parents[1]


def plans_folder() -> Path:
    """Where the shipped plans are: in the wheel, or beside the package in a checkout."""
    shipped = _PACKAGE / "_plans"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "plans"


def shipped_plans() -> dict[str, str]:
    """Name -> first docstring line of every shipped plan."""
    plans = {}
    for path in sorted(plans_folder().glob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        plans[path.stem] = doc.split("\n")[0]
    return plans


def plan_path(plan: str) -> Path:
    """The file of a plan.

    Raises:
        ConfigError: no shipped plan of this name and no such file; the nearest is offered.
    """
    shipped = plans_folder() / f"{plan}.py"
    if shipped.is_file():
        return shipped
    path = Path(plan)
    if path.suffix == ".py" and path.is_file():
        return path.resolve()
    if path.suffix == ".py":
        raise ConfigError(f"plan: there is no file {plan!r}")
    known = sorted(shipped_plans())
    raise ConfigError(
        f"plan: unknown plan {plan!r}.{nearest(plan, known)} Shipped: {', '.join(known)}; or give "
        "the path of a plan file"
    )


def load_plan(plan: str) -> ModuleType:
    """The module of a plan file, loaded afresh. It may import modules that lie beside it.

    A file with an algorithm of its own, a subclass of Algorithm with a plan or a training_step, is
    loaded once as long as its text stays: its classes are what they are.

    Raises:
        ConfigError: it does not exist, or has neither `execution_plan(workers, config)` nor an
            algorithm.
    """
    path = plan_path(plan)
    text = path.read_bytes()
    if str(path) in _WITH_ALGORITHMS and _WITH_ALGORITHMS[str(path)][0] == text:
        return _WITH_ALGORITHMS[str(path)][1]
    spec = importlib.util.spec_from_file_location(f"{PLAN_MODULE}{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(path.parent) not in sys.path and path.parent != plans_folder():
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        # the user's own file: its own last frame says more than flowrl's way to it
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = getattr(error, "lineno", None) or where.lineno
        raise ConfigError(f"plan: {path}, line {line}: {type(error).__name__}: {error}") from error
    if algorithm_in(module) is not None:
        _WITH_ALGORITHMS[str(path)] = text, module
    elif not callable(getattr(module, "execution_plan", None)):
        raise ConfigError(
            f"plan: {path} has no function execution_plan(workers, config), and no Algorithm with "
            "a plan or a training_step of its own"
        )
    return module


_WITH_ALGORITHMS: dict[str, tuple[bytes, ModuleType]] = {}


def algorithm_in(module: ModuleType) -> Any:
    """The algorithm that a plan file defines: its last class that says how it trains, if any."""
    base: Any = getattr(sys.modules.get("flowrl.trainer.algorithm"), "Algorithm", None)
    if base is None or callable(getattr(module, "execution_plan", None)):
        return None
    found = None
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, base):
            algorithm: Any = value
            own = (
                algorithm.execution_plan is not None
                or algorithm.training_step is not base.training_step
            )
            if own and value.__module__ == module.__name__:
                found = value
    return found


def modules_of(plan: ModuleType) -> list[ModuleType]:
    """The plan and the loaded modules that lie beside it: Ray workers get them by value."""
    folder = Path(str(plan.__file__)).parent

    def beside(module: ModuleType) -> bool:
        file = Path(str(getattr(module, "__file__", None) or "/"))
        ours = module.__name__.split(".")[0] in ("flowrl", "__main__")
        return folder in file.parents and "site-packages" not in file.parts and not ours

    own = [module for module in list(sys.modules.values()) if beside(module)]
    return list({id(module): module for module in (plan, *own)}.values())
