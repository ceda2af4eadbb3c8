"""Bytes that ops need beside their buffers, at the largest step; native code says how many."""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.core import _native
from kvarto.core.buffers import StepLimits
from kvarto.core.ops import Attention, HeadShape, Op
from kvarto.core.program import Program
from kvarto.ops.native.numerics import Numerics


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
        return 0


def native_heads(heads: HeadShape) -> _native.ops.Heads:
    """The same as native code has it."""
    return _native.ops.Heads(heads.num_qo_heads, heads.num_kv_heads, heads.head_dim)
