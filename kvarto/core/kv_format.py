"""How the KV of some tokens lies in a page, and which layers share a page.

page = [layer][plane][kv_head][token 0..page_size-1][dim], padded to 4 KiB; planes come from the model (k, v).
int8: each plane's codes are followed by its scales, float32 [kv_head][token]; value = code * scale.
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
SCALE_BYTES = 4
"""Of the scale that int8 keeps for each token, head and plane."""


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
    def scale_bytes(self) -> int:
        """Bytes beside the elements of one token, head and plane."""
        return SCALE_BYTES if self.dtype is DType.I8 else 0

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token in one layer slot."""
        return PLANES * self.num_kv_heads * (self.head_dim * self.dtype.itemsize + self.scale_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one group's page."""
        return self.num_layer_slots * self.layer_token_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of a page that carry KV."""
        return self.token_bytes * self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, 4 KiB-aligned."""
        return align_up(self.payload_bytes, PAGE_ALIGNMENT)

    @property
    def layer_bytes(self) -> int:
        """Bytes from one layer slot to the next."""
        return self.layer_token_bytes * self.page_size
