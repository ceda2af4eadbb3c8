"""Norms of rows, in a fixed order: what `Norm` and `HeadNorm` share."""

from __future__ import annotations

import torch

from kvarto.ops.reference.scratch import Piece, Pieces, Tensors
from kvarto.ops.reference.sums import tree_sum_

CHUNK_ELEMENTS = 1 << 16
"""Elements that are squared and summed at a time; they stay in a cache."""


class RowNorm:
    """Normalises rows of `width` elements. Every step is one IEEE operation per element."""

    @staticmethod
    def scratch(width: int) -> Pieces:
        """Terms of the sums, and one number per row."""
        rows = max(1, CHUNK_ELEMENTS // width)
        return {"terms": Piece((rows, width)), "deviation": Piece((rows, 1))}

    def __init__(self, eps: float, scratch: Tensors) -> None:
        self._eps = eps
        self._terms = scratch["terms"]
        self._deviation = scratch["deviation"]

    def rms(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """`out = x / sqrt(mean(x²) + eps) * weight`, `[n, width]`; `out` may be `x`."""
        for rows, out_rows in self._chunks(x, out):
            torch.div(rows, self._root_mean_square(rows), out=out_rows)
            out_rows.mul_(weight)

    def layer(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """`out = (x - mean) / sqrt(var + eps) * weight (+ bias)`, `[n, width]`; `out` may be `x`."""
        for rows, out_rows in self._chunks(x, out):
            mean = tree_sum_(self._terms[: len(rows)].copy_(rows)).div_(rows.shape[1])
            torch.sub(rows, mean, out=out_rows)
            out_rows.div_(self._root_mean_square(out_rows)).mul_(weight)
            if bias is not None:
                out_rows.add_(bias)

    def _chunks(self, x: torch.Tensor, out: torch.Tensor) -> zip[tuple[torch.Tensor, torch.Tensor]]:
        step = len(self._terms)
        starts = range(0, len(x), step)
        return zip((x[s : s + step] for s in starts), (out[s : s + step] for s in starts), strict=True)

    def _root_mean_square(self, rows: torch.Tensor) -> torch.Tensor:
        terms = self._terms[: len(rows)]
        torch.mul(rows, rows, out=terms)
        mean = tree_sum_(terms).div_(rows.shape[1])
        return torch.sqrt(mean.add_(self._eps), out=self._deviation[: len(rows)])
