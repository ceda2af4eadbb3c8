"""Whole cards: one container, one card. NVIDIA's device plugin, nothing shared."""

from __future__ import annotations

from collections.abc import Sequence

from kvarto.cluster.need import Need
from kvarto.cluster.schemes.base import ClusterOptions, Facts, Manifest, PodParts, Scheme, check_fits, resource
from kvarto.cluster.schemes.node_affinity import min_card_bytes
from kvarto.cluster.tree import dig
from kvarto.core.units import MIB, ceil_div

GPU = "nvidia.com/gpu"
HAMI_PARTS = ("nvidia.com/gpumem", "nvidia.com/gpumem-percentage")
VGPU_LABEL = "nvidia.com/vgpu.present"


class WholeCard(Scheme):
    """`nvidia.com/gpu: 1`."""

    name = "whole"
    is_enforced = True
    facts = Facts(
        title="whole card",
        unit="cards",
        enforced_by="the card's size: nobody else is on it",
        reported="whole card",
        over_commit="no",
        isolates_faults=True,
        compute="all of it",
    )

    def parts(self, name: str, need: Need, options: ClusterOptions) -> PodParts:
        """One card, on nodes whose cards are large enough."""
        check_fits(need, options.card)
        min_mib = ceil_div(need.limit_bytes, MIB)
        granted_bytes = options.card.memory_bytes if options.card else min_mib * MIB
        return PodParts(granted_bytes, {GPU: 1}, min_card_mib=min_mib)

    def uses(self, template: Manifest, container: Manifest) -> bool:
        """A device, and nothing that divides it."""
        is_divided = any(resource(container, part) is not None for part in HAMI_PARTS)
        return resource(container, GPU) is not None and not is_divided and not _is_vgpu(template)

    def granted_bytes(
        self, template: Manifest, container: Manifest, objects: Sequence[Manifest], options: ClusterOptions
    ) -> int | None:
        """The card's memory; where it is not named, what the node's label must promise."""
        return options.card.memory_bytes if options.card else min_card_bytes(template)


class VirtualGpu(WholeCard):
    """A virtual machine's vGPU: the node takes it for a card."""

    name = "vgpu"
    facts = Facts(
        title="NVIDIA vGPU",
        unit="frame buffer of the VM's profile, chosen outside Kubernetes",
        enforced_by="the hypervisor's driver",
        reported="the VM's part",
        over_commit="no",
        isolates_faults=True,
        compute="share by the vGPU scheduler",
    )

    def parts(self, name: str, need: Need, options: ClusterOptions) -> PodParts:
        """One device, on virtual machines whose frame buffer is large enough."""
        check_fits(need, options.card)
        min_mib = ceil_div(need.limit_bytes, MIB)
        return PodParts(min_mib * MIB, {GPU: 1}, node_selector={VGPU_LABEL: "true"}, min_card_mib=min_mib)

    def uses(self, template: Manifest, container: Manifest) -> bool:
        """A device on a node that has vGPUs."""
        return resource(container, GPU) is not None and _is_vgpu(template)

    def granted_bytes(
        self, template: Manifest, container: Manifest, objects: Sequence[Manifest], options: ClusterOptions
    ) -> int | None:
        """What the node's label must promise; the profile itself is the hypervisor's."""
        return min_card_bytes(template)


def _is_vgpu(template: Manifest) -> bool:
    return dig(template, "spec", "nodeSelector", VGPU_LABEL) is not None
