"""Which strips of an adapter become codes, where `--adapter-dtype` asks for them. Pure; what codes are: strip_codes.py.

Rows of A and columns of B do, where they are whole blocks. All else keeps the type that its file has: biases,
magnitudes and tokens' rows, which are few, and strips of other widths.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.arrays import StoredArray
from kvarto.core.strip_type import BLOCK_COLUMNS, StripType

MAX_ROWS_AT_ONCE = 512
"""Of B, whose columns are made of so many of its rows at a time: whole blocks, and whole heads where their rows come
apart. Heads of all sizes that we know fit; others keep their type."""


def quantised(adapter: Adapter, codes: StripType) -> Adapter:
    """The adapter with codes of a type in pages."""

    def coded(array: StoredArray, width: int) -> StoredArray:
        return replace(array, codes=codes) if width % BLOCK_COLUMNS == 0 and _can_be_cut(array) else array

    updates = (
        replace(u, lora_a=coded(u.lora_a, u.lora_a.shape[1]), lora_b=coded(u.lora_b, u.lora_b.shape[0]))
        for u in adapter.updates
    )
    return replace(adapter, updates=tuple(updates))


def _can_be_cut(array: StoredArray) -> bool:
    heads = array.num_permuted_heads
    return heads == 0 or math.lcm(array.file_shape[0] // heads, BLOCK_COLUMNS) <= MAX_ROWS_AT_ONCE
