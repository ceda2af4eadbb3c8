"""Bytes that ops need beside their buffers, at the largest step; native code says how many."""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.core import _native
from kvarto.core.buffers import Rows, StepLimits
from kvarto.core.dtype import DType
from kvarto.core.ops import Attention, Embed, Experts, HeadShape, Linear, Logits, Op, Route, Sample
from kvarto.core.program import Program
from kvarto.core.units import align_up
from kvarto.ops.adapter_check import band_counts
from kvarto.ops.native.numerics import Numerics

ALIGNMENT = 64
"""Bytes. A cache line, and the widest vector."""


@dataclass(frozen=True, slots=True)
class ScratchSizes:
    """All that scratch may depend on."""

    program: Program
    limits: StepLimits
    numerics: Numerics
    num_threads: int

    def scratch_bytes(self, op: Op) -> int:
        """Of one op; 0 where it needs none."""
        if isinstance(op, Attention):
            limits = self.limits
            return _native.ops.attention_scratch_bytes(
                native_heads(op.heads), limits.max_tokens, limits.max_seqs, limits.max_context, self.num_threads
            )
        if isinstance(op, Linear | Logits | Embed):
            return self.sums_offset(op) + self.num_rows(op.out) * self.sums_width(op) * DType.F32.itemsize
        if isinstance(op, Sample):
            return _native.ops.sample_scratch_bytes(self.program.vocab_size, self.num_threads)
        if isinstance(op, Route):
            return _native.ops.route_scratch_bytes(self.num_rows(op.x), self.program.weights[op.weight].shape[0])
        if isinstance(op, Experts):
            num_experts, hidden, ffn = self.program.weights[op.down].shape
            return _native.ops.experts_scratch_bytes(self.num_rows(op.x), op.top_k, num_experts, hidden, ffn)
        return 0

    def product_bytes(self, op: Linear | Logits) -> int:
        """Of a product: where x is float32 its narrowed rows, or their parts; for int8 rows in tiles."""
        kind = self.numerics.products_of.get(op.out)
        if kind is None:
            return 0
        x = self.program.buffers[op.x]
        num_rows = self.num_rows(op.x)
        is_float = self.numerics.form(op.x, num_rows) == "f32"
        if kind == "bf16x3":
            size_bytes = _native.ops.bf16x3_bytes(num_rows, x.width)
        elif kind == "bf16":
            size_bytes = _native.ops.bf16_bytes(num_rows, x.width) if is_float else 0
        else:
            size_bytes = _native.ops.linear_int8_scratch_bytes(num_rows, x.width, is_float)
        return align_up(size_bytes, ALIGNMENT)

    def sums_width(self, op: Linear | Logits | Embed) -> int:
        """Sums of adapters per row: as many as the ranks of all bands of the op; 0 where none are planned for."""
        if self.limits.max_lora_rank == 0:
            return 0
        num_bands = band_counts(self.program).get(op.out, 1)
        return align_up(num_bands * self.limits.max_lora_rank, ALIGNMENT // DType.F32.itemsize)

    def sums_offset(self, op: Linear | Logits | Embed) -> int:
        """Where they begin in the op's scratch: behind what the product takes and `Logits` leaves for sampling."""
        if isinstance(op, Embed):
            return 0
        summaries = self.summary_row_bytes * self.limits.max_samples if isinstance(op, Logits) else 0
        return align_up(self.product_bytes(op) + summaries, ALIGNMENT)

    def num_rows(self, buffer: str) -> int:
        """Of a buffer at the largest step."""
        is_per_token = self.program.buffers[buffer].rows is Rows.TOKENS
        return self.limits.max_tokens if is_per_token else self.limits.max_samples

    @property
    def summary_row_bytes(self) -> int:
        """What `Logits` tells `Sample` of one row; behind the product's bytes in the scratch of `Logits`."""
        return _native.ops.summary_row_bytes(self.program.vocab_size)


def native_heads(heads: HeadShape) -> _native.ops.Heads:
    """The same as native code has it."""
    return _native.ops.Heads(heads.num_qo_heads, heads.num_kv_heads, heads.head_dim)
