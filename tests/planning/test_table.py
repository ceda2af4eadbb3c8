"""The printed layout: rows add up to the arena, and the figures in the text are the layout's own."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kvarto.core.buffers import StepLimits, WeightPart
from kvarto.core.dtype import DType
from kvarto.core.layout import Budget
from kvarto.core.ops import Linear
from kvarto.core.program import Program
from kvarto.core.units import GIB
from kvarto.core.weight_format import WeightFormat
from kvarto.planning.plan import plan
from kvarto.planning.table import layout_rows, layout_table
from tests.planning.programs import FAMILIES, LIMITS, family, tiny


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_add_up_by_region(name: str) -> None:
    program = family(name)
    limits = StepLimits(512, 32, 32, program.max_positions)
    layout = plan(program, Budget(3 * GIB, "test"), limits, DType.F32, 16, {4: 12345})
    rows = layout_rows(layout, program)
    for region in (layout.weights, layout.activations, layout.pages):
        assert sum(row.size_bytes for row in rows if row.region == region.name) == region.size_bytes
    assert "other" not in {row.what for row in rows}, "a weight of an op that the table does not know"
    assert all(row.size_bytes > 0 for row in rows)


def test_figures_of_the_text_are_exact() -> None:
    program = tiny(3, windows=(None, 24))
    layout = plan(program, Budget(GIB + 12345, "`--device-memory 1GiB`"), LIMITS, DType.F32, 16, {})
    figures = {}
    for line in layout_table(layout, program, process_bytes=50_331_649).splitlines():
        if not line.startswith("-"):
            region, size = line.split()[0], re.search(r" {2,}([\d,]+) {2,}[\d.]+ (?:GiB|MiB|KiB|B)$", line)
            assert size is not None, line
            figures[region] = figures.get(region, 0) + int(size[1].replace(",", ""))
    assert figures["weights"] + figures["activations"] + figures["pages"] == figures["arena"] == layout.total_bytes
    assert figures["arena"] + figures["unused"] == figures["budget"] == GIB + 12345
    assert figures["host"] == layout.host_bytes
    assert figures["records"] == layout.record_bytes
    assert figures["process"] == 50_331_649
    assert "\nprocess" not in layout_table(layout, program)


def test_capacity_is_in_tokens_where_one_group_takes_all_pages() -> None:
    one, two = tiny(2), tiny(2, windows=(None, 24))
    layout = plan(one, Budget(GIB, "test"), LIMITS, DType.F32, 16, {}, max_num_pages=100)
    assert "100 pages of 16 tokens, 8.00 KiB each: 1,600 tokens" in layout_table(layout, one)
    layout = plan(two, Budget(GIB, "test"), LIMITS, DType.F32, 16, {}, max_num_pages=100)
    assert "100 pages of 16 tokens, 4.00 KiB each, in 2 layer groups" in layout_table(layout, two)


def packed(program: Program, format: WeightFormat, file_dtype: str) -> Program:
    """Every matrix in one format, and files of 1,000 bytes for each weight."""
    weights = {}
    for name, weight in program.weights.items():
        parts = (WeightPart(format, 0, weight.shape[0], file_dtype),) if len(weight.shape) == 2 else ()
        weights[name] = replace(weight, parts=parts, file_bytes=1000)
    return replace(program, weights=weights)


def test_formats_and_their_growth_are_named() -> None:
    program = packed(tiny(2), WeightFormat.Q8_0, "Q3_K")
    layout = plan(program, Budget(GIB, "test"), LIMITS, DType.F32, 16, {})
    rows = {row.what: row.size_bytes for row in layout_rows(layout, program)}
    linear = [op.weight for op in program.ops if isinstance(op, Linear)]
    assert rows["linear layers, q8_0 from Q3_K"] == sum(program.weights[name].size_bytes for name in linear)
    assert "norms, f32" in rows
    text, on_file = layout_table(layout, program), 1000 * len(program.weights)
    percent = 100 * (layout.weights.size_bytes / on_file - 1)
    assert re.search(rf"^files .* in memory \+{percent:.2f} %  +{on_file:,} ", text, re.MULTILINE)
    same = packed(tiny(2), WeightFormat.Q8_0, "Q8_0")
    assert "linear layers, q8_0 " in layout_table(plan(same, Budget(GIB, ""), LIMITS, DType.F32, 16, {}), same)


def test_files_that_nobody_has_seen_have_no_line() -> None:
    program = tiny(2)
    assert "\nfiles" not in layout_table(plan(program, Budget(GIB, ""), LIMITS, DType.F32, 16, {}), program)
