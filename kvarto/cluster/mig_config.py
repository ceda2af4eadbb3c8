"""From a packing to what creates it: commands in order, and the configuration of NVIDIA's mig-parted."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvarto.cluster.mig_packing import Assigned, MigPlan

CONFIG_NAME = "kvarto"


def creation_order(card: tuple[Assigned, ...]) -> list[Assigned]:
    """Largest first, then from the left: what is placed first leaves the rest its places."""
    return sorted(card, key=lambda each: (-each.placed.profile.memory_slices, each.placed.start))


def commands(plan: MigPlan) -> list[str]:
    """Shell commands that make the instances, each at its place: without one the driver takes any that is free."""
    lines = []
    for index, card in enumerate(plan.cards):
        tuples = ",".join(f"{each.placed.profile.name}:{each.placed.start}" for each in creation_order(card))
        lines += [f"nvidia-smi -i {index} -mig 1", f"nvidia-smi mig -i {index} -cgi {tuples} -C"]
    return lines


def mig_parted_config(plan: MigPlan) -> dict[str, Any]:
    """Cards of one node, device by device; cards with the same instances stand together."""
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for index, card in enumerate(plan.cards):
        counts = Counter(each.placed.profile.name for each in creation_order(card))
        groups.setdefault(tuple(counts.items()), []).append(index)
    return {
        "version": "v1",
        "mig-configs": {
            CONFIG_NAME: [
                {"devices": devices, "mig-enabled": True, "mig-devices": dict(counts)}
                for counts, devices in groups.items()
            ]
        },
    }
