"""Norm: RMS or layer norm of each row, with the residual stream where the op names one."""

from __future__ import annotations

from kvarto.core.ops import Norm, NormKind
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Kernel, Sizes, Views
from kvarto.ops.reference.row_norm import RowNorm
from kvarto.ops.reference.scratch import Pieces, Tensors


class NormKernel(Kernel[Norm]):
    """See `core.ops.Norm`."""

    @classmethod
    def scratch(cls, op: Norm, sizes: Sizes) -> Pieces:
        """Terms of the sums."""
        return RowNorm.scratch(sizes.width(op.x))

    def __init__(self, op: Norm, views: Views, scratch: Tensors) -> None:
        self._kind = op.kind
        self._rows = views.sizes.program.buffers[op.x].rows
        self._x = views.buffers[op.x]
        self._out = views.buffers[op.out]
        self._residual = views.buffers[op.residual] if op.residual is not None else None
        self._weight = views.weights[op.weight]
        self._bias = views.weights[op.bias] if op.bias is not None else None
        self._norm = RowNorm(op.eps, scratch)

    def run(self, batch: Batch) -> None:
        """See `core.ops.Norm`."""
        num_rows = batch.num_rows(self._rows)
        x, out = self._x[:num_rows], self._out[:num_rows]
        if self._residual is not None:
            x = self._residual[:num_rows].add_(x)
        if self._kind is NormKind.RMS:
            self._norm.rms(x, self._weight, out)
        else:
            self._norm.layer(x, self._weight, self._bias, out)
