"""One need in every scheme's own words: the request, what it grants, how many copies a card holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvarto.cluster.mig_card import card_sets
from kvarto.cluster.need import Need
from kvarto.cluster.quantity import format_quantity
from kvarto.cluster.schemes import SCHEMES, ClusterOptions, PodParts, Scheme
from kvarto.core.errors import UsageError

NAME = "kvarto"


@dataclass(frozen=True, slots=True)
class SchemeRequest:
    """A need under one scheme, or why there is none."""

    scheme: Scheme
    parts: PodParts | None
    refusal: str | None = None

    @property
    def text(self) -> str:
        """`nvidia.com/gpu: 1, nvidia.com/gpumem: 15107`."""
        if self.parts is None:
            return self.refusal or ""
        if self.parts.claim_template is not None:
            return f"capacity memory: {format_quantity(self.parts.granted_bytes)}"
        if self.scheme.name == "cpu":
            return f"memory: {format_quantity(self.parts.granted_bytes)}"
        annotations = [f'annotation {name}: "{value}"' for name, value in self.parts.annotations.items()]
        return ", ".join([*(f"{name}: {value}" for name, value in self.parts.resources.items()), *annotations])


def scheme_requests(need: Need, cpu_need: Need, options: ClusterOptions) -> Iterator[SchemeRequest]:
    """In the order of the schemes. On a CPU the need is another: the arena lies in the container's own memory."""
    for scheme in SCHEMES.values():
        try:
            parts = scheme.parts(NAME, cpu_need if scheme.name == "cpu" else need, options)
        except UsageError as error:
            yield SchemeRequest(scheme, None, str(error))
        else:
            yield SchemeRequest(scheme, parts)


def copies_per_card(request: SchemeRequest, options: ClusterOptions) -> int | None:
    """How many such servers one card holds; None where the card, or the scheme's part of it, is not known."""
    card, parts = options.card, request.parts
    if card is None or parts is None or request.scheme.name in ("cpu", "vgpu"):
        return None
    if request.scheme.name == "mig":
        counts = zip(card.profiles, card_sets(card).most, strict=True)
        return next(most for profile, most in counts if profile.resource in parts.resources)
    return 1 if request.scheme.name == "whole" else card.memory_bytes // parts.granted_bytes
