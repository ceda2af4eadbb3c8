"""WorkList: which query rows meet which tiles of keys in one step; made once per layer group and window.

A *row* is one query head of one token. The rows of a sequence that share a KV head are cut into *blocks*, ordered by
token, then head; blocks with similar contexts form *chunks*, and a chunk is what one call of the matrix library gets.

    sequence 0   rows |t0 h0|t0 h1|t0 h2|t1 h0|...       -> block 0, block 1, ...      (block_rows rows each)
    sequence 1   rows |t9 h0|t9 h1|t9 h2|  padding  |    -> block 2
    chunk        blocks that run together, tile by tile, from the first tile any of them sees to the last

A row that sees nothing of a tile is changed by nothing (see `attention.py`), so that grouping never changes a bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvarto.core.ops import HeadShape
from kvarto.core.step import Step
from kvarto.core.units import ceil_div
from kvarto.ops.reference.batch import Batch
from kvarto.ops.reference.key_places import TILE, KeyPlaces

SPAN = 1024
"""Keys per span, by absolute position."""
CHUNK_PRODUCTS = 24
"""Products per call that a chunk should have at least."""

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Sizes of every call; fixed by the model."""

    num_blocks: int
    num_kv_heads: int
    block_rows: int
    head_dim: int

    @classmethod
    def of(cls, heads: HeadShape) -> ChunkShape:
        """Blocks hold one token's heads and at least 8 rows; a chunk has about `CHUNK_PRODUCTS` products."""
        block_rows = min(32, max(8, 1 << (heads.group_size - 1).bit_length()))
        return cls(ceil_div(CHUNK_PRODUCTS, heads.num_kv_heads), heads.num_kv_heads, block_rows, heads.head_dim)

    @property
    def num_products(self) -> int:
        """Products per call: a KV head of a block each."""
        return self.num_blocks * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Hidden:
    """What of a tile is not to be seen. None: nothing."""

    scores: torch.Tensor | None
    """bool `[num_blocks, 1, block_rows, TILE]`: True where the row may not see the key."""
    values: torch.Tensor | None
    """bool `[num_blocks, 1, TILE, 1]`: True where there is no key; what lies there may be anything, NaN too."""


@dataclass(slots=True)
class Chunk:
    """Blocks that run together."""

    seqs: Int64
    """`[num_blocks]`: the sequence of each block; 0 for absent ones."""
    positions: Int64
    """`[num_blocks, block_rows]`: of each row's token; -1 for padding, which sees nothing."""
    query_rows: torch.Tensor
    """int64 `[num_products * block_rows]`: rows of `qkv` as `[num_tokens * all heads, head_dim]`; 0 for padding."""
    done_rows: torch.Tensor
    """int64: rows of the chunk that are not padding ..."""
    out_rows: torch.Tensor
    """... and where they go in `out` as `[num_tokens * q heads, head_dim]`."""
    window: int | None
    hidden: dict[int, Hidden] = field(default_factory=dict)
    """By tile; filled in by `WorkList.hidden`."""

    @property
    def lowest(self) -> int:
        """Least position of a real row."""
        return int(self.positions[self.positions >= 0].min())

    @property
    def highest(self) -> int:
        """Largest position."""
        return int(self.positions.max())

    def spans(self) -> Iterator[range]:
        """Tiles that a row sees, in order, span by span."""
        first = 0 if self.window is None else max(0, self.lowest - self.window + 1) // TILE
        last = self.highest // TILE
        per_span = SPAN // TILE
        for span in range(first // per_span, last // per_span + 1):
            yield range(max(first, span * per_span), min(last, span * per_span + per_span - 1) + 1)

    def sees_all(self, tile: int) -> bool:
        """Whether every real row sees every key of the tile."""
        if tile * TILE + TILE - 1 > self.lowest:
            return False
        return self.window is None or tile * TILE > self.highest - self.window


class WorkList:
    """Chunks of one step, and where the keys of each tile lie in the pages."""

    def __init__(self, batch: Batch, heads: HeadShape, keys: KeyPlaces, window: int | None) -> None:
        self._batch = batch
        self._heads = heads
        self._shape = ChunkShape.of(heads)
        self._keys = keys
        self._window = window
        self.chunks = self._make_chunks(batch.step)

    def places(self, chunk: Chunk, tile: int) -> torch.Tensor:
        """int64 `[num_products * runs of a tile]`: see `KeyPlaces.rows`."""
        return self._batch.upload(self._keys.rows(chunk.seqs, tile))

    def hidden(self, chunk: Chunk, tile: int) -> Hidden:
        """What the chunk may not see of the tile; the same object for every layer."""
        if tile not in chunk.hidden:
            chunk.hidden[tile] = Hidden(None, None) if chunk.sees_all(tile) else self._make_hidden(chunk, tile)
        return chunk.hidden[tile]

    def _make_hidden(self, chunk: Chunk, tile: int) -> Hidden:
        keys = tile * TILE + np.arange(TILE)
        rows = chunk.positions[:, :, None]
        scores = keys > rows
        if chunk.window is not None:
            scores |= keys <= rows - chunk.window
        values = ~self._keys.are_kept(chunk.seqs, tile)
        return Hidden(
            self._batch.upload(scores[:, None]), self._batch.upload(values[:, None, :, None]) if values.any() else None
        )

    def _make_chunks(self, step: Step) -> list[Chunk]:
        blocks = _Blocks.of(step, self._heads.group_size, self._shape.block_rows)
        order = np.lexsort((blocks.seqs, blocks.last_positions(step) // TILE))
        size = self._shape.num_blocks
        return [self._make_chunk(step, blocks, order[i : i + size]) for i in range(0, len(order), size)]

    def _make_chunk(self, step: Step, blocks: _Blocks, chosen: Int64) -> Chunk:
        heads, shape = self._heads, self._shape
        seqs = np.zeros(shape.num_blocks, np.int64)
        seqs[: len(chosen)] = blocks.seqs[chosen]
        tokens = np.full((shape.num_blocks, shape.block_rows), -1, np.int64)
        head_in_group = np.zeros_like(tokens)
        tokens[: len(chosen)], head_in_group[: len(chosen)] = blocks.rows(step, chosen)
        is_real = np.broadcast_to((tokens >= 0)[:, None], (shape.num_blocks, shape.num_kv_heads, shape.block_rows))
        head = np.arange(shape.num_kv_heads)[:, None] * heads.group_size + head_in_group[:, None]
        all_heads = heads.num_qo_heads + 2 * heads.num_kv_heads
        query_rows = np.where(is_real, tokens[:, None] * all_heads + head, 0)
        out_rows = tokens[:, None] * heads.num_qo_heads + head
        upload = self._batch.upload
        return Chunk(
            seqs,
            np.where(tokens >= 0, step.positions[tokens], -1),
            upload(query_rows.reshape(-1)),
            upload(np.flatnonzero(is_real)),
            upload(out_rows[is_real]),
            self._window,
        )


@dataclass(frozen=True, slots=True)
class _Blocks:
    """All blocks of a step, by sequence."""

    seqs: Int64
    first_rows: Int64
    """First row of the block, counted within its sequence."""
    group_size: int
    block_rows: int

    @classmethod
    def of(cls, step: Step, group_size: int, block_rows: int) -> _Blocks:
        num_blocks = -(-np.diff(step.cu_seqlens).astype(np.int64) * group_size // block_rows)
        seqs = np.repeat(np.arange(step.num_seqs), num_blocks)
        first_of_seq = np.cumsum(num_blocks) - num_blocks
        first_rows = (np.arange(len(seqs)) - first_of_seq[seqs]) * block_rows
        return cls(seqs, first_rows, group_size, block_rows)

    def last_positions(self, step: Step) -> Int64:
        """Position of the last token in each block."""
        tokens, _ = self.rows(step, np.arange(len(self.seqs)))
        positions: Int64 = step.positions[tokens.max(axis=1)].astype(np.int64)
        return positions

    def rows(self, step: Step, chosen: Int64) -> tuple[Int64, Int64]:
        """Token (row of the step) and head in its group, `[blocks, block_rows]` each; token -1 is padding."""
        seqs = self.seqs[chosen][:, None]
        offset, head = np.divmod(self.first_rows[chosen][:, None] + np.arange(self.block_rows), self.group_size)
        tokens = step.cu_seqlens[seqs].astype(np.int64) + offset
        return np.where(tokens < step.cu_seqlens[seqs + 1], tokens, -1), head
