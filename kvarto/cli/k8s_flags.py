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
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_FORMS = {
    "service": (r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", "up to 40 small letters, digits and dashes, a letter first"),
    "label": (_LABEL, "up to 63 small letters, digits and dashes"),
    "domain": (rf"{_LABEL}(\.{_LABEL})*", "small letters, digits and dashes, with dots between"),
    "label value": (r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", "up to 63 letters, digits, dashes and dots"),
    "image": (r"[^\s]+", "one without spaces, such as `kvarto:latest`"),
}
"""Forms of names that the API server asks for, and how to say so. The shortest leaves room for what we append."""


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


def check_name(flag: str, value: str | None, form: str) -> None:
    """Refuse a name that the API server would refuse. Raises UsageError."""
    pattern, says = _FORMS[form]
    if value is not None and not re.fullmatch(pattern, value):
        raise UsageError(f"`{flag} {value}` is no name; take {says}")


def cluster_options(config: ClusterConfig, overhead: OverheadConfig) -> ClusterOptions:
    """The same for `kvarto.cluster`. Raises UsageError."""
    from kvarto.cluster.cards import find_card
    from kvarto.cluster.schemes import ClusterOptions

    if config.aliyun_unit not in ALIYUN_UNITS:
        raise UsageError(f"`--aliyun-unit {config.aliyun_unit}` is unknown; take `GiB` or `MiB`")
    if config.memory_factor < 1:
        raise UsageError(f"`--memory-factor {config.memory_factor}` is too small; give 1 or more")
    check_name("--device-class", config.device_class, "domain")
    check_name("--queue", config.queue, "label value")
    check_name("--plugin-namespace", config.plugin_namespace, "label")
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
