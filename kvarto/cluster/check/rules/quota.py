"""ResourceQuota: extended resources are counted under `requests.` alone, and in the resource's own unit."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from kvarto.cluster.check.finding import Finding
from kvarto.cluster.check.manifests import Files
from kvarto.cluster.check.vocabulary import LEAST_BYTES, is_extended, unit_bytes, unit_name
from kvarto.cluster.quantity import means_bytes, means_mebibytes, parse_quantity
from kvarto.cluster.schemes import ClusterOptions
from kvarto.cluster.tree import dig, mapping
from kvarto.core.units import MIB

_READ_BY_HAMI = frozenset({"nvidia.com/gpumem", "nvidia.com/gpucores"})
"""HAMi's scheduler looks at `limits.` of these, where Kubernetes itself does not."""


def quotas(files: Files, options: ClusterOptions) -> Iterator[Finding]:
    """Keys and values of `spec.hard`."""
    for each in files.of_kind("ResourceQuota"):
        for key, value in mapping(dig(each.manifest, "spec", "hard")).items():
            kind, name = _split(str(key))
            path = ("spec", "hard", key)
            right = f"requests.{name}"
            if not is_extended(name) or str(key).startswith("count/"):
                continue
            if kind == "":
                message = f"`{key}` is no key of a quota, and Kubernetes refuses it; write `{right}`"
                moved = each.edit("spec", "hard", right, value=value)
                yield each.finding("quota-prefix", path, message, moved, each.edit(*path))
            elif kind == "limits" and name not in _READ_BY_HAMI:
                message = f"`{key}`: Kubernetes counts extended resources under `requests.` alone; write `{right}`"
                moved = each.edit("spec", "hard", right, value=value)
                yield each.finding("quota-limits", path, message, moved, each.edit(*path))
            else:
                unit = unit_bytes(name, options)
                units = None if unit is None else _meant_units(str(value), unit)
                if unit is not None and units is not None:
                    message = f"`{key}: {value}`: the resource counts {unit_name(unit)} and no bytes; write `{units}`"
                    yield each.finding("quota-unit", path, message, each.edit(*path, value=str(units)))


def _meant_units(text: str, unit: int) -> int | None:
    """Of what was written in bytes; None for plain numbers, and for what is no quantity, which the API refuses."""
    try:
        number = parse_quantity(text)
    except ValueError:
        return None
    if means_bytes(text):
        return ceil(number / unit)
    is_mebibytes = means_mebibytes(text) and 0 < number * unit < LEAST_BYTES
    return ceil(number * 1000 * MIB / unit) if is_mebibytes else None


def _split(key: str) -> tuple[str, str]:
    """`requests.nvidia.com/gpu` in two; the first part is empty for a bare name."""
    for kind in ("requests", "limits"):
        if key.startswith(f"{kind}."):
            return kind, key.removeprefix(f"{kind}.")
    return "", key
