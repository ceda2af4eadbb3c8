"""`x @ weight.T` by tiles of 32 rows: the same bits for a row whatever else is in the batch.

General matrix libraries choose kernels, and with them the order of sums, by the call's shape. Here the shape is always
`[32, in] x [in, block]` with the same zero-padded scratch, and within one shape a row's bits depend on that row alone
(measured; `tests/ops/test_fixed_order.py` checks it on each machine). Weights that are not f32 are widened by blocks
of output rows.
"""

from __future__ import annotations

import torch

from kvarto.ops.reference.scratch import Piece, Pieces, Tensors

TILE_ROWS = 32
BLOCK_BYTES = 4 << 20
"""Bytes in f32 of a block of weight rows: large enough to hide the call, small enough to stay in a cache."""


def block_rows(in_features: int, out_features: int) -> int:
    """Weight rows per call: a multiple of 16, so that each block starts at a cache line."""
    return min(out_features, max(16, BLOCK_BYTES // (4 * in_features) // 16 * 16))


class TiledProduct:
    """Scratch and loops of one product. `weight: [out, in]` may be f32, f16 or bf16; sums are f32."""

    @staticmethod
    def scratch(in_features: int, out_features: int, weight_dtype: torch.dtype) -> Pieces:
        """A tile of x, a tile of the output, and a widened block of the weight unless it is f32."""
        block = block_rows(in_features, out_features)
        pieces = {"x_tile": Piece((TILE_ROWS, in_features)), "y_tile": Piece((TILE_ROWS * block,))}
        if weight_dtype != torch.float32:
            pieces["block"] = Piece((block, in_features))
        return pieces

    def __init__(self, scratch: Tensors) -> None:
        self._x_tile = scratch["x_tile"]
        self._y_tile = scratch["y_tile"]
        self._block = scratch.get("block")

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """`out[n, out] = x[n, in] @ weight.T` for any n."""
        out_features, in_features = weight.shape
        step = block_rows(in_features, out_features)
        for start in range(0, out_features if len(x) else 0, step):
            block = self._widened(weight[start : start + step])
            self._multiply(x, block.t(), out[:, start : start + step])

    def _widened(self, rows: torch.Tensor) -> torch.Tensor:
        if self._block is None:
            return rows
        return self._block[: len(rows)].copy_(rows)

    def _multiply(self, x: torch.Tensor, block: torch.Tensor, out: torch.Tensor) -> None:
        y_tile = self._y_tile[: TILE_ROWS * block.shape[1]].view(TILE_ROWS, block.shape[1])
        for start in range(0, len(x), TILE_ROWS):
            rows = x[start : start + TILE_ROWS]
            self._x_tile[: len(rows)].copy_(rows)
            self._x_tile[len(rows) :].zero_()
            torch.mm(self._x_tile, block, out=y_tile)
            out[start : start + TILE_ROWS].copy_(y_tile[: len(rows)])
