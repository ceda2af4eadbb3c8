"""What the harness must know of an engine."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.folders import Folders
from benchmarks.peers.launch import Launch

VERSIONS = """
import sys
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in sys.argv[1:]))
"""


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """How an engine serves LoRA adapters."""

    flags: tuple[str, ...]
    """For the server, before those of the command line."""
    fields: Mapping[str, Mapping[str, Any]]
    """What a request says to ask for an adapter, by the adapter's name."""


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

    def adapter_use(self, folders: Folders, weights: str, names: Sequence[str]) -> AdapterUse:
        """How these are served and asked for, on such weights. Raises UsageError when one is not there."""


def package_versions(python: Path, *packages: str) -> str:
    """`name version` of what is installed beside that interpreter."""
    command = (str(python), "-c", VERSIONS, *packages)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def by_model(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """An adapter is asked for as OpenAI's `model`."""
    return {name: {"model": name} for name in names}


def by_shim(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """An adapter is asked for as the shim wants it."""
    return {name: {"adapter": name} for name in names}
