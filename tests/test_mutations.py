"""The list of mutations fits the code; `python tests/mutations.py` runs them."""

import pytest

from tests.mutations import MUTATIONS, ROOT, TESTS, mutated


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_changes_one_line_that_has_tests(mutation):
    original = (ROOT / "flowrl" / mutation.path).read_text().splitlines()
    changed = mutated(mutation).splitlines()
    assert sum(a != b for a, b in zip(original, changed, strict=True)) == 1
    assert all((ROOT / "tests" / name).exists() for name in TESTS[mutation.path])
