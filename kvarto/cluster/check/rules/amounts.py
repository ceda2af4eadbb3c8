"""Resources that belong together: counts, requests and limits, two schemes at once, several parts of one card."""

from __future__ import annotations

from collections.abc import Iterator

from kvarto.cluster.check.finding import Finding
from kvarto.cluster.check.manifests import Container, Files, warning
from kvarto.cluster.check.rules.names import right_name
from kvarto.cluster.check.vocabulary import (
    ALIYUN_MEMORY,
    COUNTS,
    HAMI_MEMORY,
    PERCENTAGES,
    TENCENT_CORE,
    TENCENT_MEMORY,
    VOLCANO_MEMORY,
    is_extended,
)
from kvarto.cluster.quantity import whole_number
from kvarto.cluster.schemes import ClusterOptions
from kvarto.cluster.schemes.base import annotation, resource
from kvarto.cluster.schemes.kai import FRACTION, MEMORY
from kvarto.cluster.schemes.mig import mig_resources
from kvarto.cluster.schemes.replicas import SHARED_GPU, plugin_configs, replica_entries
from kvarto.cluster.schemes.units import Tencent
from kvarto.cluster.schemes.whole import GPU
from kvarto.cluster.tree import dig, truth
from kvarto.core.units import ceil_div


def missing_count(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """`gpumem` without `gpu`: nobody allocates a device, so the limit holds for none."""
    for container in files.containers:
        present = {right_name(name) or name for _, name, _ in container.amounts()}
        for count, dependents in COUNTS.items():
            dependent = next((name for name in dependents if name in present), None)
            if dependent is None or count in present:
                continue
            right = _count(container, count, options)
            message = f"`{dependent}` without `{count}` limits a device that is never asked for; add `{count}: {right}`"
            kinds = [kind for kind in ("requests", "limits") if container.amount(kind, dependent) is not None]
            if not kinds:
                continue  # misspelt, which is said elsewhere
            edits = [container.edit("resources", kind, count, value=right) for kind in kinds]
            yield container.finding("missing-count", ("resources", kinds[-1], dependent), message, *edits)


def requests_and_limits(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Extended resources can't be over-committed: requests are limits."""
    for container in files.containers:
        for name in dict.fromkeys(name for _, name, _ in container.amounts() if is_extended(name)):
            request, limit = container.amount("requests", name), container.amount("limits", name)
            if request is not None and limit is None:
                message = (
                    f"`{name}: {request}` stands under requests only; extended resources need limits too: write "
                    f"`{name}: {request}` under limits"
                )
                edit = container.edit("resources", "limits", name, value=request)
                yield container.finding("requests-only", ("resources", "requests", name), message, edit)
            elif _differ(whole_number(request), whole_number(limit)):
                message = (
                    f"`{name}` has request {request} and limit {limit}; extended resources can't be over-committed: "
                    f"write `{limit}` for both"
                )
                edit = container.edit("resources", "requests", name, value=limit)
                yield container.finding("requests-differ", ("resources", "requests", name), message, edit)


def percentage_and_absolute(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Two numbers for one limit."""
    for container in files.containers:
        present = {name: kind for kind, name, _ in container.amounts()}
        for percentage, absolute in PERCENTAGES.items():
            if percentage in present and absolute in present:
                message = f"`{percentage}` and `{absolute}` both set the memory; leave `{percentage}` out"
                path = ("resources", present[percentage], percentage)
                yield container.finding("two-limits", path, message, *container.drop_amount(percentage))
    for pod in files.pods:
        if annotation(pod.template, MEMORY) is not None and annotation(pod.template, FRACTION) is not None:
            path = ("metadata", "annotations", FRACTION)
            message = f"annotations `{MEMORY}` and `{FRACTION}` both set the memory; leave `{FRACTION}` out"
            yield pod.finding("two-limits", path, message, pod.edit(*path))


def two_schemes(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """A whole card and a part of one: both schemes allocate, each from its own books."""
    for container in files.containers:
        if resource(container.manifest, GPU) is None or resource(container.manifest, HAMI_MEMORY) is not None:
            continue
        part = _other_part(container)
        if part is not None:
            message = f"`{GPU}` asks for a whole card beside `{part}`, a part of one; leave `{GPU}` out"
            path = ("resources", "limits", GPU)
            yield container.finding("two-schemes", path, message, *container.drop_amount(GPU))


def several_parts(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Two parts of one card add up to nothing: a process opens one device."""
    unnamed = any(not _is_renamed(files) for _ in replica_entries(files.manifests))
    for container in files.containers:
        names = [SHARED_GPU, *([GPU] if unnamed else [])]
        for name in names:
            count = resource(container.manifest, name)
            if count is not None and count > 1:
                message = (
                    f"`{name}: {count}` takes {count} turns on cards that are shared, often on the same one, and no "
                    "more memory; write `1`"
                )
                yield container.finding(
                    "several-replicas", ("resources", "limits", name), message, *container.set_amount(name, 1)
                )
        for name in mig_resources(container.manifest):
            count = resource(container.manifest, name)
            if count is not None and count > 1:
                message = f"`{name}: {count}`: a CUDA process sees one instance; write `1`, or take a larger profile"
                finding = container.finding(
                    "several-instances", ("resources", "limits", name), message, *container.set_amount(name, 1)
                )
                yield warning(finding)


def _count(container: Container, count: str, options: ClusterOptions) -> int:
    blocks = resource(container.manifest, TENCENT_MEMORY)
    if count != TENCENT_CORE or blocks is None or options.card is None:
        return 10 if count == TENCENT_CORE else 1
    size_bytes = blocks * Tencent().unit_bytes(options)
    return max(1, min(99, ceil_div(size_bytes * 100, options.card.memory_bytes)))


def _other_part(container: Container) -> str | None:
    for name in (VOLCANO_MEMORY, ALIYUN_MEMORY, TENCENT_MEMORY, SHARED_GPU, *mig_resources(container.manifest)):
        if resource(container.manifest, name) is not None:
            return name
    for name in (MEMORY, FRACTION):
        if annotation(container.pod.template, name) is not None:
            return name
    return None


def _is_renamed(files: Files) -> bool:
    sharing = [config["sharing"] for _, _, config in plugin_configs(files.manifests)]
    return all(truth(dig(each, kind, "renameByDefault")) for each in sharing for kind in each)


def _differ(request: int | None, limit: int | None) -> bool:
    """None is what is no plain number: another rule's matter, which mends both."""
    return request is not None and limit is not None and request != limit
