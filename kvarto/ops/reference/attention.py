"""Attention: causal, over pages; prefill, decode and mixed batches alike.

For a chunk of query rows (see `work_list.py`), keys come by tiles of 64 by absolute position. Each tile's scores update
the running maximum m, sum l and weighted values acc of the rows; tiles add up in order inside spans of 1,024, and
spans merge in order. All calls have one shape, fixed by the model.

Why grouping never changes a bit: a row that sees nothing of a tile has only scores of -inf there. m starts at the
lowest finite number, so the maximum stays, the old sum is scaled by exp(0) = 1 and exp(-inf - m) = 0 is added: an exact
no-op, also for a whole span. Values that do not exist are set to 0 first, for 0 * NaN is NaN.
Source: FlashAttention (arXiv:2205.14135), online softmax (arXiv:1805.02867), PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvarto.core.kv_format import PLANES
from kvarto.core.ops import Attention
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.exponential import exp_nonpositive_
from kvarto.ops.reference.kernel import Kernel, Sizes, Views
from kvarto.ops.reference.key_places import TILE, KeyPlaces, KeyRun, run_view
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors
from kvarto.ops.reference.work_list import Chunk, ChunkShape, WorkList

LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class _Sums:
    """Running softmax of a chunk's rows, over a span or over all spans so far."""

    maximum: torch.Tensor
    """`[num_products, block_rows, 1]`"""
    total: torch.Tensor
    """The same shape."""
    values: torch.Tensor
    """`[num_products, block_rows, head_dim]`"""

    def clear_(self) -> None:
        self.maximum.fill_(LOWEST)
        self.total.zero_()
        self.values.zero_()

    def scale_(self, factor: torch.Tensor) -> None:
        self.total.mul_(factor)
        self.values.mul_(factor)


class _Tile:
    """Keys or values of one tile for each product of a chunk, gathered from the pages and widened to f32."""

    def __init__(self, plane: torch.Tensor, num_blocks: int, tile: torch.Tensor, narrow: torch.Tensor | None) -> None:
        self.tensor = tile
        """`[num_products, TILE, head_dim]`"""
        self._plane = plane
        self._narrow = narrow
        self._runs = (tile if narrow is None else narrow).view(-1, plane.shape[1])
        self._by_block = tile.view(num_blocks, -1, *tile.shape[1:])

    def gather(self, places: torch.Tensor, absent: torch.Tensor | None) -> None:
        """Fetch the runs at `places`; what is `absent` becomes 0, whatever lies there."""
        torch.index_select(self._plane, 0, places, out=self._runs)
        if self._narrow is not None:
            self.tensor.copy_(self._narrow)
        if absent is not None:
            self._by_block.masked_fill_(absent, 0.0)


class AttentionKernel(Kernel[Attention]):
    """See `core.ops.Attention`."""

    @classmethod
    def scratch(cls, op: Attention, sizes: Sizes) -> Pieces:
        """Operands and sums of one chunk: a few hundred KiB, whatever the step."""
        shape = ChunkShape.of(op.heads)
        rows = (shape.num_products, shape.block_rows)
        heads, keys = Piece((*rows, shape.head_dim)), (shape.num_products, TILE, shape.head_dim)
        pieces = dict.fromkeys(("query", "span_values", "values", "done"), heads)
        columns = ("maximum", "total", "span_maximum", "span_total", "new", "factor")
        pieces |= dict.fromkeys(columns, Piece((*rows, 1)))
        pieces |= {"scores": Piece((*rows, TILE)), "key": Piece(keys), "value": Piece(keys)}
        if sizes.kv_dtype != torch.float32:
            pieces["narrow"] = Piece(keys, sizes.kv_dtype)
        return pieces

    def __init__(self, op: Attention, views: Views, scratch: Tensors) -> None:
        self._op = op
        self._page_size = views.sizes.kv_format.page_size
        self._run = KeyRun.of(views.sizes.kv_format)
        self._qkv = views.buffers[op.qkv].view(-1, op.heads.head_dim)
        self._out = views.buffers[op.out].view(-1, op.heads.head_dim)
        self._query, self._done = scratch["query"], scratch["done"].view(-1, op.heads.head_dim)
        self._scores, self._new, self._factor = scratch["scores"], scratch["new"], scratch["factor"]
        num_blocks = ChunkShape.of(op.heads).num_blocks
        self._scores_by_block = self._scores.view(num_blocks, -1, *self._scores.shape[1:])
        self._span = _Sums(scratch["span_maximum"], scratch["span_total"], scratch["span_values"])
        self._sums = _Sums(scratch["maximum"], scratch["total"], scratch["values"])
        planes = (run_view(views, self._run, op.layer_slot, plane) for plane in range(PLANES))
        tiles = (scratch["key"], scratch["value"])
        self._key, self._value = (
            _Tile(plane, num_blocks, tile, scratch.get("narrow")) for plane, tile in zip(planes, tiles, strict=True)
        )

    def run(self, batch: Batch) -> None:
        """See `core.ops.Attention`."""
        work = self._work_list(batch)
        for chunk in work.chunks:
            self._load_queries(chunk)
            self._sums.clear_()
            for tiles in chunk.spans():
                self._span.clear_()
                for tile in tiles:
                    self._add_tile(work, chunk, tile)
                self._merge_span()
            self._store(chunk)

    def _work_list(self, batch: Batch) -> WorkList:
        op = self._op
        key = (op.group, op.window)
        if key not in batch.work_lists:
            places = KeyPlaces(batch.step, op.group, self._page_size, self._run)
            batch.work_lists[key] = WorkList(batch, op.heads, places, op.window)
        return batch.work_lists[key]

    def _load_queries(self, chunk: Chunk) -> None:
        torch.index_select(self._qkv, 0, chunk.query_rows, out=self._query.view(-1, self._qkv.shape[1]))
        self._query.mul_(self._op.scale)

    def _add_tile(self, work: WorkList, chunk: Chunk, tile: int) -> None:
        """Scores, the new maximum, weights in place of the scores, sums."""
        span, scores, new, factor = self._span, self._scores, self._new, self._factor
        places, hidden = work.places(chunk, tile), work.hidden(chunk, tile)
        self._key.gather(places, None)
        self._value.gather(places, hidden.values)
        torch.bmm(self._query, self._key.tensor.transpose(1, 2), out=scores)
        self._cap_scores_()
        if hidden.scores is not None:
            self._scores_by_block.masked_fill_(hidden.scores, float("-inf"))
        torch.maximum(span.maximum, torch.amax(scores, dim=-1, keepdim=True, out=new), out=new)
        torch.sub(span.maximum, new, out=factor)
        span.maximum.copy_(new)
        span.scale_(exp_nonpositive_(factor))
        exp_nonpositive_(scores.sub_(new))
        span.total.add_(torch.sum(scores, dim=-1, keepdim=True, out=new))
        span.values.baddbmm_(scores, self._value.tensor)

    def _cap_scores_(self) -> None:
        if self._op.softcap is not None:
            self._scores.div_(self._op.softcap).tanh_().mul_(self._op.softcap)

    def _merge_span(self) -> None:
        span, sums, new = self._span, self._sums, self._new
        torch.maximum(sums.maximum, span.maximum, out=new)
        for part in (sums, span):
            part.scale_(exp_nonpositive_(torch.sub(part.maximum, new, out=self._factor)))
        sums.maximum.copy_(new)
        sums.total.add_(span.total)
        sums.values.add_(span.values)

    def _store(self, chunk: Chunk) -> None:
        # + 0.0 makes every zero positive: a no-op tile may have turned -0.0 into 0.0.
        values = self._sums.values.div_(self._sums.total).add_(0.0).view(-1, self._out.shape[1])
        done = self._done[: len(chunk.done_rows)]
        torch.index_select(values, 0, chunk.done_rows, out=done)
        self._out.index_copy_(0, chunk.out_rows, done)
