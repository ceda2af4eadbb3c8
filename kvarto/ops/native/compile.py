"""From Program and Layout to a native program: every name becomes an offset in the arena."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvarto.core import _native, ops
from kvarto.core.buffers import Rows, Weight, WeightPart
from kvarto.core.dtype import DType
from kvarto.core.layout import Layout
from kvarto.core.program import Program
from kvarto.memory.arena import Arena
from kvarto.ops.native.numerics import PRODUCTS, Numerics
from kvarto.ops.native.scratch import ScratchSizes, native_heads

KV_TYPES = (DType.F32, DType.F16, DType.BF16, DType.I8)
"""In the order of `enum class KVType` in native/core/ops.h."""
_ACTIVATIONS = list(ops.Activation)
_NORM_KINDS = list(ops.NormKind)
"""Both in the order of the enumerations in native/core/ops.h."""


def compile_program(
    program: Program, layout: Layout, arena: Arena, sizes: ScratchSizes, *, isa: str
) -> _native.ops.Program:
    """Resolve every op. The arena must outlive what is returned."""
    bounds = _native.ops.StepBounds(
        max_tokens=layout.limits.max_tokens,
        max_seqs=layout.limits.max_seqs,
        max_samples=layout.limits.max_samples,
        max_positions=program.max_positions,
        vocab_size=program.vocab_size,
        num_groups=len(program.layer_groups),
        num_pages=layout.num_pages,
        page_size=layout.kv_format.page_size,
    )
    target = _native.ops.Program(isa, sizes.num_threads, arena.address, layout.total_bytes, bounds)
    compiler = _Compiler(program, layout, sizes, target)
    for index, op in enumerate(program.ops):
        compiler.add(index, op)
    return target


class _Compiler:
    """Adds ops to a native program, in order."""

    def __init__(self, program: Program, layout: Layout, sizes: ScratchSizes, target: _native.ops.Program) -> None:
        self._program = program
        self._layout = layout
        self._sizes = sizes
        self._numerics: Numerics = sizes.numerics
        self._target = target
        self._index = 0

    def add(self, index: int, op: ops.Op) -> None:
        """One op of the program."""
        self._index = index
        _ADD[type(op)](self, op)

    # Places.

    def _rows(self, name: str) -> _native.ops.Rows:
        buffer, limits = self._program.buffers[name], self._layout.limits
        per_sample = buffer.rows is Rows.SAMPLES
        num_rows = limits.max_samples if per_sample else limits.max_tokens
        return _native.ops.Rows(
            offset=self._layout.buffer_offsets[name],
            row_bytes=buffer.stride_bytes,
            width=buffer.width,
            num_rows=num_rows,
            form=PRODUCTS.index(self._numerics.form(name, num_rows)),
            per_sample=per_sample,
        )

    def _rows_or_none(self, name: str | None) -> _native.ops.Rows | None:
        return None if name is None else self._rows(name)

    def _vector(self, name: str) -> int:
        """Offset of a row-major weight. Native ops read those as f32."""
        assert self._program.weights[name].dtype is DType.F32, f"`{name}` is not f32"
        return self._layout.weight_offsets[name]

    def _vector_or_none(self, name: str | None) -> int | None:
        return None if name is None else self._vector(name)

    def _matrix(self, name: str) -> _native.ops.Weight:
        weight = self._program.weights[name]
        parts = list(self._parts(weight))
        return _native.ops.Weight(weight.num_elements // weight.shape[-1], weight.shape[-1], parts)

    def _matrices(self, name: str) -> list[_native.ops.Weight]:
        """One per expert: its parts are those that follow the ones of the expert before."""
        weight = self._program.weights[name]
        num_experts, num_rows, num_columns = weight.shape
        per_expert = len(weight.parts) // num_experts
        parts = list(self._parts(weight))
        return [
            _native.ops.Weight(num_rows, num_columns, parts[first : first + per_expert])
            for first in range(0, len(parts), per_expert)
        ]

    def _parts(self, weight: Weight) -> Iterator[_native.ops.Part]:
        start = self._layout.weight_offsets[weight.name]
        for part, offset in zip(weight.parts, weight.part_offsets(), strict=True):
            yield _native_part(part, start + offset)

    def _scratch(self) -> _native.ops.Bytes:
        size_bytes = self._sizes.scratch_bytes(self._program.ops[self._index])
        return _native.ops.Bytes(self._layout.scratch_offsets[self._index] if size_bytes else 0, size_bytes)

    def _pages(self) -> _native.ops.Pages:
        return native_pages(self._layout)

    # Ops.

    def _embed(self, op: ops.Embed) -> None:
        positions = self._vector_or_none(op.position_table)
        self._target.add_embed(self._rows(op.out), self._matrix(op.table), op.scale, positions, self._sums(op))

    def _norm(self, op: ops.Norm) -> None:
        self._target.add_norm(
            x=self._rows(op.x),
            out=self._rows(op.out),
            residual=self._rows_or_none(op.residual),
            weight=self._vector(op.weight),
            bias=self._vector_or_none(op.bias),
            kind=_NORM_KINDS.index(op.kind),
            eps=op.eps,
        )

    def _head_norm(self, op: ops.HeadNorm) -> None:
        q_weight, k_weight = self._vector(op.q_weight), self._vector(op.k_weight)
        self._target.add_head_norm(self._rows(op.qkv), q_weight, k_weight, native_heads(op.heads), op.eps)

    def _rope(self, op: ops.Rope) -> None:
        heads = native_heads(op.heads)
        self._target.add_rope(self._rows(op.qkv), heads, list(op.inv_freq), op.attention_factor)

    def _write_kv(self, op: ops.WriteKV) -> None:
        heads = native_heads(op.heads)
        self._target.add_write_kv(self._rows(op.qkv), heads, op.group, op.layer_slot, self._pages())

    def _attention(self, op: ops.Attention) -> None:
        self._target.add_attention(
            qkv=self._rows(op.qkv),
            out=self._rows(op.out),
            heads=native_heads(op.heads),
            group=op.group,
            layer_slot=op.layer_slot,
            scale=op.scale,
            window=op.window or 0,
            softcap=op.softcap or 0.0,
            is_exact=self._numerics.is_exact,
            pages=self._pages(),
            scratch=self._scratch(),
        )

    def _gated_activation(self, op: ops.GatedActivation) -> None:
        activation, may_fuse = _ACTIVATIONS.index(op.activation), self._may_write_gated(op)
        self._target.add_gated_activation(self._rows(op.x), self._rows(op.out), activation, may_fuse=may_fuse)

    def _may_write_gated(self, op: ops.GatedActivation) -> bool:
        """Whether the linear before may write what the activation makes: nothing else reads the gates, and what is
        written does not lie where the linear still reads."""
        linear = self._program.ops[self._index - 1]
        if not isinstance(linear, ops.Linear) or sum(op.x in other.reads for other in self._program.ops) != 1:
            return False
        out, x = self._place(op.out), self._place(linear.x)
        return out.stop <= x.start or x.stop <= out.start

    def _place(self, name: str) -> range:
        start = self._layout.buffer_offsets[name]
        return range(start, start + self._program.buffers[name].size_bytes(self._layout.limits))

    def _activate(self, op: ops.Activate) -> None:
        self._target.add_activate(self._rows(op.x), self._rows(op.out), _ACTIVATIONS.index(op.activation))

    def _gather(self, op: ops.Gather) -> None:
        self._target.add_gather(self._rows(op.x), self._rows(op.out))

    def _linear(self, op: ops.Linear) -> None:
        self._target.add_linear(
            x=self._rows(op.x),
            out=self._rows(op.out),
            weight=self._matrix(op.weight),
            bias=self._vector_or_none(op.bias),
            products=self._numerics.products(op.out),
            scratch=self._product_scratch(op),
            sums=self._sums(op),
        )

    def _product_scratch(self, op: ops.Linear | ops.Logits) -> _native.ops.Bytes:
        size_bytes = self._sizes.product_bytes(op)
        return _native.ops.Bytes(self._layout.scratch_offsets[self._index] if size_bytes else 0, size_bytes)

    def _sums(self, op: ops.Linear | ops.Logits | ops.Embed) -> _native.ops.Rows | None:
        width = self._sizes.sums_width(op)
        if width == 0:
            return None
        return _native.ops.Rows(
            offset=self._layout.scratch_offsets[self._index] + self._sizes.sums_offset(op),
            row_bytes=width * DType.F32.itemsize,
            width=width,
            num_rows=self._sizes.num_rows(op.out),
            per_sample=self._program.buffers[op.out].rows is Rows.SAMPLES,
        )

    def _route(self, op: ops.Route) -> None:
        self._target.add_route(
            x=self._rows(op.x),
            ids=self._rows(op.ids),
            shares=self._rows(op.shares),
            weight=self._matrix(op.weight),
            top_k=op.top_k,
            normalise=op.normalise,
            scratch=self._scratch(),
        )

    def _experts(self, op: ops.Experts) -> None:
        self._target.add_experts(
            x=self._rows(op.x),
            ids=self._rows(op.ids),
            shares=self._rows(op.shares),
            out=self._rows(op.out),
            gate_up=self._matrices(op.gate_up),
            down=self._matrices(op.down),
            activation=_ACTIVATIONS.index(op.activation),
            top_k=op.top_k,
            scratch=self._scratch(),
        )

    def _logits(self, op: ops.Logits) -> None:
        self._target.add_logits(
            x=self._rows(op.x),
            out=self._rows(op.out),
            weight=self._matrix(op.weight),
            bias=self._vector_or_none(op.bias),
            scale=op.scale,
            softcap=op.softcap or 0.0,
            products=self._numerics.products(op.out),
            scratch=self._product_scratch(op),
            summaries=self._summaries(self._index),
            sums=self._sums(op),
        )

    def _sample(self, op: ops.Sample) -> None:
        summaries = self._summaries(self._index - 1)  # the op before is `Logits`
        self._target.add_sample(self._rows(op.logits), summaries, self._scratch())

    def _summaries(self, logits_index: int) -> _native.ops.Rows:
        op = self._program.ops[logits_index]
        assert isinstance(op, ops.Logits), "a program samples right after its logits"
        return _native.ops.Rows(
            offset=self._layout.scratch_offsets[logits_index] + self._sizes.product_bytes(op),
            row_bytes=self._sizes.summary_row_bytes,
            width=0,
            num_rows=self._layout.limits.max_samples,
            per_sample=True,
        )


def native_pages(layout: Layout) -> _native.ops.Pages:
    """The pool's pages as native code has them."""
    return _native.ops.Pages(
        offset=layout.pages.offset,
        page_bytes=layout.kv_format.page_bytes,
        layer_bytes=layout.kv_format.layer_bytes,
        page_size=layout.kv_format.page_size,
        type=KV_TYPES.index(layout.kv_format.dtype),
    )


def _native_part(part: WeightPart, offset: int) -> _native.ops.Part:
    return _native.ops.Part(part.format.code, part.group_size, part.num_rows, offset)


_ADD: dict[type[ops.Op], Callable[[_Compiler, Any], None]] = {
    ops.Embed: _Compiler._embed,
    ops.Norm: _Compiler._norm,
    ops.HeadNorm: _Compiler._head_norm,
    ops.Linear: _Compiler._linear,
    ops.Rope: _Compiler._rope,
    ops.WriteKV: _Compiler._write_kv,
    ops.Attention: _Compiler._attention,
    ops.GatedActivation: _Compiler._gated_activation,
    ops.Activate: _Compiler._activate,
    ops.Route: _Compiler._route,
    ops.Experts: _Compiler._experts,
    ops.Gather: _Compiler._gather,
    ops.Logits: _Compiler._logits,
    ops.Sample: _Compiler._sample,
}
