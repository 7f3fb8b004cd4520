"""Packages import each other in one direction, without cycles; heavy imports are lazy."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flowrl"
MAY_IMPORT = {
    "iter": set(),
    "data": {"iter"},
    "replay": {"data"},
    "envs": {"data"},
    "policies": {"data"},
    "offline": {"data", "policies"},
    "sampling": {"iter", "data", "envs", "policies"},
    "learners": {"iter", "data", "policies", "sampling"},
    "ops": {"iter", "data", "replay", "offline", "sampling", "learners"},
    "monitoring": {"iter", "learners", "ops", "policies", "sampling"},
    "trainer": {"iter", "data", "envs", "monitoring", "offline", "ops", "policies", "sampling"},
    "algorithms": {
        "data",
        "envs",
        "replay",
        "offline",
        "ops",
        "learners",
        "policies",
        "sampling",
        "trainer",
    },
    "web": {"data", "monitoring", "trainer"},
    "benchmark": {"data", "trainer"},
    "cli": {"benchmark", "iter", "data", "monitoring", "ops", "policies", "trainer", "web"},
}
BASE = {
    "errors",
    "interrupts",
    "state_schema",
    "memory_limit",
    "process_usage",
    "seeding",
    "setting_aliases",
    "setting_hints",
    "setting_values",
    "settings",
    "source",
    "threads",
    "whole_files",
}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def imports_of(path):
    """Yield the flowrl modules that a file imports, also in functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flowrl"):
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_allowed_packages(package):
    files = list((PACKAGE / package).rglob("*.py"))
    assert files
    for path in files:
        packages = {name.split(".")[1] for name in imports_of(path) if "." in name}
        forbidden = packages - {package} - BASE - MAY_IMPORT[package]
        assert not forbidden, f"{path.name} imports {forbidden}"


def test_modules_have_no_import_cycles():
    graph = {name: set(imports_of(path)) - {name} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("flowrl.iter", ["torch", "ray", "numpy"]),
        ("flowrl.ops", ["torch", "ray"]),
        ("flowrl.trainer.config", ["torch", "ray"]),  # workers that act without torch load it
        ("flowrl.cli.main", ["torch", "ray"]),
        ("flowrl.algorithms.ppo", ["ray"]),
    ],
)
def test_module_does_not_import_heavy_packages(module, absent):
    code = f"import sys, {module}; print([m for m in {absent} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def test_files_and_classes_are_short():
    for path in MODULES.values():
        text = path.read_text()
        assert text.count("\n") <= 600, path
        if path.parent.name in ("sampling", "envs"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    assert node.end_lineno - node.lineno < 400, f"{path}: {node.name}"
