"""Logits: the product with the vocabulary, scaled and softcapped."""

from __future__ import annotations

import torch

from kvarto.core.ops import Logits
from kvarto.core.units import align_up
from kvarto.ops.reference.activation import VECTOR
from kvarto.ops.reference.adapters import ProductUpdates
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Kernel, Sizes, Views
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors
from kvarto.ops.reference.tiled_product import TiledProduct


class LogitsKernel(Kernel[Logits]):
    """See `core.ops.Logits`."""

    @classmethod
    def scratch(cls, op: Logits, sizes: Sizes) -> Pieces:
        """Tiles of the product, one padded row for the softcap, and what adapters take."""
        width = sizes.width(op.out)
        pieces = TiledProduct.scratch(sizes.width(op.x), width, sizes.weight_dtype(op.weight))
        if op.softcap is not None:
            pieces["row"] = Piece((align_up(width, VECTOR),))
        return pieces | ProductUpdates.scratch(op, sizes)

    def __init__(self, op: Logits, views: Views, scratch: Tensors) -> None:
        self._rows = views.sizes.program.buffers[op.x].rows
        self._x = views.buffers[op.x]
        self._out = views.buffers[op.out]
        self._weight = views.weights[op.weight]
        self._bias = views.weights[op.bias] if op.bias is not None else None
        self._scale = op.scale
        self._softcap = op.softcap
        self._row = scratch.get("row")
        self._product = TiledProduct(scratch)
        self._adapters = ProductUpdates.of(op, views, scratch)

    def run(self, batch: Batch) -> None:
        """See `core.ops.Logits`."""
        num_rows = batch.num_rows(self._rows)
        out = self._out[:num_rows]
        self._product(self._x[:num_rows], self._weight, out)
        if self._bias is not None:
            out.add_(self._bias)
        if self._adapters is not None:
            self._adapters.apply(batch)
        if self._scale != 1.0:
            out.mul_(self._scale)
        if self._softcap is not None and self._row is not None:
            for row in out:
                self._cap(row, self._row, self._softcap)

    @staticmethod
    def _cap(row: torch.Tensor, padded: torch.Tensor, softcap: float) -> None:
        torch.div(row, softcap, out=padded[: len(row)])
        padded.tanh_()
        torch.mul(padded[: len(row)], softcap, out=row)
