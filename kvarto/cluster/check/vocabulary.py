"""Names that the schemes gave to things, and the units they count in."""

from __future__ import annotations

import re

from kvarto.cluster.schemes import ClusterOptions
from kvarto.cluster.schemes.units import VCUDA_BLOCK_BYTES
from kvarto.core.units import GIB, MIB

HAMI_MEMORY = "nvidia.com/gpumem"
VOLCANO_MEMORY = "volcano.sh/vgpu-memory"
ALIYUN_MEMORY = "aliyun.com/gpu-mem"
TENCENT_MEMORY = "tencent.com/vcuda-memory"
TENCENT_CORE = "tencent.com/vcuda-core"

LEAST_BYTES = GIB
"""Nobody asks for less in thousandths: `16384m`, which is 16.384 to Kubernetes, was meant as MiB."""

_UNITS = {
    HAMI_MEMORY: MIB, VOLCANO_MEMORY: MIB, "volcano.sh/gpu-memory": MIB, ALIYUN_MEMORY: GIB,
    TENCENT_MEMORY: VCUDA_BLOCK_BYTES, "cambricon.com/mlu.smlu.vmemory": 256 * MIB,
    "mthreads.com/sgpu-memory": 512 * MIB, "metax-tech.com/vmemory": GIB, "hygon.com/dcumem": MIB,
    "amd.com/gpumem": 10**6,
}  # fmt: skip
_ILUVATAR = re.compile(r"iluvatar\.ai/.+\.vMem")
_FACTORED = (HAMI_MEMORY, VOLCANO_MEMORY)

PERCENTAGES = {
    "nvidia.com/gpumem-percentage": HAMI_MEMORY,
    "volcano.sh/vgpu-memory-percentage": VOLCANO_MEMORY,
}
"""Of a card's memory, and the resource that says the same in units."""
CORES = ("nvidia.com/gpucores", "volcano.sh/vgpu-cores")
"""Percent of one GPU's compute."""
PERCENT = frozenset({*PERCENTAGES, *CORES})
COUNTS = {
    "nvidia.com/gpu": (HAMI_MEMORY, "nvidia.com/gpumem-percentage", "nvidia.com/gpucores"),
    "volcano.sh/vgpu-number": (VOLCANO_MEMORY, "volcano.sh/vgpu-memory-percentage", "volcano.sh/vgpu-cores"),
    TENCENT_CORE: (TENCENT_MEMORY,),
}
"""What must be there, and what means nothing without it."""
POD_ANNOTATIONS = frozenset({
    "gpu-memory", "gpu-fraction", "gpu-fraction-num-devices", "nvidia.com/use-gputype", "nvidia.com/nouse-gputype",
    "nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid", "nvidia.com/numa-bind", "nvidia.com/vgpu-mode",
    "hami.io/node-scheduler-policy", "hami.io/gpu-scheduler-policy",
})  # fmt: skip
"""Read from pods; nobody looks for them on what makes the pod."""


def unit_bytes(resource: str, options: ClusterOptions) -> int | None:
    """Bytes of one unit of a resource that carries memory; None for all others."""
    if _ILUVATAR.fullmatch(resource):
        return 256 * MIB
    if resource == ALIYUN_MEMORY and options.aliyun_unit == "MiB":
        return MIB
    unit = _UNITS.get(resource)
    return unit * options.memory_factor if unit is not None and resource in _FACTORED else unit


def unit_name(size_bytes: int) -> str:
    """`MiB`, `GiB`, `blocks of 256 MiB`, as people call it."""
    names = {MIB: "MiB", GIB: "GiB", 10**6: "MB"}
    return names.get(size_bytes) or f"blocks of {size_bytes // MIB} MiB"


def is_extended(resource: str) -> bool:
    """Whether Kubernetes counts it in whole devices: a name with a domain that is not its own."""
    domain, slash, _ = resource.partition("/")
    return bool(slash) and "." in domain and not domain.endswith(("kubernetes.io", "k8s.io"))
