"""A mistake, and changes that make one or mend it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.cluster.manifests import (
    GPU_SCHEMES,
    add_env,
    container,
    correct_manifests,
    drop_both,
    of_kind,
    set_both,
    template,
)  # fmt: skip

Documents = list[Any]
Change = Callable[[Documents], Any]
ALL_SCHEMES = (*GPU_SCHEMES, "cpu")
COUNTED = {
    "whole": "nvidia.com/gpu", "mig": "nvidia.com/mig-1g.20gb", "time-slicing": "nvidia.com/gpu.shared",
    "mps": "nvidia.com/gpu.shared", "vgpu": "nvidia.com/gpu", "hami": "nvidia.com/gpumem",
    "volcano": "volcano.sh/vgpu-memory", "aliyun": "aliyun.com/gpu-mem", "tencent": "tencent.com/vcuda-memory",
}  # fmt: skip
"""A resource of each scheme that has any."""
MEMORY = {name: COUNTED[name] for name in ("hami", "volcano", "aliyun", "tencent")}
UNIT_MIB = {"hami": 1, "volcano": 1, "aliyun": 1024, "tencent": 256}
UNIT_NAME = {"hami": "MiB", "volcano": "MiB", "aliyun": "GiB", "tencent": "blocks of 256 MiB"}


@dataclass(frozen=True)
class Mistake:
    """One wrong set of manifests."""

    name: str
    scheme: str
    change: Change
    rule: str
    message: str
    right: Change | None = None
    """What the correction must make of the correct manifests; None: it restores them exactly."""

    @property
    def id(self) -> str:
        return f"{self.scheme}-{self.name}"

    def wrong(self) -> Documents:
        documents = correct_manifests(self.scheme)
        self.change(documents)
        return documents

    def corrected(self) -> Documents:
        documents = correct_manifests(self.scheme)
        if self.right is not None:
            self.right(documents)
        return documents


def both(name: str, value: Any) -> Change:
    return lambda documents: set_both(documents, name, value)


def env(name: str, value: Any) -> Change:
    return lambda documents: add_env(documents, name, value)


def spec(**values: Any) -> Change:
    return lambda documents: template(documents)["spec"].update(values)


def annotate(documents: Documents, name: str, value: Any) -> None:
    template(documents)["metadata"]["annotations"][name] = value


def kai_fraction(text: str) -> Change:
    def change(documents: Documents) -> None:
        template(documents)["metadata"]["annotations"].pop("gpu-memory")
        annotate(documents, "gpu-fraction", text)

    return change


def renamed(name: str, other: str) -> Change:
    def change(documents: Documents) -> None:
        set_both(documents, other, drop_both(documents, name))

    return change


def misnamed(scheme: str, name: str, wrong: str) -> Mistake:
    return Mistake(
        f"name-{wrong}", scheme, renamed(name, wrong), "resource-name",
        f"`{wrong}` is a name that nothing advertises; write `{name}`",
    )  # fmt: skip


def misplaced(scheme: str, name: str, value: str) -> Mistake:
    def above(documents: Documents) -> None:
        of_kind(documents, "Deployment")["metadata"]["annotations"] = {name: value}

    def right(documents: Documents) -> None:
        of_kind(documents, "Deployment")["metadata"]["annotations"] = {}
        annotate(documents, name, value)

    return Mistake(
        f"place-{name}", scheme, above, "annotation-place",
        f"annotation `{name}` stands on the Deployment, where nobody reads it; move it to "
        "`spec.template.metadata.annotations`",
        right,
    )  # fmt: skip


def moved(node: Any, wrong: str, right: str) -> None:
    """The misspelt field, and not the right one."""
    node.pop(right, None)
    node[wrong] = "Always"


def without_flag(args: list[str]) -> list[str]:
    index = args.index("--device-memory")
    return [*args[:index], *args[index + 2 :]]


def without_arena(change: Change) -> Change:
    def both_changes(documents: Documents) -> None:
        container(documents)["args"] = without_flag(container(documents)["args"])
        change(documents)

    return both_changes


def without_own_limit(documents: Documents) -> None:
    container(documents)["env"].pop()  # KVARTO_GPU_MEMORY_LIMIT, which `render` puts last


def arena(text: str) -> Change:
    def change(documents: Documents) -> None:
        args = container(documents)["args"]
        args[args.index("--device-memory") + 1] = text

    return change


def vllm(words: list[str]) -> Change:
    return lambda documents: container(documents).update(image="vllm/vllm-openai", args=["--model", "x", *words])


def with_runtime_class(documents: Documents) -> None:
    documents.append(
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"}
    )


def quota(key: str, value: str) -> Change:
    return lambda documents: documents.append(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": {key: value}}}
    )


def plugin(*, flags: str = "", resource: str = "nvidia.com/gpu", replicas: int = 5) -> Change:
    """Another configuration of the device plugin, with the server out of the way where its part would change."""

    def change(documents: Documents) -> None:
        config = of_kind(documents, "ConfigMap")["data"]
        config["kvarto"] = flags_first(config["kvarto"], flags).replace("name: nvidia.com/gpu", f"name: {resource}")
        config["kvarto"] = config["kvarto"].replace("replicas: 5", f"replicas: {replicas}")

    return change


def flags_first(text: str, flags: str) -> str:
    first, rest = text.split("\n", 1)
    return f"{first}\n{flags}{rest}"


def mig_parted(devices: dict[str, int]) -> Change:
    lines = "".join(f"      {name}: {count}\n" for name, count in devices.items())
    text = f"version: v1\nmig-configs:\n  mine:\n  - devices: all\n    mig-enabled: true\n    mig-devices:\n{lines}"
    return lambda documents: documents.append(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mig"}, "data": {"config.yaml": text}}
    )


def shares(directory: str, change: Change) -> Change:
    def with_directory(documents: Documents) -> None:
        change(documents)
        template(documents)["spec"]["hostIPC"] = True
        volume = {"name": "mps", "hostPath": {"path": directory, "type": "DirectoryOrCreate"}}
        template(documents)["spec"]["volumes"].append(volume)
        container(documents)["volumeMounts"].append({"name": "mps", "mountPath": directory})

    return with_directory


def two_plugins(image: str, *, apart: bool = False) -> Change:
    def daemon(name: str, image: str, **extra: Any) -> dict[str, Any]:
        labels = {"app": name}
        pod = {"containers": [{"name": name, "image": image}], **extra}
        spec = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}}
        return {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": name}, "spec": spec}

    term = {"matchExpressions": [{"key": "gpu", "operator": "NotIn", "values": ["on"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    elsewhere = {"affinity": {"nodeAffinity": required}} if apart else {}
    here = {"nodeSelector": {"gpu": "on"}} if apart else {}
    return lambda documents: documents.extend([
        daemon("nvidia", "nvcr.io/nvidia/k8s-device-plugin:v0.18.0", **elsewhere), daemon("other", image, **here)
    ])  # fmt: skip


def slice_v1(*, basic: bool) -> Change:
    inner = {"capacity": {"memory": {"value": "80Gi"}}}
    device = {"name": "gpu-0", **({"basic": inner} if basic else inner)}
    pool = {"name": "node", "generation": 1, "resourceSliceCount": 1}
    return lambda documents: documents.append({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "node"},
        "spec": {"driver": "gpu.nvidia.com", "nodeName": "node", "pool": pool, "devices": [device]},
    })  # fmt: skip
