"""Manifests of one server under one scheme, and the way back: what a rendered file says it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvarto.cluster.deployment import CONTAINER, Workload, deployment, service
from kvarto.cluster.need import Need
from kvarto.cluster.schemes import ClusterOptions, Manifest, PodParts, Scheme, find_scheme, scheme_of
from kvarto.core.errors import UsageError
from kvarto.core.units import MIB
from kvarto.memory.device_limit import LIMITER_LIMIT

OLDEST = (1, 30)
"""The first Kubernetes whose `preStop` can sleep without a program in the container."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Manifests, in the order in which to apply them."""

    scheme: Scheme
    need: Need
    parts: PodParts
    documents: tuple[dict[str, Any], ...]


def render(scheme: Scheme, workload: Workload, need: Need, options: ClusterOptions) -> Rendered:
    """Whatever the scheme needs first, then Deployment and Service. Raises UsageError for what can't work."""
    if options.kubernetes < OLDEST:
        version = ".".join(map(str, options.kubernetes))
        raise UsageError(f"manifests are for Kubernetes 1.30 or later, where `preStop` can sleep; not for {version}")
    parts = scheme.parts(workload.name, need, options)
    if workload.limiter and scheme.is_enforced:
        raise UsageError(
            f"`--limiter` under `--scheme {scheme.name}`: {scheme.facts.enforced_by} limits already; leave it out"
        )
    if not scheme.is_enforced:
        # Nobody else tells the server its part in exact bytes. It is what a preloaded limiter would read, too.
        parts = replace(parts, env={**parts.env, LIMITER_LIMIT: f"{parts.granted_bytes // MIB}MiB"})
    if scheme.name == "cpu":
        workload = replace(workload, device="cpu", runtime_class=None)
    beside = [_in_namespace(each, workload) for each in parts.objects]
    return Rendered(scheme, need, parts, (*beside, deployment(workload, need, parts), service(workload)))


def read_grant(documents: Sequence[Manifest], options: ClusterOptions) -> int | None:
    """Bytes that the server of rendered manifests may take, read from nothing but them and the cluster's options."""
    for document in documents:
        if document.get("kind") == "Deployment":
            template = document["spec"]["template"]
            (container,) = (each for each in template["spec"]["containers"] if each["name"] == CONTAINER)
            scheme = scheme_of(template, container, documents) or find_scheme("cpu")
            return scheme.granted_bytes(template, container, documents, options)
    return None


def _in_namespace(manifest: dict[str, Any], workload: Workload) -> dict[str, Any]:
    """Beside the workload, unless it belongs elsewhere."""
    metadata = manifest["metadata"]
    if workload.namespace is None or "namespace" in metadata:
        return manifest
    return {**manifest, "metadata": {**metadata, "namespace": workload.namespace}}
