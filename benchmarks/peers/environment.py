"""Virtual environments of the peers, filled from PyPI."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def make_environment(folder: Path) -> Path:
    """The interpreter of a virtual environment there, made when it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return python


def pip_install(python: Path, packages: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """The newest of each; quick when they are there."""
    subprocess.run([python, "-m", "pip", "install", "--upgrade", *packages], check=True,
                   env=os.environ | (environment or {}))  # fmt: skip


def pip_install_pinned(python: Path, packages: Sequence[str], constraints: Path) -> None:
    """Of the versions in a file: into an environment that others use too."""
    subprocess.run([python, "-m", "pip", "install", "--constraint", constraints, *packages], check=True)


def pip_uninstall(python: Path, packages: Sequence[str]) -> None:
    """What an engine brings along and does not need."""
    subprocess.run([python, "-m", "pip", "uninstall", "--yes", *packages], check=True)


def num_cores() -> int:
    """Cores that this process may use: what every engine is given."""
    return len(os.sched_getaffinity(0))
