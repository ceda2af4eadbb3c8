"""What adapters make of what an op wrote, in float32, straight from the pages; see `core.bound_adapter`.

    t [rows, rank] = x A.T    by blocks of 16 rows of A, zero-padded; of an embedding the columns of A of its tokens
    y [rows, out] += s B t    by blocks of columns of y

Both products run by tiles of 32 rows, zero-padded, in shapes that the adapter fixes, like `tiled_product.py`: so a
row's bits depend on that row and its adapter alone. Rows without an active adapter are not touched.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvarto.core.bound_adapter import BoundAdapter, BoundRows, BoundUpdate, Strips
from kvarto.core.ops import Embed, Linear, Logits
from kvarto.core.units import align_up
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Sizes, Views
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors
from kvarto.ops.reference.strips import StripReader
from kvarto.ops.reference.tiled_product import TILE_ROWS

BLOCK_STRIPS = 16
BLOCK_COLUMNS = 1024
"""Of y at a time."""


class AdapterUpdates:
    """Of one op. Subclasses say what A x is, and how tokens are replaced."""

    @staticmethod
    def scratch(op: Linear | Logits | Embed, sizes: Sizes) -> Pieces:
        """Nothing where no adapters are planned for."""
        if sizes.limits.max_lora_rank == 0:
            return {}
        ranks = align_up(sizes.limits.max_lora_rank, BLOCK_STRIPS)
        width = max(sizes.program.weights[op.weights[0]].shape)
        columns = min(BLOCK_COLUMNS, sizes.width(op.out))
        pieces = StripReader.scratch(width) | {
            "lora_t": Piece((sizes.max_rows(op.out), ranks)),
            "lora_t_tile": Piece((TILE_ROWS * ranks,)),
            "lora_b": Piece((ranks * columns,)),
            "lora_bias": Piece((columns,)),
            "lora_scale": Piece((columns,)),
        }
        pieces |= dict.fromkeys(("lora_y", "lora_old", "lora_apart"), Piece((TILE_ROWS * columns,)))
        if isinstance(op, Embed):
            return pieces | {"lora_row": Piece((width,))}
        in_width = sizes.width(op.x)
        return pieces | {
            "lora_x": Piece((TILE_ROWS, in_width)),
            "lora_a": Piece((BLOCK_STRIPS, in_width)),
            "lora_ax": Piece((TILE_ROWS, BLOCK_STRIPS)),
        }

    def __init__(self, op: Linear | Logits | Embed, views: Views, scratch: Tensors) -> None:
        program = views.sizes.program
        self._op_index = program.ops.index(op)
        self._rows = program.buffers[op.out].rows
        self._out = views.buffers[op.out]
        self._scale = op.scale if isinstance(op, Embed) else 1.0
        self._strips = StripReader(views, scratch)
        self._scratch = scratch

    def apply(self, batch: Batch) -> None:
        """To what the op has left in its output."""
        for segment in batch.segments(self._rows):
            adapter, rows = segment.adapter, batch.upload(segment.rows)
            for replaced in adapter.token_rows:
                if replaced.op_index == self._op_index:
                    self._replace(batch, adapter, replaced, rows)
            for update in adapter.updates:
                if update.op_index == self._op_index:
                    self._shrink(batch, adapter, update, rows)
                    self._expand(batch, adapter, update, rows)

    def _replace(self, batch: Batch, adapter: BoundAdapter, replaced: BoundRows, rows: torch.Tensor) -> None:
        raise NotImplementedError

    def _shrink(self, batch: Batch, adapter: BoundAdapter, update: BoundUpdate, rows: torch.Tensor) -> None:
        """Fill `lora_t`, a row for each of `rows`, zeros behind the rank."""
        raise NotImplementedError

    def _base_bias(self, batch: Batch, rows: torch.Tensor, columns: slice, out: torch.Tensor) -> bool:
        """Fill `out: [rows, columns]` with what the base adds to its product; False where it adds nothing."""
        raise NotImplementedError

    def _expand(self, batch: Batch, adapter: BoundAdapter, update: BoundUpdate, rows: torch.Tensor) -> None:
        ranks = align_up(update.rank, BLOCK_STRIPS)
        for first in range(0, update.out_width, BLOCK_COLUMNS):
            count = min(BLOCK_COLUMNS, update.out_width - first)
            block = self._scratch["lora_b"][: ranks * count].view(ranks, count)
            block[update.rank :].zero_()
            for r in range(update.rank):
                self._strips.read(adapter, update.lora_b, r, first, block[r])
            bias = self._vector(adapter, update.bias, first, self._scratch["lora_bias"][:count])
            scale = self._vector(adapter, update.magnitude, first, self._scratch["lora_scale"][:count])
            columns = slice(update.first_row + first, update.first_row + first + count)
            for start, part in tiles(rows):
                y = self._multiply(start, len(part), block)
                if bias is not None:
                    y.add_(bias)
                y.mul_(update.scaling * self._scale)
                self._join(batch, y, scale, part, columns)

    def _multiply(self, start: int, num_rows: int, block: torch.Tensor) -> torch.Tensor:
        """Some rows of t by a block of B."""
        ranks, columns = block.shape
        tile = self._scratch["lora_t_tile"][: TILE_ROWS * ranks].view(TILE_ROWS, ranks)
        tile[:num_rows] = self._scratch["lora_t"][start : start + num_rows, :ranks]
        tile[num_rows:].zero_()
        y = self._scratch["lora_y"][: TILE_ROWS * columns].view(TILE_ROWS, columns)
        torch.mm(tile, block, out=y)
        return y[:num_rows]

    def _vector(
        self, adapter: BoundAdapter, strips: Strips | None, first: int, out: torch.Tensor
    ) -> torch.Tensor | None:
        if strips is None:
            return None
        self._strips.read(adapter, strips, 0, first, out)
        return out

    def _join(
        self, batch: Batch, y: torch.Tensor, scale: torch.Tensor | None, rows: torch.Tensor, columns: slice
    ) -> None:
        """One rounding at a time: nothing that a library may fuse for some lengths and not for others."""
        out = self._out[:, columns]
        old = self._scratch["lora_old"][: y.numel()].view(y.shape)
        torch.index_select(out, 0, rows, out=old)
        if scale is None:
            old.add_(y)
        else:
            apart = self._scratch["lora_apart"][: y.numel()].view(y.shape)
            is_apart = self._base_bias(batch, rows, columns, apart)
            if is_apart:
                old.sub_(apart)
            old.add_(y).mul_(scale)
            if is_apart:
                old.add_(apart)
        out.index_copy_(0, rows, old)


class ProductUpdates(AdapterUpdates):
    """Of a `Linear`, or of `Logits`: x is a row, and so is that of a token in the output matrix."""

    @classmethod
    def of(cls, op: Linear | Logits, views: Views, scratch: Tensors) -> ProductUpdates | None:
        """None where no adapters are planned for."""
        return cls(op, views, scratch) if "lora_t" in scratch else None

    def __init__(self, op: Linear | Logits, views: Views, scratch: Tensors) -> None:
        super().__init__(op, views, scratch)
        self._x = views.buffers[op.x]
        self._bias = views.weights[op.bias] if op.bias is not None else None

    def _shrink(self, batch: Batch, adapter: BoundAdapter, update: BoundUpdate, rows: torch.Tensor) -> None:
        for first, start, products in self._products(adapter, update.lora_a, rows):
            self._scratch["lora_t"][start : start + len(products), first : first + BLOCK_STRIPS] = products

    def _replace(self, batch: Batch, adapter: BoundAdapter, replaced: BoundRows, rows: torch.Tensor) -> None:
        for first, start, products in self._products(adapter, replaced.rows, rows):
            part = rows[start : start + len(products)]
            for column, token in enumerate(replaced.token_ids[first : first + BLOCK_STRIPS]):
                logits = products[:, column]
                if self._bias is not None:
                    logits.add_(self._bias[token])
                self._out[:, token].index_copy_(0, part, logits)

    def _products(
        self, adapter: BoundAdapter, strips: Strips, rows: torch.Tensor
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """First strip, first of `rows`, and their products `[some rows, 16]`; zeros for strips that there are not."""
        block, tile, products = (self._scratch[name] for name in ("lora_a", "lora_x", "lora_ax"))
        for first in range(0, strips.num_strips, BLOCK_STRIPS):
            count = min(BLOCK_STRIPS, strips.num_strips - first)
            block[count:].zero_()
            for s in range(count):
                self._strips.read(adapter, strips, first + s, 0, block[s])
            for start, part in tiles(rows):
                torch.index_select(self._x, 0, part, out=tile[: len(part)])
                tile[len(part) :].zero_()
                torch.mm(tile, block.t(), out=products)
                yield first, start, products[: len(part)]

    def _base_bias(self, batch: Batch, rows: torch.Tensor, columns: slice, out: torch.Tensor) -> bool:
        if self._bias is None:
            return False
        out.copy_(self._bias[columns])
        return True


class EmbeddingUpdates(AdapterUpdates):
    """Of an `Embed`: A x is the column of A of a row's token, and everything but positions is scaled."""

    @classmethod
    def of(cls, op: Embed, views: Views, scratch: Tensors) -> EmbeddingUpdates | None:
        """None where no adapters are planned for."""
        return cls(op, views, scratch) if "lora_t" in scratch else None

    def __init__(self, op: Embed, views: Views, scratch: Tensors) -> None:
        super().__init__(op, views, scratch)
        self._positions = views.weights[op.position_table] if op.position_table is not None else None

    def _shrink(self, batch: Batch, adapter: BoundAdapter, update: BoundUpdate, rows: torch.Tensor) -> None:
        row = self._scratch["lora_row"][: update.lora_a.num_columns]
        t = self._scratch["lora_t"][: len(rows), : align_up(update.rank, BLOCK_STRIPS)].zero_()
        for r in range(update.rank):
            self._strips.read(adapter, update.lora_a, r, 0, row)
            t[:, r] = row[batch.token_ids[rows]]

    def _replace(self, batch: Batch, adapter: BoundAdapter, replaced: BoundRows, rows: torch.Tensor) -> None:
        strip_of = {token: strip for strip, token in enumerate(replaced.token_ids)}
        values = self._scratch["lora_row"][: replaced.rows.num_columns]
        for row, token in zip(rows.tolist(), batch.token_ids[rows].tolist(), strict=True):
            if token in strip_of:
                self._strips.read(adapter, replaced.rows, strip_of[token], 0, values)
                values.mul_(self._scale)
                if self._positions is not None:
                    values.add_(self._positions[batch.positions[row]])
                self._out[row].copy_(values)

    def _base_bias(self, batch: Batch, rows: torch.Tensor, columns: slice, out: torch.Tensor) -> bool:
        if self._positions is None:
            return False
        out.copy_(self._positions[:, columns][batch.positions[rows]])
        return True


def tiles(rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows by 32, and where each tile begins."""
    for start in range(0, len(rows), TILE_ROWS):
        yield start, rows[start : start + TILE_ROWS]
