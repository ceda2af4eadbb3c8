"""Whether an adapter that is to be bound stays inside the program, the plan and the pool. Both backends ask it.

What a kernel takes for granted is looked at here, once per bind: raises ValueError that names the number.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from weakref import WeakSet

import numpy as np

from kvarto.core.bound_adapter import BoundAdapter, BoundRows, BoundShape, BoundUpdate, Strips
from kvarto.core.ids import MAX_ADAPTERS
from kvarto.core.layout import Layout
from kvarto.core.ops import Attention, Embed, GatedActivation, Linear, Logits
from kvarto.core.program import Program
from kvarto.core.strip_type import StripType

FEWEST_PAGE_BYTES = 2048
"""512 columns of float32: a piece of a strip that kernels take at once meets at most one end of a page."""


class AdapterCheck:
    """Of adapters for one program and plan. A shape is looked at when it comes for the first time."""

    def __init__(self, program: Program, layout: Layout) -> None:
        self._program = program
        self._layout = layout
        self._checked: WeakSet[BoundShape] = WeakSet()

    def check(self, handle: int, adapter: BoundAdapter) -> None:
        """Raises ValueError where a kernel would leave a page, a buffer or what was planned."""
        _require(0 <= handle < MAX_ADAPTERS, f"handle {handle} of an adapter, limit {MAX_ADAPTERS - 1}")
        _check_pages(adapter, self._layout)
        if adapter.shape not in self._checked:
            self._check_shape(adapter.shape)
            self._checked.add(adapter.shape)
        end, size_bytes = adapter.shape.end, len(adapter.pages) * adapter.page_bytes
        _require(end <= size_bytes, f"bytes up to {end} of {size_bytes}")

    def _check_shape(self, shape: BoundShape) -> None:
        for update in shape.updates:
            _check_update(update, self._program, self._layout.limits.max_lora_rank)
        for rows in shape.token_rows:
            _check_rows(rows, self._program)
        _check_order(shape, self._program)


def band_counts(program: Program) -> dict[str, int]:
    """Bands that updates may divide rows of a buffer into, by its name: q, k, v; gate and up. Others are one band."""
    halves = {op.x: 2 for op in program.ops if isinstance(op, GatedActivation)}
    return halves | {op.qkv: 3 for op in program.ops if isinstance(op, Attention)}


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"adapter: {what}")


def _check_pages(adapter: BoundAdapter, layout: Layout) -> None:
    page_bytes, pages = layout.kv_format.page_bytes, adapter.pages
    _require(
        adapter.page_bytes == page_bytes, f"pages of {adapter.page_bytes} bytes, those of the pool have {page_bytes}"
    )
    _require(page_bytes >= FEWEST_PAGE_BYTES, f"pages of {page_bytes} bytes, at least {FEWEST_PAGE_BYTES} are needed")
    if pages.ndim != 1 or pages.dtype != np.int32:  # names of types are slow to make
        raise ValueError(f"adapter: pages are {pages.dtype} with {pages.ndim} dims")
    least, most = int(pages.min(initial=0)), int(pages.max(initial=0))
    _require(least >= 0 and most < layout.num_pages, f"pages {least} to {most}, the pool has {layout.num_pages}")


def _check_update(update: BoundUpdate, program: Program, max_rank: int) -> None:
    in_width, out_width = _widths(update.op_index, program)
    a, b = update.lora_a, update.lora_b
    _require(a.num_columns == in_width, f"A has {a.num_columns} columns, op {update.op_index} takes {in_width}")
    _require(a.num_strips == b.num_strips, f"A has {a.num_strips} rows, B {b.num_strips} columns")
    _require(1 <= update.rank <= max_rank, f"rank {update.rank}, planned for {max_rank}")
    end = update.first_row + b.num_columns
    _require(0 <= update.first_row < end <= out_width, f"rows {update.first_row} to {end} of {out_width}")
    _require(math.isfinite(update.scaling), f"scaling {update.scaling}")
    for strips in update.strips():
        _check_strips(strips)
    for vector in (update.bias, update.magnitude):
        is_one = vector is None or (vector.num_strips, vector.num_columns) == (1, b.num_columns)
        _require(is_one, f"{vector} beside {b.num_columns} rows of B")
        _require(vector is None or not vector.type.has_codes, f"a vector of {vector}")
    _require(update.magnitude is None or update.magnitude.type is StripType.F32, "a magnitude is not float32")


def _check_strips(strips: Strips) -> None:
    type = strips.type
    _require(strips.num_strips > 0 and strips.num_columns > 0, f"empty {strips}")
    _require(strips.num_columns % type.block_columns == 0, f"{type} strips of {strips.num_columns} columns")
    _require(strips.start >= 0, f"bytes {strips.start} to {strips.end} of a stream")
    _require(strips.start % type.alignment == 0, f"{type} at byte {strips.start}")


def _check_rows(rows: BoundRows, program: Program) -> None:
    _widths(rows.op_index, program)
    op = program.ops[rows.op_index]
    _require(isinstance(op, Embed | Logits), f"op {rows.op_index} has no rows of tokens")
    assert isinstance(op, Embed | Logits)
    num_tokens, width = program.weights[op.weights[0]].shape
    _check_strips(rows.rows)
    _require(not rows.rows.type.has_codes, f"rows of tokens in {rows.rows.type}")
    ids = rows.token_ids
    _require(0 < len(ids) == rows.rows.num_strips, f"{rows.rows.num_strips} rows for {len(ids)} tokens")
    _require(len(set(ids)) == len(ids), "a token is replaced twice")
    _require(min(ids) >= 0 and max(ids) < num_tokens, f"tokens {min(ids)} to {max(ids)} of {num_tokens}")
    _require(rows.rows.num_columns == width, f"rows of {rows.rows.num_columns} elements, not {width}")


def _check_order(shape: BoundShape, program: Program) -> None:
    for one, two in pairwise(shape.updates):
        is_behind = two.op_index > one.op_index or two.first_row >= one.first_row + one.out_width
        is_behind = is_behind and two.op_index >= one.op_index
        places = [(update.op_index, update.first_row) for update in (one, two)]
        _require(is_behind, f"bands (op, row) {places} overlap or lie in another order")
    most = band_counts(program)
    for index, count in Counter(update.op_index for update in shape.updates).items():
        most_here = most.get(program.ops[index].writes[0], 1)
        _require(count <= most_here, f"{count} bands of op {index}, at most {most_here}")
    ops = [rows.op_index for rows in shape.token_rows]
    _require(all(two > one for one, two in pairwise(ops)), f"rows of tokens for ops {ops}")


def _widths(op_index: int, program: Program) -> tuple[int, int]:
    """Columns of A, and outputs, of an op that can be updated."""
    _require(0 <= op_index < len(program.ops), f"op {op_index} of {len(program.ops)}")
    op = program.ops[op_index]
    _require(isinstance(op, Linear | Logits | Embed), f"op {op_index}, {type(op).__name__}, cannot be updated")
    num_rows, num_columns = program.weights[op.weights[0]].shape
    return (num_rows, num_columns) if isinstance(op, Embed) else (num_columns, num_rows)
