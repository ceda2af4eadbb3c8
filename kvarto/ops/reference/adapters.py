"""What adapters add to the rows of a product: `y[band] += scaling * (B (A x) + bias)`, in float32, from the pages.

    t [rows, rank] = x A.T    by blocks of 16 rows of A, zero-padded
    y [rows, out] += s B t    by blocks of columns of y

Both products run by tiles of 32 rows, zero-padded, in shapes that the adapter fixes, like `tiled_product.py`: so a
row's bits depend on that row and its adapter alone. Rows without an active adapter are not touched.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvarto.core.bound_adapter import BoundAdapter, BoundUpdate
from kvarto.core.ops import Linear, Logits
from kvarto.core.units import align_up
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Sizes, Views
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors
from kvarto.ops.reference.strips import StripReader
from kvarto.ops.reference.tiled_product import TILE_ROWS

BLOCK_RANKS = 16
BLOCK_COLUMNS = 1024
"""Of y at a time."""


class AdapterProduct:
    """Adds to `out` what the adapters of a step make of `x`, for the op of one product."""

    @staticmethod
    def scratch(op: Linear | Logits, sizes: Sizes) -> Pieces:
        """Nothing where no adapters are planned for."""
        if sizes.limits.max_lora_rank == 0:
            return {}
        ranks = align_up(sizes.limits.max_lora_rank, BLOCK_RANKS)
        in_width, columns = sizes.width(op.x), min(BLOCK_COLUMNS, sizes.width(op.out))
        return StripReader.scratch(max(in_width, columns)) | {
            "lora_x": Piece((TILE_ROWS, in_width)),
            "lora_a": Piece((BLOCK_RANKS, in_width)),
            "lora_ax": Piece((TILE_ROWS, BLOCK_RANKS)),
            "lora_t": Piece((sizes.max_rows(op.x), ranks)),
            "lora_t_tile": Piece((TILE_ROWS * ranks,)),
            "lora_b": Piece((ranks * columns,)),
            "lora_y": Piece((TILE_ROWS * columns,)),
            "lora_old": Piece((TILE_ROWS * columns,)),
            "lora_bias": Piece((columns,)),
        }

    @classmethod
    def of(cls, op: Linear | Logits, views: Views, scratch: Tensors) -> AdapterProduct | None:
        """None where no adapters are planned for."""
        return cls(op, views, scratch) if "lora_t" in scratch else None

    def __init__(self, op: Linear | Logits, views: Views, scratch: Tensors) -> None:
        program = views.sizes.program
        self._op_index = program.ops.index(op)
        self._rows = program.buffers[op.x].rows
        self._x = views.buffers[op.x]
        self._out = views.buffers[op.out]
        self._strips = StripReader(views, scratch)
        self._scratch = scratch

    def add(self, batch: Batch) -> None:
        """To what the product left in the op's output."""
        for segment in batch.segments(self._rows):
            for update in segment.adapter.updates:
                if update.op_index == self._op_index:
                    rows = batch.upload(segment.rows)
                    self._shrink(segment.adapter, update, rows)
                    self._expand(segment.adapter, update, rows)

    def _shrink(self, adapter: BoundAdapter, update: BoundUpdate, rows: torch.Tensor) -> None:
        block, tile, ax = (self._scratch[name] for name in ("lora_a", "lora_x", "lora_ax"))
        for first in range(0, update.rank, BLOCK_RANKS):
            count = min(BLOCK_RANKS, update.rank - first)
            block[count:].zero_()
            for r in range(count):
                self._strips.read(adapter, update.lora_a, first + r, 0, block[r])
            for start, part in _tiles(rows):
                torch.index_select(self._x, 0, part, out=tile[: len(part)])
                tile[len(part) :].zero_()
                torch.mm(tile, block.t(), out=ax)
                self._scratch["lora_t"][start : start + len(part), first : first + BLOCK_RANKS] = ax[: len(part)]

    def _expand(self, adapter: BoundAdapter, update: BoundUpdate, rows: torch.Tensor) -> None:
        ranks = align_up(update.rank, BLOCK_RANKS)
        for first in range(0, update.out_width, BLOCK_COLUMNS):
            count = min(BLOCK_COLUMNS, update.out_width - first)
            block = self._scratch["lora_b"][: ranks * count].view(ranks, count)
            block[update.rank :].zero_()
            for r in range(update.rank):
                self._strips.read(adapter, update.lora_b, r, first, block[r])
            bias = self._bias(adapter, update, first, count)
            column = update.first_row + first
            for start, part in _tiles(rows):
                y = self._multiply(start, len(part), block)
                self._join(y, bias, update.scaling, part, self._out[:, column : column + count])

    def _multiply(self, start: int, num_rows: int, block: torch.Tensor) -> torch.Tensor:
        """Some rows of t by a block of B."""
        ranks, columns = block.shape
        tile = self._scratch["lora_t_tile"][: TILE_ROWS * ranks].view(TILE_ROWS, ranks)
        tile[:num_rows] = self._scratch["lora_t"][start : start + num_rows, :ranks]
        tile[num_rows:].zero_()
        y = self._scratch["lora_y"][: TILE_ROWS * columns].view(TILE_ROWS, columns)
        torch.mm(tile, block, out=y)
        return y[:num_rows]

    def _bias(self, adapter: BoundAdapter, update: BoundUpdate, first: int, count: int) -> torch.Tensor | None:
        if update.bias is None:
            return None
        bias = self._scratch["lora_bias"][:count]
        self._strips.read(adapter, update.bias, 0, first, bias)
        return bias

    def _join(
        self, y: torch.Tensor, bias: torch.Tensor | None, scaling: float, rows: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One rounding at a time: nothing that a library may fuse for some lengths and not for others."""
        if bias is not None:
            y.add_(bias)
        y.mul_(scaling)
        old = self._scratch["lora_old"][: y.numel()].view(y.shape)
        torch.index_select(out, 0, rows, out=old)
        out.index_copy_(0, rows, old.add_(y))


def _tiles(rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, len(rows), TILE_ROWS):
        yield start, rows[start : start + TILE_ROWS]
