"""How to continue a run, in Python and with a command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from flowrl.data.checkpoint import CheckpointError, read_manifest
from flowrl.errors import ConfigError
from flowrl.policies.code_references import UntrustedCodeError
from flowrl.settings import import_object
from flowrl.trainer.checkpoint_loading import BASE_ALGORITHM, settings_of_checkpoint
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
    needs_trust = _needs_trust(cls, checkpoint)
    changes = [f"{name!r}: …" for name in code if name != "algorithm"]
    shown = format_path(run_dir)
    arguments = [repr(shown)]
    if changes:
        arguments.append(f"config={{{', '.join(changes)}}}")
    elif needs_trust:
        arguments.append("trust=True")
    ways = [f"{cls.__name__}.from_checkpoint({', '.join(arguments)}).learn(…)"]
    if not code:
        stop = " --stop-timesteps …" if needs_limit else ""
        ways.append(f"{program} resume {shlex.quote(shown)}{trust_flag(checkpoint)}{stop}")
    return ways


def trust_flag(checkpoint: Path) -> str:
    """Return the flag that commands need to load a checkpoint; "" if they need none."""
    return " --trust" if _needs_trust(import_object(BASE_ALGORITHM), checkpoint) else ""


def _needs_trust(cls: Any, checkpoint: Path) -> bool:
    """Return whether loading a checkpoint by its class needs trust=True."""
    try:
        settings_of_checkpoint(cls, checkpoint, None, trust=False)
    except UntrustedCodeError:
        return True
    except (CheckpointError, ConfigError):
        return False
    return False
