"""Flags that the commands of `kvarto k8s` share: what the cluster is like."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from kvarto.core.errors import UsageError
from kvarto.memory.device_limit import DEVICE_OVERHEAD_BYTES

if TYPE_CHECKING:
    from kvarto.cluster.schemes import ClusterOptions

ALIYUN_UNITS = ("GiB", "MiB")


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheme must know of the cluster that it is used on."""

    card: str | None = None
    """Card of the nodes: `A30`, `A100-40`, `A100-80`, `H100-80`, `H100-94`, `H200`, `B200`, `L4`, …"""
    kubernetes: str = "1.36"
    """Version of the API server; 1.25 to 1.37."""
    memory_factor: int = 1
    """MiB per unit of HAMi's `gpumem` and Volcano's `vgpu-memory`, where the cluster was set up with a factor."""
    aliyun_unit: str = "GiB"
    """Unit of `aliyun.com/gpu-mem`: `GiB`, or `MiB` where the plugin was started so."""
    device_class: str = "gpu.nvidia.com"
    """DeviceClass of DRA claims."""
    queue: str = "default-queue"
    """Queue that KAI schedules the pod in."""
    plugin_namespace: str = "gpu-operator"
    """Namespace in which NVIDIA's device plugin reads its configuration."""


class OverheadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a server takes beside the plan."""

    overhead_memory: int = DEVICE_OVERHEAD_BYTES
    """Bytes on the GPU beside the arena: the driver's context and workspaces. An allowance; cards differ."""


def cluster_options(config: ClusterConfig, overhead: OverheadConfig) -> ClusterOptions:
    """The same for `kvarto.cluster`. Raises UsageError."""
    from kvarto.cluster.cards import find_card
    from kvarto.cluster.schemes import ClusterOptions

    if config.aliyun_unit not in ALIYUN_UNITS:
        raise UsageError(f"`--aliyun-unit {config.aliyun_unit}` is unknown; take `GiB` or `MiB`")
    if config.memory_factor < 1:
        raise UsageError(f"`--memory-factor {config.memory_factor}` is too small; give 1 or more")
    return ClusterOptions(
        card=None if config.card is None else find_card(config.card),
        kubernetes=_version(config.kubernetes),
        memory_factor=config.memory_factor,
        aliyun_unit=config.aliyun_unit,
        device_class=config.device_class,
        queue=config.queue,
        overhead_bytes=overhead.overhead_memory,
        plugin_namespace=config.plugin_namespace,
    )


def _version(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"v?([0-9]{1,3})\.([0-9]{1,3})(\..*)?", text)
    if match is None:
        raise UsageError(f"`--kubernetes {text}` is no version; write one such as `1.36`")
    return int(match[1]), int(match[2])
