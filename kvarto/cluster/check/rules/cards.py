"""Sums against the card: a request that no card holds, containers that must share one, MIG sets without a placement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvarto.cluster.cards import Card
from kvarto.cluster.check.finding import Finding
from kvarto.cluster.check.manifests import Files, Object, Pod
from kvarto.cluster.check.vocabulary import ALIYUN_MEMORY, unit_bytes, unit_name
from kvarto.cluster.mig_card import card_sets
from kvarto.cluster.quantity import format_quantity, parse_quantity, whole_number
from kvarto.cluster.schemes import ClusterOptions
from kvarto.cluster.schemes.base import annotation, resource
from kvarto.cluster.schemes.dra import device_requests, requests_path
from kvarto.cluster.schemes.kai import MEMORY
from kvarto.cluster.tree import dig, mapping, mappings
from kvarto.cluster.yaml_text import dump, load_all
from kvarto.core.errors import BadFile, UsageError
from kvarto.core.units import MIB, format_bytes


def over_card(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """One container's request beyond the whole card."""
    card = options.card
    if card is None:
        return
    for container in files.containers:
        for name in dict.fromkeys(name for _, name, _ in container.amounts()):
            unit, units = unit_bytes(name, options), resource(container.manifest, name)
            if unit is None or units is None or units * unit <= card.memory_bytes:
                continue
            right = card.memory_bytes // unit
            message = f"`{name}: {units}` is {format_bytes(units * unit)}, {_beyond(card)}; at most `{right}` fits"
            yield container.finding(
                "over-card", ("resources", "limits", name), message, *container.set_amount(name, right)
            )
    for pod in files.pods:
        mib = whole_number(annotation(pod.template, MEMORY))
        if mib is not None and mib * MIB > card.memory_bytes:
            path = ("metadata", "annotations", MEMORY)
            most = str(card.memory_bytes // MIB)
            message = f"`{MEMORY}: {mib}` is {format_bytes(mib * MIB)}, {_beyond(card)}; at most `{most}` fits"
            yield pod.finding("over-card", path, message, pod.edit(*path, value=most))


def claims_over_card(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """A claim's capacity beyond the whole card."""
    card = options.card
    if card is None:
        return
    for each in files.of_kind("ResourceClaim", "ResourceClaimTemplate"):
        for index, request in enumerate(device_requests(each.manifest)):
            inner = ("exactly",) if "exactly" in request else ()
            path = (*requests_path(each.manifest), index, *inner, "capacity", "requests", "memory")
            memory = dig(each.manifest, *path)
            try:
                is_over = memory is not None and parse_quantity(memory) > card.memory_bytes
            except ValueError:
                continue
            if is_over:
                right = format_quantity(card.memory_bytes)
                message = f"`memory: {memory}` is {_beyond(card)}; at most `{right}` fits"
                yield each.finding("over-card", path, message, each.edit(*path, value=right))


def sum_over_card(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """All containers of an Alibaba pod land on one GPU."""
    unit = unit_bytes(ALIYUN_MEMORY, options)
    if options.card is None or unit is None:
        return
    for pod in files.pods:
        yield from _one_gpu(pod, options.card, unit)


def mig_sets(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Sets of MIG instances, in mig-parted's configuration, that the card has no placement for."""
    if options.card is None or not options.card.profiles:
        return
    for each in files.of_kind("ConfigMap"):
        for key, text in mapping(each.manifest.get("data")).items():
            config = _mig_config(text)
            if config is not None:
                yield from _mig_findings(each, key, config, options.card)


def _one_gpu(pod: Pod, card: Card, unit: int) -> Iterator[Finding]:
    parts = [
        (container, units)
        for container in pod.containers
        if container.path[1] == "containers" and (units := resource(container.manifest, ALIYUN_MEMORY)) is not None
    ]
    total = sum(units for _, units in parts)
    if len(parts) < 2 or total * unit <= card.memory_bytes or any(n * unit > card.memory_bytes for _, n in parts):
        return
    most = card.memory_bytes // unit
    edits = []
    for container, units in parts:
        edits += container.set_amount(ALIYUN_MEMORY, max(1, units * most // total))
    message = (
        f"`{ALIYUN_MEMORY}` of {len(parts)} containers adds up to {total} {unit_name(unit)}, and all land on one GPU: "
        f"{_beyond(card)}; at most `{most}` in all fits"
    )
    yield pod.finding("sum-over-card", ("spec", "containers"), message, *edits)


def _mig_config(text: Any) -> Any:
    if not isinstance(text, str) or "mig-configs" not in text:
        return None
    try:
        parsed = load_all(text)
    except BadFile:
        return None
    return parsed[0] if len(parsed) == 1 and isinstance(dig(parsed[0], "mig-configs"), dict) else None


def _mig_findings(each: Object, key: str, config: Any, card: Card) -> Iterator[Finding]:
    for name, groups in config["mig-configs"].items():
        for group in mappings(groups):
            devices = mapping(group.get("mig-devices"))
            wanted = {str(profile): count for profile, count in devices.items() if isinstance(count, int) and count > 0}
            fitting = _fitting(card, wanted)
            if fitting is None or fitting == wanted:
                continue
            group["mig-devices"] = {profile: count for profile, count in fitting.items() if count}
            asked = ", ".join(f"{count} × {profile}" for profile, count in wanted.items())
            fits = ", ".join(f"{count} × {profile}" for profile, count in group["mig-devices"].items())
            message = f"`{name}`: `{card.name}` has no placement for {asked}; {fits} fits"
            yield each.finding("mig-set", ("data", key), message, each.edit("data", key, value=dump(config)))
            return  # the next round sees what is left


def _fitting(card: Card, wanted: dict[str, int]) -> dict[str, int] | None:
    """The wanted set, one instance after the other as long as all so far have a placement; None for unknown names."""
    try:
        indices = {name: card.profiles.index(card.profile(name)) for name in wanted}
    except UsageError:
        return None
    feasible = card_sets(card).feasible
    counts = [0] * len(card.profiles)
    for name, count in wanted.items():
        for _ in range(min(count, card.compute_slices + 1)):
            counts[indices[name]] += 1
            if tuple(counts) not in feasible:
                counts[indices[name]] -= 1
                break
    return {name: counts[index] for name, index in indices.items()}


def _beyond(card: Card) -> str:
    return f"more than the {format_bytes(card.memory_bytes)} of `{card.name}`"
