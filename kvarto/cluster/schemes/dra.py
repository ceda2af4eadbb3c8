"""Dynamic resource allocation: a claim for so many bytes of a device, exact in every unit that Kubernetes knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarto.cluster.need import Need
from kvarto.cluster.quantity import format_quantity, parse_quantity
from kvarto.cluster.schemes.base import ClusterOptions, Facts, Manifest, PodParts, Scheme, check_fits
from kvarto.cluster.tree import Path, dig, mappings
from kvarto.core.errors import UsageError
from kvarto.core.units import MIB

GROUP = "resource.k8s.io"
CLAIM = "gpu"
"""Name of the pod's claim and of the claim's request."""
CAPACITY_SINCE = (1, 34)
"""Consumable capacity: behind a gate in 1.34 and 1.35, on from 1.36."""


class Dra(Scheme):
    """A ResourceClaimTemplate with `capacity.requests.memory`."""

    name = "dra"
    is_enforced = False
    facts = Facts(
        title="DRA by capacity",
        unit="any quantity",
        enforced_by="what the driver brings: NVIDIA's nothing, HAMi's a preloaded library (cooperation)",
        reported="whole card, or the limit with HAMi's driver",
        over_commit="no: the scheduler adds up capacity",
        isolates_faults=False,
        compute="what the driver brings",
    )

    def parts(self, name: str, need: Need, options: ClusterOptions) -> PodParts:
        """A claim of the pod's own, made from a template."""
        check_fits(need, options.card)
        if options.kubernetes < CAPACITY_SINCE:
            version = ".".join(map(str, options.kubernetes))
            raise UsageError(
                f"`--scheme dra` asks for capacity, which Kubernetes {version} does not know; it needs 1.34 with the "
                "gate `DRAConsumableCapacity`, or 1.36"
            )
        template = f"{name}-{CLAIM}"
        exactly = {
            "deviceClassName": options.device_class,
            "allocationMode": "ExactCount",
            "count": 1,
            "capacity": {"requests": {"memory": format_quantity(need.limit_bytes)}},
        }
        claim = {
            "apiVersion": f"{GROUP}/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": template},
            "spec": {"spec": {"devices": {"requests": [{"name": CLAIM, "exactly": exactly}]}}},
        }
        return PodParts(need.limit_bytes, claim_template=template, objects=(claim,))

    def uses(self, template: Manifest, container: Manifest) -> bool:
        """A claim of the container's."""
        return bool(mappings(dig(container, "resources", "claims")))

    def granted_bytes(
        self, template: Manifest, container: Manifest, objects: Sequence[Manifest], options: ClusterOptions
    ) -> int | None:
        """The capacity that the pod's claim asks for, where claim or template are among the objects."""
        claimed = [claim.get("name") for claim in mappings(dig(container, "resources", "claims"))]
        for claim in mappings(dig(template, "spec", "resourceClaims")):
            if claim.get("name") in claimed:
                return _claim_bytes(claim, objects)
        return None


def device_requests(manifest: Manifest) -> list[dict[str, Any]]:
    """Requests of a ResourceClaim or ResourceClaimTemplate."""
    return mappings(dig(manifest, *requests_path(manifest)))


def requests_path(manifest: Manifest) -> Path:
    """Where they stand."""
    spec = ("spec", "spec") if manifest.get("kind") == "ResourceClaimTemplate" else ("spec",)
    return (*spec, "devices", "requests")


def _claim_bytes(claim: Manifest, objects: Sequence[Manifest]) -> int | None:
    names = [
        ("ResourceClaimTemplate", claim.get("resourceClaimTemplateName")),
        ("ResourceClaim", claim.get("resourceClaimName")),
    ]
    for each in objects:
        if (each.get("kind"), dig(each, "metadata", "name")) in names:
            for request in device_requests(each):
                memory = dig(request.get("exactly") or request, "capacity", "requests", "memory")
                if memory is not None:
                    return _whole(memory)
    return None


def _whole(quantity: str | int) -> int | None:
    try:
        number = parse_quantity(quantity)
    except ValueError:
        return None
    return int(number) if number.denominator == 1 and number >= MIB else None  # less is a unit forgotten
