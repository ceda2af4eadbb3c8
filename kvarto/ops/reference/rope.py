"""Rope: rotate q and k heads by position. Source: RoFormer (arXiv:2104.09864)."""

from __future__ import annotations

import torch

from kvarto.core.ops import Rope
from kvarto.core.units import align_up
from kvarto.ops.reference.activation import VECTOR
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Kernel, Sizes, Views, heads_view
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors

CHUNK_ROWS = 64


class RopeKernel(Kernel[Rope]):
    """See `core.ops.Rope`."""

    @classmethod
    def scratch(cls, op: Rope, sizes: Sizes) -> Pieces:
        """Angles, cosines and sines of some tokens; two products per pair of dims of their heads."""
        pairs = len(op.inv_freq)
        angles = Piece((align_up(CHUNK_ROWS * pairs, VECTOR),))
        products = Piece((CHUNK_ROWS, op.heads.num_qo_heads + op.heads.num_kv_heads, pairs))
        return {
            "angles": angles,
            "cos": angles,
            "sin": angles,
            "low": products,
            "high": products,
        }

    def __init__(self, op: Rope, views: Views, scratch: Tensors) -> None:
        num_rotated = op.heads.num_qo_heads + op.heads.num_kv_heads
        self._heads = heads_view(views, op.qkv, op.heads)[:, :num_rotated]
        self._factor = op.attention_factor
        self._inv_freq = torch.tensor(op.inv_freq, dtype=torch.float32, device=self._heads.device)
        self._scratch = scratch

    def run(self, batch: Batch) -> None:
        """See `core.ops.Rope`."""
        heads = self._heads[: batch.num_tokens]
        for start in range(0, batch.num_tokens, CHUNK_ROWS):
            cos, sin = self._rotation(batch.positions[start : start + CHUNK_ROWS])
            self._rotate(heads[start : start + CHUNK_ROWS], cos, sin)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, `[n, 1, pairs]`."""
        pairs = len(self._inv_freq)
        count = len(positions) * pairs
        padded = align_up(count, VECTOR)
        angles, cos, sin = (self._scratch[name][:padded] for name in ("angles", "cos", "sin"))
        torch.mul(positions[:, None], self._inv_freq, out=angles[:count].view(-1, pairs))
        torch.cos(angles, out=cos)
        torch.sin(angles, out=sin)
        if self._factor != 1.0:
            cos.mul_(self._factor)
            sin.mul_(self._factor)
        return cos[:count].view(-1, 1, pairs), sin[:count].view(-1, 1, pairs)

    def _rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        pairs = len(self._inv_freq)
        low, high = heads[..., :pairs], heads[..., pairs : 2 * pairs]
        low_sin, high_sin = self._scratch["low"][: len(heads)], self._scratch["high"][: len(heads)]
        torch.mul(low, sin, out=low_sin)
        torch.mul(high, sin, out=high_sin)
        low.mul_(cos).sub_(high_sin)
        high.mul_(cos).add_(low_sin)
