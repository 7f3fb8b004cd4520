"""Open the run or checkpoint that `flowrl resume` or `flowrl evaluate` names."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.cli.arguments import import_from_current_folder
from flowrl.cli.run_settings import (
    HELP_FLAGS,
    absolute_plan,
    algorithm_config,
    check_trusted,
    is_algorithm_run,
    parse_algorithm_run,
    parse_run,
)
from flowrl.data.checkpoint import CheckpointError, read_manifest, resolve_checkpoint, run_dir_of
from flowrl.policies.code_references import UntrustedCodeError
from flowrl.setting_values import equal
from flowrl.settings import ConfigError
from flowrl.trainer.plan_files import is_shipped
from flowrl.trainer.plan_settings import plan_config
from flowrl.trainer.registry import algorithm_names, algorithm_path
from flowrl.trainer.runs.saved_run import (
    find_checkpoint,
    own_code,
    read_command,
    read_config,
)


class SavedRun(NamedTuple):
    """A run or a checkpoint.

    Attributes:
        run_dir: the run directory; None for a checkpoint outside of one.
        checkpoint: the checkpoint.
        config: the settings.
        plan: name or file of the plan; None uses the config's plan.
        algorithm: class of the algorithm; None for the config's class.
    """

    run_dir: Path | None
    checkpoint: Path | str
    config: Any
    plan: str | None
    algorithm: Any

    @property
    def name(self) -> str:
        """Name of the run directory, or of the checkpoint outside of one."""
        return Path(self.run_dir or self.checkpoint).resolve().name

    def build(self, config: Any) -> Any:
        """Return the algorithm with these settings."""
        if self.plan is not None:
            config = config.updated(plan=self.plan)
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
    if run_dir is None:
        assert found is not None
        config, algorithm = _settings_of_checkpoint(path, found, plan, trust)
        return SavedRun(None, found, config, None, algorithm)
    read_config(run_dir)  # a clear error if this is not a run directory
    found = found or find_checkpoint(run_dir, checkpoint)
    # a run that `flowrl train` has not started: config.json has not all of its settings
    if read_command(run_dir)[:2] != ["flowrl", "train"]:
        config, algorithm = _settings_of_checkpoint(str(run_dir), found, plan, trust)
        total = read_config(run_dir)[0].get("total_timesteps")
        return SavedRun(run_dir, found, config.updated(total_timesteps=total), None, algorithm)
    config, plan_of_run = config_of_run(run_dir, found, plan, trust)
    return SavedRun(run_dir, found, config, plan_of_run, None)


def _locate(path: str) -> tuple[Path | None, Path | str | None]:
    """Return the run directory and the checkpoint that a path names; either may be None."""
    folder = Path(path).expanduser()
    may_be_run = "://" not in path and not (folder / "manifest.json").exists()
    if may_be_run and ((folder / "config.json").exists() or not (folder / "algorithm").is_dir()):
        return folder, None
    try:
        checkpoint = resolve_checkpoint(path)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    return run_dir_of(checkpoint), checkpoint


def _settings_of_checkpoint(
    path: str, checkpoint: Path | str, plan: str | None, trust: bool
) -> tuple[Any, Any]:
    """Return the settings in a checkpoint, and the class of its algorithm.

    Args:
        path: as on the command line.
        checkpoint: the checkpoint.
        plan: plan to use instead of the checkpoint's.
        trust: import and execute the code that the checkpoint names.

    Raises:
        ConfigError: the checkpoint is damaged, or it names code that is not trusted or that cannot
            be imported.
    """
    from flowrl.trainer.algorithm import Algorithm
    from flowrl.trainer.checkpoint_loading import settings_of_checkpoint

    try:
        in_program = own_code(read_manifest(checkpoint))
        if in_program:
            raise ConfigError(_in_program_message(path, in_program))
        changes = {} if plan is None else {"plan": absolute_plan(plan)}
        algorithm, config = settings_of_checkpoint(Algorithm, checkpoint, changes, trust)
        return config, algorithm
    except UntrustedCodeError as error:
        raise ConfigError(f"{path}: it names {error.code}: pass --trust to import it") from None
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


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
    changes = ", ".join(f"{name!r}: …" for name in code)
    are = "is" if len(code) == 1 else "are"
    return (
        f"{path}: its {' and its '.join(code)} {are} code or an object of the program itself "
        f"({', '.join(code.values())}), which no other program has: move code to a module in the "
        "current folder, replace objects by numbers, text, lists, dicts or arrays, and train "
        "again; or continue in Python: "
        f"Algorithm.from_checkpoint({path!r}, config={{{changes}}})"
    )


def unused_settings_message(run: SavedRun, plan: str) -> str | None:
    """Return which settings of a plan file a run that continues with it does not use, if any."""
    config = plan_config(plan, run.config.env)
    differing = {
        name: value
        for name, value in config.chosen().items()
        if name in run.config and not equal(value, run.config[name])
    }
    if not differing:
        return None
    values = ", ".join(f"{name}={run.config[name]!r}" for name in differing)
    changes = {**differing, "plan": plan}
    return (
        f"{plan}: the run keeps its own settings {values}; to change them, continue in Python: "
        f"Algorithm.from_checkpoint({str(run.run_dir or run.checkpoint)!r}, config={changes!r})"
    )


def config_of_run(
    run_dir: Path, checkpoint: Path | str, plan: str | None = None, trust: bool = False
) -> tuple[Any, str | None]:
    """Return the config and the plan of a run that `flowrl train` has started.

    Settings that are code come from the plan or the algorithm, all others from config.json.

    Args:
        run_dir: the run directory.
        checkpoint: the checkpoint of the run that will be loaded.
        plan: plan to use instead of the run's.
        trust: import and execute the code that the files of the run name.

    Raises:
        ConfigError: a file is damaged, the plan cannot be loaded, the checkpoint is of another
            algorithm, or the run names code that is not trusted.
    """
    config, plan_of_run = _config_of_run(run_dir, checkpoint, plan, trust)
    try:
        check_trusted(config, trust, [] if plan is None else ["plan"])
    except ConfigError as error:
        raise ConfigError(f"{run_dir}: {error}") from None
    return config, plan_of_run


def _config_of_run(
    run_dir: Path, checkpoint: Path | str, plan: str | None, trust: bool
) -> tuple[Any, str | None]:
    settings, code = read_config(run_dir)
    command = read_command(run_dir)
    if plan is not None:
        settings["plan"] = absolute_plan(plan)
    if is_algorithm_run(command):
        _, config = parse_algorithm_run(_after_train(run_dir, command), import_code=trust)
        return config.updated(**settings), None
    name = settings.get("plan") if plan is None else plan
    algorithm = _saved_algorithm(checkpoint) if plan is None else None
    if not isinstance(name, str):
        if algorithm is None:
            raise ConfigError(f"{run_dir}: the run has neither a plan nor a registered algorithm")
        return algorithm_config(algorithm, settings), None
    if plan is None and not trust and not is_shipped(name):
        raise ConfigError(
            f"{run_dir}: its plan is the file {name}: pass --trust to execute it, or --plan FILE"
        )
    config = plan_config(name, settings.get("env"))
    saved = _saved_algorithm(checkpoint) if algorithm is None else algorithm
    if plan is not None and saved is not None and algorithm_path(saved) != config.algorithm:
        raise ConfigError(
            f"--plan: {checkpoint} is of {saved}, but the plan {plan} is of "
            f"{config.algorithm.split(':')[-1]}"
        )
    # a YAML file may run a registered algorithm with the plan of another one
    if algorithm is not None and algorithm_path(algorithm) != config.algorithm:
        try:
            return algorithm_config(algorithm, settings), None
        except ConfigError as error:
            raise ConfigError(
                f"{checkpoint} was written by {algorithm}, which does not have the settings of "
                f"this run: use another checkpoint ({error})"
            ) from None
    from_flags = [setting for setting in code if not _is_code(config[setting])]
    if from_flags and not trust:
        flag = from_flags[0].replace("_", "-")
        raise ConfigError(f"{run_dir}: its flag --{flag} names code: pass --trust to import it")
    # config.json has neither PolicySpecs nor code
    if from_flags or any(flag.startswith("--policies.") for flag in command):
        flags = _after_train(run_dir, command)[1:]
        _, config = parse_run(name, partial(plan_config, name), flags, import_code=trust)
    return config.updated(**settings), name


def _after_train(run_dir: Path, command: list[str]) -> list[str]:
    """Return the arguments after `flowrl train` in the command of a run."""
    if "train" not in command:
        raise ConfigError(f"{run_dir}: command.txt contains no training command")
    return [word for word in command[command.index("train") + 1 :] if word not in HELP_FLAGS]


def _is_code(value: Any) -> bool:
    """Return whether a setting's value contains code."""
    if hasattr(value, "items"):
        return any(_is_code(part) for _, part in value.items())
    if isinstance(value, (list, tuple)):
        return any(map(_is_code, value))
    return not isinstance(value, (str, int, float, bool, type(None)))


def _saved_algorithm(checkpoint: Path | str) -> str | None:
    """Return the name of the registered algorithm that wrote a checkpoint."""
    try:
        path = read_manifest(checkpoint)["algorithm"]
    except (CheckpointError, ConfigError, KeyError):
        return None
    return next((name for name in algorithm_names() if algorithm_path(name) == path), None)
