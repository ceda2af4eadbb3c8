"""Budget and Layout: how many bytes there are, and where every one of them goes."""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.core.buffers import StepLimits
from kvarto.core.kv_format import KVFormat


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of device memory for this process, whatever others do."""

    device_bytes: int
    """Weights, activations and pages together."""
    source: str
    """Where the number comes from, for people: `--device-memory 8GiB`, `default`, …"""
    kv_bytes: int | None = None
    """Pages take exactly this much (`--kv-cache-memory-bytes`); None: what is left."""


@dataclass(frozen=True, slots=True)
class Region:
    """A contiguous part of the arena."""

    name: str
    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        """First byte after it."""
        return self.offset + self.size_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """The device arena: `weights | activations | pages`, back to back. Exact, and made before anything is allocated.

    Offsets of weights, buffers and scratch are absolute in the arena.
    """

    budget: Budget
    limits: StepLimits
    kv_format: KVFormat
    num_pages: int
    weights: Region
    activations: Region
    pages: Region
    weight_offsets: dict[str, int]
    buffer_offsets: dict[str, int]
    scratch_offsets: dict[int, int]
    """By op index, for ops that need scratch."""
    activation_lower_bound_bytes: int
    """The largest sum of live buffers at any op: no packing can be smaller."""
    host_bytes: int
    """Bookkeeping outside the arena from the start: page tables, step arrays, pool counts."""
    record_bytes: int
    """Records of the prefix cache, outside the arena too, once every page is cached."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the arena."""
        return self.pages.end

    @property
    def num_cacheable_tokens(self) -> int:
        """Tokens that the pages hold if one group takes all of them."""
        return self.num_pages * self.kv_format.page_size
