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

from kvarto.core.ops import Attention
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.kernel import Kernel, Sizes, Views
from kvarto.ops.reference.key_places import TILE, KeyPlaces, KeyRun, run_view
from kvarto.ops.reference.scratch import Piece, Pieces, Tensors
from kvarto.ops.reference.work_list import Chunk, ChunkShape, WorkList

LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class _Sums:
    """Running softmax of a chunk's rows, over a span or over all spans so far."""

    maximum: torch.Tensor
    """`[num_blocks, num_kv_heads, block_rows, 1]`"""
    total: torch.Tensor
    """The same shape."""
    values: torch.Tensor
    """`[num_blocks, num_kv_heads, block_rows, head_dim]`"""

    def clear_(self) -> None:
        self.maximum.fill_(LOWEST)
        self.total.zero_()
        self.values.zero_()

    def scale_(self, factor: torch.Tensor) -> None:
        self.total.mul_(factor)
        self.values.mul_(factor)


class AttentionKernel(Kernel[Attention]):
    """See `core.ops.Attention`."""

    @classmethod
    def scratch(cls, op: Attention, sizes: Sizes) -> Pieces:
        """Operands and sums of one chunk: a few hundred KiB, whatever the step."""
        shape = ChunkShape.of(op.heads)
        rows = (shape.num_blocks, shape.num_kv_heads, shape.block_rows)
        heads, keys = Piece((*rows, shape.head_dim)), (*rows[:2], TILE, shape.head_dim)
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
        self._keys, self._values = (run_view(views, self._run, op.layer_slot, plane) for plane in (0, 1))
        self._qkv = views.buffers[op.qkv].view(-1, op.heads.head_dim)
        self._out = views.buffers[op.out].view(-1, op.heads.head_dim)
        self._scratch = scratch
        self._span = _Sums(scratch["span_maximum"], scratch["span_total"], scratch["span_values"])
        self._sums = _Sums(scratch["maximum"], scratch["total"], scratch["values"])

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
        query = self._scratch["query"]
        torch.index_select(self._qkv, 0, chunk.query_rows, out=query.view(-1, query.shape[-1]))
        query.mul_(self._op.scale)

    def _add_tile(self, work: WorkList, chunk: Chunk, tile: int) -> None:
        """Tile by tile: scores, new maximum, weights in place of scores, sums."""
        scores, new, factor = self._scratch["scores"], self._scratch["new"], self._scratch["factor"]
        places, hidden = work.places(chunk, tile), work.hidden(chunk, tile)
        key = self._gather(self._keys, places, self._scratch["key"])
        value = self._gather(self._values, places, self._scratch["value"])
        if hidden.values is not None:
            value.masked_fill_(hidden.values, 0.0)
        torch.bmm(_batched(self._scratch["query"]), _batched(key).transpose(1, 2), out=_batched(scores))
        self._cap_(scores)
        if hidden.scores is not None:
            scores.masked_fill_(hidden.scores, float("-inf"))
        torch.amax(scores, dim=-1, keepdim=True, out=new)
        torch.maximum(self._span.maximum, new, out=new)
        torch.sub(self._span.maximum, new, out=factor)
        self._span.maximum.copy_(new)
        self._span.scale_(factor.exp_())
        scores.sub_(new).exp_()
        self._span.total.add_(torch.sum(scores, dim=-1, keepdim=True, out=new))
        _batched(self._span.values).baddbmm_(_batched(scores), _batched(value))

    def _gather(self, plane: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        narrow = self._scratch.get("narrow")
        target = out if narrow is None else narrow
        torch.index_select(plane, 0, places, out=target.view(-1, plane.shape[1]))
        return target if narrow is None else out.copy_(narrow)

    def _cap_(self, scores: torch.Tensor) -> None:
        if self._op.softcap is not None:
            scores.div_(self._op.softcap).tanh_().mul_(self._op.softcap)

    def _merge_span(self) -> None:
        span, sums = self._span, self._sums
        new, factor = self._scratch["new"], self._scratch["factor"]
        torch.maximum(sums.maximum, span.maximum, out=new)
        for part in (sums, span):
            torch.sub(part.maximum, new, out=factor)
            part.scale_(factor.exp_())
        sums.maximum.copy_(new)
        sums.total.add_(span.total)
        sums.values.add_(span.values)

    def _store(self, chunk: Chunk) -> None:
        width = self._out.shape[1]
        # + 0.0 makes every zero positive: a no-op tile may have turned -0.0 into 0.0.
        values = self._sums.values.div_(self._sums.total).add_(0.0).view(-1, width)
        done = self._scratch["done"].view(-1, width)[: len(chunk.done_rows)]
        torch.index_select(values, 0, chunk.done_rows, out=done)
        self._out.index_copy_(0, chunk.out_rows, done)


def _batched(tensor: torch.Tensor) -> torch.Tensor:
    """`[num_blocks, num_kv_heads, rows, columns]` as the matrix library wants it: one dim of products."""
    return tensor.view(-1, *tensor.shape[2:])
