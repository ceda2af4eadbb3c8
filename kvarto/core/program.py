"""Program: a model compiled once, at load, into a flat list of ops over named buffers. No branches.

Each op knows what it reads and writes, its FLOPs and the bytes it moves; each buffer knows its bytes per row and,
through the ops, its lifespan (first writer to last reader). Activation planning, execution, streaming and the cost
model all read this one structure. Nothing here runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvarto.core.buffers import Buffer, Weight
from kvarto.core.dtype import DType
from kvarto.core.kv_format import KVFormat, LayerGroup
from kvarto.core.ops import Op


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled model. `ops` name buffers and weights by their keys in the two dictionaries."""

    architecture: str
    buffers: dict[str, Buffer]
    weights: dict[str, Weight]
    ops: tuple[Op, ...]
    layer_groups: tuple[LayerGroup, ...]
    hidden_size: int
    vocab_size: int
    """Width of the logits. Token ids are checked against it."""
    max_positions: int
    """The context length that the model was made for."""
    num_padding_layer_slots: int = 0
    """Layer slots of all groups together that no layer uses."""

    def kv_format(self, dtype: DType, page_size: int) -> KVFormat:
        """Geometry of the pages."""
        group = self.layer_groups[0]
        return KVFormat(dtype, page_size, group.num_layer_slots, group.num_kv_heads, group.head_dim)

    def lifespans(self) -> dict[str, tuple[int, int]]:
        """For each buffer the half-open range of op indices in which it must keep its bytes."""
        spans: dict[str, tuple[int, int]] = {}
        for index, name in self._touches():
            first, _ = spans.get(name, (index, index))
            spans[name] = (first, index + 1)
        return spans

    def _touches(self) -> Iterator[tuple[int, str]]:
        for index, op in enumerate(self.ops):
            for name in (*op.reads, *op.writes):
                yield index, name

    def check(self) -> None:
        """Raise AssertionError naming the broken law: everything named exists, nothing is read before written."""
        written: set[str] = set()
        used: set[str] = set()
        for index, op in enumerate(self.ops):
            for name in op.reads:
                assert name in written, f"op {index} `{op}` reads buffer `{name}` before it is written"
            for name in op.writes:
                assert name in self.buffers, f"op {index} `{op}` writes unknown buffer `{name}`"
                written.add(name)
            for name in op.weights:
                assert name in self.weights, f"op {index} `{op}` uses unknown weight `{name}`"
                used.add(name)
        assert used == set(self.weights), f"weights that no op uses: {sorted(set(self.weights) - used)}"
        assert written == set(self.buffers), f"buffers that no op writes: {sorted(set(self.buffers) - written)}"
