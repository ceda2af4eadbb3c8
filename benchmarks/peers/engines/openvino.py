"""OpenVINO GenAI: reads the GGUF file; continuous batching behind the shim, since it has no OpenAI server of its own.

Formats are the file's. Its own settings are flags: `--property INFERENCE_PRECISION_HINT=f32` for the type of
activations (by default that of the machine: bf16 where there is AMX), and `KV_CACHE_PRECISION` and
whatever else it knows likewise.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from benchmarks.peers.engines.base import AdapterUse, by_shim, package_versions
from benchmarks.peers.environment import make_environment, pip_install
from benchmarks.peers.folders import CHECKOUT, OUR_PYTHON, Folders
from benchmarks.peers.launch import Launch


class OpenVino:
    """The shim's front runs in our environment, the engine in its own."""

    name = "openvino"
    formats = ("q4_1", "q4_0", "q8_0", "f16")

    def install(self, folders: Folders) -> None:
        """Three hundred megabytes."""
        pip_install(make_environment(folders.environment("openvino")), ["openvino-genai"])

    def launch(self, folders: Folders, weights: str, port: int, flags: Sequence[str]) -> Launch:
        """Prefix cache on; 4 GB of KV."""
        python = folders.python("openvino")
        engine = (str(python), "-m", "benchmarks.peers.shim.openvino_engine", str(folders.weights(weights)), *flags)
        command = (str(OUR_PYTHON), "-m", "benchmarks.peers.shim", str(port), str(folders.folder("f32")), *engine)
        version = package_versions(python, "openvino-genai")
        environment = {"PYTHONPATH": str(CHECKOUT)}
        return Launch(f"openvino:{weights}", command, environment, "demo", port, version)

    def adapter_use(self, folders: Folders, weights: str, names: Sequence[str]) -> AdapterUse:
        """Loaded once; those of one adapter run together, and one adapter after the other: it cannot mix them."""
        loaded = (part for name in names for part in ("--adapter", str(folders.adapter(name))))
        # Its prefix cache does not tell adapters apart: one would go on from what another computed.
        flags = ("--named", str(folders.openvino_named(weights)), "--no-prefix-caching", *loaded)
        return AdapterUse(flags, by_shim(names))

    def write_named(self, folders: Folders) -> None:
        """The models that adapters need, of what is there; quick when they are too."""
        for weights in self.formats:
            source, target = folders.weights_path(weights), folders.openvino_named_path(weights)
            if source.exists() and not target.exists():
                command = (folders.python("openvino"), "-m", "benchmarks.peers.openvino_names", source, target)
                subprocess.run(command, env=os.environ | {"PYTHONPATH": str(CHECKOUT)}, check=True)
