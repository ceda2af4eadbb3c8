"""The Deployment of one server: probes, drain, a locked-down container, and `--device-memory` that matches the limit.

    start: startup probe on /readyz, as long as loading takes
    end:   preStop waits until the endpoints forget the pod; SIGTERM drains; after the grace period the kubelet kills
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarto.cluster.need import Need
from kvarto.cluster.quantity import format_quantity
from kvarto.cluster.schemes import PodParts
from kvarto.cluster.schemes.dra import CLAIM
from kvarto.cluster.schemes.node_affinity import min_card_affinity
from kvarto.core.units import MIB

CONTAINER = "server"
PORT = 8000
USER_ID = 10001
"""Not root, and nobody's on a usual node."""
MODELS = "/models"
"""Where models are kept in the container: `HF_HOME`, `KVARTO_HOME`."""
PROBE_PERIOD_S = 5
LIMITER_LIBRARY = "/usr/local/lib/libkvarto-limiter.so"
"""In the image that `deploy/Containerfile` builds."""
LIMITER_LEDGER = "/run/kvarto"
"""Folder of the limiter's account: one per container, gone with it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is served, and how."""

    name: str = "kvarto"
    namespace: str | None = None
    model: str = "demo"
    image: str = "kvarto:latest"
    replicas: int = 1
    flags: tuple[str, ...] = ()
    """Further flags of `kvarto serve`, as they are typed."""
    device: str = "cuda:0"
    model_claim: str | None = None
    """PersistentVolumeClaim with the models; without one they are fetched into the pod."""
    runtime_class: str | None = None
    start_limit_s: int = 900
    """How long fetching and loading may take."""
    drain_s: int = 300
    """How long running requests may take to finish."""
    limiter: bool = False
    """Preload the limiter: a limit that holds as long as nobody goes round it."""
    stop_wait_s: int = 10
    """Between leaving the Service and the drain, for those who have not heard of it yet."""


def deployment(workload: Workload, need: Need, parts: PodParts) -> dict[str, Any]:
    """The manifest. Requests and limits of the container's memory are equal, so that it is never evicted for memory."""
    labels = {"app.kubernetes.io/name": "kvarto", "app.kubernetes.io/instance": workload.name}
    template = {"metadata": _metadata(labels, parts), "spec": _pod(workload, need, parts)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": object_metadata(workload, labels),
        "spec": {
            "replicas": workload.replicas,
            # The old pod leaves first: a card that is full has no room for both.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "selector": {"matchLabels": dict(labels)},
            "template": template,
        },
    }


def service(workload: Workload) -> dict[str, Any]:
    """The Service in front of it."""
    labels = {"app.kubernetes.io/name": "kvarto", "app.kubernetes.io/instance": workload.name}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": object_metadata(workload, labels),
        "spec": {"selector": dict(labels), "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]},
    }


def object_metadata(workload: Workload, labels: dict[str, str]) -> dict[str, Any]:
    """Name, namespace where one was given, and labels."""
    namespace = {} if workload.namespace is None else {"namespace": workload.namespace}
    return {"name": workload.name, **namespace, "labels": dict(labels)}


def serve_arguments(workload: Workload, need: Need) -> list[str]:
    """Arguments of the container, after `kvarto`."""
    fixed = ["--host", "0.0.0.0", "--port", str(PORT), "--device", workload.device]
    return ["serve", workload.model, *fixed, "--device-memory", f"{need.arena_bytes // MIB}MiB", *workload.flags]


def _metadata(labels: dict[str, str], parts: PodParts) -> dict[str, Any]:
    scraped = {"prometheus.io/scrape": "true", "prometheus.io/port": str(PORT), "prometheus.io/path": "/metrics"}
    return {"labels": {**labels, **parts.labels}, "annotations": {**scraped, **parts.annotations}}


def _pod(workload: Workload, need: Need, parts: PodParts) -> dict[str, Any]:
    optional: dict[str, Any] = {
        "schedulerName": parts.scheduler_name,
        "runtimeClassName": workload.runtime_class,
        "nodeSelector": dict(parts.node_selector),
        "affinity": None if parts.min_card_mib is None else min_card_affinity(parts.min_card_mib),
        "resourceClaims": _claims(parts),
    }
    ledger = [{"name": "ledger", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}}] if workload.limiter else []
    models: dict[str, Any] = {"name": "models", "emptyDir": {}}
    if workload.model_claim is not None:
        models = {"name": "models", "persistentVolumeClaim": {"claimName": workload.model_claim}}
    return {
        **{key: value for key, value in optional.items() if value},
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": workload.stop_wait_s + workload.drain_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(workload, need, parts)],
        "volumes": [models, {"name": "tmp", "emptyDir": {}}, *ledger],
    }


def _claims(parts: PodParts) -> list[dict[str, str]]:
    if parts.claim_template is None:
        return []
    return [{"name": CLAIM, "resourceClaimTemplateName": parts.claim_template}]


def _container(workload: Workload, need: Need, parts: PodParts) -> dict[str, Any]:
    env = {"HF_HOME": MODELS, "KVARTO_HOME": MODELS, **parts.env}
    mounts = [{"name": "models", "mountPath": MODELS}, {"name": "tmp", "mountPath": "/tmp"}]
    if workload.limiter:
        env["LD_PRELOAD"] = LIMITER_LIBRARY
        mounts.append({"name": "ledger", "mountPath": LIMITER_LEDGER})
    return {
        "name": CONTAINER,
        "image": workload.image,
        "args": serve_arguments(workload, need),
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": _resources(need, parts),
        "startupProbe": _probe("/readyz", failure_threshold=workload.start_limit_s // PROBE_PERIOD_S),
        "readinessProbe": _probe("/readyz", failure_threshold=1),
        "livenessProbe": _probe("/livez", failure_threshold=6),
        "lifecycle": {"preStop": {"sleep": {"seconds": workload.stop_wait_s}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _resources(need: Need, parts: PodParts) -> dict[str, Any]:
    memory = {"memory": format_quantity(need.host_bytes)}
    claims = {} if parts.claim_template is None else {"claims": [{"name": CLAIM}]}
    return {
        "requests": {"cpu": "1", **memory, **parts.resources},
        "limits": {**memory, **parts.resources},
        **claims,
    }


def _probe(path: str, *, failure_threshold: int) -> dict[str, Any]:
    get = {"path": path, "port": "http"}
    return {"httpGet": get, "periodSeconds": PROBE_PERIOD_S, "timeoutSeconds": 3, "failureThreshold": failure_threshold}
