"""No GPU: the container's own memory limit holds weights, activations and pages. What the native backend runs on."""

from __future__ import annotations

from collections.abc import Sequence

from kvarto.cluster.need import Need
from kvarto.cluster.quantity import parse_quantity
from kvarto.cluster.schemes.base import ClusterOptions, Facts, Manifest, PodParts, Scheme
from kvarto.cluster.tree import dig


class Cpu(Scheme):
    """`memory` of the container, which every container has."""

    name = "cpu"
    is_enforced = True
    facts = Facts(
        title="no GPU",
        unit="any quantity",
        enforced_by="the kernel's control group: beyond it the container is killed",
        reported="the machine; the server reads its control group",
        over_commit="requests below limits",
        isolates_faults=True,
        compute="CPU quota",
    )

    def parts(self, name: str, need: Need, options: ClusterOptions) -> PodParts:
        """Nothing beyond the container's memory, which the deployment states anyway."""
        return PodParts(need.host_bytes)

    def uses(self, template: Manifest, container: Manifest) -> bool:
        """Only where nothing else does; see `schemes.scheme_of`."""
        return False

    def granted_bytes(
        self, template: Manifest, container: Manifest, objects: Sequence[Manifest], options: ClusterOptions
    ) -> int | None:
        """The memory limit."""
        memory = dig(container, "resources", "limits", "memory")
        try:
            return None if memory is None else int(parse_quantity(memory))
        except ValueError:
            return None
