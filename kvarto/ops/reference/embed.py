"""Embed: rows of a table by token id, scaled, with learned positions where the model has them."""

from __future__ import annotations

import torch

from kvarto.core.ops import Embed
from kvarto.ops.reference.adapters import EmbeddingUpdates
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Kernel, Sizes, Views
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors

CHUNK_ROWS = 32


class EmbedKernel(Kernel[Embed]):
    """See `core.ops.Embed`."""

    @classmethod
    def scratch(cls, op: Embed, sizes: Sizes) -> Pieces:
        """Some rows of each table as they lie there, and what adapters take."""
        shape = (CHUNK_ROWS, sizes.width(op.out))
        rows = {name: Piece(shape, sizes.weight_dtype(name)) for name in op.weights}
        return rows | EmbeddingUpdates.scratch(op, sizes)

    def __init__(self, op: Embed, views: Views, scratch: Tensors) -> None:
        self._out = views.buffers[op.out]
        self._scale = op.scale
        self._adapters = EmbeddingUpdates.of(op, views, scratch)
        self._table = views.weights[op.table]
        self._rows = scratch[op.table]
        self._position_table = views.weights[op.position_table] if op.position_table is not None else None
        self._position_rows = scratch[op.position_table] if op.position_table is not None else None

    def run(self, batch: Batch) -> None:
        """See `core.ops.Embed`."""
        for start in range(0, batch.num_tokens, CHUNK_ROWS):
            end = min(start + CHUNK_ROWS, batch.num_tokens)
            out = self._out[start:end]
            rows = self._rows[: end - start]
            torch.index_select(self._table, 0, batch.token_ids[start:end], out=rows)
            out.copy_(rows)
            if self._scale != 1.0:
                out.mul_(self._scale)
            if self._position_table is not None and self._position_rows is not None:
                rows = self._position_rows[: end - start]
                torch.index_select(self._position_table, 0, batch.positions[start:end], out=rows)
                out.add_(rows)
        if self._adapters is not None:
            self._adapters.apply(batch)
