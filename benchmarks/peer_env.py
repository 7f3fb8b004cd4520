"""Virtual environments of the peers, made once under .peers/ beside the checkout's files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / ".peers"


def peer_python(name: str, *requirements: str) -> Path:
    """The interpreter of the peer's environment, with torch 2.13.0 and what it requires."""
    folder = ROOT / name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for wanted in (["torch==2.13.0"], list(requirements)):
            subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted], check=True)
        (folder / "ready").touch()
    return python
