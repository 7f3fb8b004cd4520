"""Plan files: found by short name or path, loaded, listed. Listing imports nothing of them."""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from flowrl.policies.config import ConfigError, nearest

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

    Raises:
        ConfigError: it does not exist, or lacks `execution_plan(workers, config)`.
    """
    path = plan_path(plan)
    spec = importlib.util.spec_from_file_location(f"flowrl_plan_{path.stem}", path)
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
    if not callable(getattr(module, "execution_plan", None)):
        raise ConfigError(f"plan: {path} has no function execution_plan(workers, config)")
    return module


def modules_of(plan: ModuleType) -> list[ModuleType]:
    """The plan and the loaded modules that lie beside it: Ray workers get them by value."""
    folder = Path(str(plan.__file__)).parent

    def beside(module: ModuleType) -> bool:
        file = Path(str(getattr(module, "__file__", None) or "/"))
        ours = module.__name__.split(".")[0] in ("flowrl", "__main__")
        return folder in file.parents and "site-packages" not in file.parts and not ours

    own = [module for module in list(sys.modules.values()) if beside(module)]
    return list({id(module): module for module in (plan, *own)}.values())
