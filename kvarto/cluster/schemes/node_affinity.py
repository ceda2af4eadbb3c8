"""Nodes whose cards are large enough: an affinity on `nvidia.com/gpu.memory`, which feature discovery writes in MiB."""

from __future__ import annotations

from typing import Any

from kvarto.cluster.quantity import whole_number
from kvarto.cluster.schemes.base import Manifest
from kvarto.cluster.tree import dig, mappings
from kvarto.core.units import MIB

LABEL = "nvidia.com/gpu.memory"


def min_card_affinity(min_mib: int) -> dict[str, Any]:
    """A required node affinity. `Gt` is strict, so the bound is one less."""
    term = {"matchExpressions": [{"key": LABEL, "operator": "Gt", "values": [str(min_mib - 1)]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def min_card_bytes(template: Manifest) -> int | None:
    """What such an affinity asks for; None where there is none."""
    required = dig(template, "spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    for term in mappings(dig(required, "nodeSelectorTerms")):
        for expression in mappings(term.get("matchExpressions")):
            bound = whole_number(dig(expression, "values", 0))
            if expression.get("key") == LABEL and expression.get("operator") == "Gt" and bound is not None:
                return (bound + 1) * MIB
    return None
