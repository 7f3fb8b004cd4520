"""Sphinx directives that insert code, tables and drawings of plans, generated from the code.

Each directive writes Markdown, which MyST parses as if it stood in the page, so that tables and
lists cannot go out of date.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import tables
from docutils import nodes
from docutils.parsers.rst import directives
from plan_diagram import svg
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from flowrl.settings import import_object
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.plan_files import load_plan
from flowrl.trainer.plan_settings import plan_config

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/flowrl/flowrl"


class Markdown(SphinxDirective):
    """A directive whose content is Markdown that `text` returns."""

    optional_arguments = 1
    final_argument_whitespace = True

    def text(self) -> str:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(self.text(), allow_section_headings=True)


class PlanCode(Markdown):
    """`{plan-code} NAME`: the source of a shipped plan."""

    def text(self) -> str:
        source = inspect.getsource(load_plan(self.arguments[0])).strip()
        return f"```python\n{source}\n```"


class PlanDiagram(SphinxDirective):
    """`{plan-diagram} NAME`: the drawing of a shipped plan."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        with plan_config(name).build(plan=name) as algorithm:
            drawing = svg(algorithm.plan.stats())
        html = f'<div class="plan-drawing" aria-label="the plan {name}">{drawing}</div>'
        return [nodes.raw("", html, format="html")]


class Generate(Markdown):
    """`{generate} NAME [ARGUMENT …]`: what the function of that name in `tables` returns."""

    required_arguments = 1
    option_spec = {"group": directives.unchanged}

    def text(self) -> str:
        name, *arguments = self.words()
        result: Any = getattr(tables, name)(*arguments, **self.options)
        return str(result)

    def words(self) -> list[str]:
        return " ".join(self.arguments).split()

    def run(self) -> list[nodes.Node]:
        found = super().run()
        if self.words()[0].startswith("settings"):
            common = AlgorithmConfig.model_fields if "own" in self.words() else ()
            # sections are added to the document and not returned
            index_settings(found or [self.state.document], set(common))
        return found


def index_settings(found: list[nodes.Node], declared_elsewhere: set[str]) -> None:
    """Add the settings of tables to the index, which the search of the site reads.

    Args:
        found: nodes with the tables; the first cell of a row has the name of a setting.
        declared_elsewhere: settings that the tables only repeat, which the search lists last.
    """
    for row in [row for node in found for row in node.findall(nodes.row)]:
        name = row[0].next_node(nodes.literal)
        if name is None:
            continue  # the header
        parts = name.astext().split(".")  # "lr", or "model.use_lstm"
        target = nodes.make_id(f"setting-{name.astext()}")
        row["ids"].append(target)
        main = "" if parts[0] in declared_elsewhere else "main"
        entry = ("single", parts[-1], target, main, None)
        row[0].insert(0, addnodes.index(entries=[entry]))


def source_role(
    name: str, rawtext: str, text: str, lineno: int, inliner: Any, **unused: Any
) -> tuple[list[nodes.Node], list[Any]]:
    """{source}`module:Name.attribute`: a link to the lines of the code."""
    try:
        code = inspect.unwrap(import_object(text))
    except (ImportError, AttributeError) as error:
        message = inliner.reporter.error(f"{{source}}`{text}`: {error}", line=lineno)
        return [inliner.problematic(rawtext, rawtext, message)], [message]
    file = Path(inspect.getsourcefile(code) or "").relative_to(ROOT)
    lines, first = inspect.getsourcelines(code)
    url = f"{REPOSITORY}/blob/main/{file}#L{first}-L{first + len(lines) - 1}"
    return [nodes.reference(rawtext, text.partition(":")[2], refuri=url)], []


def prepare_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Turn a docstring into reStructuredText: `*` is a character, and settings have their page."""
    for number, line in enumerate(lines):
        if line.startswith("Settings by group"):
            del lines[number:]
            break
        parts = line.split("`")  # code is in the odd parts
        parts[::2] = [part.replace("*", r"\*") for part in parts[::2]]
        lines[number] = "`".join(parts)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("plan-code", PlanCode)
    app.add_directive("plan-diagram", PlanDiagram)
    app.add_directive("generate", Generate)
    app.add_role("source", source_role)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=100)  # before napoleon
    return {"parallel_read_safe": True}
