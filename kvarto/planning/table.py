"""The layout as a table for people: where every byte of the arena goes. Rows add up to the arena, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvarto.core.buffers import Weight
from kvarto.core.layout import Layout
from kvarto.core.ops import Embed, Experts, HeadNorm, Linear, Logits, Norm, Op, Route
from kvarto.core.program import Program
from kvarto.core.units import format_bytes

_KINDS: dict[type[Op], str] = {
    Embed: "embedding",
    Norm: "norms",
    HeadNorm: "norms",
    Linear: "linear layers",
    Experts: "experts",
    Route: "routers",
    Logits: "logits",
}


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """Some bytes of a region and what they are for."""

    region: str
    what: str
    size_bytes: int


def layout_rows(layout: Layout, program: Program) -> list[LayoutRow]:
    """Every byte of the arena in one row; rows of no bytes are left out."""
    rows = [*_weight_rows(layout, program), *_activation_rows(layout), *_page_rows(layout, program)]
    rows = [row for row in rows if row.size_bytes]
    assert sum(row.size_bytes for row in rows) == layout.total_bytes, "the rows do not add up to the arena"
    return rows


def layout_table(layout: Layout, program: Program, process_bytes: int | None = None) -> str:
    """The rows, their sum, the budget and the bookkeeping outside the arena, as plain text.

    `process_bytes`: what the engine's process had when the plan was made; only that process knows.
    """
    budget = layout.budget
    lines = [(row.region, row.what, row.size_bytes) for row in layout_rows(layout, program)]
    totals = [
        ("arena", _capacity(layout, program), layout.total_bytes),
        ("budget", budget.source, budget.device_bytes),
        ("unused", "less than a page, or not asked for", budget.device_bytes - layout.total_bytes),
        ("host", "page tables, step arrays and counts, outside the arena", layout.host_bytes),
        ("records", "prefix cache, outside the arena, once every page is cached", layout.record_bytes),
        *_process(process_bytes),
        *_growth(layout, program),
    ]
    everything = [*lines, *totals]
    widths = [max(len(region) for region, _, _ in everything), max(len(what) for _, what, _ in everything)]
    text = [_line(line, widths) for line in lines]
    rule = "-" * max(len(line) for line in text)
    return "\n".join([*text, rule, *(_line(line, widths) for line in totals)])


def _line(line: tuple[str, str, int], widths: list[int]) -> str:
    region, what, size_bytes = line
    return f"{region:<{widths[0]}}  {what:<{widths[1]}}  {size_bytes:>19,}  {format_bytes(size_bytes):>11}"


def _weight_rows(layout: Layout, program: Program) -> Iterator[LayoutRow]:
    """By format, and by the kind of op that uses a weight first; a tied embedding counts as embedding."""
    sizes: dict[str, int] = {}
    seen: set[str] = set()
    for op in program.ops:
        for name in op.weights:
            if name not in seen:
                seen.add(name)
                for format, size_bytes in _formats(program.weights[name]):
                    what = f"{_KINDS.get(type(op), 'other')}, {format}"
                    sizes[what] = sizes.get(what, 0) + size_bytes
    for what, size_bytes in sizes.items():
        yield LayoutRow("weights", what, size_bytes)
    yield LayoutRow("weights", "alignment", layout.weights.size_bytes - sum(sizes.values()))


def _formats(weight: Weight) -> Iterator[tuple[str, int]]:
    """Each part's format and bytes; what the file has is named where it is another."""
    if not weight.parts:
        yield str(weight.dtype), weight.size_bytes
    for part in weight.parts:
        is_other = part.file_dtype.lower() not in ("", part.format)
        yield f"{part.format} from {part.file_dtype}" if is_other else part.format, part.size_bytes(weight.shape[-1])


def _process(process_bytes: int | None) -> Iterator[tuple[str, str, int]]:
    if process_bytes is not None:
        yield "process", "the engine's interpreter, libraries and file headers, before all this", process_bytes


def _growth(layout: Layout, program: Program) -> Iterator[tuple[str, str, int]]:
    """What the model's files take for the same weights, and how much more or less the region does."""
    sizes = [weight.file_bytes for weight in program.weights.values()]
    known = [size_bytes for size_bytes in sizes if size_bytes is not None]
    if len(known) == len(sizes) and sum(known) > 0:
        percent = 100 * (layout.weights.size_bytes / sum(known) - 1)
        yield "files", f"the same weights on disk; in memory {percent:+.2f} %", sum(known)


def _activation_rows(layout: Layout) -> Iterator[LayoutRow]:
    live_bytes = layout.activation_lower_bound_bytes
    buffers = f"{len(layout.buffer_offsets)} buffers, {len(layout.scratch_offsets)} scratch, live at the fullest op"
    yield LayoutRow("activations", buffers, live_bytes)
    yield LayoutRow("activations", "packing and alignment", layout.activations.size_bytes - live_bytes)


def _page_rows(layout: Layout, program: Program) -> Iterator[LayoutRow]:
    kv_format, num_groups = layout.kv_format, len(program.layer_groups)
    # Which group a page will serve is not known yet; over all groups alike, this share of the slots has no layer.
    payload_bytes = layout.num_pages * kv_format.payload_bytes
    num_slots = num_groups * kv_format.num_layer_slots
    padding_bytes = payload_bytes * program.num_padding_layer_slots // num_slots
    yield LayoutRow("pages", f"{kv_format.dtype} KV", payload_bytes - padding_bytes)
    yield LayoutRow("pages", f"padding: {program.num_padding_layer_slots} of {num_slots} layer slots", padding_bytes)
    yield LayoutRow("pages", "padding to 4 KiB", layout.pages.size_bytes - payload_bytes)


def _capacity(layout: Layout, program: Program) -> str:
    kv_format, num_groups = layout.kv_format, len(program.layer_groups)
    pages = f"{layout.num_pages:,} pages of {kv_format.page_size} tokens, {format_bytes(kv_format.page_bytes)} each"
    if num_groups == 1:
        return f"{pages}: {layout.num_cacheable_tokens:,} tokens"
    return f"{pages}, in {num_groups} layer groups"
