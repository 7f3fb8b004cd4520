"""Virtual environments of peer libraries, created once in the folder .peers/ of the checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / ".peers"


def peer_python(name: str, *requirements: str) -> Path:
    """Return the interpreter of a peer's environment with torch 2.13.0 and the requirements."""
    folder = ROOT / name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for packages in (["torch==2.13.0"], list(requirements)):
            subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
        (folder / "ready").touch()
    return python
