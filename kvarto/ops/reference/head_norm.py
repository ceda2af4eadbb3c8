"""HeadNorm: RMS norm of each q head and each k head, in place."""

from __future__ import annotations

from kvarto.core.ops import HeadNorm
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Kernel, Sizes, Views
from kvarto.ops.reference.row_norm import RowNorm
from kvarto.ops.reference.scratch import Pieces, Tensors


class HeadNormKernel(Kernel[HeadNorm]):
    """See `core.ops.HeadNorm`."""

    @classmethod
    def scratch(cls, op: HeadNorm, sizes: Sizes) -> Pieces:
        """Terms of the sums."""
        return RowNorm.scratch(op.heads.head_dim)

    def __init__(self, op: HeadNorm, views: Views, scratch: Tensors) -> None:
        self._heads = op.heads
        self._qkv = views.buffers[op.qkv]
        self._q_weight = views.weights[op.q_weight]
        self._k_weight = views.weights[op.k_weight]
        self._norm = RowNorm(op.eps, scratch)

    def run(self, batch: Batch) -> None:
        """See `core.ops.HeadNorm`."""
        num_q, num_k = self._heads.num_qo_heads, self._heads.num_kv_heads
        qkv = self._qkv[: batch.num_tokens].view(batch.num_tokens, -1, self._heads.head_dim)
        for head in range(num_q + num_k):  # one head of all tokens: rows at a constant stride
            rows = qkv[:, head]
            self._norm.rms(rows, self._q_weight if head < num_q else self._k_weight, rows)
