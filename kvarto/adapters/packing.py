"""Where each tile of an adapter goes in its pages. Pure functions of sizes.

```text
strip  = a row of A per rank [in], a column of B per rank [out], a bias, a magnitude, a token's row; never padded
stream = all strips one after the other: those of whole cache lines first, then the rest, wider types first, so
         that each strip begins at a multiple of its type's alignment
page   = | t0 | t1 | t2 | t3 |...| t8' |   a strip is cut at each 512 columns, and wherever its page ends:
         | t8"| t9 | ...               |   no tile straddles a page, and no byte is left between tiles
```
So every page but the last is full, the slack of an adapter is below one page at any page size, and the number of pages
is `ceil(bytes / page_bytes)`. Strips of whole cache lines come first, so that each of their tiles begins at a multiple
of 64 bytes, at no cost: the widths of all models that we know are multiples of 32. Their cuts fall on multiples of 16
columns too, so a kernel with sixteen lanes adds up the same numbers in the same lanes, wherever pages end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.adapter import SCALE_TYPE, Adapter
from kvarto.core.strip_type import StripType
from kvarto.core.units import ceil_div

TILE_COLUMNS = 512
LINE_BYTES = 64

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Strips:
    """Strips of equal size: of one matrix, of a vector, or of the rows of some tokens."""

    num_strips: int
    num_columns: int
    type: StripType

    @property
    def strip_bytes(self) -> int:
        """Bytes of one strip."""
        return self.type.size_bytes(self.num_columns)

    @property
    def size_bytes(self) -> int:
        """Bytes of all."""
        return self.num_strips * self.strip_bytes


@dataclass(frozen=True, slots=True)
class Packing:
    """Tiles in the order of strips, and of columns in a strip."""

    page_bytes: int
    num_pages: int
    payload_bytes: int
    strips_of: Int64
    """`[matrices + 1]`: strips `[strips_of[m], strips_of[m + 1])` are those of matrix m."""
    tiles_of: Int64
    """`[strips + 1]`: tiles `[tiles_of[s], tiles_of[s + 1])` are those of strip s."""
    page: Int32
    """`[tiles]`: index among the adapter's pages."""
    offset: Int32
    """`[tiles]`: bytes from the start of the page."""
    first_column: Int32
    """`[tiles]`."""
    num_columns: Int32
    """`[tiles]`: 1 to 512."""

    @property
    def num_tiles(self) -> int:
        """Tiles in all."""
        return len(self.page)

    @property
    def slack_bytes(self) -> int:
        """Bytes of the pages that hold nothing; all at the end of the last."""
        return self.num_pages * self.page_bytes - self.payload_bytes


def num_pages(size_bytes: int, page_bytes: int) -> int:
    """Pages that an adapter of this size takes, exactly."""
    return ceil_div(size_bytes, page_bytes)


def strips_of(adapter: Adapter) -> list[Strips]:
    """Per update A, B, bias and magnitude where there are any; then token rows."""
    found: list[Strips] = []
    for update in adapter.updates:
        a, b = update.lora_a, update.lora_b
        found.append(Strips(update.rank, a.shape[1], a.strip_type))
        found.append(Strips(update.rank, b.shape[0], b.strip_type))
        if update.bias is not None:
            found.append(Strips(1, update.bias.shape[0], update.bias.strip_type))
        if update.magnitude is not None:
            found.append(Strips(1, update.magnitude.shape[0], SCALE_TYPE))
    rows = (token_rows.rows for token_rows in adapter.token_rows)
    return found + [Strips(array.shape[0], array.shape[1], array.strip_type) for array in rows]


def stream_bytes(adapter: Adapter) -> int:
    """Bytes of all strips. More than the file's where a magnitude is there in 16 bits."""
    return sum(matrix.size_bytes for matrix in strips_of(adapter))


def stream_order(matrices: Sequence[Strips]) -> list[int]:
    """Indices of the matrices in the order in which their bytes follow each other."""
    return sorted(
        range(len(matrices)), key=lambda m: (matrices[m].strip_bytes % LINE_BYTES != 0, -matrices[m].type.alignment, m)
    )


def stream_starts(matrices: Sequence[Strips]) -> Int64:
    """Byte of the stream at which each matrix begins."""
    starts = np.zeros(len(matrices), np.int64)
    position = 0
    for index in stream_order(matrices):
        starts[index] = position
        position += matrices[index].size_bytes
    return starts


def pack(matrices: Sequence[Strips], page_bytes: int) -> Packing:
    """Place every tile. `page_bytes` is a multiple of 64 and holds at least one tile of float32.

    Not of strips of codes, whose blocks are cut wherever a page ends, so that a column may lie on two pages.
    """
    assert not any(m.type.has_codes for m in matrices), "tiles are of whole columns"
    assert page_bytes % LINE_BYTES == 0, f"pages of {page_bytes} bytes"
    assert page_bytes >= 4 * TILE_COLUMNS, f"pages of {page_bytes} bytes hold no tile of float32"
    assert all(min(m.num_strips, m.num_columns) > 0 for m in matrices), "a matrix without elements has no place"
    payload = sum(matrix.size_bytes for matrix in matrices)
    counts = np.array([m.num_strips for m in matrices], np.int64)
    widths = np.array([m.num_columns for m in matrices], np.int64)
    items = np.array([m.type.block_bytes for m in matrices], np.int64)
    matrix_of = np.repeat(np.arange(len(matrices)), counts)
    strip_start = stream_starts(matrices)[matrix_of] + _within(counts) * (widths * items)[matrix_of]
    num_grid_tiles = (-(-widths // TILE_COLUMNS))[matrix_of]
    strip_of = np.repeat(np.arange(len(matrix_of)), num_grid_tiles)
    column = _within(num_grid_tiles) * TILE_COLUMNS
    width = np.minimum(widths[matrix_of[strip_of]] - column, TILE_COLUMNS)
    start = strip_start[strip_of] + column * items[matrix_of[strip_of]]
    tiles = _cut(np.stack((strip_of, start, column, width)), items[matrix_of[strip_of]], page_bytes)
    strip_of, start, column, width = tiles
    return Packing(
        page_bytes=page_bytes,
        num_pages=num_pages(payload, page_bytes),
        payload_bytes=payload,
        strips_of=_ends(counts),
        tiles_of=_ends(np.bincount(strip_of, minlength=len(matrix_of))),
        page=(start // page_bytes).astype(np.int32),
        offset=(start % page_bytes).astype(np.int32),
        first_column=column.astype(np.int32),
        num_columns=width.astype(np.int32),
    )


def _cut(tiles: NDArray[Any], item_bytes: Int64, page_bytes: int) -> NDArray[Any]:
    """Tiles `[strip, start, column, width]` that cross the end of a page become two. None crosses more than one."""
    _, start, _, width = tiles
    left = page_bytes - start % page_bytes
    before = left // item_bytes  # exact: types lie at multiples of their size
    is_cut = before < width
    tiles = np.repeat(tiles, 1 + is_cut, axis=1)
    second = np.flatnonzero(is_cut) + np.arange(1, np.count_nonzero(is_cut) + 1)
    tiles[3, second - 1] = before[is_cut]
    tiles[1, second] += left[is_cut]
    tiles[2, second] += before[is_cut]
    tiles[3, second] -= before[is_cut]
    return tiles


def _within(counts: Int64) -> Int64:
    """0, 1, ... for each of the counts: `[2, 3]` gives `[0, 1, 0, 1, 2]`."""
    ends = _ends(counts)
    return np.arange(ends[-1]) - np.repeat(ends[:-1], counts)


def _ends(counts: NDArray[Any]) -> Int64:
    """`[0, c0, c0 + c1, ...]`."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
