"""The algorithm that a checkpoint is of, made again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.data.checkpoint import MANIFEST, CheckpointError, read_manifest
from flowrl.policies.json_codec import config_from_json, config_to_json, import_trusted
from flowrl.settings import ConfigError
from flowrl.trainer.plan_files import PLAN_MODULE, load_plan
from flowrl.trainer.setting_aliases import our_names


def algorithm_from_checkpoint(
    cls: Any, path: Path | str, config: Mapping[str, Any] | None, trust: bool
) -> Any:
    """See Algorithm.from_checkpoint."""
    if not isinstance(config or {}, Mapping):
        raise ConfigError(f"from_checkpoint: config is a mapping of changes, got {config!r}")
    path = checkpoint_at(path)
    about, changes = read_manifest(path), our_names(dict(config or {}))
    code: bool | str = trust
    try:
        plan = changes.get("plan", about["plan"])
        in_file = plan is not None and plan.endswith(".py")
        named = about["algorithm"]
        own = f"{cls.__module__}:{cls.__qualname__}"
        if in_file and named == f"{PLAN_MODULE}{Path(plan).stem}:{cls.__qualname__}":
            # the run had loaded the file that this class is of as a plan
            code = trust or named.split(":")[0]
            sys.modules[named.split(":")[0]] = sys.modules[cls.__module__]
            named = own
        elif named == own:
            code = trust or cls.__module__
        elif in_file and trust:
            load_plan(plan)
        made = cls if named == own else import_trusted(named, trust)
        if not (isinstance(made, type) and issubclass(made, cls)):
            raise CheckpointError(f"it is of {named}, not of {own}")
        if in_file and named != own and "plan" not in changes and not trust:
            raise CheckpointError(f"its plan is the file {plan}: give trust=True to run it")
        lacking = [name for name in about["left_out"] if name not in changes]
        if lacking and plan is not None:  # the plan's own code is still there
            of_plan: Any = getattr(load_plan(plan), "config", None)
            its = [] if of_plan is None else config_to_json(of_plan)[1]
            changes = {n: of_plan[n] for n in lacking if n in its} | changes
            lacking = [name for name in lacking if name not in changes]
        if lacking:
            raise CheckpointError(
                f"it could not hold {lacking}, which must be given again: "
                f"from_checkpoint(path, config={{{lacking[0]!r}: …}})"
            )
        settings = config_from_json(about["config"], changes, code)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: it cannot be made again: {error}") from error
    algorithm = made(settings)
    try:
        algorithm.restore(path)
    except BaseException:
        algorithm.stop()
        raise
    return algorithm


def checkpoint_at(path: Path | str) -> Path | str:
    """The checkpoint that a path stands for: itself, a run directory's newest one, or that in a
    checkpoint folder of Ray Tune.

    Raises:
        CheckpointError: there is none.
    """
    folder = Path(path)
    if "://" in str(path) or (folder / MANIFEST).exists():
        return path
    inner = folder / "algorithm"
    if (inner / MANIFEST).exists():
        return inner
    there = sorted(p for p in folder.glob("checkpoints/*") if (p / MANIFEST).exists())
    if there:
        return there[-1]
    what = "it holds no checkpoint" if folder.is_dir() else "there is no such folder"
    raise CheckpointError(f"{path}: {what}")
