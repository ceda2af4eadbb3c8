"""Linear: `out = x @ weight.T (+ bias)`."""

from __future__ import annotations

from kvarto.core.ops import Linear
from kvarto.ops.reference.adapters import ProductUpdates
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Kernel, Sizes, Views
from kvarto.ops.reference.scratch import Pieces, Tensors
from kvarto.ops.reference.tiled_product import TiledProduct


class LinearKernel(Kernel[Linear]):
    """See `core.ops.Linear`."""

    @classmethod
    def scratch(cls, op: Linear, sizes: Sizes) -> Pieces:
        """Tiles of the product, and what adapters take."""
        pieces = TiledProduct.scratch(sizes.width(op.x), sizes.width(op.out), sizes.weight_dtype(op.weight))
        return pieces | ProductUpdates.scratch(op, sizes)

    def __init__(self, op: Linear, views: Views, scratch: Tensors) -> None:
        self._rows = views.sizes.program.buffers[op.x].rows
        self._x = views.buffers[op.x]
        self._out = views.buffers[op.out]
        self._weight = views.weights[op.weight]
        self._bias = views.weights[op.bias] if op.bias is not None else None
        self._product = TiledProduct(scratch)
        self._adapters = ProductUpdates.of(op, views, scratch)

    def run(self, batch: Batch) -> None:
        """See `core.ops.Linear`."""
        num_rows = batch.num_rows(self._rows)
        out = self._out[:num_rows]
        self._product(self._x[:num_rows], self._weight, out)
        if self._bias is not None:
            out.add_(self._bias)  # a bias in f16 or bf16 is widened exactly
        if self._adapters is not None:
            self._adapters.apply(batch)
