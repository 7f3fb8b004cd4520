"""`flowrl evaluate RUN_DIR`: play episodes with a trained policy."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymnasium.error import DependencyNotInstalled

from flowrl.cli.arguments import (
    Parser,
    add_checkpoint_option,
    add_trust_option,
    count,
    file_path,
    reject_settings,
)
from flowrl.cli.display import print_failure, printable
from flowrl.cli.run_settings import without_actors
from flowrl.cli.saved_runs import SavedRun, open_run, suggest_intact_checkpoint
from flowrl.data.checkpoint import CheckpointError, list_checkpoints, read_manifest
from flowrl.errors import ConfigError, install_hint
from flowrl.policies.devices import on_available_device
from flowrl.setting_values import expanded_path
from flowrl.trainer.checkpoint_saving import OtherSettingsError
from flowrl.trainer.runs.formatting import format_count, format_number

if TYPE_CHECKING:
    from flowrl.trainer.algorithm import Algorithm

NUM_ENVS = 16  # environments that are stepped together


def evaluate_command(arguments: list[str]) -> int:
    """Run the command; return the exit code.

    Raises:
        ConfigError: wrong usage, a damaged run, or a missing package.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest:
        reject_settings("evaluate", options.run, rest)
        parser.parse_args(arguments)  # raises: an unknown option
    if options.render is not None and options.video is not None:
        raise ConfigError(
            "evaluate: --render shows the episodes in a window, --video records them without one: "
            "give one of the two"
        )
    run = open_run(options.run, options.checkpoint, options.plan, options.trust)
    config = without_actors(run.config).updated(
        log_to=[], log_config={}, output=None, evaluation_video_dir=None
    )
    config = on_available_device(config)
    if options.seed is not None:
        config = config.updated(seed=options.seed)
    rounds, num_envs = [("greedy", False), ("sampled", True)], NUM_ENVS
    if options.render is not None:
        env_config = config.evaluation_config.get("env_config", config.env_config)
        env_config = {**env_config, "render_mode": options.render}
        config = config.updated(
            evaluation_config={**config.evaluation_config, "env_config": env_config}
        )
        rounds, num_envs = rounds[:1], 1
        if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            message = "--render human: there is no display, so no window opens; use --video FOLDER"
            print(f"flowrl: {message}", file=sys.stderr)
    with run.build(config) as algorithm:
        try:
            names_run = run.run_dir == expanded_path(options.run)
            run = _restore_policies(algorithm, run, names_run and options.checkpoint is None)
        except CheckpointError as error:
            print(f"flowrl: {printable(error)}", file=sys.stderr)
            if not isinstance(error, OtherSettingsError):
                suggest_intact_checkpoint("evaluate", run)
            return 1
        except ConfigError:
            raise
        except Exception as error:  # of the user's environment
            print_failure(error)
            return 1
        for name, explore in rounds:
            video = None if explore or options.video is None else options.video / run.name
            file = video and video / f"evaluation-{algorithm.iteration:06d}-0.mp4"
            earlier = _time_of(file)  # of a video that another evaluation recorded
            try:
                metrics = algorithm.evaluate(options.episodes, explore, num_envs, video_dir=video)
            except KeyboardInterrupt:
                print(f"interrupted during the {name} episodes: no result", file=sys.stderr)
                raise
            except ConfigError:
                raise
            except Exception as error:
                if options.render and _needs_pygame(error):
                    raise ConfigError(install_hint(f"--render {options.render}", "video")) from None
                print_failure(error)
                return 1
            _print_metrics(name, metrics)
            if _time_of(file) != earlier:
                print(f"         video: {file}")
    return 0


def _time_of(file: Path | None) -> int | None:
    """Return the time at which a file was written; None if there is none."""
    return file.stat().st_mtime_ns if file is not None and file.exists() else None


def _restore_policies(algorithm: Algorithm, run: SavedRun, is_newest: bool) -> SavedRun:
    """Restore the policies and the iteration of a run's checkpoint; return the run with the
    restored checkpoint.

    Args:
        algorithm: the algorithm.
        run: the run.
        is_newest: whether the user wants the newest checkpoint, which a training may have replaced
            since the run was opened.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    while True:
        try:
            iteration = read_manifest(run.checkpoint)["training_iteration"]
            algorithm.restore_policies(run.checkpoint)
            algorithm.iteration = iteration
            return run
        except CheckpointError:
            newest = list_checkpoints(run.run_dir)[-1:] if run.run_dir and is_newest else []
            if newest in ([], [run.checkpoint]):
                raise
            run = run._replace(checkpoint=newest[0])


def _parser() -> Parser:
    parser = Parser(
        prog="flowrl evaluate",
        description="Play episodes with a trained policy, with greedy and with sampled actions.",
    )
    parser.add_argument("run", metavar="RUN_DIR", help="a run directory, or a checkpoint")
    parser.add_argument(
        "--episodes",
        type=count,
        default=100,
        help="episodes with greedy and with sampled actions each (default: 100)",
    )
    parser.add_argument("--seed", type=int, help="seed of the episodes (default: the run's)")
    parser.add_argument(
        "--render", choices=["human"], help="show the greedy episodes in a window, one at a time"
    )
    add_checkpoint_option(parser)
    add_trust_option(parser, "the run")
    parser.add_argument("--plan", help="plan file to evaluate with, instead of the run's")
    parser.add_argument(
        "--video",
        metavar="FOLDER",
        type=file_path,
        help="folder for a video of one greedy episode, FOLDER/RUN/evaluation-ITERATION-0.mp4",
    )
    return parser


def _print_metrics(name: str, metrics: dict[str, Any]) -> None:
    print(
        f"{name:8} mean return {format_number(metrics['episode_reward_mean'])} "
        f"(min {format_number(metrics['episode_reward_min'])}, "
        f"max {format_number(metrics['episode_reward_max'])}, "
        f"std {format_number(metrics['episode_reward_std'])}), "
        f"mean length {metrics['episode_len_mean']:.1f}, "
        f"{format_count(metrics['episodes'], 'episode')}"
    )
    if dropped := metrics["num_faulty_episodes"]:
        print(f"         dropped, because the environment failed: {dropped} more")
    if unfinished := metrics["num_unfinished_episodes"]:
        print(f"         did not end: {unfinished} more")
    by_policy = metrics["policy_reward_mean"]
    for policy_id, value in by_policy.items() if len(by_policy) > 1 else ():
        print(f"         policy {policy_id}: mean return {format_number(value)} per agent")


def _needs_pygame(error: Exception) -> bool:
    """Return whether an environment cannot draw its window because pygame is not installed."""
    is_missing = isinstance(error, (ImportError, DependencyNotInstalled))
    return is_missing and "pygame" in str(error)
