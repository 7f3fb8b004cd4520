"""Rebuild an algorithm from its checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.data.checkpoint import MANIFEST, CheckpointError, read_manifest
from flowrl.policies.json_codec import config_from_json, config_to_json, import_trusted
from flowrl.setting_aliases import canonical_names
from flowrl.settings import ConfigError
from flowrl.trainer.plan_files import PLAN_MODULE, load_plan

CHECKPOINTS = "checkpoints"
"""Folder of a run directory; each checkpoint in it is named by the number of its iteration."""


def algorithm_from_checkpoint(
    cls: Any, path: Path | str, config: Mapping[str, Any] | None, trust: bool
) -> Any:
    """Implement `Algorithm.from_checkpoint`; `cls` is the class that it is called on."""
    if not isinstance(config or {}, Mapping):
        raise ConfigError(f"from_checkpoint: config must be a mapping of changes, got {config!r}")
    path = resolve_checkpoint(path)
    manifest, changes = read_manifest(path), canonical_names(dict(config or {}))
    trusted_code: bool | str = trust
    try:
        plan = changes.get("plan", manifest["plan"])
        is_plan_file = plan is not None and plan.endswith(".py")
        saved_class = manifest["algorithm"]
        own_class = f"{cls.__module__}:{cls.__qualname__}"
        if is_plan_file and saved_class == f"{PLAN_MODULE}{Path(plan).stem}:{cls.__qualname__}":
            # the plan file that the run executed is a module that the caller has imported
            plan_module = saved_class.split(":")[0]
            trusted_code = trust or plan_module
            sys.modules[plan_module] = sys.modules[cls.__module__]
            saved_class = own_class
        elif saved_class == own_class:
            trusted_code = trust or cls.__module__
        elif is_plan_file and trust:
            load_plan(plan)
        algorithm_class = cls if saved_class == own_class else import_trusted(saved_class, trust)
        if not (isinstance(algorithm_class, type) and issubclass(algorithm_class, cls)):
            raise CheckpointError(f"it belongs to {saved_class}, not to {own_class}")
        if is_plan_file and saved_class != own_class and "plan" not in changes and not trust:
            raise CheckpointError(f"its plan is the file {plan}: pass trust=True to execute it")
        missing = [name for name in manifest["left_out"] if name not in changes]
        if missing and plan is not None:  # take the code from the plan's own config
            plan_config: Any = getattr(load_plan(plan), "config", None)
            plan_code = [] if plan_config is None else config_to_json(plan_config)[1]
            changes = {n: plan_config[n] for n in missing if n in plan_code} | changes
            missing = [name for name in missing if name not in changes]
        if missing:
            raise CheckpointError(
                f"it does not contain the settings {missing}; pass them again: "
                f"from_checkpoint(path, config={{{missing[0]!r}: …}})"
            )
        settings = config_from_json(manifest["config"], changes, trusted_code)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot rebuild the algorithm: {error}") from error
    algorithm = algorithm_class(settings)
    try:
        algorithm.restore(path)
    except BaseException:
        algorithm.stop()
        raise
    return algorithm


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run directory, oldest first."""
    folder = run_dir / CHECKPOINTS
    paths = [path for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
    complete = [path for path in paths if (path / MANIFEST).exists()]
    return sorted(complete, key=lambda path: int(path.name))


def resolve_checkpoint(path: Path | str) -> Path | str:
    """Return the checkpoint at or inside a path.

    Args:
        path: a checkpoint, a run directory (its newest checkpoint), a checkpoint folder of Ray
            Tune, or a URI.

    Raises:
        CheckpointError: the folder contains no checkpoint.
    """
    folder = Path(path)
    if "://" in str(path) or (folder / MANIFEST).exists():
        return path
    in_tune_folder = folder / "algorithm"
    if (in_tune_folder / MANIFEST).exists():
        return in_tune_folder
    run_checkpoints = list_checkpoints(folder)
    if run_checkpoints:
        return run_checkpoints[-1]
    problem = "it contains no checkpoint" if folder.is_dir() else "there is no such folder"
    raise CheckpointError(f"{path}: {problem}")
