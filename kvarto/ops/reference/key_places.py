"""KeyPlaces: where the keys of each tile lie in the pages, whatever the page size.

A *run* is `min(page_size, 64)` tokens of one KV head, which are contiguous in a page; a tile of 64 tokens is 1 to 8
runs. Pages are padded to 4 KiB, so that a page need not be a whole number of runs: starts count in *units*, the
greatest common divisor of a page and a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvarto.core.ids import NO_PAGE
from kvarto.core.kv_format import KVFormat
from kvarto.core.step import Step
from kvarto.core.units import ceil_div
from kvarto.ops.reference.kernel import Views

TILE = 64
"""Keys per tile, by absolute position."""

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KeyRun:
    """Sizes of runs, and distances in units."""

    num_tokens: int
    num_elements: int
    unit_elements: int
    page_units: int
    """From one page to the next."""
    run_units: int
    """From one run to the next in a page."""
    head_units: Int64
    """`[num_kv_heads, 1]`: from a page's first KV head to each."""

    @classmethod
    def of(cls, kv_format: KVFormat) -> KeyRun:
        """Of one page geometry."""
        num_tokens = min(kv_format.page_size, TILE)
        num_elements = num_tokens * kv_format.head_dim
        page_elements = kv_format.page_bytes // kv_format.dtype.itemsize
        unit = math.gcd(page_elements, num_elements)
        run_units = num_elements // unit
        runs_per_head = kv_format.page_size // num_tokens
        head_units = np.arange(kv_format.num_kv_heads, dtype=np.int64)[:, None] * (runs_per_head * run_units)
        return cls(num_tokens, num_elements, unit, page_elements // unit, run_units, head_units)

    @property
    def per_tile(self) -> int:
        """Runs that make a tile."""
        return TILE // self.num_tokens


def run_view(views: Views, run: KeyRun, layer_slot: int, plane: int) -> torch.Tensor:
    """One plane of one layer as `[units, run elements]`: row u begins u units behind the first page's plane.

    Rows overlap; it is only ever read, at starts that `KeyPlaces` gives.
    """
    kv = views.sizes.kv_format
    base = layer_slot * (kv.layer_bytes // kv.dtype.itemsize) + plane * kv.num_kv_heads * kv.page_size * kv.head_dim
    num_starts = (views.pages.numel() - base - run.num_elements) // run.unit_elements + 1
    return views.pages.as_strided(
        (num_starts, run.num_elements), (run.unit_elements, 1), views.pages.storage_offset() + base
    )


class KeyPlaces:
    """Starts of the runs of one layer group in one step."""

    def __init__(self, step: Step, group: int, page_size: int, run: KeyRun) -> None:
        self._run = run
        self._context_lens = step.context_lens.astype(np.int64)
        num_tiles = ceil_div(int(self._context_lens.max(initial=1)), TILE)
        runs = np.arange(num_tiles * run.per_tile)
        columns, runs_in_page = np.divmod(runs, page_size // run.num_tokens)
        pages = _pages(step.page_tables[group], columns)
        self._is_kept = pages != NO_PAGE
        self._starts = np.where(self._is_kept, pages * run.page_units + runs_in_page * run.run_units, 0)

    def rows(self, seqs: Int64, tile: int) -> Int64:
        """Rows of `run_view`, `[seqs, num_kv_heads, runs of the tile]` flattened; 0 where no page is kept."""
        starts = self._starts[seqs, tile * self._run.per_tile : (tile + 1) * self._run.per_tile]
        return (starts[:, None, :] + self._run.head_units).reshape(-1)

    def are_kept(self, seqs: Int64, tile: int) -> NDArray[np.bool_]:
        """`[seqs, TILE]`: whether the key has been written, into a page that is kept."""
        per_tile = self._run.per_tile
        kept = np.repeat(self._is_kept[seqs, tile * per_tile : (tile + 1) * per_tile], self._run.num_tokens, axis=1)
        return kept & (tile * TILE + np.arange(TILE) < self._context_lens[seqs][:, None])


def _pages(table: NDArray[np.int32], columns: Int64) -> Int64:
    """`table[:, columns]`, `NO_PAGE` beyond its width: the last tile may be wider than the table."""
    pages = np.full((len(table), len(columns)), NO_PAGE, np.int64)
    is_inside = columns < table.shape[1]
    pages[:, is_inside] = table[:, columns[is_inside]]
    return pages
