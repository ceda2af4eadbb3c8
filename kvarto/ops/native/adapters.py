"""Bound adapters as native code has them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from kvarto.core import _native
from kvarto.core.bound_adapter import BoundAdapter, BoundShape, BoundUpdate, Strips
from kvarto.core.layout import Layout
from kvarto.ops.native.compile import native_pages


class NativeShapes:
    """Shapes of adapters as one program has them, made when they come for the first time."""

    def __init__(self, target: _native.ops.Program, layout: Layout) -> None:
        self._target = target
        self._pages = native_pages(layout)
        self._shapes: WeakKeyDictionary[BoundShape, _native.ops.AdapterShape] = WeakKeyDictionary()

    def bind(self, handle: int, adapter: BoundAdapter) -> None:
        """Let steps of the program name the adapter. It has been checked against the program."""
        shape = self._shapes.get(adapter.shape)
        if shape is None:
            shape = self._shapes[adapter.shape] = self._native(adapter.shape)
        self._target.bind_adapter(handle, self._pages, adapter.pages.tolist(), shape)

    def _native(self, shape: BoundShape) -> _native.ops.AdapterShape:
        updates = [_update(update) for update in shape.updates]
        tokens = [_native.ops.Tokens(r.op_index, _strips(r.rows), list(r.token_ids)) for r in shape.token_rows]
        return self._target.adapter_shape(updates, tokens)


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
    return _native.ops.Strips(strips.start, strips.num_strips, strips.num_columns, strips.type.code)
