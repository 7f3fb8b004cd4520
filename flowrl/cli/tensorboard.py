"""`flowrl tensorboard [FOLDER]`: show the curves of runs in TensorBoard."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

from flowrl.cli.arguments import Parser, file_path
from flowrl.errors import ConfigError, check_installed
from flowrl.trainer.runs.signal_handler import TERMINATED


def tensorboard_command(arguments: list[str]) -> int:
    """Run the command until it is interrupted; return TensorBoard's exit code.

    Raises:
        ConfigError: the extra is not installed, or there is no such folder.
    """
    parser = Parser(
        prog="flowrl tensorboard",
        description="Show the curves of runs in TensorBoard. Other options are TensorBoard's.",
    )
    parser.add_argument(
        "folder",
        type=file_path,
        nargs="?",
        default=Path("runs"),
        help="run directories (default: runs)",
    )
    # the folder comes first, so that values of TensorBoard's options are not taken for it
    has_folder = bool(arguments) and not arguments[0].startswith("-")
    options = parser.parse_args(arguments[:1] if has_folder else [])
    rest = arguments[int(has_folder) :]
    if rest[:1] in (["-h"], ["--help"]):
        parser.print_help()
        return 0
    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder}: there is no such folder")
    check_installed("tensorboard", "flowrl tensorboard", extra="tensorboard")
    # -P: the current folder must not take the place of the package
    program = [sys.executable, "-P", "-m", "tensorboard.main"]
    command = [*program, "--logdir", str(options.folder), *rest]
    process = None
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        process = subprocess.Popen(command)
        code = process.wait()
        return code if code >= 0 else 128 - code  # ended by a signal
    finally:
        if process is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        signal.signal(signal.SIGTERM, handler)
