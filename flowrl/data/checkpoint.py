"""Checkpoints: a folder of state.json, arrays.safetensors and a manifest of their hashes.

State is a tree of dicts and lists whose leaves are JSON values, numpy arrays or batches. Nothing is
ever unpickled. A checkpoint is written beside its place and renamed into it, so a reader finds the
previous one or the new one, never half of one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from flowrl.data import MultiAgentBatch, SampleBatch

FORMAT = 1
_ARRAY = "__array__"
_OBJECTS = "__objects__"
_BATCH = "__batch__"
_POLICIES = "__policies__"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: names the file and what is wrong with it."""


def write_checkpoint(path: Path | str, state: dict[str, Any], about: dict[str, Any]) -> Path:
    """Write a state tree, replacing what is at `path`.

    Args:
        about: goes into the manifest (versions, the plan's name and hash).

    Raises:
        TypeError: a leaf is neither a JSON value nor a numeric array, named by its path.
        OSError: the folder cannot be written; what was at `path` is untouched.
    """
    path = Path(path)
    arrays: dict[str, np.ndarray] = {}
    tree = _encode(state, "", arrays)
    files = {
        "state.json": json.dumps(tree, indent=1).encode(),
        "arrays.safetensors": save({k: np.ascontiguousarray(v) for k, v in arrays.items()}),
    }
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    manifest = {"format": FORMAT, **about, "sha256": hashes}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        files["manifest.json"] = json.dumps(manifest, indent=1).encode()
        for name, data in files.items():
            with open(fresh / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        os.chmod(fresh, 0o755)
        _put_in_place(fresh, path)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return path


def _put_in_place(fresh: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}-old")
    if old.exists() and path.exists():
        shutil.rmtree(old)
    if path.exists():
        os.replace(path, old)
    os.replace(fresh, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    shutil.rmtree(old, ignore_errors=True)


def read_checkpoint(path: Path | str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state tree and the manifest of a checkpoint.

    Raises:
        CheckpointError: missing, incomplete, altered, or of another format.
    """
    path = Path(path)
    if not path.exists() and path.with_name(f".{path.name}-old").exists():
        path = path.with_name(f".{path.name}-old")  # the writer was killed between two renames
    manifest = _json(_read(path / "manifest.json"), path / "manifest.json")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / 'manifest.json'}: not a checkpoint of format {FORMAT}")
    hashes = manifest.get("sha256")
    if not isinstance(hashes, dict):
        raise CheckpointError(f"{path / 'manifest.json'}: it has no hashes")
    files = {}
    for name in ("state.json", "arrays.safetensors"):
        files[name] = _read(path / name)
        if hashlib.sha256(files[name]).hexdigest() != hashes.get(name):
            raise CheckpointError(f"{path / name}: the file was altered (its hash is another)")
    tree = _json(files["state.json"], path / "state.json")
    return _decode(tree, load(files["arrays.safetensors"])), manifest


def _read(path: Path) -> bytes:
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    return path.read_bytes()


def _json(data: bytes, path: Path) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error


def _encode(value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return {_OBJECTS: _encode(value.tolist(), path, arrays)}
        arrays[path] = value
        return {_ARRAY: path}
    if isinstance(value, SampleBatch):
        return {_BATCH: _encode(dict(value.without_unread()), path, arrays)}
    if isinstance(value, MultiAgentBatch):
        policies = _encode(dict(value.policy_batches), path, arrays)
        return {_POLICIES: policies, "env_steps": value.env_steps()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"checkpoint: key {key!r} under {path or 'the top'} is no string")
        return {k: _encode(v, f"{path}/{k}" if path else k, arrays) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(v, f"{path}/{i}", arrays) for i, v in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"checkpoint: {path} is a {type(value).__name__}, which cannot be saved")


def _decode(tree: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(tree, dict):
        if set(tree) == {_ARRAY}:
            return arrays[tree[_ARRAY]]
        if set(tree) == {_OBJECTS}:
            items = _decode(tree[_OBJECTS], arrays)
            column = np.empty(len(items), object)
            column[:] = items
            return column
        if set(tree) == {_BATCH}:
            return SampleBatch(_decode(tree[_BATCH], arrays))
        if set(tree) == {_POLICIES, "env_steps"}:
            return MultiAgentBatch(_decode(tree[_POLICIES], arrays), tree["env_steps"])
        return {key: _decode(value, arrays) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_decode(value, arrays) for value in tree]
    return tree
