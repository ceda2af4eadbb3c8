"""`transformers` in our own environment: `generate` behind the shim, batches of what waits."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.engines.base import AdapterUse, by_shim, package_versions
from benchmarks.peers.environment import pip_install_pinned
from benchmarks.peers.folders import CHECKOUT, OUR_PYTHON, Folders
from benchmarks.peers.launch import Launch


class Transformers:
    """Reads the dequantised folder."""

    name = "transformers"
    formats = ("bf16", "f32")

    def install(self, folders: Folders) -> None:
        """Part of the development environment, whose versions stay: a newer PyTorch brings gigabytes for GPUs along."""
        packages = ["transformers", "torch", "accelerate", "peft"]
        pip_install_pinned(OUR_PYTHON, packages, CHECKOUT / "constraints-dev.txt")

    def launch(self, folders: Folders, weights: str, port: int, flags: Sequence[str]) -> Launch:
        """Attention by PyTorch's fused kernel."""
        folder = str(folders.folder(weights))
        engine = (str(OUR_PYTHON), "-m", "benchmarks.peers.shim.transformers_engine", folder, *flags)
        command = (str(OUR_PYTHON), "-m", "benchmarks.peers.shim", str(port), folder, *engine)
        version = package_versions(OUR_PYTHON, "transformers", "peft", "torch")
        environment = {"PYTHONPATH": str(CHECKOUT)}
        return Launch(f"transformers:{weights}", command, environment, "demo", port, version)

    def adapter_use(self, folders: Folders, weights: str, names: Sequence[str]) -> AdapterUse:
        """Loaded once, into one `PeftModel`; a batch may hold rows of all."""
        flags = (part for name in names for part in ("--adapter", str(folders.adapter(name))))
        return AdapterUse(tuple(flags), by_shim(names))
