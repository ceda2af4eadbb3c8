"""Replicas of NVIDIA's device plugin: turns and no memory under time-slicing, both under MPS."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from kvarto.cluster.need import Need
from kvarto.cluster.schemes.base import ClusterOptions, Facts, Manifest, PodParts, Scheme, per_card, resource
from kvarto.cluster.schemes.whole import GPU
from kvarto.cluster.tree import dig, mapping, mappings
from kvarto.cluster.yaml_text import dump, load_all
from kvarto.core.errors import BadFile
from kvarto.core.units import MIB
from kvarto.memory.device_limit import MPS_LIMIT

SHARED_GPU = "nvidia.com/gpu.shared"
"""The name that `renameByDefault` gives to replicas, so that nobody takes them for cards."""


class _Replicas(Scheme):
    sharing: str
    """The plugin's key for it."""

    def parts(self, name: str, need: Need, options: ClusterOptions) -> PodParts:
        """One replica, and the plugin's configuration that makes as many as hold the need each."""
        card = options.need_card(self.name)
        count = per_card(need, card, self.name)
        granted_bytes = card.memory_bytes // count
        return PodParts(
            granted_bytes,
            {SHARED_GPU: 1},
            env=self._env(granted_bytes),
            objects=(self._plugin_config(name, count, options),),
        )

    def uses(self, template: Manifest, container: Manifest) -> bool:
        """A replica. Time-slicing and MPS look the same here; the plugin's configuration tells them apart."""
        return resource(container, SHARED_GPU) is not None

    def granted_bytes(
        self, template: Manifest, container: Manifest, objects: Sequence[Manifest], options: ClusterOptions
    ) -> int | None:
        """An equal part of the card."""
        counts = [entry["replicas"] for key, entry in replica_entries(objects) if key == self.sharing]
        if options.card is None or not counts or not isinstance(counts[0], int) or counts[0] < 1:
            return None
        return options.card.memory_bytes // counts[0]

    def _env(self, granted_bytes: int) -> dict[str, str]:
        return {}

    def _plugin_config(self, name: str, count: int, options: ClusterOptions) -> dict[str, Any]:
        sharing: dict[str, Any] = {"renameByDefault": True}
        if self.sharing == "timeSlicing":
            sharing["failRequestsGreaterThanOne"] = True  # MPS always refuses more than one
        sharing["resources"] = [{"name": GPU, "replicas": count}]
        config = {"version": "v1", "sharing": {self.sharing: sharing}}
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{name}-device-plugin", "namespace": options.plugin_namespace},
            "data": {name: dump(config)},
        }


class TimeSlicing(_Replicas):
    """`nvidia.com/gpu.shared: 1` of a card that takes turns."""

    name = "time-slicing"
    sharing = "timeSlicing"
    is_enforced = False
    facts = Facts(
        title="time-slicing",
        unit="replicas of a card, all equal; no memory is meant",
        enforced_by="nothing: any container may fill the card",
        reported="whole card",
        over_commit="always possible",
        isolates_faults=False,
        compute="turns",
    )


class Mps(_Replicas):
    """`nvidia.com/gpu.shared: 1` of a card behind an MPS server."""

    name = "mps"
    sharing = "mps"
    is_enforced = True
    facts = Facts(
        title="MPS",
        unit="replicas of a card, all equal",
        enforced_by="the MPS server, for each client process and not for the container",
        reported="whole card",
        over_commit="no",
        isolates_faults=False,
        compute="equal thread percentages",
    )

    def _env(self, granted_bytes: int) -> dict[str, str]:
        return {MPS_LIMIT: f"0={granted_bytes // MIB}M"}  # so that the server reads what its client limit is


def plugin_configs(objects: Sequence[Manifest]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Configurations of NVIDIA's device plugin inside ConfigMaps: index of the object, key, parsed text."""
    for index, each in enumerate(objects):
        if each.get("kind") != "ConfigMap":
            continue
        for key, text in mapping(each.get("data")).items():
            config = _parse(text) if isinstance(text, str) and "sharing" in text else None
            if config is not None:
                yield index, key, config


@lru_cache(maxsize=64)
def _parse(text: str) -> dict[str, Any] | None:
    """A plugin's configuration, or None for anything else. Shared: whoever changes it copies it first."""
    try:
        parsed = load_all(text)
    except BadFile:
        return None
    is_config = len(parsed) == 1 and isinstance(dig(parsed[0], "sharing"), dict)
    return dict(parsed[0]) if is_config else None


def replica_entries(objects: Sequence[Manifest]) -> Iterator[tuple[str, dict[str, Any]]]:
    """`timeSlicing` or `mps`, and one entry of its resources."""
    for _, _, config in plugin_configs(objects):
        for sharing in ("timeSlicing", "mps"):
            for entry in mappings(dig(config, "sharing", sharing, "resources")):
                if "replicas" in entry:
                    yield sharing, entry
