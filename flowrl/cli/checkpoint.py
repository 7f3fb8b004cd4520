"""`flowrl checkpoint inspect PATH`: verify a checkpoint and show its contents."""

from __future__ import annotations

import json
import sys
from typing import Any

from flowrl.cli.arguments import Parser
from flowrl.cli.display import printable
from flowrl.data.checkpoint import (
    DAMAGED,
    CheckpointError,
    read_checkpoint,
    read_manifest,
    resolve_checkpoint,
)
from flowrl.trainer.runs.formatting import format_count


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
        read_checkpoint(path)
    except CheckpointError as error:
        print(f"flowrl: {printable(error)}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(manifest, indent=1))
        return 0
    try:
        lines = _describe(manifest)
    except DAMAGED as error:
        problem = printable(f"{type(error).__name__}: {error}")
        print(f"flowrl: {path}: not the manifest of an algorithm: {problem}", file=sys.stderr)
        return 1
    print(f"{path}: valid")
    for line in lines:
        print("  " + printable(line).replace("\n", "\\n"))
    return 0


def _describe(manifest: dict[str, Any]) -> list[str]:
    """Return the lines that describe a manifest."""
    iteration, steps = manifest["training_iteration"], manifest["timesteps_total"]
    lines = [
        f"algorithm   {manifest['algorithm']}, plan {manifest['plan']}",
        f"trained     {format_count(iteration, 'iteration')}, {format_count(steps, 'env step')}",
    ]
    if manifest.get("score") is not None:
        lines.append(f"score       {manifest['score']:g}")
    lines += [f"{name:11} {manifest[name]}" for name in ("flowrl", "torch", "gymnasium")]
    for policy_id, policy in manifest["policies"].items():
        lines.append(f"policy      {policy_id}: {policy['class']}")
    if manifest["left_out"]:
        names = ", ".join(manifest["left_out"])
        lines.append(f"left out    {names} (code without an import path)")
    for name, file in manifest["files"].items():
        array = f"  {file['array']}" if "array" in file else ""
        lines.append(f"{file['bytes']:>14,} bytes  {name}{array}")
    return lines
