"""The table of schemes, for a card and a model: what each promises, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarto.cluster.requests import SchemeRequest, copies_per_card
from kvarto.cluster.schemes import ClusterOptions
from kvarto.core.units import format_bytes

HEADERS = (
    "scheme", "request for this model", "granted", "copies per card", "unit", "limit enforced by", "nvidia-smi shows",
    "over-commit", "isolates faults", "compute",
)  # fmt: skip


def comparison(requests: Sequence[SchemeRequest], options: ClusterOptions) -> list[tuple[str, ...]]:
    """One row per scheme, in the order of `HEADERS`."""
    return [_row(request, options) for request in requests]


def as_dicts(requests: Sequence[SchemeRequest], options: ClusterOptions) -> list[dict[str, Any]]:
    """The same for programs, with exact bytes."""
    rows = []
    for request in requests:
        facts = request.scheme.facts
        rows.append({
            "scheme": request.scheme.name,
            "request": request.text if request.parts is not None else None,
            "refusal": request.refusal,
            "granted_bytes": None if request.parts is None else request.parts.granted_bytes,
            "copies_per_card": copies_per_card(request, options),
            "unit": facts.unit,
            "enforced_by": facts.enforced_by,
            "is_enforced": request.scheme.is_enforced,
            "reported": facts.reported,
            "over_commit": facts.over_commit,
            "isolates_faults": facts.isolates_faults,
            "compute": facts.compute,
        })  # fmt: skip
    return rows


def text_blocks(rows: Sequence[tuple[str, ...]]) -> str:
    """A block of lines per scheme: ten columns are wider than any terminal."""
    width = max(map(len, HEADERS))
    blocks = []
    for row in rows:
        lines = [f"  {header:<{width}}  {cell}" for header, cell in zip(HEADERS[1:], row[1:], strict=True)]
        blocks.append("\n".join([row[0], *lines]))
    return "\n\n".join(blocks)


def markdown_table(rows: Sequence[tuple[str, ...]]) -> str:
    """GitHub's form."""
    lines = [HEADERS, tuple("---" for _ in HEADERS), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _row(request: SchemeRequest, options: ClusterOptions) -> tuple[str, ...]:
    facts, parts = request.scheme.facts, request.parts
    copies = copies_per_card(request, options)
    return (
        f"{request.scheme.name} ({facts.title})",
        request.text,
        "–" if parts is None else format_bytes(parts.granted_bytes),
        "–" if copies is None else str(copies),
        facts.unit,
        facts.enforced_by,
        facts.reported,
        facts.over_commit,
        "yes" if facts.isolates_faults else "no",
        facts.compute,
    )
