"""What the named adapters will take: pages on the device and bytes in host memory, each to the byte, before any start.

An adapter's pages are the same on every tier. Nothing is reserved for adapters; what is resident comes out of the
pages that the KV cache uses too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvarto.core.errors import AdapterError
from kvarto.core.layout import Layout
from kvarto.core.program import Program
from kvarto.core.units import format_bytes
from kvarto.engine.adapter_parts import adapter_files
from kvarto.engine.adapter_settings import named_adapters
from kvarto.engine.config import EngineConfig

MAX_ROWS = 40
"""Of the printed table; the sums are of all."""


@dataclass(frozen=True, slots=True)
class PlannedAdapter:
    """One named adapter."""

    name: str
    rank: int
    size_bytes: int
    """Of its strips, as pages have them."""
    num_pages: int
    dtype: str
    """Of A and B in pages; of both, or of several modules, where they differ."""
    refusal: str | None = None
    """Why it will not be served; sizes are 0 then."""


def plan_adapters(config: EngineConfig, program: Program, layout: Layout) -> list[PlannedAdapter]:
    """All that are named; only headers are read. Raises UsageError for a folder that cannot be listed."""
    if not layout.limits.max_lora_rank:
        return []
    files = adapter_files(config, program, layout.kv_format.page_bytes)
    planned = []
    for each in named_adapters(config):
        try:
            found = files.find(each.path)
        except AdapterError as error:
            planned.append(PlannedAdapter(each.name, 0, 0, 0, "", str(error)))
            continue
        adapter = found.adapter
        sizes = (adapter.max_rank, adapter.size_bytes, found.num_pages)
        planned.append(PlannedAdapter(each.name, *sizes, "+".join(adapter.strip_types)))
    return planned


def adapter_table(planned: Sequence[PlannedAdapter], layout: Layout, host_bytes: int) -> str:
    """Rows of the largest, their sum, and how much of each tier that is, as plain text."""
    page_bytes = layout.kv_format.page_bytes
    served = [each for each in planned if each.refusal is None]
    width = max((len(each.name) for each in planned), default=0)
    largest = sorted(served, key=lambda each: -each.num_pages)[:MAX_ROWS]
    lines = [f"{each.name:<{width}}  {_row(each, page_bytes)}" for each in largest]
    if len(served) > MAX_ROWS:
        lines.append(f"… and {len(served) - MAX_ROWS:,} smaller ones")
    num_pages = sum(each.num_pages for each in served)
    total = format_bytes(num_pages * page_bytes)
    lines.append(
        f"{len(served):,} adapters take {num_pages:,} of {layout.num_pages:,} pages ({total}) when all are on the "
        f"device, and none while they are not used; host memory keeps {format_bytes(host_bytes)} of them"
    )
    lines += [f"{each.name}: refused: {each.refusal}" for each in planned if each.refusal is not None][:MAX_ROWS]
    return "\n".join(lines)


def _row(planned: PlannedAdapter, page_bytes: int) -> str:
    taken_bytes = planned.num_pages * page_bytes
    return (
        f"rank {planned.rank:>3}  {planned.dtype:<9}  {planned.num_pages:>7,} pages  {taken_bytes:>17,}  "
        f"{format_bytes(taken_bytes):>11}  slack {taken_bytes - planned.size_bytes:,}"
    )
