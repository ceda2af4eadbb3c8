"""OpenVINO GenAI: reads the GGUF file; continuous batching behind the shim, since it has no OpenAI server of its own.

Formats are the file's. Its own settings are flags: `--property INFERENCE_PRECISION_HINT=f32` for the type of
activations (by default that of the machine: bf16 where there is AMX), and `KV_CACHE_PRECISION` and
whatever else it knows likewise.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.engines.base import package_versions
from benchmarks.peers.environment import make_environment, pip_install
from benchmarks.peers.folders import CHECKOUT, OUR_PYTHON, Folders
from benchmarks.peers.server_process import Launch


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
        return Launch(" ".join((f"openvino:{weights}", *flags)), command, environment, "demo", port, version)
