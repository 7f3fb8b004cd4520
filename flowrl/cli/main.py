"""The command line: flowrl train | resume | evaluate | explain | plans | checkpoint | copy.

Exit codes: 0 done, 1 something failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flowrl
from flowrl.settings import ConfigError, nearest

# Before numpy loads its own: a policy's matrices are far too small to share between threads.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

_USAGE = """usage: flowrl COMMAND …

  train PLAN [--setting value …]   train a shipped plan or a plan file
  train --run=PPO --env=… --config='{…}'   an algorithm with its general defaults
  train FILE.yaml                  what a YAML file says
  resume RUN_DIR                   go on with a run
  evaluate RUN_DIR                 play episodes with a trained policy
  explain PLAN                     the plan as a tree; nothing runs
  plans                            the shipped plans
  checkpoint inspect PATH          what a checkpoint holds, and whether it is whole
  copy PLAN FILE                   start your own plan from a shipped one
  version

`flowrl train PLAN --help` lists the plan's settings."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0 if given else 2
    command = _COMMANDS.get(given[0])
    if command is None:
        hint = nearest(given[0], list(_COMMANDS))
        print(f"flowrl: unknown command {given[0]!r}.{hint}\n\n{_USAGE}", file=sys.stderr)
        return 2
    try:
        return command(given[1:])
    except ConfigError as error:
        print(f"flowrl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has gone
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 141


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"flowrl {name}", description=about)


def _version(given: list[str]) -> int:
    _parser("version", "print flowrl's version").parse_args(given)
    print(f"flowrl {flowrl.__version__}")
    return 0


def _plans(given: list[str]) -> int:
    from flowrl.trainer.plan_files import shipped_plans

    _parser("plans", "list the shipped plans").parse_args(given)
    plans = shipped_plans()
    width = max(map(len, plans))
    for name, line in plans.items():
        print(f"{name:{width}} {line}")
    return 0


def _copy(given: list[str]) -> int:
    from flowrl.trainer.plan_files import plan_path

    parser = _parser("copy", "start your own plan from a shipped one")
    parser.add_argument("plan")
    parser.add_argument("file", type=Path)
    options = parser.parse_args(given)
    source = plan_path(options.plan)
    if options.file.exists():
        raise ConfigError(f"{options.file} exists already: choose another name")
    try:
        shutil.copyfile(source, options.file)
    except OSError as error:
        raise ConfigError(f"cannot write {options.file}: {error.strerror}") from error
    print(f"{options.file}: run it with `flowrl train {options.file}`")
    return 0


def _explain(given: list[str]) -> int:
    parser = _parser("explain", "print a plan as a tree; nothing runs")
    parser.add_argument("plan")
    plan = parser.parse_args(given).plan
    from flowrl.cli.train import load

    _, config = load(plan)
    with config.build(plan=plan) as algorithm:
        try:
            print(algorithm.plan.explain())
        except Exception as error:
            return _tell(error)
    return 0


def _tell(error: Exception) -> int:
    from flowrl.cli.training_run import tell_failure

    tell_failure(error)
    return 1


def _train(given: list[str]) -> int:
    from flowrl.cli.train import train_command

    return train_command(given)


def _resume(given: list[str]) -> int:
    from flowrl.cli.train import resume_command

    return resume_command(given)


def _checkpoint(given: list[str]) -> int:
    """Show what a checkpoint says of itself."""
    parser = _parser("checkpoint", "look at a checkpoint, or at the newest one of a run")
    parser.add_argument("verb", choices=["inspect"])
    parser.add_argument("path", help="a checkpoint, a run directory, or a URI")
    parser.add_argument("--json", action="store_true", help="the manifest as it is")
    options = parser.parse_args(given)
    from flowrl.cli.run_directory import CHECKPOINTS, newest_checkpoint
    from flowrl.data.checkpoint import CheckpointError, read_checkpoint, read_manifest

    path: Any = options.path
    if "://" not in path:
        path = Path(path)
        if (path / CHECKPOINTS).is_dir():
            path = newest_checkpoint(path)
    try:
        manifest = read_manifest(path)
        if options.json:
            print(json.dumps(manifest, indent=1))
            return 0
        read_checkpoint(path)
    except CheckpointError as error:
        print(f"flowrl: {error}", file=sys.stderr)
        return 1
    print(f"{path}: whole")
    print(f"  algorithm   {manifest['algorithm']}, plan {manifest['plan']}")
    iteration, steps = manifest["training_iteration"], manifest["timesteps_total"]
    print(f"  after       {iteration:,} iterations, {steps:,} env steps")
    if manifest.get("score") is not None:
        print(f"  score       {manifest['score']:g}")
    for name in ("flowrl", "torch", "gymnasium"):
        print(f"  {name:11} {manifest[name]}")
    for policy_id, about in manifest["policies"].items():
        print(f"  policy      {policy_id}: {about['class']}")
    if manifest["left_out"]:
        print(f"  left out    {', '.join(manifest['left_out'])} (code without an import path)")
    for file, about in manifest["files"].items():
        held = f"  {about['array']}" if "array" in about else ""
        print(f"  {about['bytes']:>14,} bytes  {file}{held}")
    return 0


def _evaluate(given: list[str]) -> int:
    from flowrl.cli.arguments import positive
    from flowrl.cli.train import CHECKPOINT_HELP

    parser = _parser("evaluate", "play episodes with a trained policy, greedy and sampled")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--episodes", type=positive(int), default=100, help="of each (100)")
    parser.add_argument("--checkpoint", help=CHECKPOINT_HELP)
    parser.add_argument("--video", type=Path, help="folder for a video of the first greedy episode")
    options = parser.parse_args(given)

    from flowrl.cli.train import checkpoint_named, config_of_run
    from flowrl.data.checkpoint import CheckpointError

    config, plan = config_of_run(options.run_dir)
    path = checkpoint_named(options.run_dir, options.checkpoint)
    alone = {"num_workers": 0, "log_to": [], "log_config": {}, "output": None}
    with config.updated(**alone).build(plan=plan) as algorithm:
        try:
            algorithm.restore_policies(path)
        except CheckpointError as error:
            print(f"flowrl: {error}", file=sys.stderr)
            return 1
        for name, explore in (("greedy", False), ("sampled", True)):
            try:
                video = None if explore else options.video
                told = algorithm.evaluate(options.episodes, explore, 16, video_dir=video)
            except Exception as error:
                return _tell(error)
            print(
                f"{name:8} mean return {told['episode_reward_mean']:.1f} "
                f"(min {told['episode_reward_min']:.1f}, max {told['episode_reward_max']:.1f}, "
                f"std {told['episode_reward_std']:.1f}), mean length "
                f"{told['episode_len_mean']:.1f}, {told['episodes']} episodes"
            )
            if video is not None:
                print(f"         video: {video / 'evaluation-0.mp4'}")
            for policy_id, mean in told["policy_reward_mean"].items():
                print(f"         policy {policy_id}: mean return {mean:.1f} of each of its agents")
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "resume": _resume,
    "evaluate": _evaluate,
    "explain": _explain,
    "plans": _plans,
    "checkpoint": _checkpoint,
    "copy": _copy,
    "version": _version,
}

if __name__ == "__main__":
    sys.exit(main())
