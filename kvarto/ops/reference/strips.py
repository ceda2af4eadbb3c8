"""Reads strips of adapters out of their pages, widened to float32."""

from __future__ import annotations

import torch

from kvarto.core.bound_adapter import BoundAdapter, Strips
from kvarto.core.dtype import DType
from kvarto.core.strip_type import BLOCK_COLUMNS, SCALE_BYTES, StripType
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
        """Fill `out: [n]` with columns from `first_column` on of one strip; of codes, whole blocks."""
        raw = self._bytes[: strips.type.size_bytes(len(out))]
        self._gather(adapter, strips.place(strip, first_column), raw)
        if strips.type.has_codes:
            _decode(raw, strips.type, out)
        else:
            out.copy_(raw.view(TORCH_DTYPES[DType(strips.type.value)]))

    def _gather(self, adapter: BoundAdapter, start: int, out: torch.Tensor) -> None:
        done = 0
        while done < len(out):
            index, offset = divmod(start + done, adapter.page_bytes)
            count = min(len(out) - done, adapter.page_bytes - offset)
            place = int(adapter.pages[index]) * adapter.page_bytes + offset
            out[done : done + count].copy_(self._pages[place : place + count])
            done += count


def _decode(raw: torch.Tensor, type: StripType, out: torch.Tensor) -> None:
    """Blocks to what their codes stand for; see core/strip_type.py."""
    blocks = raw.view(-1, type.block_bytes)
    scales = blocks[:, :SCALE_BYTES].contiguous().view(torch.float16).float()
    codes, values = blocks[:, SCALE_BYTES:], out.view(-1, BLOCK_COLUMNS)
    if type is StripType.Q8:
        values.copy_(codes.view(torch.int8))
    else:
        half = BLOCK_COLUMNS // 2
        values[:, :half] = codes & 15
        values[:, half:] = codes >> 4
        values.sub_(8)
    values.mul_(scales)
    values.copy_(values.bfloat16())
