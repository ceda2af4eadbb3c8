"""What the server in the container takes, against what it may take."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from kvarto.cluster.check.finding import Finding
from kvarto.cluster.check.manifests import Container, Files, warning
from kvarto.cluster.check.server_flags import (
    KVARTO_FLAGS,
    SHARE_FLAGS,
    Flag,
    device_memory,
    find_flag,
    is_kvarto,
    runs_on_cpu,
    set_device_memory,
    written_device_memory,
)
from kvarto.cluster.quantity import parse_quantity
from kvarto.cluster.schemes import ClusterOptions, Scheme, find_scheme
from kvarto.cluster.schemes.dra import device_requests
from kvarto.cluster.tree import dig
from kvarto.core.units import MIB, format_bytes
from kvarto.memory.device_limit import LIMITER_LIMIT

CPU_OVERHEAD_BYTES = 512 * MIB
"""Beside the arena in the container's memory: the least that processes and libraries take."""
READ_BY_SERVER = ("aliyun", "kai")
"""Schemes that enforce nothing, yet tell the container its part, which Kvarto reads."""


def size_of_arena(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """`--device-memory 8Gi` is Kubernetes' way to write it, and not the server's, which would not start."""
    for container in files.containers:
        written = written_device_memory(container) if is_kvarto(container) else None
        if written is None or device_memory(container) is not None:
            continue
        text, place = written
        path = place.path if isinstance(place, Flag) else ("env", place)
        message = f"`{KVARTO_FLAGS[0]} {text:.80}` is no size to the server"
        try:
            size_bytes = ceil(parse_quantity(text) / MIB) * MIB
        except ValueError:
            size_bytes = 0
        if size_bytes <= 0:
            yield container.finding("arena-size", path, f"{message}; write one such as `8GiB`")
            continue
        edit = set_device_memory(container, place, size_bytes)
        yield container.finding("arena-size", path, f"{message}; write `{size_bytes // MIB}MiB`", edit)


def arena_and_limit(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """`--device-memory` and what the driver takes must fit the limit."""
    for container in files.containers:
        if not is_kvarto(container):
            continue
        scheme = container.scheme or (find_scheme("cpu") if runs_on_cpu(container) else None)
        if scheme is None:
            yield _no_gpu(container)
            continue
        granted = scheme.granted_bytes(container.pod.template, container.manifest, files.manifests, options)
        said = device_memory(container)
        if said is not None and granted is not None:
            overhead_bytes = CPU_OVERHEAD_BYTES if scheme.name == "cpu" else options.overhead_bytes
            yield from _against(container, scheme, said[0], granted, overhead_bytes)


def no_limit(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Where nothing enforces a part, the server must keep to it by itself."""
    for container in files.containers:
        scheme = container.scheme
        if scheme is None or scheme.is_enforced or (scheme.name == "dra" and _is_limited_by_driver(files)):
            continue
        granted = scheme.granted_bytes(container.pod.template, container.manifest, files.manifests, options)
        if is_kvarto(container):
            if scheme.name in READ_BY_SERVER:
                continue
            if device_memory(container) is None and all(name != LIMITER_LIMIT for _, name, _ in container.env()):
                yield _kvarto_without(container, scheme, granted, options.overhead_bytes)
        else:
            yield from _other(container, scheme, granted, options)


def _no_gpu(container: Container) -> Finding:
    message = "the server computes on a GPU, and the container asks for none; ask by a scheme, or give `--device cpu`"
    return container.finding("no-gpu", ("resources", "limits"), message)


def _is_limited_by_driver(files: Files) -> bool:
    """Whether claims go to HAMi's driver, the one that brings a limit."""
    claims = files.of_kind("ResourceClaim", "ResourceClaimTemplate")
    requests = [request for each in claims for request in device_requests(each.manifest)]
    names = [dig(request.get("exactly") or request, "deviceClassName") for request in requests]
    return any("hami" in str(name) for name in names)


def _against(
    container: Container, scheme: Scheme, said_bytes: int, granted: int, overhead: int
) -> Iterator[Finding]:
    if said_bytes + overhead <= granted:
        return
    what = "processes and libraries take" if scheme.name == "cpu" else "the driver takes"
    message = (
        f"`--device-memory` is {format_bytes(said_bytes)}, and with about {format_bytes(overhead)} that {what} beyond "
        f"the {format_bytes(granted)} that this container may use"
    )
    path = ("args",)
    right = (granted - overhead) // MIB
    if right <= 0:
        yield container.finding("arena-over-limit", path, f"{message}; ask for more")
        return
    found = device_memory(container)
    assert found is not None, "the flag was read a moment ago"
    message = f"{message}; write `{right}MiB`, or ask for more"
    yield container.finding("arena-over-limit", path, message, set_device_memory(container, found[1], right * MIB))


def _kvarto_without(container: Container, scheme: Scheme, granted: int | None, overhead: int) -> Finding:
    message = f"nothing limits memory under {scheme.facts.title}, and this server is not told how much it may take"
    if granted is None or granted <= overhead:
        hint = f"give `{KVARTO_FLAGS[0]}`; for a number, name the card and add the plugin's configuration"
        return container.finding("no-limit", ("args",), f"{message}; {hint}")
    right = (granted - overhead) // MIB
    message = f"{message}; its part of the card leaves `{KVARTO_FLAGS[0]} {right}MiB`"
    return container.finding("no-limit", ("args",), message, set_device_memory(container, None, right * MIB))


def _other(container: Container, scheme: Scheme, granted: int | None, options: ClusterOptions) -> Iterator[Finding]:
    """Servers such as vLLM and SGLang take a share of the whole card, whatever part of it was meant."""
    flag = find_flag(container, SHARE_FLAGS)
    title = scheme.facts.title
    if flag is None or granted is None or options.card is None:
        message = f"nothing limits memory under {title}: this container may fill the card; see that it limits itself"
        yield warning(container.finding("no-limit", ("resources",), message))
        return
    hundredths = (granted + MIB) * 100 // options.card.memory_bytes  # a fifth, cut down to whole bytes, is 20 %
    try:
        is_over = float(flag.value) * 100 > hundredths
    except ValueError:
        return
    if is_over and hundredths > 0:
        right = f"{hundredths / 100:g}"
        message = (
            f"`{flag.name} {flag.value}` is a share of the whole card, of which {title} means {hundredths} % for this "
            f"container; write `{right}`"
        )
        yield container.finding("share-of-card", flag.path, message, flag.edit(container, right))
