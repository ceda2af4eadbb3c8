"""Runs one op of the native backend on plain arrays, compiled as a program's ops are, in an arena that holds NaN
wherever nothing was put.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvarto.core import _native
from kvarto.core.buffers import Buffer, Rows, StepLimits, Weight, WeightPart
from kvarto.core.dtype import DType
from kvarto.core.kv_format import LayerGroup
from kvarto.core.layout import Budget, Layout
from kvarto.core.ops import Op
from kvarto.core.program import Program
from kvarto.core.step import Step, StepResult
from kvarto.core.units import ceil_div
from kvarto.core.weight_format import WeightFormat
from kvarto.memory.arena import Arena
from kvarto.models.convert import to_bfloat16, to_rows
from kvarto.models.packing import matrix_names
from kvarto.ops.native.adapters import NativeShapes
from kvarto.ops.native.compile import compile_program
from kvarto.ops.native.numerics import Numerics
from kvarto.ops.native.scratch import ScratchSizes
from kvarto.planning.plan import plan
from tests.ops.adapters import Stored
from tests.ops.native import red_zones
from tests.ops.one_op import OneOp

Array = np.ndarray[Any, Any]
ISAS: list[str] = _native.ops.isas()
_PAGE_SIZE = 16
_MAX_CONTEXT = 64


@dataclass
class NativeOp:
    """An op with its weights; `run` gives it rows."""

    op: Op
    weights: Mapping[str, Array] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)
    """Of buffers that are only written."""
    weight_dtype: DType = DType.F32
    """Of matrices."""
    sample_buffers: tuple[str, ...] = ()
    i32_buffers: tuple[str, ...] = ()
    int8_buffers: frozenset[str] = frozenset()
    """Buffers that the op writes quantised."""
    isa: str = ISAS[-1]
    num_threads: int = 1
    adapters: Mapping[int, Stored] = field(default_factory=dict)
    """By handle; in pages of 4 KiB."""
    max_lora_rank: int = 0
    num_pages: int = 64

    @classmethod
    def like(cls, bench: OneOp, **options: Any) -> NativeOp:
        """The same op as the reference's bench runs."""
        dtype = bench.weight_dtype
        return cls(bench.op, bench.weights, bench.widths, dtype, bench.sample_buffers, bench.i32_buffers, **options)

    def run(self, rows: Mapping[str, Array], step: Step) -> dict[str, Array]:
        """Every buffer that the op writes, at the step's rows; of quantised ones the raw bytes, `[rows, row bytes]`."""
        num_rows, num_samples = step.num_tokens + 3, step.num_samples + 3
        limits = StepLimits(num_rows, max(step.num_seqs, 1), num_samples, _MAX_CONTEXT, self.max_lora_rank)
        program = self._program({name: values.shape[1] for name, values in rows.items()} | dict(self.widths))
        sizes = ScratchSizes(program, limits, Numerics({}, dict.fromkeys(self.int8_buffers, "int8")), self.num_threads)
        size_bytes = sizes.scratch_bytes(self.op)
        scratch = {0: size_bytes} if size_bytes else {}
        layout = plan(program, Budget(1 << 28, "test"), limits, DType.F32, _PAGE_SIZE, scratch, self.num_pages)
        arena = Arena(layout.total_bytes)
        arena.array[:] = 0xFF
        self._store_weights(program, layout, arena)
        for name, values in rows.items():
            self._view(program, layout, arena, name, len(values))[:] = values
        compiled = compile_program(program, layout, arena, sizes, isa=self.isa)
        shapes = NativeShapes(compiled, layout)
        for handle, stored in self.adapters.items():
            stored.write(arena.view(layout.pages.offset, layout.pages.size_bytes))
            shapes.bind(handle, stored.bound)
        red_zones.poison_gaps(arena.array, _places(program, layout, scratch))
        step = _with_tables(step)
        compiled.run(step, step.page_tables, step.slot_mapping, _no_result(step))
        written = {name: self._written(program, layout, arena, name, step) for name in self.op.writes}
        del compiled, shapes
        red_zones.clear(arena.array)
        arena.close()
        return written

    def _program(self, widths: Mapping[str, int]) -> Program:
        buffers = {name: self._buffer(name, width) for name, width in widths.items()}
        weights = {name: Weight(name, values.shape, DType.F32, ()) for name, values in self.weights.items()}
        program = Program("test", buffers, weights, (self.op,), (LayerGroup((0,), 1, 1, 16, None),), 1, 333, 64)
        format = WeightFormat(self.weight_dtype)
        packed = {
            name: replace(weights[name], parts=(WeightPart(format, 0, self.weights[name].shape[0]),))
            for name in matrix_names(program)
        }
        return replace(program, weights=weights | packed)

    def _buffer(self, name: str, width: int) -> Buffer:
        rows = Rows.SAMPLES if name in self.sample_buffers else Rows.TOKENS
        return Buffer(name, width, rows, DType.I32 if name in self.i32_buffers else DType.F32)

    def _store_weights(self, program: Program, layout: Layout, arena: Arena) -> None:
        for name, values in self.weights.items():
            weight = program.weights[name]
            target = arena.view(layout.weight_offsets[name], weight.size_bytes)
            if not weight.parts:
                target.view(np.float32)[:] = self._as_on_file(values).reshape(-1)
                continue
            raw = to_rows(values, weight.parts[0].format, name)
            _native.weights.repack_rows(weight.parts[0].format.code, 0, values.shape[1], raw, target)

    def _as_on_file(self, values: Array) -> Array:
        """Vectors are f32 there; tables of positions have the matrices' type."""
        if values.ndim == 1 or self.weight_dtype is DType.F32:
            return values
        if self.weight_dtype is DType.F16:
            return values.astype(np.float16).astype(np.float32)
        return (to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)

    def _view(self, program: Program, layout: Layout, arena: Arena, name: str, num_rows: int) -> Array:
        buffer = program.buffers[name]
        raw = arena.view(layout.buffer_offsets[name], num_rows * buffer.stride_bytes)
        items = raw.view(np.int32 if buffer.dtype is DType.I32 else np.float32)
        rows = items.reshape(num_rows, buffer.stride_bytes // 4)
        return rows[:, : buffer.width]

    def _written(self, program: Program, layout: Layout, arena: Arena, name: str, step: Step) -> Array:
        buffer = program.buffers[name]
        num_rows = step.num_samples if buffer.rows is Rows.SAMPLES else step.num_tokens
        values = self._view(program, layout, arena, name, num_rows).copy()
        return values.view(np.uint8) if name in self.int8_buffers else values


def _places(program: Program, layout: Layout, scratch: Mapping[int, int]) -> list[tuple[int, int]]:
    """(offset, bytes) of all that the plan names."""
    weights = [(at, program.weights[name].size_bytes) for name, at in layout.weight_offsets.items()]
    buffers = [(at, program.buffers[name].size_bytes(layout.limits)) for name, at in layout.buffer_offsets.items()]
    pieces = [(layout.scratch_offsets[index], size) for index, size in scratch.items()]
    return [*weights, *buffers, *pieces, (layout.pages.offset, layout.pages.size_bytes)]


def _with_tables(step: Step) -> Step:
    """Steps of tests of single ops have no pages; a native program looks at them before it runs."""
    num_pages = ceil_div(int(step.context_lens.max(initial=1)), _PAGE_SIZE)
    return replace(step, page_tables=np.zeros((1, step.num_seqs, num_pages), np.int32))


def _no_result(step: Step) -> StepResult:
    n = step.num_samples
    none = np.zeros((n, 0), np.int32)
    return StepResult(
        np.zeros(n, np.int32), np.zeros(n, np.float32), none, none.astype(np.float32), np.zeros(n, np.bool_)
    )
