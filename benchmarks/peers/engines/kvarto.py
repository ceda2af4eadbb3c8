"""Ours: `kvarto serve` of this checkout, with whatever flags are given."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from benchmarks.peers.engines.base import AdapterUse, by_model
from benchmarks.peers.folders import CHECKOUT, OUR_PYTHON, Folders
from benchmarks.peers.launch import Launch


class Kvarto:
    """Reads the demo file and the dequantised folder."""

    name = "kvarto"
    formats = ("q4_1", "q4_0", "q8_0", "f16", "bf16", "f32")

    def install(self, folders: Folders) -> None:
        """It runs from the checkout."""

    def launch(self, folders: Folders, weights: str, port: int, flags: Sequence[str]) -> Launch:
        """As many sequences as the widest column sends; the flags given come last and win."""
        command = (str(OUR_PYTHON), "-m", "kvarto", "serve", str(folders.weights(weights)), "--port", str(port),
                   "--served-model-name", "demo", *flags)  # fmt: skip
        environment = {"PYTHONPATH": str(CHECKOUT)}
        return Launch(f"kvarto:{weights}", command, environment, "demo", port, f"commit {_commit()}")

    def adapter_use(self, folders: Folders, weights: str, names: Sequence[str]) -> AdapterUse:
        """All that lie in the folder."""
        return AdapterUse(("--adapter-dir", str(folders.adapter(names[0]).parent)), by_model(names))


def _commit() -> str:
    """The checkout, with a `+` when files of the package differ from it."""
    git = ("git", "-C", str(CHECKOUT))
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changes = subprocess.run([*git, "status", "--porcelain", "--", "kvarto", "native"], capture_output=True, text=True,
                             check=False)  # fmt: skip
    return (commit.stdout.strip() or "unknown") + ("+" if changes.stdout.strip() else "")
