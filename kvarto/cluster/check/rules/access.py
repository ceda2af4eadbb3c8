"""Ways round a limit, most of them taken by accident: privileged pods, devices and limits set by hand, switches."""

from __future__ import annotations

from collections.abc import Iterator

from kvarto.cluster.check.finding import Finding
from kvarto.cluster.check.manifests import Container, Files, warning
from kvarto.cluster.schemes import ClusterOptions
from kvarto.cluster.tree import dig, truth
from kvarto.memory.device_limit import HAMI_LIMIT

_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SPLIT = "max_split_size_mb"
_INTERCEPTED = ("hami", "volcano", "tencent")


def privileged(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """A privileged container has every device node, whatever it asked for. One beside a server may need to be so."""
    path = ("securityContext", "privileged")
    for container in files.containers:
        if not container.pod.uses_gpu or not truth(dig(container.manifest, *path)):
            continue
        gives = "`privileged: true` gives the container every GPU of the node"
        if container.scheme is not None:
            message = f"{gives}, past any limit; leave it out"
            yield container.finding("privileged", path, message, container.edit(*path))
        else:
            message = f"{gives}, and it asks for none; leave it out if it can do without"
            yield warning(container.finding("privileged", path, message))


def environment(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Variables that the node's components set, set by hand."""
    for container in files.containers:
        for index, name, value in container.env():
            message = _about(container, name, value)
            if message is not None:
                rule, text = message
                yield container.finding(rule, ("env", index), text, container.edit("env", index))


def split_size(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """`max_split_size_mb` says which blocks PyTorch's allocator splits; it limits nothing."""
    for container in files.containers:
        for index, name, value in container.env():
            if name not in _ALLOCATOR_SETTINGS or _SPLIT not in str(value):
                continue
            rest = ",".join(part for part in str(value).split(",") if not part.strip().startswith(_SPLIT))
            path = ("env", index)
            message = (
                f"`{name}={value}`: `{_SPLIT}` only says which blocks PyTorch splits and limits no memory; leave it out"
            )
            edit = container.edit("env", index, "value", value=rest) if rest else container.edit(*path)
            yield container.finding("max-split-size", path, message, edit)


def _about(container: Container, name: str, value: object) -> tuple[str, str] | None:
    """Rule and message for one variable; None where it is all right."""
    scheme = container.scheme.name if container.scheme is not None else None
    is_of_node = container.pod.object.kind == "DaemonSet" and scheme is None  # a plugin or exporter, which needs all
    if name == "NVIDIA_VISIBLE_DEVICES" and value not in (None, "", "void", "none") and not is_of_node:
        whose = "beside those that it asks for" if scheme else "though it asks for none, and nobody counts it"
        return "visible-devices", f"`{name}={value}` shows the container GPUs of the node {whose}; leave it out"
    if name == "CUDA_VISIBLE_DEVICES" and scheme in _INTERCEPTED and value is not None:
        return "device-order", (
            f"`{name}={value}` renumbers devices whose limits are set by number, so the wrong one may be charged; "
            "leave it out"
        )
    if name == "CUDA_DISABLE_CONTROL" and str(value).lower() not in ("false", "0", "none"):
        return "control-off", f"`{name}={value}` switches HAMi's limit off for this container; leave it out"
    if name.startswith(HAMI_LIMIT) and name != f"{HAMI_LIMIT}_SHARED_CACHE" and scheme in ("hami", "volcano"):
        return "limit-by-hand", f"`{name}={value}` goes against the limit that the scheduler counts; leave it out"
    return None
