"""Run the code of README.md and of the documentation: `pytest docs README.md`.

- ```python blocks run in order, in one namespace per page. A block whose first line is a comment
  with a file name (`# my_plan.py`) is written to that file instead.
- ```bash blocks: each line is a `flowrl …` command or `python FILE`, which is run.
- ```output blocks must equal what the last block printed; `...` matches anything.
- ```console blocks are only shown: installation, and what needs several machines or a browser.

A page runs in an empty folder of its own.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import runpy
import shlex
import sys
import tempfile
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.parsers.myst import CodeBlockParser

_EXIT_CODE = re.compile(r"# exit code (\d+)$")  # of a command that fails
_FILE_NAME = re.compile(r"# ([\w/]+\.(?:py|yaml|md))\n")
_SHOWN_ONLY = {"pip", "make", "git", "cd", "source", "ray", "docker"}


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run folders of tests in three processes, of which one often waits for Ray on two cores; slow
    tests, which use whole cores, in two; single files in one."""
    paths = [argument.split("::")[0] for argument in config.args]
    if any(os.path.isdir(path) or path.endswith(".md") for path in paths):
        return 2 if config.option.markexpr in ("slow", "seeds") else 3
    config.option.dist = "no"
    return 0


def _run_python(example: Example) -> str | None:
    name = _FILE_NAME.match(example.parsed)
    if name is not None:
        with open(name[1], "w") as file:
            file.write(example.parsed)
        return None
    # the line numbers of tracebacks are those of the page
    code = compile("\n" * (example.line + example.parsed.line_offset) + example.parsed,
                   example.path, "exec")  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code, example.namespace)
    example.namespace["_output"] = output.getvalue()
    return None


def _run_commands(example: Example) -> str | None:
    from flowrl.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as output:
        for line in example.parsed.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if not words:
                continue
            if words[0] == "flowrl":
                code, expected = main(words[1:]), _EXIT_CODE.search(line)
                wanted = 0 if expected is None else int(expected[1])
                assert code == wanted, f"exit code {code}: {line}\n{output.getvalue()}"
            elif words[0] == "python" and len(words) == 2:
                runpy.run_path(words[1], run_name="__main__")
            else:
                raise AssertionError(f"cannot run {line!r}: use ```console for what is only shown")
    example.namespace["_output"] = output.getvalue()
    return None


def _check_output(example: Example) -> str | None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    actual = example.namespace.get("_output", "")
    if doctest.OutputChecker().check_output(example.parsed, actual, options):
        return None
    return f"expected:\n{example.parsed}\nprinted:\n{actual}"


def _check_shown(example: Example) -> str | None:
    for line in example.parsed.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        takes_long = words[:2] in (["flowrl", "watch"], ["flowrl", "benchmark"])
        needs_terminal = words[:2] == ["flowrl", "replay"] and "--until" in words
        is_shown = not words or takes_long or needs_terminal or words[0] in _SHOWN_ONLY
        assert is_shown, f"```console shows {line!r}: use ```bash"
    return None


def _enter_folder(namespace: dict[str, Any]) -> None:
    folder = tempfile.TemporaryDirectory()
    namespace.update(__name__="__main__", _folder=folder, _start=os.getcwd(), _path=sys.path[:])
    namespace["_modules"] = set(sys.modules)
    os.chdir(folder.name)
    sys.path.insert(0, folder.name)


def _leave_folder(namespace: dict[str, Any]) -> None:
    os.chdir(namespace["_start"])
    sys.path[:] = namespace["_path"]
    folder = namespace["_folder"].name
    for name in set(sys.modules) - namespace["_modules"]:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]  # other pages have files of the same name
    if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        ray.shutdown()
    namespace["_folder"].cleanup()


pytest_collect_file = Sybil(
    parsers=[
        CodeBlockParser(language="python", evaluator=_run_python),
        CodeBlockParser(language="bash", evaluator=_run_commands),
        CodeBlockParser(language="output", evaluator=_check_output),
        CodeBlockParser(language="console", evaluator=_check_shown),
    ],
    patterns=["docs/**/*.md", "docs/*.md", "README.md"],
    setup=_enter_folder,
    teardown=_leave_folder,
).pytest()
