"""Print the errors of a run, and the name of the program."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
from pathlib import Path

import flowrl
from flowrl.errors import ConfigError, OfflineDataError

# files whose frames are not shown
_HIDDEN = (f"{Path(flowrl.__file__).parent}{os.sep}", contextlib.__file__, "<frozen importlib")


def program_name() -> str:
    """Return how the user calls flowrl: by name if it is on the PATH, else by its path."""
    script, on_path = Path(sys.argv[0]), shutil.which("flowrl")
    if script.name != "flowrl" or (on_path and Path(on_path).resolve() == script.resolve()):
        return "flowrl"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)


def printable(text: object) -> str:
    """Return text from a file with control characters escaped: a terminal would execute them."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(text))


def print_failure(error: BaseException) -> None:
    """Print an error with the user's part of its traceback, if there is one, and its notes.

    Errors of settings and of recorded experience are printed without a traceback.
    """
    if isinstance(error, ConfigError | OfflineDataError):
        from flowrl.iter.recovery import REMOTE_TRACEBACK

        print(f"flowrl: {printable(error)}", file=sys.stderr)
        for note in getattr(error, "__notes__", []):
            if not note.startswith(REMOTE_TRACEBACK):
                print(textwrap.indent(printable(note), "  "), file=sys.stderr)
        return
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    shown = [f for f in frames if not f.filename.startswith(_HIDDEN)]
    if shown:
        print("Traceback (without flowrl's frames):", file=sys.stderr)
        print("".join(traceback.format_list(shown)), end="", file=sys.stderr)
    print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
