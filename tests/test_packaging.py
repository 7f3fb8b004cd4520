"""Dependencies, extras, install commands and metadata agree with each other and with the code."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import flowrl
from flowrl.errors import DISTRIBUTION
from flowrl.trainer.loggers import LoggerName
from tests.extras import MODULES

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile"]
SOURCES = [*ROOT.glob("flowrl/**/*.py"), *ROOT.glob("plans/*.py")]

# distributions whose module has another name
DISTRIBUTION_OF = {
    "cv2": "opencv-python-headless", "yaml": "pyyaml", "mlflow": "mlflow-skinny"
}  # fmt: skip

NOT_IMPORTED = {
    "alembic": "mlflow creates its local database with it",
    "furo": "the theme of the documentation",
    "hypothesis": "the tests import it",
    "mpe2": "users pass its environments",
    "mypy": "a command",
    "myst-parser": "reads the documentation's Markdown",
    "onnx": "torch.onnx imports it",
    "onnxruntime": "runs exported programs, in the tests",
    "onnxscript": "torch.onnx imports it",
    "opencv-python-headless": "gymnasium resizes the frames of Atari with it",
    "optuna": "ray.tune.search.optuna imports it",
    "pettingzoo": "users pass its environments",
    "pygame": "environments of gymnasium and PettingZoo render with it",
    "scipy": "the tests compare statistics with it",
    "tensorboard": "a program that `flowrl tensorboard` runs",
    "pytest": "the tests import it",
    "pytest-timeout": "a plugin of pytest",
    "pytest-xdist": "a plugin of pytest",
    "ruff": "a command",
    "selenium": "the tests of the web page import it",
    "sphinx": "builds the documentation",
    "sphinx-copybutton": "a plugin of the documentation",
    "sqlalchemy": "mlflow stores runs in a local database with it",
    "sybil": "runs the code of the documentation",
}


def parse(requirements: list[str]) -> dict[str, Requirement]:
    """Return canonical name -> requirement."""
    parsed = map(Requirement, requirements)
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


BASE = parse(PROJECT["dependencies"])
EXTRAS = {extra: parse(names) for extra, names in PROJECT["optional-dependencies"].items()}
DECLARED = {**BASE, **{name: r for names in EXTRAS.values() for name, r in names.items()}}
DECLARED.pop(DISTRIBUTION)  # extras that consist of other extras


class Import(NamedTuple):
    place: str
    module: str
    distribution: str
    at_import: bool
    """Whether importing the file imports the module: the statement is not in a function."""


def imports_of(path: Path) -> Iterator[Import]:
    """Yield the third-party modules that a file imports."""
    tree = ast.parse(path.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lazy = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            top = module.split(".")[0]
            if top not in sys.stdlib_module_names and top not in ("flowrl", "tests"):
                distribution = canonicalize_name(DISTRIBUTION_OF.get(top, top))
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield Import(place, module, distribution, id(node) not in lazy)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    """Return the imports of all files."""
    # sb3_script.py runs in a virtual environment of its own
    files = [path for path in SOURCES if path.name != "sb3_script.py"]
    return [found for path in files for found in imports_of(path)]


def test_imported_packages_are_declared(imports):
    assert {found for found in imports if found.distribution not in DECLARED} == set()


def test_base_package_imports_only_base_dependencies(imports):
    at_import = {found for found in imports if found.at_import}
    assert {found for found in at_import if found.distribution not in BASE} == set()
    tune = {found.place.split(":")[0] for found in at_import if found.module.startswith("ray.tune")}
    assert tune == {"flowrl/tune.py"}  # ray.tune needs the extra `tune`


def test_declared_dependencies_are_imported_or_needed_for_a_reason(imports):
    imported = {found.distribution for found in imports}
    assert set(DECLARED) - imported == set(NOT_IMPORTED)


def test_all_contains_every_feature():
    (everything,) = EXTRAS["all"].values()
    assert everything.name == PROJECT["name"] == DISTRIBUTION
    assert everything.extras == set(EXTRAS) - {"all", "dev", "docs"} == set(MODULES)


def test_declared_dependencies_have_tested_versions():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(name): version for name, version in (x.split("==") for x in lines)}
    for name, requirement in DECLARED.items():
        assert requirement.specifier.contains(pins[name]), requirement


# -- install commands ------------------------------------------------------------------------------


def test_code_has_install_commands_in_one_place():
    files = [path for path in SOURCES if "pip install" in path.read_text()]
    assert files == [ROOT / "flowrl/errors.py"]


def test_install_commands_in_documents_name_the_distribution_and_its_extras():
    commands = [
        command
        for path in DOCUMENTS
        for command in re.findall(r"pip install ([^`\n#&|)]+)", path.read_text())
    ]
    assert len(commands) > 3
    for command in commands:
        assert set(re.findall(r"\bflowrl[\w-]*", command)) <= {DISTRIBUTION}, command
        for name, extras in re.findall(r"([\w.-]*)\[([\w,]+)\]", command):
            assert name in (DISTRIBUTION, "."), command
            assert set(extras.split(",")) <= set(EXTRAS), command


def test_named_extras_exist():
    named = {
        extra
        for path in [*DOCUMENTS, *SOURCES]
        for extra in re.findall(r"\bextra\s+`(\w+)`", path.read_text())
    }
    assert {"video", "minari"} <= named <= set(EXTRAS)


def test_errors_name_the_extra_that_has_the_package():
    checked = []
    for path in SOURCES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "check_installed(" in text else ():
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "check_installed":
                continue
            extra = {keyword.arg: keyword.value for keyword in node.keywords}["extra"]
            if isinstance(extra, ast.Constant):
                checked.append((node.args[0].value, extra.value))
            else:  # a logger and its extra have the same name
                checked += [(name, name) for name in get_args(LoggerName)]
    assert len(checked) > 7
    for module, extra in checked:
        assert canonicalize_name(DISTRIBUTION_OF.get(module, module)) in EXTRAS[extra]


@pytest.mark.slow
def test_training_imports_no_optional_package(tmp_path):
    optional = sorted({"ray.tune", *(name for names in MODULES.values() for name in names)})
    code = f"""
import sys
import flowrl
from flowrl.algorithms.ppo import PPOConfig
from flowrl.cli.main import main

with PPOConfig(env="CartPole-v1", train_batch_size=200).build() as algorithm:
    algorithm.train()
assert main(["train", "ppo", "--stop-iters", "1"]) == 0
print([name for name in {optional} if name in sys.modules])
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert process.stdout.splitlines()[-1] == "[]"


# -- make ------------------------------------------------------------------------------------------


def planned_commands(*targets):
    """Return the commands that make would run in a new checkout."""
    process = subprocess.run(
        ["make", "--dry-run", "--always-make", *targets],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in process.stdout.splitlines() if not line.startswith("echo")]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_installs_what_a_target_needs():
    train = [command for command in planned_commands("train") if "pip install" in command]
    assert [command.split()[-1] for command in train] == ["torch", "."]
    for target in ("test", "slow", "lint", "docs", "docs-test", "bench"):
        commands = [command for command in planned_commands(target) if "pip install" in command]
        assert commands[:2] == train
        assert [command.split()[-1] for command in commands[2:]] == ["'.[all,dev,docs]'"]


# -- metadata --------------------------------------------------------------------------------------


def test_project_addresses_are_in_one_repository():
    urls = PROJECT["urls"]
    assert set(urls) == {"Homepage", "Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(urls["Source"]) for url in urls.values())


def test_version_is_declared_once():
    assert PROJECT["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "flowrl/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", flowrl.__version__)
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_citation_has_the_required_fields():
    """The Citation File Format 1.2.0 requires these fields; the values agree with pyproject."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["type"] == "software"
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Source"]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]
    for work in (citation, *citation["references"]):
        assert work["title"]
        assert all({"name", "family-names"} & set(author) for author in work["authors"])
    (paper,) = citation["references"]
    assert paper["type"] == "conference-paper"
    assert paper["identifiers"][0]["value"] == "arXiv:2011.12719"


def test_extras_are_in_the_reference():
    page = (ROOT / "docs/reference/extras.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(EXTRAS) - {"dev", "docs"}
