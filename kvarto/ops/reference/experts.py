"""Experts: each token through the experts that `Route` chose, weighted by their shares."""

from __future__ import annotations

import numpy as np
import torch

from kvarto.core.ops import Experts
from kvarto.ops.reference.activation import Pointwise
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Kernel, Sizes, Views
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors
from kvarto.ops.reference.tiled_product import TILE_ROWS, TiledProduct


class ExpertsKernel(Kernel[Experts]):
    """See `core.ops.Experts`."""

    @classmethod
    def scratch(cls, op: Experts, sizes: Sizes) -> Pieces:
        """One tile of rows between the products, and tiles of both products."""
        _, hidden, ffn = sizes.program.weights[op.down].shape
        pieces = Pointwise.scratch() | {
            "x": Piece((TILE_ROWS, hidden)),
            "gate_up": Piece((TILE_ROWS, 2 * ffn)),
            "activated": Piece((TILE_ROWS, ffn)),
            "down": Piece((TILE_ROWS, hidden)),
        }
        raising = TiledProduct.scratch(hidden, 2 * ffn, sizes.weight_dtype(op.gate_up))
        lowering = TiledProduct.scratch(ffn, hidden, sizes.weight_dtype(op.down))
        pieces |= {f"raising.{name}": piece for name, piece in raising.items()}
        return pieces | {f"lowering.{name}": piece for name, piece in lowering.items()}

    def __init__(self, op: Experts, views: Views, scratch: Tensors) -> None:
        self._rows = views.sizes.program.buffers[op.x].rows
        self._x = views.buffers[op.x]
        self._ids = views.buffers[op.ids]
        self._shares = views.buffers[op.shares]
        self._out = views.buffers[op.out]
        self._gate_up = views.weights[op.gate_up]
        self._down = views.weights[op.down]
        self._scratch = scratch
        self._pointwise = Pointwise(op.activation, scratch)
        self._raise = TiledProduct(_named(scratch, "raising."))
        self._lower = TiledProduct(_named(scratch, "lowering."))

    def run(self, batch: Batch) -> None:
        """See `core.ops.Experts`. Experts run in ascending order, so that a row adds up in that order."""
        num_rows = batch.num_rows(self._rows)
        self._out[:num_rows].zero_()
        ids = self._ids[:num_rows].cpu().numpy()
        for expert in np.unique(ids):
            rows, choices = np.nonzero(ids == expert)
            for start in range(0, len(rows), TILE_ROWS):
                chosen = slice(start, start + TILE_ROWS)
                self._add(int(expert), batch.upload(rows[chosen]), batch.upload(choices[chosen]))

    def _add(self, expert: int, rows: torch.Tensor, choices: torch.Tensor) -> None:
        names = ("x", "gate_up", "activated", "down")
        x, gate_up, activated, down = (self._scratch[name][: len(rows)] for name in names)
        torch.index_select(self._x, 0, rows, out=x)
        self._raise(x, self._gate_up[expert], gate_up)
        self._pointwise.apply_gated(gate_up, activated)
        self._lower(activated, self._down[expert], down)
        down.mul_(self._shares[rows, choices][:, None])
        self._out.index_add_(0, rows, down)  # a row is named once per expert: one addition each


def _named(scratch: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in scratch.items() if name.startswith(prefix)}
