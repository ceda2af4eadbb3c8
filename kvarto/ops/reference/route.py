"""Route: the `top_k` experts of each token and their shares."""

from __future__ import annotations

import torch

from kvarto.core.ops import Route
from kvarto.core.units import align_up
from kvarto.ops.reference.activation import VECTOR
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.exponential import exp_nonpositive_
from kvarto.ops.reference.kernel import Kernel, Sizes, Views
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors
from kvarto.ops.reference.sums import tree_sum_
from kvarto.ops.reference.tiled_product import TILE_ROWS, TiledProduct


class RouteKernel(Kernel[Route]):
    """See `core.ops.Route`."""

    @classmethod
    def scratch(cls, op: Route, sizes: Sizes) -> Pieces:
        """Tiles of the product; logits of a tile of rows, sorted, and their order."""
        num_experts = sizes.program.weights[op.weight].shape[0]
        shape = (TILE_ROWS, num_experts)
        return TiledProduct.scratch(sizes.width(op.x), num_experts, sizes.weight_dtype(op.weight)) | {
            "logits": Piece((align_up(TILE_ROWS * num_experts, VECTOR),)),
            "terms": Piece(shape),
            "sorted": Piece(shape),
            "order": Piece(shape, torch.int64),
        }

    def __init__(self, op: Route, views: Views, scratch: Tensors) -> None:
        self._op = op
        self._rows = views.sizes.program.buffers[op.x].rows
        self._x = views.buffers[op.x]
        self._ids = views.buffers[op.ids]
        self._shares = views.buffers[op.shares]
        self._weight = views.weights[op.weight]
        self._scratch = scratch
        self._product = TiledProduct(scratch)

    def run(self, batch: Batch) -> None:
        """See `core.ops.Route`."""
        num_rows = batch.num_rows(self._rows)
        for start in range(0, num_rows, TILE_ROWS):
            rows = slice(start, min(start + TILE_ROWS, num_rows))
            self._route(self._x[rows], self._ids[rows], self._shares[rows])

    def _route(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> None:
        num_rows, top_k = shares.shape
        flat = self._scratch["logits"]
        logits = flat[: num_rows * len(self._weight)].view(num_rows, -1)
        self._product(x, self._weight, logits)
        logits.sub_(logits.amax(dim=1, keepdim=True))
        exp_nonpositive_(flat)
        terms = self._scratch["terms"][:num_rows].copy_(logits)
        logits.div_(tree_sum_(terms))
        sorted_shares, order = self._scratch["sorted"][:num_rows], self._scratch["order"][:num_rows]
        # Stable: the lower id wins among equals.
        torch.sort(logits, dim=1, descending=True, stable=True, out=(sorted_shares, order))
        ids.copy_(order[:, :top_k])
        shares.copy_(sorted_shares[:, :top_k])
        if self._op.normalise:
            shares.div_(tree_sum_(sorted_shares[:, :top_k]))
