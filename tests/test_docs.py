"""The documentation names every public name, plan, command and error; README's table is generated.

`make docs-test` runs the code of all pages, `make docs` checks their links.
"""

import inspect
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import flowrl
import flowrl.iter
import flowrl.ops
from flowrl.cli import main as cli
from flowrl.trainer.metric_reference import METRICS
from flowrl.trainer.plan_files import shipped_plans

from .extras import require_extra

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.fixture(scope="module")
def tables():
    sys.path.insert(0, str(DOCS))
    import tables

    yield tables
    sys.path.remove(str(DOCS))


def text(name):
    return (DOCS / name).read_text()


def test_every_public_name_is_in_the_reference(tables):
    api = text("reference/api.md")
    configs_and_algorithms = tables.algorithm_names()
    for name in flowrl.__all__:
        known = name in configs_and_algorithms or name in ("ConfigError", "__version__")
        assert known or re.search(rf"\bflowrl\.(\w+\.)?{name}\b", api), name
    iterators = text("reference/iterators.md")
    for name in flowrl.iter.__all__:
        public = inspect.isclass(getattr(flowrl.iter, name)) or name.startswith("from_")
        assert not public or f"flowrl.iter.{name}\n" in iterators, name


def test_settings_of_tables_are_in_the_index_of_the_search(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(DOCS)
    from docutils import nodes
    from generated import index_settings

    rows = [
        nodes.row("", nodes.entry("", nodes.paragraph("", "", nodes.literal("", name))))
        for name in ("training_intensity", "lr", "model.use_lstm")
    ]
    index_settings([nodes.tgroup("", *rows)], declared_elsewhere={"lr", "model"})
    entries = [row[0][0]["entries"][0] for row in rows]
    assert [entry[1:4] for entry in entries] == [
        ("training_intensity", "setting-training-intensity", "main"),
        ("lr", "setting-lr", ""),
        ("use_lstm", "setting-model-use-lstm", ""),
    ]
    assert [row["ids"] for row in rows] == [[entry[2]] for entry in entries]


def test_every_operator_is_in_the_table_and_documented(tables):
    public = {n for n in flowrl.ops.__all__ if not n.startswith("_") and n != "ResultDict"}
    details = set(re.findall(r"flowrl\.ops\.(\w+)", tables.operator_details()))
    assert details == public
    rows = set(re.findall(r"^\| \[`(\w+)`\]", tables.operators(), re.MULTILINE))
    classes = {name for name in public if inspect.isclass(getattr(flowrl.ops, name))}
    assert rows == {*classes, "ParallelRollouts"}


def test_every_operator_that_is_chained_states_its_items(tables):
    for row in tables.operators().splitlines()[2:]:
        name, chained, items, meaning = (cell.strip() for cell in row.strip("|").split(" | "))
        assert meaning, name
        assert chained.startswith("(") or bool(chained) == bool(items), name


def test_every_setting_has_a_meaning_in_the_reference(tables):
    page = tables.settings_by_group()
    for info in flowrl.AlgorithmConfig.describe():
        assert f"| `{info.name}" in page, info.name
    without = [row for row in page.splitlines() if row.startswith("| `") and row.endswith("|  |")]
    assert without == []


def test_every_algorithm_has_a_page_and_a_row(tables):
    table = tables.algorithms()
    for plan in shipped_plans():
        page = text(f"algorithms/{tables.page_of(plan)}.md")
        assert f"{{plan-code}} {plan}\n" in page or f"`{plan}`" in page, plan
        assert plan in ("ppo_dqn", "three_way") or f"[`{plan}`]" in table


def test_scores_of_pages_are_those_of_the_files(tables, monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import scores

    assert set(scores.LIMITS) <= set(shipped_plans())
    pages = "".join(page.read_text() for page in (DOCS / "algorithms").glob("*.md"))
    shown = re.findall(r"{generate} scores (\w+)", pages)
    assert sorted(shown) == sorted(scores.LIMITS)
    for plan in shown:
        runs = json.loads((scores.FOLDER / f"{plan}.json").read_text())
        assert [run["seed"] for run in runs] == list(scores.SEEDS)
        for run in runs:
            assert run["reached"] in tables.scores(plan)


def test_every_command_is_in_the_reference(tables):
    page = tables.commands()
    for command in cli._COMMANDS:
        assert f"## flowrl {command}" in page or command == "version", command


def test_every_error_is_in_the_reference(tables):
    defined = {
        name
        for path in ROOT.glob("flowrl/**/*.py")
        for name in re.findall(r"^class ([A-Z]\w*Error)\(", path.read_text(), re.MULTILINE)
    }
    assert defined == set(re.findall(r"^\| `(\w+)`", tables.errors(), re.MULTILINE))


def test_every_metric_is_in_the_reference(tables):
    page = tables.metrics()
    assert [name for name in METRICS if f"| `{name}` |" not in page] == []


def pages_in_order(page=DOCS / "index.md"):
    """Yield the pages of the site in the order of its tables of contents."""
    yield page
    tree = re.search(r"```{toctree}\n(?::.*\n)*\n(.*?)```", page.read_text(), re.DOTALL)
    for entry in tree[1].split() if tree else ():
        yield from pages_in_order(page.parent / f"{entry}.md")


def test_every_page_links_to_the_next_one():
    pages = list(pages_in_order())
    assert sorted(pages) == PAGES
    links = {
        page: re.findall(r"^Next: \[.*?\]\((.*?)\)", page.read_text(), re.MULTILINE)
        for page in pages[1:-1]
    }
    targets = [(page.parent / links[page][0]).resolve() for page in links if links[page]]
    assert targets == pages[2:]


def test_pages_load_nothing_from_other_hosts():
    for page in PAGES:
        assert not re.search(r"!\[[^\]]*\]\(https?:", page.read_text()), page


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_algorithm_of_the_tutorial_learns(tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    code = (
        text("tutorials/own_algorithm.md").split("```python\n# reinforce.py\n")[1].split("```")[0]
    )
    (tmp_path / "reinforce.py").write_text(code)
    flags = ["--stop-reward", "400", "--stop-timesteps", "250000", "--seed", seed]
    assert cli.main(["train", "reinforce.py", "--run-dir", "r", *flags]) == 0
    last = json.loads((tmp_path / "r/result.json").read_text().splitlines()[-1])
    assert last["episode_reward_mean"] >= 400


@pytest.mark.slow
def test_half_cheetah_command_trains(tmp_path, monkeypatch):
    """Run the command with fewer steps before learning starts."""
    require_extra("mujoco")
    monkeypatch.chdir(tmp_path)
    page = text("algorithms/sac.md")
    command = re.search(r"^flowrl (train sac --env HalfCheetah-v5.*)$", page, re.MULTILINE)
    flags = [*shlex.split(command[1]), "--learning-starts", "200", "--stop-timesteps", "400"]
    flags += ["--min-sample-timesteps-per-iteration", "200", "--run-dir", "r"]
    assert cli.main(flags) == 0
    last = json.loads((tmp_path / "r/result.json").read_text().splitlines()[-1])
    assert last["num_env_steps_trained"] > 0


def defaults_of_page(page):
    """Yield (algorithm, setting, value) of the tables of defaults on a page about another
    library."""
    for line in text(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`([a-z_]+)`", cells[-3]) if len(cells) >= 3 else []
        value = cells[-1].replace(",", "")
        if names and re.fullmatch(r"[0-9.e-]+|None|True|False", value):
            algorithms = cells[0].split(", ") if len(cells) == 4 else ["PPO"]
            for algorithm in algorithms:
                yield algorithm, names[-1], value


def test_defaults_on_pages_about_other_libraries_are_those_of_the_code():
    rows = [row for name in ("rllib", "sb3") for row in defaults_of_page(f"how_to/from_{name}.md")]
    assert len(rows) > 25
    for algorithm, name, value in rows:
        config = getattr(flowrl, f"{algorithm}Config")()
        default = config[name] if name in config else config.model[name]
        if name == "exploration_config":
            default = default.scale
        expected = {"None": None, "True": True, "False": False}
        on_page = expected[value] if value in expected else float(value)
        assert default == on_page, (algorithm, name)
