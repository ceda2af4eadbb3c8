"""How the KV of some tokens lies in a page, and which layers share a page.

page = [layer][plane][kv_head][token 0..page_size-1][dim], padded to 4 KiB; planes come from the model (k, v).
One page carries all layers of one layer group, so moving it to another tier is one contiguous copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.core.dtype import DType
from kvarto.core.units import align_up

PAGE_ALIGNMENT = 4096
"""Bytes. Direct I/O and huge pages want it."""
PLANES = 2
"""k and v."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same tokens. All groups of a program have equal `num_layer_slots`, heads and dims."""

    layers: tuple[int, ...]
    """Model layer of each slot; shorter than `num_layer_slots` where the last slots are padding."""
    num_layer_slots: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    """Tokens that a query sees, itself included; None for full attention."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Page geometry of one process: every group's pages have the same bytes."""

    dtype: DType
    page_size: int
    """Tokens per page."""
    num_layer_slots: int
    num_kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one group's page."""
        return self.num_layer_slots * PLANES * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def payload_bytes(self) -> int:
        """Bytes of a page that carry KV."""
        return self.token_bytes * self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, 4 KiB-aligned."""
        return align_up(self.payload_bytes, PAGE_ALIGNMENT)

    @property
    def layer_stride(self) -> int:
        """Elements from one layer slot to the next."""
        return PLANES * self.num_kv_heads * self.page_size * self.head_dim
