"""Views on parsed manifests: every object, wherever it stands, every pod in whatever makes it, every container."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvarto.cluster.check.finding import Edit, Finding, Severity
from kvarto.cluster.schemes import Manifest, Scheme, scheme_of
from kvarto.cluster.tree import Path, dig, mapping, sequence
from kvarto.core.errors import BadFile

_TEMPLATES: dict[str, Path] = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
    **dict.fromkeys(
        ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job", "ReplicationController"), ("spec", "template")
    ),
}
"""Where the pod stands in what makes it, for Kubernetes' own kinds."""
_OWN_GROUPS = ("", "apps", "batch")


@dataclass(frozen=True, slots=True)
class Object:
    """One manifest; items of a `List` or a `PodList` are objects too."""

    document: int
    path: Path
    """In its document; empty but for items."""
    manifest: Any

    @property
    def kind(self) -> str:
        """`Deployment`."""
        return str(self.manifest.get("kind"))

    @property
    def name(self) -> str:
        """`Deployment kvarto`, for people."""
        metadata = mapping(self.manifest.get("metadata"))
        return f"{self.kind} {metadata.get('name') or metadata.get('generateName') or '(no name)'}"

    @property
    def is_of_kubernetes(self) -> bool:
        """Whether Kubernetes itself makes its pods; a controller of others may add what a template lacks."""
        return str(self.manifest["apiVersion"]).rpartition("/")[0] in _OWN_GROUPS

    def finding(self, rule: str, path: Path, message: str, *edits: Edit, where: str | None = None) -> Finding:
        """A mistake at `path` of this object."""
        return Finding(rule, where or self.name, self.document, (*self.path, *path), message, edits)

    def edit(self, *path: str | int, **value: Any) -> Edit:
        """`edit("spec", "nodeName")` removes, `edit("spec", "replicas", value=1)` sets."""
        return Edit(self.document, (*self.path, *path), **value)


@dataclass(frozen=True)
class Pod:
    """A pod, or the template that pods are made from."""

    object: Object
    path: Path
    """In the object."""
    files: Files

    @cached_property
    def template(self) -> Any:
        """`metadata` and `spec`."""
        return dig(self.object.manifest, *self.path)

    @property
    def spec(self) -> Any:
        """Of the pod; empty where there is none."""
        return mapping(self.template.get("spec"))

    @cached_property
    def containers(self) -> list[Container]:
        """Init containers, then the others."""
        found = []
        for kind in ("initContainers", "containers"):
            for index, manifest in enumerate(sequence(self.spec.get(kind))):
                if isinstance(manifest, dict):
                    found.append(Container(self, ("spec", kind, index), manifest))
        return found

    @property
    def uses_gpu(self) -> bool:
        """Whether any container asks for one."""
        return any(container.scheme is not None for container in self.containers)

    def finding(self, rule: str, path: Path, message: str, *edits: Edit) -> Finding:
        """A mistake at `path` of the template."""
        return self.object.finding(rule, (*self.path, *path), message, *edits)

    def edit(self, *path: str | int, **value: Any) -> Edit:
        """As `Object.edit`, from the template on."""
        return self.object.edit(*self.path, *path, **value)


@dataclass(frozen=True)
class Container:
    """A container of a pod."""

    pod: Pod
    path: Path
    """In the template."""
    manifest: Any

    @cached_property
    def scheme(self) -> Scheme | None:
        """How it asks for a GPU."""
        return scheme_of(self.pod.template, self.manifest, self.pod.files.manifests)

    def amounts(self) -> Iterator[tuple[str, str, Any]]:
        """`requests` or `limits`, resource, value as written."""
        for kind in ("requests", "limits"):
            for name, value in mapping(dig(self.manifest, "resources", kind)).items():
                yield kind, str(name), value

    def amount(self, kind: str, name: str) -> Any:
        """The value as written, or None."""
        return dig(self.manifest, "resources", kind, name)

    def env(self) -> Iterator[tuple[int, str, Any]]:
        """Index, name, literal value or None."""
        for index, entry in enumerate(sequence(self.manifest.get("env"))):
            if isinstance(entry, dict):
                yield index, str(entry.get("name")), entry.get("value")

    def finding(self, rule: str, path: Path, message: str, *edits: Edit) -> Finding:
        """A mistake at `path` of the container."""
        full = (*self.pod.path, *self.path, *path)
        where = f"{self.pod.object.name}, container {self.manifest.get('name')}"
        return self.pod.object.finding(rule, full, message, *edits, where=where)

    def edit(self, *path: str | int, **value: Any) -> Edit:
        """As `Object.edit`, from the container on."""
        return self.pod.edit(*self.path, *path, **value)

    def set_amount(self, name: str, value: Any) -> list[Edit]:
        """The same request and limit; a request is written only where requests are."""
        kinds = ["limits"] if self.amount("requests", name) is None else ["requests", "limits"]
        return [self.edit("resources", kind, name, value=value) for kind in kinds]

    def drop_amount(self, name: str) -> list[Edit]:
        """Neither request nor limit."""
        return [self.edit("resources", kind, each) for kind, each, _ in self.amounts() if each == name]


class Files:
    """All objects of all documents. Raises BadFile for a document that is no Kubernetes object."""

    def __init__(self, documents: Sequence[Any]) -> None:
        self.objects = [each for index, document in enumerate(documents) for each in _objects(index, (), document)]

    @cached_property
    def manifests(self) -> list[Manifest]:
        """Without their places."""
        return [each.manifest for each in self.objects]

    @cached_property
    def pods(self) -> list[Pod]:
        """Every pod and template."""
        places = ((each, path) for each in self.objects for path in _pod_paths(each))
        return [Pod(each, path, self) for each, path in places if isinstance(dig(each.manifest, *path), dict)]

    @property
    def containers(self) -> Iterator[Container]:
        """Of all pods."""
        for pod in self.pods:
            yield from pod.containers

    def of_kind(self, *kinds: str) -> list[Object]:
        """Objects of these kinds."""
        return [each for each in self.objects if each.kind in kinds]


def _pod_paths(each: Object) -> list[Path]:
    """Where an object's pods stand. Kinds that others defined, a RayCluster or a Volcano Job, are searched for them."""
    if each.is_of_kubernetes:
        path = _TEMPLATES.get(each.kind)
        return [] if path is None else [path]
    below = _mappings_below(each.manifest, ())
    return [path for path in below if sequence(dig(each.manifest, *path, "spec", "containers"))]


def _mappings_below(node: Any, path: Path) -> Iterator[Path]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if isinstance(value, dict):
            yield (*path, key)
        yield from _mappings_below(value, (*path, key))


def warning(finding: Finding) -> Finding:
    """The same, as something to think about and no reason to stop."""
    return Finding(
        finding.rule, finding.where, finding.document, finding.path, finding.message, finding.edits, Severity.WARNING
    )


def _objects(document: int, path: Path, manifest: Any) -> Iterator[Object]:
    if not isinstance(manifest, dict) or not isinstance(manifest.get("kind"), str) or "apiVersion" not in manifest:
        raise BadFile(f"document {document + 1} is no Kubernetes object: it has no `apiVersion` and `kind`")
    kind, items = manifest["kind"], manifest.get("items")
    if not kind.endswith("List") or (kind != "List" and not isinstance(items, list)):
        yield Object(document, path, manifest)
        return
    # A `PodList` says once what its items are.
    common = {} if kind == "List" else {"apiVersion": manifest["apiVersion"], "kind": kind.removesuffix("List")}
    for index, item in enumerate(sequence(items)):
        yield from _objects(document, (*path, "items", index), {**common, **item} if isinstance(item, dict) else item)
