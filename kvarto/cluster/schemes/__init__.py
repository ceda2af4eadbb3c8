"""The schemes by name, and which one a container uses."""

from __future__ import annotations

from collections.abc import Sequence

from kvarto.cluster.schemes.base import ClusterOptions, Facts, Manifest, PodParts, Scheme
from kvarto.cluster.schemes.cpu import Cpu
from kvarto.cluster.schemes.dra import Dra
from kvarto.cluster.schemes.kai import Kai
from kvarto.cluster.schemes.mig import Mig
from kvarto.cluster.schemes.replicas import Mps, TimeSlicing, replica_entries
from kvarto.cluster.schemes.units import Aliyun, Hami, Tencent, Volcano
from kvarto.cluster.schemes.whole import VirtualGpu, WholeCard
from kvarto.core.errors import UsageError

__all__ = ["SCHEMES", "ClusterOptions", "Facts", "Manifest", "PodParts", "Scheme", "find_scheme", "scheme_of"]

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        WholeCard(), Mig(), TimeSlicing(), Mps(), VirtualGpu(), Hami(), Volcano(), Aliyun(), Tencent(), Kai(), Dra(),
        Cpu(),
    )
}  # fmt: skip


def find_scheme(name: str) -> Scheme:
    """By name. Raises UsageError."""
    if name not in SCHEMES:
        raise UsageError(f"`--scheme {name}` is unknown; take one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


def scheme_of(template: Manifest, container: Manifest, objects: Sequence[Manifest]) -> Scheme | None:
    """The scheme by which a container asks for a GPU; None where it asks for none."""
    for scheme in SCHEMES.values():
        if scheme.uses(template, container):
            is_replica = isinstance(scheme, TimeSlicing)
            has_mps = any(sharing == "mps" for sharing, _ in replica_entries(objects))
            return SCHEMES["mps"] if is_replica and has_mps else scheme
    return None
