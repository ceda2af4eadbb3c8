"""Where peers, their virtual environments and their copies of the model live: a cache, never the tree."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from kvarto.core.errors import UsageError

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE_VARIABLE = "KVARTO_PEERS_CACHE"
MODEL_NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Folders:
    """One cache: `root/NAME` is the virtual environment of a peer, `root/models` holds converted weights."""

    root: Path
    gguf: Path
    """The demo model in the format that it is published in, Q4_1."""

    @classmethod
    def default(cls, root: Path | None = None) -> Folders:
        """In `root`, in the folder that `KVARTO_PEERS_CACHE` names, or under `~/.cache/kvarto`."""
        base = Path.home() / ".cache" / "kvarto"
        chosen = root or Path(os.environ.get(CACHE_VARIABLE, base / "peers"))
        return cls(chosen.resolve(), base / "models" / f"{MODEL_NAME}.Q4_1.gguf")

    @property
    def models(self) -> Path:
        """Copies of the demo model in other formats."""
        return self.root / "models"

    @property
    def adapters(self) -> Path:
        """Random adapters of the demo model, of rank 16 on all linears."""
        return self.root / "adapters"

    @property
    def gguf_adapters(self) -> Path:
        """The same as GGUF files: `NAME.gguf`."""
        return self.root / "gguf-adapters"

    def environment(self, name: str) -> Path:
        """The virtual environment of a peer."""
        return self.root / name

    def python(self, name: str) -> Path:
        """The interpreter of a peer. Raises UsageError when the peer is not installed."""
        path = self.environment(name) / "bin" / "python"
        if not path.exists():
            raise UsageError(f"`{path}` does not exist; make it with `python -m benchmarks.peers install {name}`")
        return path

    def weights_path(self, weights: str) -> Path:
        """The demo model as a GGUF file in a format such as `q4_0`; Q4_1 is the published one."""
        return self.gguf if weights == "q4_1" else self.models / f"{MODEL_NAME}.{weights}.gguf"

    def folder_path(self, weights: str) -> Path:
        """The demo model as a Hugging Face folder, `f32` or `bf16`."""
        return self.models / f"{MODEL_NAME}.{weights}"

    def openvino_named_path(self, weights: str) -> Path:
        """OpenVINO's model of the GGUF file in that format, with named linears."""
        return self.models / f"{MODEL_NAME}.{weights}.openvino"

    def weights(self, weights: str) -> Path:
        """The GGUF file, which must exist. Raises UsageError."""
        return _existing(self.weights_path(weights))

    def folder(self, weights: str) -> Path:
        """The Hugging Face folder, which must exist. Raises UsageError."""
        return _existing(self.folder_path(weights))

    def openvino_named(self, weights: str) -> Path:
        """The folder, which must exist. Raises UsageError."""
        return _existing(self.openvino_named_path(weights), "adapters")

    def adapter(self, name: str) -> Path:
        """The folder of an adapter, which must exist. Raises UsageError."""
        return _existing(self.adapters / name, "adapters")

    def gguf_adapter(self, name: str) -> Path:
        """The same as a file, which must exist. Raises UsageError."""
        return _existing(self.gguf_adapters / f"{name}.gguf", "adapters")


def _existing(path: Path, command: str = "install") -> Path:
    if not path.exists():
        raise UsageError(f"`{path}` does not exist; make it with `python -m benchmarks.peers {command}`")
    return path


OUR_PYTHON = Path(sys.executable)
"""Runs `kvarto serve` and the front of the shims: the interpreter that runs the benchmark."""
