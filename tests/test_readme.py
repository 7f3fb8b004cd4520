"""README.md is short and true: its table, folders, links and figures follow from the repository.

`make docs-test` runs its code.
"""

import re
import sys
from pathlib import Path

import pytest

from flowrl.trainer.plan_files import shipped_plans

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]}


def test_readme_is_short():
    assert len(README.splitlines()) <= 250


def test_table_of_algorithms_is_the_generated_one(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import tables

    assert tables.algorithms("docs/algorithms/{}.md") in README
    sys.modules.pop("tables")


def test_table_of_scores_is_the_generated_one(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import tables

    assert tables.benchmark_scores() in README
    sys.modules.pop("tables")


def test_number_of_plans():
    assert f"{len(shipped_plans())} plans are shipped" in README


def test_two_algorithms_is_the_shipped_plan():
    shipped = (ROOT / "plans/ppo_dqn.py").read_text()
    shown = README.split("flowrl copy ppo_dqn two_algorithms.py\n")[1].split("```")[0]
    assert shown.strip() in shipped


def test_table_of_folders_is_complete():
    listed = re.findall(r"^\| `([\w/]+)` \|", README.split("## Folders")[1], re.MULTILINE)
    packages = {f"flowrl/{path.parent.name}" for path in ROOT.glob("flowrl/*/__init__.py")}
    assert {name for name in listed if name.startswith("flowrl/")} == packages
    assert all((ROOT / name).is_dir() for name in listed)


def test_links_of_readme_exist():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert len(targets) > 20
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_quoted_ratios_are_those_of_the_pages():
    pages = "".join(text for path, text in PAGES.items() if path.name != "README.md")
    pages += "".join(path.read_text() for path in ROOT.glob("benchmarks/results/*.md"))
    row = r"^\| .* \| ([\d.]+) \| ([\d.]+) \| `(benchmarks/\w+\.py)` \|$"
    rows = re.findall(row, README, re.MULTILINE)
    assert len(rows) == 10
    for *ratios, script in rows:
        assert (ROOT / script).is_file()
        for ratio in ratios:
            assert re.search(rf"\b{re.escape(ratio)}\b", pages), (ratio, script)


def test_make_bench_runs_every_quoted_script():
    quoted = set(re.findall(r"benchmarks/(\w+)\.py", "".join(PAGES.values())))
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    assert set(re.search(r"BENCHMARKS := (.*)", makefile)[1].split()) == quoted
    assert quoted == {path.stem for path in ROOT.glob("benchmarks/*.py")} - {"peer_env", "figures"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_of_pages_are_run_or_only_shown(path):
    """A language that conftest.py does not know would not be run; `py` is other libraries' code."""
    languages = set(re.findall(r"^```(\w+)$", PAGES[path], re.MULTILINE))
    languages -= {"py"} if path.name.startswith("from_") else set()
    assert languages <= {"python", "bash", "output", "console", "text", "yaml", "toml", "json"}
