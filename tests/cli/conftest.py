"""Fixtures: every test of the command line runs in an empty folder."""

import sys

import pytest

from flowrl.cli.main import main


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # `flowrl train` adds the current folder


@pytest.fixture
def cli(capsys):
    """Run a command; return its exit code, standard output and standard error."""

    def run(*arguments):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code or 0
        output = capsys.readouterr()
        return code, output.out, output.err

    return run
