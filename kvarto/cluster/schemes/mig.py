"""MIG instances under the device plugin's `mixed` strategy: the hardware divides memory, cache and compute."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvarto.cluster.mig_packing import Demand, fitting_profiles
from kvarto.cluster.need import Need
from kvarto.cluster.schemes.base import ClusterOptions, Facts, Manifest, PodParts, Scheme
from kvarto.cluster.tree import dig, mapping
from kvarto.core.errors import UsageError

PREFIX = "nvidia.com/mig-"
_RESOURCE = re.compile(r"nvidia\.com/mig-([1-7]g\.[0-9]+gb)(\.me|\.gfx|\.me\.all|-me)?")


class Mig(Scheme):
    """`nvidia.com/mig-3g.40gb: 1`."""

    name = "mig"
    is_enforced = True
    facts = Facts(
        title="MIG",
        unit="profiles",
        enforced_by="hardware",
        reported="the instance",
        over_commit="no",
        isolates_faults=True,
        compute="the profile's slices",
    )

    def parts(self, name: str, need: Need, options: ClusterOptions) -> PodParts:
        """The smallest profile that holds the need."""
        profiles = fitting_profiles(options.need_card(self.name), Demand(name, need.limit_bytes))
        return PodParts(profiles[0].memory_bytes, {profiles[0].resource: 1})

    def uses(self, template: Manifest, container: Manifest) -> bool:
        """Any MIG resource."""
        return bool(mig_resources(container))

    def granted_bytes(
        self, template: Manifest, container: Manifest, objects: Sequence[Manifest], options: ClusterOptions
    ) -> int | None:
        """The instance's memory. A process sees one instance, however many the container has."""
        if options.card is None:
            return None
        for name in mig_resources(container):
            match = _RESOURCE.fullmatch(name)
            if match is not None:
                try:
                    return options.card.profile(match[1]).memory_bytes
                except UsageError:
                    return None
        return None


def mig_resources(container: Manifest) -> list[str]:
    """Names of the MIG resources that it asks for, well formed or not."""
    names = [str(name) for kind in ("limits", "requests") for name in mapping(dig(container, "resources", kind))]
    return [name for name in dict.fromkeys(names) if name.startswith(PREFIX)]
