"""What every scheme of sharing a GPU offers: facts for people, parts of a pod, and the way back to bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvarto.cluster.cards import Card
from kvarto.cluster.need import Need
from kvarto.cluster.quantity import parse_quantity
from kvarto.cluster.tree import dig
from kvarto.core.errors import UsageError
from kvarto.core.units import format_bytes
from kvarto.memory.device_limit import DEVICE_OVERHEAD_BYTES

Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How the cluster was set up, as far as a scheme must know."""

    card: Card | None = None
    """The cards of the nodes that the pod may land on."""
    kubernetes: tuple[int, int] = (1, 36)
    """Minor version of the API server."""
    memory_factor: int = 1
    """MiB per unit of HAMi's `gpumem` (`memoryFactor`) and Volcano's `vgpu-memory` (`gpu-memory-factor`)."""
    aliyun_unit: str = "GiB"
    """`GiB`, or `MiB` where Alibaba's plugin was started so."""
    device_class: str = "gpu.nvidia.com"
    """DeviceClass of DRA claims."""
    queue: str = "default-queue"
    """Queue that KAI schedules the pod in."""
    overhead_bytes: int = DEVICE_OVERHEAD_BYTES
    """Of the GPU, beside a server's arena; for judging whether both fit a limit."""
    plugin_namespace: str = "gpu-operator"
    """Where NVIDIA's device plugin reads its configuration."""

    def need_card(self, scheme: str) -> Card:
        """The card. Raises UsageError where it was not named."""
        if self.card is None:
            raise UsageError(f"`--scheme {scheme}` depends on the card; name it, such as `--card H100-80`")
        return self.card


@dataclass(frozen=True, slots=True)
class Facts:
    """One row of the comparison; honest before all."""

    title: str
    unit: str
    """In which memory is asked for."""
    enforced_by: str
    reported: str
    """What nvidia-smi and cuMemGetInfo show inside the container."""
    over_commit: str
    isolates_faults: bool
    """Whether a neighbour's crash or illegal access leaves this container alone."""
    compute: str


@dataclass(frozen=True, slots=True)
class PodParts:
    """What a scheme adds to a pod, and beside it."""

    granted_bytes: int
    """What the container may take by this request, enforced or agreed: at least the need."""
    resources: dict[str, int] = field(default_factory=dict)
    """Of the container; requests and limits are the same."""
    annotations: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    node_selector: dict[str, str] = field(default_factory=dict)
    min_card_mib: int | None = None
    """The node's cards must have at least so much, by the label `nvidia.com/gpu.memory`."""
    scheduler_name: str | None = None
    claim_template: str | None = None
    """ResourceClaimTemplate that the pod's one claim is made from."""
    objects: tuple[dict[str, Any], ...] = ()
    """Further manifests."""


class Scheme(ABC):
    """One way to give a container a part of a GPU."""

    name: str
    facts: Facts
    is_enforced: bool
    """Whether something but the server's own `--device-memory` keeps it within its part."""

    @abstractmethod
    def parts(self, name: str, need: Need, options: ClusterOptions) -> PodParts:
        """The smallest request that holds the need. `name` is the workload's. Raises UsageError where none does."""

    @abstractmethod
    def uses(self, template: Manifest, container: Manifest) -> bool:
        """Whether a container of that pod template asks for a GPU in this way."""

    @abstractmethod
    def granted_bytes(
        self, template: Manifest, container: Manifest, objects: Sequence[Manifest], options: ClusterOptions
    ) -> int | None:
        """The way back: bytes that the container may take; None where the manifests don't say."""


def resource(container: Manifest, name: str) -> int | None:
    """An extended resource's whole number, of limits before requests; None where it is absent or no such number."""
    for kind in ("limits", "requests"):
        value = dig(container, "resources", kind, name)
        if value is not None:
            try:
                number = parse_quantity(value)
            except ValueError:
                return None
            return int(number) if number.denominator == 1 else None
    return None


def annotation(template: Manifest, name: str) -> str | None:
    """Of the pod, not of what makes it."""
    value = dig(template, "metadata", "annotations", name)
    return None if value is None else str(value)


def per_card(need: Need, card: Card, scheme: str) -> int:
    """How many equal parts of the card hold the need each. Raises UsageError where not even two do."""
    count = card.memory_bytes // need.limit_bytes
    if count < 2:
        raise UsageError(
            f"`--scheme {scheme}` divides a card into equal parts, and `{card.name}` "
            f"({format_bytes(card.memory_bytes)}) has no two of {format_bytes(need.limit_bytes)}; take `--scheme whole`"
        )
    return count


def check_fits(need: Need, card: Card | None) -> None:
    """Raise UsageError for more than a whole card."""
    if card is not None and need.limit_bytes > card.memory_bytes:
        raise UsageError(
            f"{format_bytes(need.limit_bytes)} are more than `{card.name}` has ({format_bytes(card.memory_bytes)}); "
            "take a larger card, `--dtype bf16`, fewer `--max-num-seqs` or a shorter `--max-model-len`"
        )
