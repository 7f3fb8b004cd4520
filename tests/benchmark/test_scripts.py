"""The scripts in benchmarks/ use names that exist; the scripts themselves run for minutes."""

import ast
import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_names_that_a_script_imports_from_flowrl_exist(path):
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if is_of_flowrl(node)]
    names = [(node.module, alias.name) for node in imports for alias in node.names]
    assert [name for name in names if not exists(*name)] == []


def is_of_flowrl(node):
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "flowrl"


def exists(module, name):
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    return hasattr(found, name)
