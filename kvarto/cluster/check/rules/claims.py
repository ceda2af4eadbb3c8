"""DRA: claims that nobody uses, shapes of another version, capacity in the wrong unit."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

from kvarto.cluster.check.finding import Edit, Finding
from kvarto.cluster.check.manifests import Container, Files, Object, Pod
from kvarto.cluster.quantity import means_mebibytes, parse_quantity
from kvarto.cluster.schemes import ClusterOptions
from kvarto.cluster.schemes.dra import GROUP, device_requests, requests_path
from kvarto.cluster.tree import dig, mapping, mappings, sequence
from kvarto.core.units import MIB

_CLAIMS = ("resources", "claims")
"""Of a container."""
_SERVED = {"v1beta1": ((1, 32), (1, 38)), "v1beta2": ((1, 33), (1, 38)), "v1": ((1, 34), (9, 0))}
"""Versions of the API, the first Kubernetes that serves each and the first that no longer does."""
_KINDS = ("DeviceClass", "ResourceClaim", "ResourceClaimTemplate", "ResourceSlice")
_FLAT = frozenset({"v1beta1", "v1alpha3"})
"""Versions whose requests and devices have no, or another, wrapper."""
_REQUEST_FIELDS = ("deviceClassName", "selectors", "allocationMode", "count", "adminAccess", "tolerations", "capacity")


def pod_claims(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """The pod declares, the container uses; one without the other gives no device."""
    for pod in files.pods:
        declared = [str(claim.get("name")) for claim in mappings(pod.spec.get("resourceClaims"))]
        meant = _meant(files, declared)
        used: set[str] = set()
        for container in pod.containers:
            for index, claim in enumerate(mappings(dig(container.manifest, *_CLAIMS))):
                name = str(claim.get("name"))
                used.add(name if name in declared or meant is None else meant)
                if name not in declared:
                    yield _undeclared(container, index, name, meant, declared)
        for name in declared:
            if name not in used and pod.containers:
                yield _unused(pod, name)


def api_versions(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Objects of a version that the cluster does not serve."""
    for each in _objects(files):
        if each.kind not in _KINDS:
            continue  # they come and go by versions of their own
        version = _version(each)
        since, until = _SERVED.get(version, ((9, 0), (0, 0)))
        if since <= options.kubernetes < until:
            continue
        served = [name for name, (first, end) in _SERVED.items() if first <= options.kubernetes < end]
        minor = ".".join(map(str, options.kubernetes))
        message = f"`{GROUP}/{version}` is not served by Kubernetes {minor}"
        if not served:
            yield each.finding("dra-version", ("apiVersion",), f"{message}, which has no DRA; it needs 1.32 or later")
            continue
        right = served[-1]
        edits = [each.edit("apiVersion", value=f"{GROUP}/{right}"), *_reshape(each, right)]
        yield each.finding("dra-version", ("apiVersion",), f"{message}; write `{GROUP}/{right}`", *edits)


def shapes(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Wrappers that came and went: `exactly` around requests since v1beta2, `basic` around devices until v1beta1."""
    for each in _objects(files):
        version = _version(each)
        edits = _reshape(each, version) if version in _SERVED else []
        if not edits:
            continue
        flat = version in _FLAT
        if each.kind == "ResourceSlice":
            what = "devices stand inside `basic`" if flat else "devices have no `basic` around them"
        else:
            what = "requests have no `exactly` around them" if flat else "requests stand inside `exactly`"
        message = f"this is the shape of another version: in `{GROUP}/{version}` {what}"
        yield each.finding("dra-shape", ("spec",), message, *edits)


def capacities(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """`memory: 20480` is 20 KiB: DRA counts bytes, in any unit that is written down."""
    for each in _objects(files):
        base = requests_path(each.manifest)
        for index, request in enumerate(device_requests(each.manifest)):
            inner = ("exactly",) if "exactly" in request else ()
            path = (*inner, "capacity", "requests", "memory")
            memory = dig(request, *path)
            try:
                size_bytes = None if memory is None else parse_quantity(memory)
            except ValueError:
                continue  # the schema says it
            if size_bytes is not None and 0 < size_bytes < MIB:
                right = f"{ceil(size_bytes * (1000 if means_mebibytes(memory) else 1))}Mi"
                message = f"`memory: {memory}` is {ceil(size_bytes):,} bytes: DRA counts bytes; write `{right}`"
                full = (*base, index, *path)
                yield each.finding("dra-unit", full, message, each.edit(*full, value=right))


def template_nesting(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """A template holds a claim, which has a spec of its own."""
    for each in files.of_kind("ResourceClaimTemplate"):
        devices = dig(each.manifest, "spec", "devices")
        if devices is not None:
            message = "`spec.devices` belongs to a claim; a template holds a whole one: write `spec.spec.devices`"
            edits = [each.edit("spec", "devices"), each.edit("spec", "spec", "devices", value=devices)]
            yield each.finding("dra-template", ("spec", "devices"), message, *edits)


def _objects(files: Files) -> list[Object]:
    return [each for each in files.objects if str(each.manifest.get("apiVersion")).startswith(f"{GROUP}/")]


def _version(each: Object) -> str:
    return str(each.manifest["apiVersion"]).partition("/")[2]


def _undeclared(container: Container, index: int, name: str, meant: str | None, declared: list[str]) -> Finding:
    """`meant` is the pod's one claim, or the one template beside a pod that declares none."""
    path = (*_CLAIMS, index)
    message = f"the container uses claim `{name}`, which the pod does not declare"
    if meant is None:
        return container.finding("claim-undeclared", path, f"{message}; declare it")
    if meant in declared:
        edit = container.edit(*path, "name", value=meant)
        return container.finding("claim-undeclared", path, f"{message}; the pod's claim is `{meant}`: write that", edit)
    claim = {"name": name, "resourceClaimTemplateName": meant}
    edit = container.pod.edit("spec", "resourceClaims", value=[claim])
    return container.finding("claim-undeclared", path, f"{message}; declare it, from the template `{meant}`", edit)


def _unused(pod: Pod, name: str) -> Finding:
    first = next(each for each in pod.containers if each.path[1] == "containers" or len(pod.containers) == 1)
    claims = sequence(dig(first.manifest, *_CLAIMS))
    entry = {"name": name}
    edit = first.edit(*_CLAIMS, len(claims), value=entry) if claims else first.edit(*_CLAIMS, value=[entry])
    message = (
        f"the pod declares claim `{name}` and no container uses it, so none gets the device; add it to "
        f"`resources.claims` of `{first.manifest.get('name')}`"
    )
    return pod.finding("claim-unused", ("spec", "resourceClaims"), message, edit)


def _meant(files: Files, declared: list[str]) -> str | None:
    """The one claim that can be meant: the pod's, or the one template beside it."""
    if len(declared) == 1:
        return declared[0]
    templates = [str(dig(each.manifest, "metadata", "name")) for each in files.of_kind("ResourceClaimTemplate")]
    return templates[0] if not declared and len(templates) == 1 else None


def _reshape(each: Object, version: str) -> list[Edit]:
    """Edits that bring the object into the shape of a version; none where it has it."""
    flat = version in _FLAT
    if each.kind == "ResourceSlice":
        path: tuple[str | int, ...] = ("spec", "devices")
        items = sequence(dig(each.manifest, *path))
        fixed = [_device(item, flat=flat) for item in items]
    else:
        path = requests_path(each.manifest)
        items = sequence(dig(each.manifest, *path))
        fixed = [_request(item, flat=flat) for item in items]
    pairs = enumerate(zip(fixed, items, strict=True))
    return [each.edit(*path, index, value=new) for index, (new, old) in pairs if new != old]


def _request(request: Any, *, flat: bool) -> Any:
    if not isinstance(request, dict) or "firstAvailable" in request:
        return request
    if flat:
        exactly = mapping(request.get("exactly"))
        return {**{key: value for key, value in request.items() if key != "exactly"}, **exactly}
    moved = {key: value for key, value in request.items() if key in _REQUEST_FIELDS}
    if not moved:
        return request
    kept = {key: value for key, value in request.items() if key not in _REQUEST_FIELDS}
    return {**kept, "exactly": {**mapping(request.get("exactly")), **moved}}


def _device(device: Any, *, flat: bool) -> Any:
    if not isinstance(device, dict):
        return device
    if not flat:
        return {**{key: value for key, value in device.items() if key != "basic"}, **mapping(device.get("basic"))}
    if "basic" in device:
        return device
    return {"name": device.get("name"), "basic": {key: value for key, value in device.items() if key != "name"}}
