"""Where, when and with which versions a training ran."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from flowrl.benchmark.sb3 import PACKAGES, installed_version
from flowrl.errors import ConfigError
from flowrl.process_usage import num_cores
from flowrl.whole_files import write_whole

CHECKOUT = Path(__file__).parents[2]
RESULTS = "benchmarks/results"  # which benchmarks write themselves
# packages whose versions are in a result, if they are installed
VERSIONS = ("flowrl-dataflow", "torch", *PACKAGES)

Origin = dict[str, Any]
"""`date`, `machine`, `python`, `commit` and `versions` (package -> version) of a process that
trains."""


def present_origin() -> Origin:
    """Return the origin of what this process trains."""
    return {
        "date": date.today().isoformat(),
        "machine": machine(),
        "python": platform.python_version(),
        "commit": commit(),
        "versions": {name: number for name in VERSIONS if (number := installed_version(name))},
    }


def joined(origins: Sequence[Origin]) -> Origin:
    """Return the origin of a training that was continued: different values joined by " then "; the
    last date."""
    origins = origins or [present_origin()]
    packages = dict.fromkeys(name for origin in origins for name in origin["versions"])
    return {
        "date": origins[-1]["date"],
        **{key: _then([one[key] for one in origins]) for key in ("machine", "python", "commit")},
        "versions": {
            name: _then([one["versions"].get(name, "none") for one in origins]) for name in packages
        },
    }


def _then(values: Sequence[Any]) -> Any:
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else " then ".join(map(str, different))


def read_record(file: Path) -> tuple[str | None, list[Origin]]:
    """Return the checksum of the settings of a training, and its origins; (None, []) without a
    file.

    Raises:
        ConfigError: the file contains something else.
    """
    if not file.exists():
        return None, []
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return record["settings"], record["origins"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"benchmark: {file} cannot be read: remove it and its training to train again ({error})"
        ) from None


def write_record(file: Path, checksum: str, origins: Sequence[Origin]) -> None:
    """Write what `read_record` returns."""
    write_whole(file, json.dumps({"settings": checksum, "origins": origins}))


def machine() -> str:
    """Return the number of cores and the name of the processor."""
    return f"{num_cores()} cores of {processor()}"


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit(root: Path = CHECKOUT) -> str | None:
    """Return the commit of a checkout of flowrl, with `-dirty` if a file outside of RESULTS differs
    from it; None outside of a checkout, or without git."""
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short", "HEAD")
        changed = git("diff", "--name-only", "HEAD", "--", ".", f":!{RESULTS}")
    except OSError:
        return None
    return f"{head}-dirty" if changed else head or None
