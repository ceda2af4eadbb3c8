"""Who places the pod: node names, scheduler names, annotations on the wrong object, runtime classes."""

from __future__ import annotations

from collections.abc import Iterator

from kvarto.cluster.check.finding import Finding
from kvarto.cluster.check.manifests import Files, Pod
from kvarto.cluster.check.vocabulary import POD_ANNOTATIONS
from kvarto.cluster.schemes import ClusterOptions
from kvarto.cluster.schemes.base import annotation
from kvarto.cluster.schemes.kai import FRACTION, MEMORY, QUEUE_LABEL
from kvarto.cluster.tree import TruthWord, as_text, dig, mapping

HOSTNAME = "kubernetes.io/hostname"
DEFAULT_SCHEDULER = "default-scheduler"
_OWN_SCHEDULERS = {"volcano": "volcano", "kai": "kai-scheduler"}
"""Schemes whose counting is done by a scheduler of their own."""
_DEFAULT_ONLY = {
    "hami": ("HAMi's webhook passes over pods that name one, and their limit is forgotten", "hami-scheduler"),
    "aliyun": ("Alibaba's extender belongs to the default scheduler", DEFAULT_SCHEDULER),
    "tencent": ("gpu-manager's extender belongs to the default scheduler", DEFAULT_SCHEDULER),
}


def node_name(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """`nodeName` skips every scheduler, and with it every count."""
    for pod in files.pods:
        node = pod.spec.get("nodeName")
        if node and pod.uses_gpu:
            message = (
                f"`nodeName: {node}` passes over every scheduler, so nobody counts this pod's GPU memory; write "
                f"`nodeSelector: {{{HOSTNAME}: {node}}}`"
            )
            selected = pod.edit("spec", "nodeSelector", HOSTNAME, value=node)
            yield pod.finding("node-name", ("spec", "nodeName"), message, pod.edit("spec", "nodeName"), selected)


def scheduler_name(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Each scheme needs the scheduler that counts for it."""
    path = ("spec", "schedulerName")
    for pod in files.pods:
        name = pod.spec.get("schedulerName")
        schemes = {container.scheme.name for container in pod.containers if container.scheme is not None}
        for scheme in sorted(schemes):
            wanted = _OWN_SCHEDULERS.get(scheme)
            if wanted is not None and name != wanted and (name or pod.object.is_of_kubernetes):
                written = f"`schedulerName: {name}`" if name else "no `schedulerName`"
                message = f"{written}: only `{wanted}` counts what this pod asks for; write `schedulerName: {wanted}`"
                yield pod.finding("scheduler-name", path, message, pod.edit(*path, value=wanted))
            reason, allowed = _DEFAULT_ONLY.get(scheme, ("", ""))
            if reason and name and name not in (DEFAULT_SCHEDULER, allowed):
                message = f"`schedulerName: {name}`: {reason}; leave it out"
                yield pod.finding("scheduler-name", path, message, pod.edit(*path))


def annotation_place(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Annotations of pods that stand on what makes the pod."""
    for pod in files.pods:
        if not pod.path:
            continue
        for name, value in mapping(dig(pod.object.manifest, "metadata", "annotations")).items():
            if name in POD_ANNOTATIONS:
                message = (
                    f"annotation `{name}` stands on the {pod.object.kind}, where nobody reads it; move it to "
                    f"`{'.'.join(map(str, pod.path))}.metadata.annotations`"
                )
                edits = [pod.object.edit("metadata", "annotations", name)]
                if annotation(pod.template, name) is None:
                    edits.append(pod.edit("metadata", "annotations", name, value=value))
                yield pod.object.finding("annotation-place", ("metadata", "annotations", name), message, *edits)


def annotation_text(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Annotations and labels are text; YAML reads `16384` as a number, which the API server refuses."""
    for pod in files.pods:
        for kind in ("annotations", "labels"):
            for name, value in mapping(dig(pod.template, "metadata", kind)).items():
                if isinstance(value, (bool, int, float, TruthWord)):
                    text = as_text(value)
                    path = ("metadata", kind, name)
                    message = f'`{name}: {text}` is no text, as {kind} must be; write `"{text}"`'
                    yield pod.finding("annotation-text", path, message, pod.edit(*path, value=text))


def kai_queue(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """KAI schedules from queues; a pod in none waits for ever."""
    for pod in files.pods:
        asks = annotation(pod.template, MEMORY) is not None or annotation(pod.template, FRACTION) is not None
        path = ("metadata", "labels", QUEUE_LABEL)
        if asks and pod.object.is_of_kubernetes and dig(pod.template, *path) is None:
            message = f"no label `{QUEUE_LABEL}`: KAI leaves pods without a queue waiting; write `{options.queue}`"
            yield pod.finding("kai-queue", path, message, pod.edit(*path, value=options.queue))


def runtime_class(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Where NVIDIA's runtime is a class of its own, a pod must name it to see a driver."""
    classes = [
        str(dig(each.manifest, "metadata", "name"))
        for each in files.of_kind("RuntimeClass")
        if str(each.manifest.get("handler")).startswith("nvidia")
    ]
    if not classes:
        return
    for pod in files.pods:
        if _needs_runtime(pod):
            path = ("spec", "runtimeClassName")
            message = f"no `runtimeClassName`, and NVIDIA's runtime is the class `{classes[0]}`; write it"
            yield pod.finding("runtime-class", path, message, pod.edit(*path, value=classes[0]))


def _needs_runtime(pod: Pod) -> bool:
    return pod.uses_gpu and not pod.spec.get("runtimeClassName")
