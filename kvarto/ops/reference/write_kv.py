"""WriteKV: store k and v heads in the pages, at each token's slot."""

from __future__ import annotations

import torch

from kvarto.core.kv_format import PLANES
from kvarto.core.ops import WriteKV
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Kernel, Sizes, Views
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors


class WriteKVKernel(Kernel[WriteKV]):
    """See `core.ops.WriteKV`."""

    @classmethod
    def scratch(cls, op: WriteKV, sizes: Sizes) -> Pieces:
        """Heads of one plane in the pages' element type."""
        return {"narrow": Piece((sizes.limits.max_tokens, op.heads.num_kv_heads, op.heads.head_dim), sizes.kv_dtype)}

    def __init__(self, op: WriteKV, views: Views, scratch: Tensors) -> None:
        self._heads = op.heads
        self._group = op.group
        self._qkv = views.buffers[op.qkv]
        self._narrow = scratch["narrow"]
        self._planes = [plane_view(views, op.layer_slot, plane) for plane in range(PLANES)]

    def run(self, batch: Batch) -> None:
        """See `core.ops.WriteKV`."""
        heads = self._qkv[: batch.num_tokens].view(batch.num_tokens, -1, self._heads.head_dim)
        first = self._heads.num_qo_heads
        slots = batch.slots(self._group)
        for plane in self._planes:
            narrow = self._narrow[: batch.num_tokens].copy_(heads[:, first : first + self._heads.num_kv_heads])
            plane.index_put_(slots, narrow)
            first += self._heads.num_kv_heads


def plane_view(views: Views, layer_slot: int, plane: int) -> torch.Tensor:
    """One plane of one layer in all pages: `[num_pages, page_size, num_kv_heads, head_dim]`."""
    kv = views.sizes.kv_format
    head_stride = kv.page_size * kv.head_dim
    return views.pages.as_strided(
        (views.num_pages, kv.page_size, kv.num_kv_heads, kv.head_dim),
        (views.page_elements, kv.head_dim, head_stride, 1),
        views.pages.storage_offset() + layer_slot * kv.layer_stride + plane * kv.num_kv_heads * head_stride,
    )
