"""A bound adapter as native code has it."""

from __future__ import annotations

from kvarto.core import _native
from kvarto.core.bound_adapter import BoundAdapter, BoundUpdate, Strips
from kvarto.core.dtype import DType
from kvarto.core.layout import Layout
from kvarto.ops.native.compile import native_pages

_TYPES = (DType.F32, DType.F16, DType.BF16)
"""In the order of `enum class StripType` in native/core/adapters.h."""


def bind_native(target: _native.ops.Program, handle: int, adapter: BoundAdapter, layout: Layout) -> None:
    """Let steps of `target` name the adapter. It has been checked against the program."""
    updates = [_update(update) for update in adapter.updates]
    tokens = [_native.ops.Tokens(r.op_index, _strips(r.rows), list(r.token_ids)) for r in adapter.token_rows]
    target.bind_adapter(handle, native_pages(layout), adapter.pages.tolist(), updates, tokens)


def _update(update: BoundUpdate) -> _native.ops.Update:
    return _native.ops.Update(
        op=update.op_index,
        first_row=update.first_row,
        scaling=update.scaling,
        a=_strips(update.lora_a),
        b=_strips(update.lora_b),
        bias=None if update.bias is None else _strips(update.bias),
        magnitude=None if update.magnitude is None else _strips(update.magnitude),
    )


def _strips(strips: Strips) -> _native.ops.Strips:
    return _native.ops.Strips(strips.start, strips.num_strips, strips.num_columns, _TYPES.index(strips.dtype))
