"""Gather: the rows whose next token is asked, one per sample."""

from __future__ import annotations

import torch

from kvarto.core.ops import Gather
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Kernel, Sizes, Views
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors


class GatherKernel(Kernel[Gather]):
    """See `core.ops.Gather`."""

    @classmethod
    def scratch(cls, op: Gather, sizes: Sizes) -> Pieces:
        """The residual's rows."""
        if op.residual is None:
            return {}
        return {"residual": Piece((sizes.limits.max_samples, sizes.width(op.out)))}

    def __init__(self, op: Gather, views: Views, scratch: Tensors) -> None:
        self._x = views.buffers[op.x]
        self._out = views.buffers[op.out]
        self._residual = views.buffers[op.residual] if op.residual is not None else None
        self._residual_rows = scratch.get("residual")

    def run(self, batch: Batch) -> None:
        """See `core.ops.Gather`."""
        out = self._out[: batch.num_samples]
        torch.index_select(self._x, 0, batch.sample_rows, out=out)
        if self._residual is not None and self._residual_rows is not None:
            rows = self._residual_rows[: batch.num_samples]
            torch.index_select(self._residual, 0, batch.sample_rows, out=rows)
            out.add_(rows)
