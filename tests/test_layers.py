"""Who may import whom, read from the source by ast."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flowrl"
MAY_IMPORT = {
    "iter": set(),
    "data": set(),
    "policies": {"data"},
    "sampling": {"iter", "data", "policies"},
    "ops": {"iter", "data"},
    "algorithms": {"iter", "data", "policies", "sampling", "ops"},
}


def imported_rooms(path):
    """Rooms that a file imports at run time."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flowrl."):
            yield node.module.split(".")[1]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room):
    files = list((PACKAGE / room).rglob("*.py"))
    assert files
    for path in files:
        foreign = set(imported_rooms(path)) - {room, "seeding"} - MAY_IMPORT[room]
        assert not foreign, f"{path.name} imports {foreign}"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("flowrl.iter", ["torch", "ray", "numpy"]),
        ("flowrl.ops", ["torch", "ray"]),
        ("flowrl.cli", ["torch", "ray"]),
        ("flowrl.algorithms.ppo", ["ray"]),
    ],
)
def test_imports_stay_light(module, absent):
    code = f"import sys, {module}; print([m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
