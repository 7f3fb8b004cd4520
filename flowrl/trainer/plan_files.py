"""Plan files: find them by name or path, list the shipped ones and load them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import shlex
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from flowrl.errors import ConfigError, with_message
from flowrl.policies.code_references import PLAN_MODULE
from flowrl.setting_values import expanded_path, nearest

_PACKAGE = Path(__file__).resolve().parents[1]
_PATHS = sysconfig.get_paths()
# starts of the files of code that is not the user's; "<" of code without a file
_LIBRARIES = (
    "<",
    f"{_PACKAGE}{os.sep}",
    *(f"{_PATHS[name]}{os.sep}" for name in ("stdlib", "purelib", "platlib")),
)


_PLAN_FOLDERS: list[Path] = []  # of plan files, in `sys.path`, in this order


def plans_folder() -> Path:
    """Return the folder of the shipped plans: inside the wheel, or next to it in a checkout."""
    shipped = _PACKAGE / "_plans"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "plans"


def shipped_plans() -> dict[str, str]:
    """Return name -> first line of the docstring of every shipped plan. Imports no plan."""
    plans = {}
    for path in sorted(plans_folder().glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        plans[path.stem] = docstring.split("\n")[0]
    return plans


def is_shipped(plan: Any) -> bool:
    """Return whether this is the name of a shipped plan."""
    is_name = isinstance(plan, str) and plan.isidentifier()
    return is_name and (plans_folder() / f"{plan}.py").is_file()


def plan_named(text: str) -> str:
    """Return the plan that a command names: names of shipped plans may be in upper case."""
    is_name = not is_shipped(text) and is_shipped(text.lower())
    return text.lower() if is_name else text


def is_plan_file(plan: Any) -> bool:
    """Return whether a value of the setting `plan` is the path of a plan file."""
    return isinstance(plan, str) and plan.endswith(".py")


def absolute_plan(plan: str, start: str = "") -> str:
    """Return the absolute path of a plan file, or the name of a shipped plan.

    Args:
        plan: the path or the name.
        start: the folder in which relative paths begin; "" is the current one.
    """
    return str(Path(start, expanded_path(plan)).resolve()) if is_plan_file(plan) else plan


def plan_path(plan: str) -> Path:
    """Return the file of a plan.

    Args:
        plan: name of a shipped plan, or path of a plan file.

    Raises:
        ConfigError: there is no such plan; the message suggests the nearest name.
    """
    if is_shipped(plan):
        return plans_folder() / f"{plan}.py"
    path = expanded_path(plan)
    if path.suffix == ".py" and path.is_file():
        return path.resolve()
    if path.suffix == ".py":
        raise ConfigError(f"plan: there is no file {plan!r}")
    if path.name and path.with_suffix(".py").is_file():
        raise ConfigError(f"plan: unknown plan {plan!r}. Did you mean the file '{plan}.py'?")
    if (path / "config.json").is_file():
        of_run = path / "plan.py"
        found = of_run if of_run.is_file() else path / "plan.txt"  # plan.txt: only drawn
        raise ConfigError(
            f"plan: {plan!r} is a run directory, whose plan is in {found}. To continue "
            f"the run, use `{shlex.join(['flowrl', 'resume', plan])}`"
        )
    known = sorted(shipped_plans())
    raise ConfigError(
        f"plan: unknown plan {plan!r}.{nearest(plan, known)} Shipped plans: {', '.join(known)}; "
        "or give the path of a plan file"
    )


def load_plan(plan: str, text: bytes | None = None) -> ModuleType:
    """Execute a plan file and return its module. It can import modules from its own folder.

    A file that defines an algorithm (a subclass of Algorithm with a plan or a training_step) is
    executed again only if its text changes, so that its classes keep their identity. A module that
    was passed to `plan_of_module` is returned without being executed again.

    Args:
        plan: name of a shipped plan, or path of a plan file.
        text: text of the file if it was read before, for a check.

    Raises:
        ConfigError: the file does not exist, fails, or defines neither
            `execution_plan(workers, config)` nor an algorithm.
    """
    path = plan_path(plan)
    if path.parent != plans_folder():
        _import_from(path.parent)
    if str(path) in _GIVEN_MODULES:
        return _GIVEN_MODULES[str(path)]
    text = path.read_bytes() if text is None else text
    if str(path) in _LOADED_ALGORITHMS and _LOADED_ALGORITHMS[str(path)][0] == text:
        return _LOADED_ALGORITHMS[str(path)][1]
    spec = importlib.util.spec_from_file_location(f"{PLAN_MODULE}{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        exec(
            compile(text, str(path), "exec", dont_inherit=True), vars(module)
        )  # the text that was checked
    except ConfigError as error:
        sys.modules.pop(spec.name, None)
        raise with_message(error, f"plan: {_failed_place(error, path)}: {error}") from error
    except (Exception, SystemExit) as error:
        sys.modules.pop(spec.name, None)
        place = _failed_place(error, path)
        raise ConfigError(f"plan: {place}: {type(error).__name__}: {error}") from error
    _check_defines_plan(module, str(path))
    if algorithm_in(module) is not None:
        _LOADED_ALGORITHMS[str(path)] = text, module
    return module


def _import_from(folder: Path) -> None:
    """Let a plan file import the modules of its folder, although the folder of another plan file
    may have modules of the same names."""
    if str(folder) in sys.path:
        if folder not in _PLAN_FOLDERS:
            return
        sys.path.remove(str(folder))
    others = [other for other in _PLAN_FOLDERS if other != folder and str(other) in sys.path]
    _PLAN_FOLDERS[:] = [folder, *others]
    places = [sys.path.index(str(other)) for other in others]
    sys.path.insert(min(places, default=len(sys.path)), str(folder))
    names = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    for name in names - {"flowrl"}:
        module: Any = sys.modules.get(name)
        parts = f"{name}.py", f"{name}/__init__.py", name
        of_others = {str(other / part) for other in others for part in parts}
        # a package without __init__.py has paths, but no file
        if of_others & {getattr(module, "__file__", None), *getattr(module, "__path__", ())}:
            for known in [n for n in sys.modules if n == name or n.startswith(f"{name}.")]:
                del sys.modules[known]


def _failed_place(error: BaseException, path: Path) -> str:
    """Return the plan file and the number of its last line in the traceback of an error. If the
    traceback ends in another file of the user, also return that file and line."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}, line {error.lineno}" if error.lineno else str(path)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)]
    if not own:
        return str(path)
    last = [f for f in frames if not f.filename.startswith(_LIBRARIES)][-1:] or own[-1:]
    elsewhere = f" ({last[0].filename}, line {last[0].lineno})"
    return f"{path}, line {own[-1].lineno}" + (elsewhere if last[0] not in own else "")


def _check_defines_plan(module: ModuleType, name: str) -> None:
    algorithm, has_function = algorithm_in(module), has_plan_function(module)
    method = None if algorithm is None or not has_function else _own_plan(algorithm)
    if method is not None and getattr(algorithm, method) is not module.execution_plan:
        raise ConfigError(
            f"plan: {name} defines two plans, the function execution_plan and "
            f"{algorithm.__name__}.{method}: remove one"
        )
    if algorithm is None and not has_function:
        if hasattr(module, "config"):
            raise ConfigError(
                f"plan: {name} has a `config`, but neither a function execution_plan(workers, "
                "config) nor an Algorithm: add one; settings alone train with `flowrl train "
                "--run=PPO --config='{…}'` or as a YAML file"
            )
        raise ConfigError(
            f"plan: {name} defines neither a function execution_plan(workers, config) nor an "
            "Algorithm"
        )


def _own_plan(algorithm: Any) -> str | None:
    """Return the name of the method of an algorithm that is its plan; None if it has none."""
    base: Any = getattr(sys.modules["flowrl.trainer.algorithm"], "Algorithm")  # noqa: B009
    if algorithm.execution_plan is not None:
        return "execution_plan"
    return "training_step" if algorithm.training_step is not base.training_step else None


def has_plan_function(module: ModuleType) -> bool:
    """Return whether a plan file defines the function `execution_plan`."""
    return callable(getattr(module, "execution_plan", None))


# path -> imported module
_GIVEN_MODULES: dict[str, ModuleType] = {}

# path -> (text, module) of the plan files that define an algorithm
_LOADED_ALGORITHMS: dict[str, tuple[bytes, ModuleType]] = {}


def plan_of_module(module: ModuleType) -> str:
    """Return the value of the setting `plan` for an imported plan file.

    Raises:
        ConfigError: the module has no file, or defines neither a plan nor an algorithm.
    """
    file = getattr(module, "__file__", None)
    if file is None:
        raise ConfigError(
            f"plan: the module {module.__name__} has no file: pass its execution_plan instead"
        )
    _check_defines_plan(module, file)
    path = Path(file).resolve()
    if path.parent == plans_folder():
        return path.stem
    _GIVEN_MODULES[str(path)] = module
    return str(path)


def module_with_config(is_same: Callable[[Any], bool]) -> ModuleType | None:
    """Return the imported module that has an `execution_plan` and a certain `config`, or None."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if callable(names.get("execution_plan")) and is_same(names.get("config")):
            return module
    return None


def plan_source(plan: str | Callable[..., Any]) -> str | None:
    """Return the text of a plan file, or the source of a plan's function if there is one."""
    if isinstance(plan, str):
        return plan_path(plan).read_text(encoding="utf-8")
    try:
        return textwrap.dedent(inspect.getsource(plan))
    except (OSError, TypeError):  # defined interactively, or not a function
        return None


def algorithm_in(module: ModuleType) -> Any:
    """Return the algorithm that a plan file defines, or None.

    It is the file's last subclass of Algorithm that has a plan: its own `execution_plan`, a
    `training_step`, the function `execution_plan` of the file, or the shipped plan of the algorithm
    that it derives from.
    """
    base: Any = getattr(sys.modules.get("flowrl.trainer.algorithm"), "Algorithm", None)
    if base is None:
        return None
    algorithm: Any = None
    for value in vars(module).values():
        if not (isinstance(value, type) and issubclass(value, base)):
            continue
        subclass: Any = value
        has_plan = (
            has_plan_function(module)
            or _own_plan(subclass) is not None
            or subclass.config_class.model_fields["plan"].default is not None
        )
        if has_plan and subclass.__module__ == module.__name__:
            algorithm = subclass
    return algorithm


def modules_of(plan: ModuleType) -> list[ModuleType]:
    """Return a plan's module and the loaded modules from its folder.

    Ray workers cannot import them, so they are pickled by value.
    """
    folder = Path(str(plan.__file__)).resolve().parent
    if f"{folder}{os.sep}".startswith(_LIBRARIES):  # such as a shipped plan
        return [plan]

    def is_local(name: str, module: Any) -> bool:
        file = getattr(module, "__file__", None)
        # a Path is not created for the thousands of modules of libraries
        if not isinstance(file, str) or file.startswith(_LIBRARIES):
            return False
        if not isinstance(module, ModuleType) or name.split(".")[0] in ("flowrl", "__main__"):
            return False
        is_installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
        return not is_installed and folder in Path(file).parents

    local = [module for name, module in list(sys.modules.items()) if is_local(name, module)]
    return list({id(module): module for module in (plan, *local)}.values())
