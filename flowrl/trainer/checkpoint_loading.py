"""Rebuild an algorithm from its checkpoint."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrl.data.checkpoint import (
    DAMAGED,
    CheckpointError,
    read_manifest,
    resolve_checkpoint,
    run_dir_of,
)
from flowrl.errors import ConfigError
from flowrl.policies.code_references import (
    PLAN_MODULE,
    CodeResolver,
    UntrustedCodeError,
    code_path,
)
from flowrl.policies.json_codec import (
    config_from_json,
    decode_setting,
    is_given,
    missing_settings_error,
)
from flowrl.policies.policy_spec import changes_specs
from flowrl.setting_aliases import canonical_names
from flowrl.settings import import_object
from flowrl.trainer.plan_files import (
    absolute_plan,
    is_plan_file,
    is_shipped,
    load_plan,
    plan_path,
)
from flowrl.trainer.registry import algorithm_class, algorithm_names, algorithm_path
from flowrl.trainer.trust import untrusted_code

log = logging.getLogger("flowrl")

BASE_ALGORITHM = "flowrl.trainer.algorithm:Algorithm"


def algorithm_from_checkpoint(
    cls: Any, path: Path | str, config: Mapping[str, Any] | None, trust: bool
) -> Any:
    """Implement `Algorithm.from_checkpoint`; `cls` is the class that it is called on."""
    if not isinstance(config or {}, Mapping):
        raise ConfigError(f"from_checkpoint: config must be a mapping of changes, got {config!r}")
    checkpoint = resolve_checkpoint(path)
    cls_of_run, settings = settings_of_checkpoint(cls, checkpoint, config, trust)
    algorithm = cls_of_run(settings)
    try:
        checkpoint = _restore(algorithm, path, checkpoint)
        if (total := canonical_names(dict(config or {})).get("total_timesteps")) is not None:
            algorithm.workers.set_total_timesteps(total)  # also the value that was saved
    except BaseException:
        algorithm.stop()
        raise
    algorithm.run_dir = run_dir_of(checkpoint)
    return algorithm


def _restore(algorithm: Any, path: Path | str, checkpoint: Path | str) -> Path | str:
    """Restore a checkpoint and return its path.

    If a training has replaced the checkpoint meanwhile, restore the newest one at `path`.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    while True:
        try:
            algorithm.restore(checkpoint)
            return checkpoint
        except CheckpointError:
            newest = checkpoint
            with suppress(CheckpointError):  # there is none
                newest = resolve_checkpoint(path)
            if newest == checkpoint:
                raise
            checkpoint = newest


def settings_of_checkpoint(
    cls: Any, path: Path | str, config: Mapping[str, Any] | None, trust: bool
) -> tuple[Any, Any]:
    """Return the class and the settings of the algorithm that wrote a checkpoint.

    Args and raises: see `Algorithm.from_checkpoint`; `cls` is the class that it is called on.
    """
    return settings_of_manifest(cls, path, read_manifest(path), config, trust)


def needs_trust(path: Path | str, plan: str | None = None, cls: Any = None) -> bool:
    """Return whether loading a checkpoint needs trust=True.

    Args:
        path: the checkpoint.
        plan: a plan that the caller chooses; None uses that of the checkpoint.
        cls: the class that `from_checkpoint` is called on; None for `Algorithm`.
    """
    changes = None if plan is None else {"plan": plan}
    try:
        settings_of_checkpoint(cls or import_object(BASE_ALGORITHM), path, changes, trust=False)
    except UntrustedCodeError:
        return True
    except (CheckpointError, ConfigError):
        return False
    return False


def settings_of_manifest(
    cls: Any,
    path: Path | str,
    manifest: Mapping[str, Any],
    config: Mapping[str, Any] | None,
    trust: bool,
) -> tuple[Any, Any]:
    """Return the class and the settings of the algorithm that wrote a manifest.

    Args and raises: see `Algorithm.from_checkpoint`; `cls` is the class that it is called on, and
    messages name the path.
    """
    changes = canonical_names(dict(config or {}))
    try:
        return _settings_of_manifest(cls, manifest, changes, trust)
    except UntrustedCodeError as error:
        raise UntrustedCodeError(error.code, error.remedy, path, error.setting) from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (ImportError, *DAMAGED) as error:
        if isinstance(error, ConfigError) and changes:
            raise
        raise CheckpointError(f"{path}: cannot rebuild the algorithm: {error}") from error


def _settings_of_manifest(
    cls: Any, manifest: Mapping[str, Any], changes: dict[str, Any], trust: bool
) -> tuple[Any, Any]:
    """Return the class and the settings of the algorithm that wrote a manifest; its errors do not
    name the path."""
    chosen_by_caller = {*changes, "plan"}  # these settings need no trust
    for name in ("model", "q_model"):
        if not is_given(changes, f"{name}.custom_model"):
            chosen_by_caller.discard(name)
    if changes_specs(changes.get("policies")):
        chosen_by_caller.discard("policies")
    plan = changes.get("plan", manifest["config"]["values"].get("plan"))
    if isinstance(plan, str):
        plan = absolute_plan(plan)  # once: the file that is checked is the one executed
    known = _known_classes(cls, plan)
    manifest, plan_modules = _load_plan_of(cls, manifest, plan, known, trust, "plan" in changes)
    cls_of_run = _algorithm_class(manifest["algorithm"], CodeResolver(trust, known, plan_modules))
    if not (isinstance(cls_of_run, type) and issubclass(cls_of_run, cls)):
        raise CheckpointError(f"it belongs to {manifest['algorithm']}, not to {code_path(cls)}")
    changes = _with_settings_of_plan(changes, manifest, plan)
    if is_plan_file(plan):
        changes = changes | {"plan": plan}
    resolver = CodeResolver(trust, known | _known_classes(cls_of_run, plan), plan_modules)
    settings = config_from_json(manifest["config"], changes, resolver)
    saved = manifest["config"]["values"]
    if changes.get("seed") is not None and changes["seed"] != saved.get("seed"):
        log.warning(
            "seed: the training continues with the random numbers of the checkpoint; the new seed "
            "applies to evaluations and to workers that are restarted. For other random numbers, "
            "build a new algorithm and call its restore_policies(path)"
        )
    unused = [name for name in changes if name in saved and settings.first_ineffective([name])]
    settings.check_changes({n: decode_setting(n, saved[n], resolver) for n in unused})
    code = None if trust else untrusted_code(settings, chosen_by_caller)
    if code is not None:
        raise UntrustedCodeError(
            code, "pass trust=True to allow that, or replace the setting: config={…}"
        )
    return cls_of_run, settings


def _load_plan_of(
    cls: Any,
    manifest: Mapping[str, Any],
    plan: Any,
    known: Mapping[str, Any],
    trust: bool,
    is_chosen_by_caller: bool,
) -> tuple[Mapping[str, Any], list[str]]:
    """Load the plan of a run if its code may be executed.

    Args:
        cls: the class that `from_checkpoint` is called on.
        manifest: the manifest of the checkpoint.
        plan: the setting `plan`, of the caller or of the checkpoint.
        known: see `_known_classes`.
        trust: see `Algorithm.from_checkpoint`.
        is_chosen_by_caller: whether the caller passed the setting `plan`.

    Returns:
        the manifest with import paths in the plan's module, and the names of the modules in which
        the manifest may name code.

    Raises:
        CheckpointError: see `_check_plan`.
    """
    saved_class = manifest["algorithm"]
    if not trust and not is_chosen_by_caller:
        return manifest, _check_plan(plan, manifest["plan_sha256"], known.get(saved_class))
    if not is_plan_file(plan):
        return manifest, []
    if saved_class in known and _is_module_of(cls, plan):
        # the file is a module that the caller has imported: its other code is in this module
        sys.modules[f"{PLAN_MODULE}{Path(plan).stem}"] = sys.modules[cls.__module__]
        return manifest, []
    module = load_plan(plan).__name__  # the caller names or trusts the file
    saved_plan = manifest["config"]["values"].get("plan")
    if is_plan_file(saved_plan):  # the file may have another name now
        manifest = _renamed(manifest, f"{PLAN_MODULE}{Path(saved_plan).stem}:", f"{module}:")
    return manifest, [module]


def _is_module_of(cls: Any, plan: str) -> bool:
    """Return whether a plan file is the module that defines a class."""
    file = getattr(sys.modules.get(getattr(cls, "__module__", "")), "__file__", None)
    return file is not None and Path(plan).resolve() == Path(file).resolve()


def _with_settings_of_plan(
    changes: dict[str, Any], manifest: Mapping[str, Any], plan: Any
) -> dict[str, Any]:
    """Return changes with the settings that the manifest leaves to the config of the plan.

    Raises:
        CheckpointError: settings that the manifest leaves out are not given.
    """
    missing = [name for name in manifest["left_out"] if not is_given(changes, name)]
    of_plan = [name for name in manifest["settings_of_plan"] if not is_given(changes, name)]
    if of_plan:
        plan_config: Any = {} if plan is None else getattr(load_plan(plan), "config", {})
        missing += [name for name in of_plan if not is_given(plan_config, name)]
        for name in of_plan:
            changes = _completed(changes, name, plan_config)
    if missing:
        raise missing_settings_error(missing)
    return changes


def _completed(
    changes: dict[str, Any], name: str, plan_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return changes with the setting of a plan's config, such as `model.custom_model`, if the
    config has it."""
    outer, _, inner = name.partition(".")
    if not is_given(plan_config, name):
        return changes
    if inner:
        return changes | {outer: _completed(changes.get(outer, {}), inner, plan_config[outer])}
    return changes | {outer: plan_config[outer]}


def _known_classes(cls: Any, plan: Any) -> dict[str, Any]:
    """Return import path -> class for the class that `from_checkpoint` is called on, its config and
    its policy class.

    A run of a plan file stores classes with the module name of the plan file, `flowrl_plan_NAME`.
    """
    parts = [part for part in (cls, cls.config_class, cls.policy_class) if part is not None]
    known = {f"__main__:{cls.__qualname__}": cls}
    for part in parts:
        known[code_path(part)] = part
        if is_plan_file(plan) and part.__module__ == cls.__module__:
            known[f"{PLAN_MODULE}{Path(plan).stem}:{part.__qualname__}"] = part
    return known


def _renamed(value: Any, prefix: str, new_prefix: str) -> Any:
    """Return a JSON value in which strings that begin with a prefix begin with another one."""
    if isinstance(value, Mapping):
        return {key: _renamed(inner, prefix, new_prefix) for key, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner, prefix, new_prefix) for inner in value]
    if isinstance(value, str) and value.startswith(prefix):
        return new_prefix + value.removeprefix(prefix)
    return value


def _check_plan(plan: Any, sha256: str | None, known_class: Any) -> list[str]:
    """Check that a plan needs no trust: a shipped plan, or the file of a class that is known.

    Args:
        plan: the setting `plan` of the checkpoint.
        sha256: hash of the plan's text when the checkpoint was written.
        known_class: the checkpoint's algorithm, if the caller passed it in.

    Returns:
        the name of the plan's module, if code in it may be named.

    Raises:
        CheckpointError: the plan would be executed, but is not trusted.
    """
    if plan is None:
        return []
    if is_shipped(plan):
        text = plan_path(plan).read_bytes()
        if sha256 == hashlib.sha256(text).hexdigest():
            load_plan(plan, text)
            return [f"{PLAN_MODULE}{plan}"]
        return []
    if is_plan_file(plan) and _is_module_of(known_class, plan):
        return []
    if isinstance(plan, Mapping):  # a reference to code
        raise UntrustedCodeError(
            f"as its plan the function {plan.get('__code__')}",
            "pass the function, config={'plan': …}, or trust=True to import it",
        )
    raise UntrustedCodeError(
        f"the plan file {plan}",
        "pass trust=True to execute it, or name the file yourself: config={'plan': …}",
    )


def _algorithm_class(path: str, resolver: CodeResolver) -> Any:
    """Return the Algorithm class of an import path: without trust, a known or registered one."""
    for name in algorithm_names():
        if algorithm_path(name) == path:
            return algorithm_class(name)
    return resolver.resolve(path, BASE_ALGORITHM)
