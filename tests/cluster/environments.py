"""What a container sees under each scheme: variables and files that the node's components make, reported memory.

Taken from the manifest alone, as the components do it: the field notes say how each of them encodes a limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvarto.cluster.cards import Card
from kvarto.core.units import GIB, MIB
from kvarto.memory.device_limit import VCUDA_MEMORY_OFFSET
from tests.cluster.manifests import container, template

GPU_UUID = "GPU-6ba7b810-9dad-11d1-80b4-00c04fd430c8"
CONTEXT_BYTES = 500 * MIB
"""What the driver took before the server looked."""


@dataclass(frozen=True)
class Environment:
    """A container's view."""

    total_bytes: int
    free_bytes: int
    variables: dict[str, str] = field(default_factory=dict)
    vcuda: bytes | None = None
    """Content of gpu-manager's record."""


def environment(scheme: str, documents: list[Any], card: Card) -> Environment:
    """Of the server's container on an otherwise empty card."""
    limits = container(documents)["resources"]["limits"]
    written = {entry["name"]: entry["value"] for entry in container(documents)["env"]}
    shown = {"NVIDIA_VISIBLE_DEVICES": GPU_UUID, **written}
    total = card.memory_bytes
    if scheme in ("hami", "volcano"):
        mib = limits["nvidia.com/gpumem" if scheme == "hami" else "volcano.sh/vgpu-memory"]
        variables = {"CUDA_DEVICE_MEMORY_LIMIT_0": f"{mib}m", "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/usr/local/vgpu/x"}
        return Environment(mib * MIB, mib * MIB - CONTEXT_BYTES, {**shown, **variables})
    if scheme == "mig":
        (name,) = (name.removeprefix("nvidia.com/mig-") for name in limits if "mig-" in name)
        size = card.profile(name).memory_bytes
        return Environment(size, size - CONTEXT_BYTES, {**written, "NVIDIA_VISIBLE_DEVICES": "MIG-c3b1"})
    if scheme == "aliyun":
        variables = {
            "ALIYUN_COM_GPU_MEM_IDX": "0",
            "ALIYUN_COM_GPU_MEM_POD": str(limits["aliyun.com/gpu-mem"]),
            "ALIYUN_COM_GPU_MEM_CONTAINER": str(limits["aliyun.com/gpu-mem"]),
            "ALIYUN_COM_GPU_MEM_DEV": str(total // GIB),
        }
        return Environment(total, total - CONTEXT_BYTES, {**shown, **variables})
    if scheme == "tencent":
        size = limits["tencent.com/vcuda-memory"] * 256 * MIB
        record = bytes(VCUDA_MEMORY_OFFSET) + size.to_bytes(8, "little") + bytes(24)
        return Environment(size, size - CONTEXT_BYTES, shown, record)
    if scheme == "kai":
        mib = int(template(documents)["metadata"]["annotations"]["gpu-memory"])
        return Environment(total, total - CONTEXT_BYTES, {**shown, "GPU_PORTION": f"{mib * MIB / total:.2f}"})
    if scheme == "mps":
        size = int(written["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"].removeprefix("0=").removesuffix("M")) * MIB
        return Environment(total, size - CONTEXT_BYTES, {**shown, "CUDA_MPS_PIPE_DIRECTORY": "/mps/pipe"})
    if scheme == "vgpu":
        return Environment(16 * GIB, 16 * GIB - CONTEXT_BYTES, shown)
    return Environment(total, total - CONTEXT_BYTES, shown)  # whole, time-slicing, dra
