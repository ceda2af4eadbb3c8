"""Correct manifests of each scheme, and ways to reach into them. Tests change copies."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from kvarto.cluster.cards import find_card
from kvarto.cluster.deployment import Workload
from kvarto.cluster.need import Need
from kvarto.cluster.render import render
from kvarto.cluster.schemes import SCHEMES, ClusterOptions
from kvarto.cluster.yaml_text import dump_all, load_all
from kvarto.core.units import GIB, MIB

CARD = find_card("H100-80")
OPTIONS = ClusterOptions(card=CARD)
NEED = Need(arena_bytes=14 * GIB, overhead_bytes=768 * MIB, host_bytes=3 * GIB)
CPU_NEED = Need(arena_bytes=14 * GIB, overhead_bytes=0, host_bytes=17 * GIB)
LIMIT_MIB = NEED.limit_bytes // MIB
GPU_SCHEMES = tuple(name for name in SCHEMES if name != "cpu")


@cache
def _parsed(scheme: str) -> list[Any]:
    need = CPU_NEED if scheme == "cpu" else NEED
    return load_all(dump_all(render(SCHEMES[scheme], Workload(), need, OPTIONS).documents))


def correct_manifests(scheme: str) -> list[Any]:
    """What `render` prints, parsed, in plain types."""
    documents = plain(_parsed(scheme))
    assert isinstance(documents, list)
    return documents


def of_kind(documents: list[Any], kind: str) -> Any:
    """The one document of that kind."""
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


def template(documents: list[Any]) -> Any:
    """The pod's template in the Deployment."""
    return of_kind(documents, "Deployment")["spec"]["template"]


def container(documents: list[Any]) -> Any:
    """The server's."""
    return template(documents)["spec"]["containers"][0]


def limits(documents: list[Any]) -> Any:
    return container(documents)["resources"]["limits"]


def requests(documents: list[Any]) -> Any:
    return container(documents)["resources"]["requests"]


def set_both(documents: list[Any], name: str, value: Any) -> None:
    """Request and limit."""
    limits(documents)[name] = value
    requests(documents)[name] = value


def drop_both(documents: list[Any], name: str) -> Any:
    """Neither; returns the limit that was there."""
    requests(documents).pop(name, None)
    return limits(documents).pop(name)


def add_env(documents: list[Any], name: str, value: Any) -> None:
    container(documents)["env"].append({"name": name, "value": value})


def plain(node: Any) -> Any:
    """Without the YAML library's types, and without the order of keys."""
    if isinstance(node, dict):
        return {str(key): plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [plain(item) for item in node]
    return node if node is None or isinstance(node, bool) else type(node).__mro__[-2](node)


def as_pod(documents: list[Any]) -> list[Any]:
    """The Deployment's pod by itself."""
    pod = copy.deepcopy(template(documents))
    pod["metadata"]["name"] = "server"
    carried = {"apiVersion": "v1", "kind": "Pod", **pod}
    return [carried if document["kind"] == "Deployment" else document for document in documents]


def as_cron_job(documents: list[Any]) -> list[Any]:
    """The same pod, made by a CronJob."""
    pod = copy.deepcopy(template(documents))
    pod["spec"]["restartPolicy"] = "Never"
    job = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": "server"},
        "spec": {"schedule": "0 3 * * *", "jobTemplate": {"spec": {"template": pod}}},
    }
    return [job if document["kind"] == "Deployment" else document for document in documents]


def as_list(documents: list[Any]) -> list[Any]:
    """All of it as items of one `List`."""
    return [{"apiVersion": "v1", "kind": "List", "items": documents}]
