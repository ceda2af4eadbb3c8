"""Gather: the rows whose next token is asked, one per sample."""

from __future__ import annotations

import torch

from kvarto.core.ops import Gather
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Kernel, Sizes, Views
from kvarto.ops.reference.scratch import Pieces, Tensors


class GatherKernel(Kernel[Gather]):
    """See `core.ops.Gather`."""

    @classmethod
    def scratch(cls, op: Gather, sizes: Sizes) -> Pieces:
        """None."""
        return {}

    def __init__(self, op: Gather, views: Views, scratch: Tensors) -> None:
        self._x = views.buffers[op.x]
        self._out = views.buffers[op.out]

    def run(self, batch: Batch) -> None:
        """See `core.ops.Gather`."""
        torch.index_select(self._x, 0, batch.sample_rows, out=self._out[: batch.num_samples])
