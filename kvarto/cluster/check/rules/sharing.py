"""What shares the cards: configurations of NVIDIA's device plugin, MPS that a pod runs itself, two plugins at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from kvarto.cluster.check.finding import Edit, Finding
from kvarto.cluster.check.manifests import Container, Files, Object, Pod
from kvarto.cluster.quantity import whole_number
from kvarto.cluster.schemes import ClusterOptions
from kvarto.cluster.schemes.replicas import SHARED_GPU, plugin_configs
from kvarto.cluster.schemes.whole import GPU
from kvarto.cluster.tree import dig, mapping, mappings, sequence, truth
from kvarto.cluster.yaml_text import dump

_MIG_PREFIX = "nvidia.com/mig-"
_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
_PIPE_DEFAULT = "/tmp/nvidia-mps"
_CONTROL = "nvidia-cuda-mps-control"
_PLUGIN_IMAGES = {"k8s-device-plugin": "NVIDIA's", "hami": "HAMi's", "volcano-vgpu-device-plugin": "Volcano's"}
_NODE_KEY = "gpu"
"""HAMi's own label for its nodes, `gpu=on`."""


def mps_with_mig(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """The plugin can share whole cards by MPS, or give out MIG instances, not both."""
    for place in _configs(files):
        if "mps" not in place.config["sharing"]:
            continue
        fixed = copy.deepcopy(place.config)
        wrong = []
        strategy = dig(fixed, "flags", "migStrategy")
        if strategy not in (None, "none"):
            wrong.append(f"`migStrategy: {strategy}`")
            fixed["flags"]["migStrategy"] = "none"
        for entry in mappings(dig(fixed, "sharing", "mps", "resources")):
            if str(entry.get("name")).startswith(_MIG_PREFIX):
                wrong.append(f"`{entry['name']}`")
                entry["name"] = GPU
        if wrong:
            beside = ", ".join(wrong)
            message = f"MPS beside {beside}: the plugin does not share MIG instances by MPS; share `{GPU}` alone"
            yield place.finding("mps-mig", message, place.rewrite(fixed))


def replica_counts(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """One replica shares nothing, and the plugin refuses it."""
    for place in _configs(files):
        fixed = copy.deepcopy(place.config)
        for kind in ("timeSlicing", "mps"):
            for entry in mappings(dig(fixed, "sharing", kind, "resources")):
                count = entry.get("replicas")
                if not isinstance(count, int) or count < 2:
                    right = entry["replicas"] = max(2, whole_number(count) or 0)  # a number in quotes is not read
                    wants = "a number of at least 2" if right > 2 else "at least 2"
                    message = f"`replicas: {count}` of `{entry.get('name')}`: the plugin wants {wants}; write `{right}`"
                    yield place.finding("replicas", message, place.rewrite(fixed))


def replica_names(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Pods must ask for the name that the plugin's configuration gives."""
    places = list(_configs(files))
    if not places:
        return
    renamed = all(_renames(place.config) for place in places)
    wrong, right = (GPU, SHARED_GPU) if renamed else (SHARED_GPU, GPU)
    for container in files.containers:
        scheme = container.scheme.name if container.scheme is not None else None
        value = container.amount("limits", wrong)
        if value is None or scheme not in ("whole", "time-slicing", "mps"):
            continue
        if container.amount("limits", right) is not None:
            continue  # both: another rule's matter
        message = f"`{wrong}`, but the plugin's configuration names its replicas `{right}`; write that"
        edits = []
        for kind in ("requests", "limits"):
            if container.amount(kind, wrong) is not None:
                edits.append(container.edit("resources", kind, right, value=container.amount(kind, wrong)))
                edits.append(container.edit("resources", kind, wrong))
        yield container.finding("replica-name", ("resources", "limits", wrong), message, *edits)


def own_mps(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Clients meet their MPS server through a directory and shared memory; without both each runs alone, unlimited."""
    for pod in files.pods:
        for container in pod.containers:
            directory = _pipe_directory(container)
            if directory is None or container.amount("limits", SHARED_GPU) is not None:
                continue
            missing = []
            edits: list[Edit] = []
            if not truth(pod.spec.get("hostIPC")):
                missing.append("`hostIPC: true`")
                edits.append(pod.edit("spec", "hostIPC", value=True))
            if not _is_shared(pod, container, directory):
                missing.append(f"a `hostPath` volume at `{directory}`")
                edits += _share_directory(pod, container, directory)
            if missing:
                message = f"MPS run by hand needs {' and '.join(missing)}; without, clients don't meet their server"
                yield container.finding("own-mps", ("env",), message, *edits)


def two_plugins(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Two device plugins that advertise `nvidia.com/gpu` on the same node take turns in overwriting each other."""
    plugins = [(pod, whose) for pod in files.pods if (whose := _plugin_of(pod)) is not None]
    for index, (pod, whose) in enumerate(plugins):
        for other, others in plugins[:index]:
            if whose != others and not _apart(pod, other):
                first, second = sorted(((whose, pod), (others, other)), key=lambda each: each[0] == "NVIDIA's")
                message = (
                    f"{whose} and {others} device plugins both advertise `{GPU}` on the same nodes; let {first[0]} run "
                    f"where `{_NODE_KEY}=on` and {second[0]} elsewhere"
                )
                edits = [
                    first[1].edit("spec", "nodeSelector", _NODE_KEY, value="on"),
                    second[1].edit("spec", "affinity", "nodeAffinity", value=_elsewhere()),
                ]
                yield pod.finding("two-plugins", ("spec",), message, *edits)


class _Place:
    """A plugin's configuration inside a ConfigMap."""

    def __init__(self, each: Object, key: str, config: dict[str, Any]) -> None:
        self._object = each
        self._key = key
        self.config = config

    def finding(self, rule: str, message: str, edit: Edit) -> Finding:
        return self._object.finding(rule, ("data", self._key), message, edit)

    def rewrite(self, config: dict[str, Any]) -> Edit:
        return self._object.edit("data", self._key, value=dump(config))


def _configs(files: Files) -> Iterator[_Place]:
    for index, key, config in plugin_configs(files.manifests):
        yield _Place(files.objects[index], key, config)


def _renames(config: dict[str, Any]) -> bool:
    return any(truth(mapping(each).get("renameByDefault")) for each in config["sharing"].values())


def _pipe_directory(container: Container) -> str | None:
    """The directory of an MPS server that the pod runs or meets by hand."""
    for _, name, value in container.env():
        if name == _PIPE:
            return str(value)
    words = [*sequence(container.manifest.get("command")), *sequence(container.manifest.get("args"))]
    return _PIPE_DEFAULT if any(_CONTROL in str(word) for word in words) else None


def _is_shared(pod: Pod, container: Container, directory: str) -> bool:
    host = {str(volume.get("name")) for volume in mappings(pod.spec.get("volumes")) if "hostPath" in volume}
    mounts = mappings(container.manifest.get("volumeMounts"))
    return any(mount.get("mountPath") == directory and str(mount.get("name")) in host for mount in mounts)


def _share_directory(pod: Pod, container: Container, directory: str) -> list[Edit]:
    names = [volume.get("name") for volume in mappings(pod.spec.get("volumes"))]
    edits: list[Edit] = []
    if "mps" not in names:
        volume = {"name": "mps", "hostPath": {"path": directory, "type": "DirectoryOrCreate"}}
        edits.append(_append(pod, ("spec", "volumes"), pod.spec.get("volumes"), volume))
    mount = {"name": "mps", "mountPath": directory}
    mounts = container.manifest.get("volumeMounts")
    edits.append(_append(pod, (*container.path, "volumeMounts"), mounts, mount))
    return edits


def _append(pod: Pod, path: tuple[str | int, ...], items: Any, item: dict[str, Any]) -> Edit:
    count = len(sequence(items))
    return pod.edit(*path, count, value=item) if count else pod.edit(*path, value=[item])


def _plugin_of(pod: Pod) -> str | None:
    if pod.object.kind != "DaemonSet":
        return None
    for container in pod.containers:
        image = str(container.manifest.get("image")).rpartition("/")[2].partition("@")[0].partition(":")[0]
        if image in _PLUGIN_IMAGES:
            return _PLUGIN_IMAGES[image]
    return None


def _apart(pod: Pod, other: Pod) -> bool:
    """Whether labels keep them on different nodes."""
    mine, others = (mapping(each.spec.get("nodeSelector")) for each in (pod, other))
    if any(mine[key] != others[key] for key in mine.keys() & others.keys()):
        return True
    return _avoids(pod, others) or _avoids(other, mine)


def _avoids(pod: Pod, labels: dict[str, Any]) -> bool:
    required = dig(pod.spec, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    for term in mappings(dig(required, "nodeSelectorTerms")):
        for each in mappings(term.get("matchExpressions")):
            if each.get("operator") == "NotIn" and labels.get(str(each.get("key"))) in sequence(each.get("values")):
                return True
    return False


def _elsewhere() -> dict[str, Any]:
    term = {"matchExpressions": [{"key": _NODE_KEY, "operator": "NotIn", "values": ["on"]}]}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
