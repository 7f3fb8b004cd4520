"""How to continue a run, in Python and with a command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from flowrl.data.checkpoint import read_manifest
from flowrl.trainer.checkpoint_loading import needs_trust
from flowrl.trainer.runs.formatting import format_path
from flowrl.trainer.runs.saved_run import own_code


def ways_to_continue(
    algorithm: Any, run_dir: Path, checkpoint: Path, program: str, needs_limit: bool
) -> list[str]:
    """Return the Python expression that continues a run, and the command if there is one.

    Args:
        algorithm: the algorithm.
        run_dir: its run directory.
        checkpoint: the newest checkpoint in it.
        program: how the user calls flowrl.
        needs_limit: whether it ends at once without a larger limit.
    """
    cls, code = type(algorithm), own_code(read_manifest(checkpoint))
    changes = [f"{name!r}: …" for name in code if name != "algorithm"]
    shown = format_path(run_dir)
    arguments = [repr(shown)]
    if changes:
        arguments.append(f"config={{{', '.join(changes)}}}")
    elif needs_trust(checkpoint, cls=cls):
        arguments.append("trust=True")
    ways = [f"{cls.__name__}.from_checkpoint({', '.join(arguments)}).learn(…)"]
    if not code:
        stop = " --stop-timesteps …" if needs_limit else ""
        ways.append(f"{program} resume {shlex.quote(shown)}{trust_flag(checkpoint)}{stop}")
    return ways


def trust_flag(checkpoint: Path) -> str:
    """Return the flag that commands need to load a checkpoint; "" if they need none."""
    return " --trust" if needs_trust(checkpoint) else ""
