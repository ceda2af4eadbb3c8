"""WriteKV: store k and v heads in the pages, at each token's slot."""

from __future__ import annotations

import torch

from kvarto.core.kv_format import PLANES
from kvarto.core.ops import WriteKV
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Kernel, Sizes, Views, heads_view
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors


class WriteKVKernel(Kernel[WriteKV]):
    """See `core.ops.WriteKV`."""

    @classmethod
    def scratch(cls, op: WriteKV, sizes: Sizes) -> Pieces:
        """Heads of one plane in the pages' element type."""
        return {"narrow": Piece((sizes.limits.max_tokens, op.heads.num_kv_heads, op.heads.head_dim), sizes.kv_dtype)}

    def __init__(self, op: WriteKV, views: Views, scratch: Tensors) -> None:
        heads = heads_view(views, op.qkv, op.heads)
        num_q, num_kv = op.heads.num_qo_heads, op.heads.num_kv_heads
        self._group = op.group
        self._narrow = scratch["narrow"]
        self._sources = [heads[:, num_q + plane * num_kv :][:, :num_kv] for plane in range(PLANES)]
        self._planes = [plane_view(views, op.layer_slot, plane) for plane in range(PLANES)]

    def run(self, batch: Batch) -> None:
        """See `core.ops.WriteKV`."""
        for source, plane in zip(self._sources, self._planes, strict=True):
            narrow = self._narrow[: batch.num_tokens].copy_(source[: batch.num_tokens])
            plane.index_put_(batch.slots(self._group), narrow)


def plane_view(views: Views, layer_slot: int, plane: int) -> torch.Tensor:
    """One plane of one layer in all pages: `[num_pages, page_size, num_kv_heads, head_dim]`."""
    kv = views.sizes.kv_format
    head_stride, layer_stride = kv.page_size * kv.head_dim, kv.layer_bytes // kv.dtype.itemsize
    return views.pages.as_strided(
        (views.num_pages, kv.page_size, kv.num_kv_heads, kv.head_dim),
        (views.page_elements, kv.head_dim, head_stride, 1),
        views.pages.storage_offset() + layer_slot * layer_stride + plane * kv.num_kv_heads * head_stride,
    )
