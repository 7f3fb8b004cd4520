"""`flowrl checkpoint inspect PATH`: verify a checkpoint and show its contents."""

from __future__ import annotations

import json
import sys
from typing import Any

from flowrl.cli.arguments import Parser
from flowrl.data.checkpoint import (
    CheckpointError,
    read_checkpoint,
    read_manifest,
    resolve_checkpoint,
)


def checkpoint_command(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    parser = Parser(
        prog="flowrl checkpoint", description="Verify a checkpoint and show its contents."
    )
    parser.add_argument("verb", choices=["inspect"])
    parser.add_argument("path", help="a checkpoint, a URI, or a run directory (newest checkpoint)")
    parser.add_argument("--json", action="store_true", help="print only the manifest, as JSON")
    options = parser.parse_args(arguments)
    try:
        path = resolve_checkpoint(options.path)
        manifest = read_manifest(path)
        if options.json:
            print(json.dumps(manifest, indent=1))
            return 0
        read_checkpoint(path)
    except CheckpointError as error:
        print(f"flowrl: {error}", file=sys.stderr)
        return 1
    print(f"{path}: valid")
    _print_manifest(manifest)
    return 0


def _print_manifest(manifest: dict[str, Any]) -> None:
    print(f"  algorithm   {manifest['algorithm']}, plan {manifest['plan']}")
    iteration, steps = manifest["training_iteration"], manifest["timesteps_total"]
    print(f"  trained     {iteration:,} iterations, {steps:,} env steps")
    if manifest.get("score") is not None:
        print(f"  score       {manifest['score']:g}")
    for name in ("flowrl", "torch", "gymnasium"):
        print(f"  {name:11} {manifest[name]}")
    for policy_id, policy in manifest["policies"].items():
        print(f"  policy      {policy_id}: {policy['class']}")
    if manifest["left_out"]:
        print(f"  left out    {', '.join(manifest['left_out'])} (code without an import path)")
    for name, file in manifest["files"].items():
        array = f"  {file['array']}" if "array" in file else ""
        print(f"  {file['bytes']:>14,} bytes  {name}{array}")
