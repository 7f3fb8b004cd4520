"""The imports in docs/reference/compatibility.md."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/reference/compatibility.md").read_text()
IMPORTS = re.findall(r"\| `((?:from flowrl|import gymnasium)[^`]*)` \|", PAGE)


@pytest.mark.parametrize("statement", IMPORTS)
def test_documented_import(statement):
    exec(statement, {})


def test_every_row_of_the_first_table_is_an_import():
    table = PAGE.split("## Imports")[1].split("##")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(IMPORTS) == len(rows) - 1  # the last row is a command
