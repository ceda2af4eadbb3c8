"""HeadNorm: RMS norm of each q head and each k head, in place."""

from __future__ import annotations

from kvarto.core.ops import HeadNorm
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Kernel, Sizes, Views, heads_view
from kvarto.ops.reference.row_norm import RowNorm
from kvarto.ops.reference.scratch import Pieces, Tensors


class HeadNormKernel(Kernel[HeadNorm]):
    """See `core.ops.HeadNorm`."""

    @classmethod
    def scratch(cls, op: HeadNorm, sizes: Sizes) -> Pieces:
        """Terms of the sums."""
        return RowNorm.scratch(op.heads.head_dim)

    def __init__(self, op: HeadNorm, views: Views, scratch: Tensors) -> None:
        self._num_q = op.heads.num_qo_heads
        self._num_normed = op.heads.num_qo_heads + op.heads.num_kv_heads
        self._heads = heads_view(views, op.qkv, op.heads)
        self._q_weight = views.weights[op.q_weight]
        self._k_weight = views.weights[op.k_weight]
        self._norm = RowNorm(op.eps, scratch)

    def run(self, batch: Batch) -> None:
        """See `core.ops.HeadNorm`."""
        for head in range(self._num_normed):  # one head of all tokens: rows at a constant stride
            rows = self._heads[: batch.num_tokens, head]
            self._norm.rms(rows, self._q_weight if head < self._num_q else self._k_weight, rows)
