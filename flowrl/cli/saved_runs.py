"""Open the run or checkpoint that `flowrl resume` or `flowrl evaluate` names."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flowrl.cli.arguments import import_from_current_folder
from flowrl.cli.display import program_name
from flowrl.data.checkpoint import CheckpointError, read_manifest, resolve_checkpoint, run_dir_of
from flowrl.errors import ConfigError
from flowrl.policies.code_references import PLAN_MODULE, UntrustedCodeError, code_path
from flowrl.policies.json_codec import text_of_changes
from flowrl.setting_values import equal_code, expanded_path
from flowrl.trainer.checkpoint_loading import needs_trust
from flowrl.trainer.checkpoint_saving import FIXED_SETTINGS
from flowrl.trainer.config import AlgorithmConfig, absolute_folders
from flowrl.trainer.plan_files import absolute_plan, algorithm_in, load_plan
from flowrl.trainer.plan_settings import plan_config
from flowrl.trainer.runs.continuing import trust_flag
from flowrl.trainer.runs.formatting import format_path
from flowrl.trainer.runs.saved_run import (
    find_checkpoint,
    last_intact_checkpoint,
    own_code,
    read_config,
    read_setup,
)
from flowrl.trainer.runs.stop_rules import StopRules

if TYPE_CHECKING:
    from flowrl.trainer.algorithm import Algorithm


class SavedRun(NamedTuple):
    """A run or a checkpoint.

    Attributes:
        run_dir: the run directory; None for a checkpoint outside of one.
        checkpoint: the checkpoint.
        config: the settings.
        algorithm: class of the algorithm.
    """

    run_dir: Path | None
    checkpoint: Path | str
    config: AlgorithmConfig
    algorithm: type[Algorithm]

    @property
    def name(self) -> str:
        """Name of the run directory, or of the checkpoint outside of one."""
        return Path(self.run_dir or self.checkpoint).resolve().name

    def build(self, config: AlgorithmConfig) -> Algorithm:
        """Return the algorithm with these settings."""
        return config.updated().build_as(self.algorithm)


def open_run(
    path: str, checkpoint: str | None = None, plan: str | None = None, trust: bool = False
) -> SavedRun:
    """Return the run at a path, and its checkpoint.

    Args:
        path: a run directory, a checkpoint in one, or another checkpoint (a folder or a URI).
        checkpoint: number of a checkpoint of the run directory, "best", or None for the newest one.
        plan: plan to use instead of the run's.
        trust: import and execute the code that the files name.

    Raises:
        ConfigError: there is no run or checkpoint, a file is damaged, the plan cannot be loaded, or
            a file names code that is not trusted.
    """
    if trust:
        import_from_current_folder()
    run_dir, found = _locate(path)
    if checkpoint is not None and (run_dir is None or found is not None):
        raise ConfigError(f"--checkpoint {checkpoint}: {path} is a checkpoint, not a run directory")
    if run_dir is not None:
        total = read_config(run_dir).get("total_timesteps")
        found = found or find_checkpoint(run_dir, checkpoint)
    assert found is not None
    shown = path if run_dir is None else str(run_dir)
    manifest = read_saved_manifest(found, run_dir)
    setup = None
    if run_dir is not None:
        with suppress(ConfigError):  # the checkpoint has everything
            setup = read_setup(run_dir)
    if setup is not None and not _is_same(setup["algorithm"], manifest.get("algorithm")):
        raise ConfigError(
            f"{found} was written by {manifest.get('algorithm')}, but the run {shown} is of "
            f"{setup['algorithm']}: use another checkpoint"
        )
    config, algorithm = settings_of(shown, manifest, plan, trust)
    if run_dir is not None:  # a resumed run may have a larger total
        config = config.updated(total_timesteps=total)
    return SavedRun(run_dir, found, config, algorithm)


def _is_same(algorithm: str, other: str | None) -> bool:
    """Return whether two import paths name the same class; a plan file may have been renamed."""
    paths = [path.partition(":") for path in (algorithm, other or "")]
    are_in_plans = all(module.startswith(PLAN_MODULE) for module, _, _ in paths)
    return algorithm == other or (are_in_plans and paths[0][2] == paths[1][2])


def _locate(path: str) -> tuple[Path | None, Path | str | None]:
    """Return the run directory and the checkpoint that a path names; either may be None."""
    folder = expanded_path(path)
    may_be_run = "://" not in path and not (folder / "manifest.json").exists()
    if may_be_run and ((folder / "config.json").exists() or not (folder / "algorithm").is_dir()):
        return folder, None
    try:
        checkpoint = resolve_checkpoint(path)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    return run_dir_of(checkpoint), checkpoint


def read_saved_manifest(checkpoint: Path | str, run_dir: Path | None = None) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        ConfigError: it cannot be read; the message names an older checkpoint of the run directory
            that is intact.
    """
    try:
        return read_manifest(checkpoint)
    except CheckpointError as error:
        intact = run_dir and last_intact_checkpoint(run_dir, Path(checkpoint))
        hint = f"; an older checkpoint is intact: --checkpoint {intact.name}" if intact else ""
        raise ConfigError(f"{error}{hint}") from None


def suggest_intact_checkpoint(command: str, run: SavedRun) -> None:
    """Print how to use an older checkpoint of a run instead of its damaged one, if one is intact.

    Args:
        command: the command that read the damaged checkpoint.
        run: the run, with the damaged checkpoint.
    """
    if run.run_dir is None:
        return
    intact = last_intact_checkpoint(run.run_dir, Path(run.checkpoint))
    if intact is not None:
        path = shlex.quote(format_path(run.run_dir))
        print(
            f"An older checkpoint is intact: {program_name()} {command} {path}"
            f"{trust_flag(intact)} --checkpoint {intact.name}",
            file=sys.stderr,
        )


def settings_of(
    path: str, manifest: dict[str, Any], plan: str | None, trust: bool
) -> tuple[AlgorithmConfig, type[Algorithm]]:
    """Return the settings in a manifest, and the class of its algorithm.

    Args:
        path: the run or checkpoint, as on the command line.
        manifest: the manifest.
        plan: plan to use instead of the saved one.
        trust: import and execute the code that the manifest names.

    Raises:
        ConfigError: the manifest is damaged, the plan is of another algorithm, or the manifest
            names code that is not trusted or that cannot be imported.
    """
    from flowrl.trainer.algorithm import Algorithm
    from flowrl.trainer.checkpoint_loading import settings_of_manifest

    in_program = own_code(manifest)
    if in_program:
        raise ConfigError(_in_program_message(path, in_program))
    changes = {} if plan is None else {"plan": absolute_plan(plan)}
    saved_plan = str(manifest.get("plan"))
    if plan is None and saved_plan.endswith(".py") and not Path(saved_plan).exists():
        kept = Path(path, "plan.py")
        remedy = f"a run directory keeps its text: pass --plan {kept}"
        if not kept.is_file():
            remedy = "pass --plan FILE with its new path"
        raise ConfigError(f"{path}: there is no plan file {saved_plan}; {remedy}")
    try:
        algorithm, config = settings_of_manifest(Algorithm, path, manifest, changes, trust)
    except UntrustedCodeError as error:
        other = ", or --plan FILE" if error.code.startswith("the plan file") else ""
        raise ConfigError(
            f"{path}: the settings contain {error.code}, which is not trusted: pass --trust to "
            f"allow it{other}"
        ) from None
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    if plan is not None and _has_config(plan):
        defined = algorithm_in(load_plan(plan))
        expected = code_path(defined) if defined else plan_config(plan, config.env).algorithm
        name = expected.split(":")[-1]
        is_class_of_file = name == algorithm.__qualname__  # a renamed file has another module name
        if not is_class_of_file and expected not in map(code_path, algorithm.__mro__):
            raise ConfigError(
                f"--plan: {path} is of {algorithm.__name__}, but the plan {plan} is of {name}"
            )
    return config, algorithm


def _has_config(plan: str) -> bool:
    return isinstance(getattr(load_plan(plan), "config", None), AlgorithmConfig)


def _in_program_message(path: str, code: dict[str, str]) -> str:
    """Return what to do with a run whose code is in the program that started it.

    Args:
        path: the run, as on the command line.
        code: result of `own_code`.
    """
    if "algorithm" in code:
        return (
            f"{path}: its algorithm {code['algorithm']} is a class of the program itself, which no "
            "other program can import: move it to a module in the current folder and train again, "
            f"or continue in that program: {code['algorithm'].split(':')[-1]}.from_checkpoint("
            f"{path!r})"
        )
    are = "is" if len(code) == 1 else "are"
    return (
        f"{path}: its {' and its '.join(code)} {are} code or an object of the program itself "
        f"({', '.join(code.values())}), which no other program has: move code to a module in the "
        "current folder, replace objects by numbers, text, lists, dicts or arrays, and train "
        "again; or continue in Python: "
        f"Algorithm.from_checkpoint({path!r}, config={text_of_changes(code)})"
    )


def unused_settings_message(run: SavedRun, plan: str, stop: StopRules) -> str | None:
    """Return which settings of a plan file a run that continues with it does not use, if any.

    Args:
        run: the run.
        plan: the plan file.
        stop: the new limits; `total_timesteps` follows a limit on env steps.
    """
    if not _has_config(plan):
        return None
    config = plan_config(plan, run.config.env)
    config = config.updated(**absolute_folders(config))
    differing = {
        name: value
        for name, value in config.explicit_settings().items()
        if name in run.config and not (name == "total_timesteps" and stop.env_steps)
        if not equal_code(value, run.config[name])
    }
    if not differing:
        return None
    values = ", ".join(f"{name}={run.config[name]!r}" for name in differing)
    message = f"{plan}: the run keeps its own settings {values}"
    changes = {name: value for name, value in differing.items() if name not in FIXED_SETTINGS}
    if not changes:
        return f"{message}, because each worker and environment continues from its own state"
    trust = ", trust=True" if needs_trust(run.checkpoint, plan) else ""
    return (
        f"{message}; to change {', '.join(changes)}, continue in Python: Algorithm.from_checkpoint("
        f"{str(run.run_dir or run.checkpoint)!r}, config={ {**changes, 'plan': plan}!r}{trust})"
    )
