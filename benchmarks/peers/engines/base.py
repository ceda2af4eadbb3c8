"""What the harness must know of an engine."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.peers.folders import Folders
from benchmarks.peers.server_process import Launch

VERSIONS = """
import sys
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in sys.argv[1:]))
"""


class Engine(Protocol):
    """One engine."""

    @property
    def name(self) -> str:
        """How the command line calls it."""

    @property
    def formats(self) -> tuple[str, ...]:
        """Of weights, that it is measured in; the default first."""

    def install(self, folders: Folders) -> None:
        """Into its virtual environment; quick when it is there."""

    def launch(self, folders: Folders, weights: str, port: int, flags: Sequence[str]) -> Launch:
        """How a server of the demo model in format `weights` starts. Raises UsageError when something is missing."""


def package_versions(python: Path, *packages: str) -> str:
    """`name version` of what is installed beside that interpreter."""
    command = (str(python), "-c", VERSIONS, *packages)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
