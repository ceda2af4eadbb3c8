"""Reads strips of adapters out of their pages, widened to float32."""

from __future__ import annotations

import torch

from kvarto.core.bound_adapter import BoundAdapter, Strips
from kvarto.ops.reference.kernel import TORCH_DTYPES, Views
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors


class StripReader:
    """Byte b of an adapter's stream lies in page `pages[b // page_bytes]`, at `b % page_bytes`."""

    @staticmethod
    def scratch(num_columns: int) -> Pieces:
        """The bytes of up to `num_columns` columns, side by side."""
        return {"lora_bytes": Piece((4 * num_columns,), torch.uint8)}

    def __init__(self, views: Views, scratch: Tensors) -> None:
        self._pages = views.pages.view(torch.uint8)
        self._bytes = scratch["lora_bytes"]

    def read(self, adapter: BoundAdapter, strips: Strips, strip: int, first_column: int, out: torch.Tensor) -> None:
        """Fill `out: [n]` with columns from `first_column` on of one strip."""
        size = strips.dtype.itemsize
        start = strips.start + strip * strips.strip_bytes + first_column * size
        raw = self._bytes[: len(out) * size]
        self._gather(adapter, start, raw)
        out.copy_(raw.view(TORCH_DTYPES[strips.dtype]))

    def _gather(self, adapter: BoundAdapter, start: int, out: torch.Tensor) -> None:
        done = 0
        while done < len(out):
            index, offset = divmod(start + done, adapter.page_bytes)
            count = min(len(out) - done, adapter.page_bytes - offset)
            place = int(adapter.pages[index]) * adapter.page_bytes + offset
            out[done : done + count].copy_(self._pages[place : place + count])
            done += count
