"""tests/fault_cases.py names tests that exist."""

import ast
from pathlib import Path

import pytest

from tests.fault_cases import FAULTS

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.fault)
def test_tests_of_faults_exist(case):
    assert case.tests
    for test in case.tests:
        file, name = test.split("::")
        tree = ast.parse((TESTS / file).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
