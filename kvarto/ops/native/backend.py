"""NativeBackend: runs a Program in one native call per step, inside the planned arena."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvarto.core import _native
from kvarto.core.bound_adapter import BoundAdapter
from kvarto.core.buffers import StepLimits
from kvarto.core.dtype import DType
from kvarto.core.kv_format import KVFormat
from kvarto.core.layout import Layout
from kvarto.core.ops import Op, Sample
from kvarto.core.program import Program
from kvarto.core.step import Step, StepResult
from kvarto.core.weight_format import LANES, WeightFormat, panel_bytes
from kvarto.memory.arena import Arena
from kvarto.ops.adapter_check import AdapterCheck
from kvarto.ops.native.adapters import NativeShapes
from kvarto.ops.native.compile import compile_program
from kvarto.ops.native.isa import arithmetic, choose_isa
from kvarto.ops.native.numerics import BF16_ISAS, Numerics, decide_numerics
from kvarto.ops.native.scratch import ScratchSizes
from kvarto.ops.native.weight_formats import kept_format

KERNEL_VERSION = 6
"""Raised by every change that can change a bit of the output."""


class NativeBackend:
    """Implements `ops.base.Backend` on this machine's cores."""

    def __init__(
        self, threads: int = 1, *, activations: str = "auto", dtype: str = "auto", isa: str | None = None
    ) -> None:
        self._num_threads = threads
        self._activations = activations
        self._dtype = dtype
        self._isa = isa or choose_isa()
        self._decided: tuple[Program, Numerics] | None = None
        self._opened: _Opened | None = None

    @property
    def fingerprint(self) -> str:
        """Threads are not part of it: no sum depends on them."""
        if self._decided is None:
            return f"native-{KERNEL_VERSION}/{self._activations}/{self._isa}"
        numerics = self._decided[1]
        machine = arithmetic(self._isa) if numerics.is_plain else self._isa
        return f"native-{KERNEL_VERSION}/{numerics.name}/{machine}"

    @property
    def arena(self) -> Arena | None:
        """The arena of an open backend, to back it ahead and to count it."""
        return None if self._opened is None else self._opened.arena

    def device_memory(self) -> tuple[int, int] | None:
        """None: it computes in this machine's memory."""
        return None

    def default_kv_dtype(self, program: Program) -> DType:
        """Nothing is lost by paging where all is float32; else half of its bytes, in the type that is fastest here."""
        if self._numerics(program).is_exact:
            return DType.F32
        return DType.BF16 if self._isa in BF16_ISAS else DType.F16

    def weight_format(self, file_format: str) -> WeightFormat | None:
        """See `ops.base.Backend`."""
        return kept_format(file_format, self._dtype)

    def scratch_bytes(self, op: Op, program: Program, limits: StepLimits, kv_format: KVFormat) -> int:
        """See `ops.base.Backend`."""
        return self._scratch_sizes(program, limits).scratch_bytes(op)

    def open(self, program: Program, layout: Layout) -> None:
        """See `ops.base.Backend`. Raises MemoryLimitError when the machine refuses the arena."""
        assert self._opened is None, "the backend is open"
        arena = Arena(layout.total_bytes)
        try:
            sizes = self._scratch_sizes(program, layout.limits)
            compiled = compile_program(program, layout, arena, sizes, isa=self._isa)
        except BaseException:
            arena.close()
            raise
        self._opened = _Opened(program, layout, arena, compiled)

    def store_weight(self, name: str, offset_bytes: int, data: NDArray[np.uint8]) -> None:
        """See `ops.base.Backend`."""
        opened = self._open()
        opened.arena.view(opened.layout.weight_offsets[name] + offset_bytes, len(data))[:] = data

    def store_rows(self, name: str, part_index: int, first_row: int, raw: NDArray[np.uint8]) -> None:
        """See `ops.base.Backend`."""
        opened = self._open()
        weight = opened.program.weights[name]
        part, num_columns = weight.parts[part_index], weight.shape[-1]
        size_bytes = panel_bytes(part.format, num_columns, part.group_size)
        start = opened.layout.weight_offsets[name] + weight.part_offsets()[part_index]
        panels = opened.arena.view(start + first_row // LANES * size_bytes, -(-len(raw) // LANES) * size_bytes)
        _native.weights.repack_rows(part.format.code, part.group_size, num_columns, raw, panels)

    def read_rows(self, name: str, first_row: int, num_rows: int) -> NDArray[np.float32]:
        """See `ops.base.Backend`."""
        opened = self._open()
        weight = opened.program.weights[name]
        assert 0 <= first_row <= first_row + num_rows <= weight.shape[0], f"rows {first_row} + {num_rows} of `{name}`"
        rows = np.empty((num_rows, weight.shape[-1]), np.float32)
        part_row = 0
        for part, offset in zip(weight.parts, weight.part_offsets(), strict=True):
            start, stop = max(first_row, part_row), min(first_row + num_rows, part_row + part.num_rows)
            if start < stop:
                place = opened.layout.weight_offsets[name] + offset
                panels = opened.arena.view(place, part.size_bytes(weight.shape[-1]))
                out = rows[start - first_row : stop - first_row]
                _native.weights.unpack_rows(part.format.code, part.group_size, panels, start - part_row, out)
            part_row += part.num_rows
        return rows

    def run(self, step: Step) -> StepResult:
        """See `ops.base.Backend`."""
        opened = self._open()
        result = empty_result(step)
        tables, slots = np.ascontiguousarray(step.page_tables), np.ascontiguousarray(step.slot_mapping)
        opened.compiled.run(step, tables, slots, result)
        opened.num_logits = step.num_samples
        return result

    def logits_of_last_step(self) -> NDArray[np.float32]:
        """`[num_samples, vocab_size]`, raw. For tests."""
        opened = self._open()
        stride_bytes = opened.program.buffers[opened.logits_name].stride_bytes
        raw = opened.arena.view(opened.layout.buffer_offsets[opened.logits_name], opened.num_logits * stride_bytes)
        rows = raw.view(np.float32).reshape(opened.num_logits, stride_bytes // DType.F32.itemsize)
        return rows[:, : opened.program.vocab_size].copy()

    def copy_page(self, source: int, target: int) -> None:
        """See `ops.base.Backend`."""
        opened = self._open()
        size_bytes, start = opened.layout.kv_format.page_bytes, opened.layout.pages.offset
        page = opened.arena.view(start + source * size_bytes, size_bytes)
        opened.arena.view(start + target * size_bytes, size_bytes)[:] = page

    def host_pages(self) -> NDArray[np.uint8]:
        """See `ops.base.Backend`."""
        layout = self._open().layout
        page_bytes = layout.kv_format.page_bytes
        region = self._open().arena.view(layout.pages.offset, layout.num_pages * page_bytes)
        return region.reshape(layout.num_pages, page_bytes)

    def write_pages(self, pages: NDArray[np.int32], images: NDArray[np.uint8], which: NDArray[np.int32]) -> None:
        """See `ops.base.Backend`. One call without the interpreter's lock. Raises ValueError where one is not there."""
        region = self.host_pages()
        _native.memory.stream_pages(region, region.shape[1], pages, images, images.shape[1], which)

    def bind_adapter(self, handle: int, adapter: BoundAdapter) -> None:
        """See `ops.base.Backend`. Raises ValueError where it does not fit the program, the plan or the pool."""
        opened = self._open()
        assert handle not in opened.adapters, f"handle {handle} is bound"
        opened.check.check(handle, adapter)
        opened.shapes.bind(handle, adapter)
        opened.adapters.add(handle)

    def unbind_adapter(self, handle: int) -> None:
        """See `ops.base.Backend`."""
        opened = self._open()
        assert handle in opened.adapters, f"handle {handle} is not bound"
        opened.compiled.unbind_adapter(handle)
        opened.adapters.remove(handle)

    def close(self) -> None:
        """See `ops.base.Backend`."""
        if self._opened is not None:
            arena = self._opened.arena
            self._opened = None  # its threads end before the memory goes
            arena.close()

    def _open(self) -> _Opened:
        assert self._opened is not None, "the backend is not open"
        return self._opened

    def _numerics(self, program: Program) -> Numerics:
        if self._decided is None or self._decided[0] is not program:
            self._decided = program, decide_numerics(program, self._activations, self._isa)
        return self._decided[1]

    def _scratch_sizes(self, program: Program, limits: StepLimits) -> ScratchSizes:
        return ScratchSizes(program, limits, self._numerics(program), self._num_threads)


class _Opened:
    """What there is between `open` and `close`."""

    def __init__(self, program: Program, layout: Layout, arena: Arena, compiled: _native.ops.Program) -> None:
        self.program = program
        self.layout = layout
        self.arena = arena
        self.compiled = compiled
        self.check = AdapterCheck(program, layout)
        self.shapes = NativeShapes(compiled, layout)
        self.adapters: set[int] = set()
        """Handles that are bound."""
        self.num_logits = 0
        self.logits_name = next(op.logits for op in program.ops if isinstance(op, Sample))


def empty_result(step: Step) -> StepResult:
    """Arrays for what the step asks for; sampling writes every element."""
    num_samples = step.num_samples
    num_top = int(step.sampling.num_logprobs.max(initial=0))
    return StepResult(
        token_ids=np.empty(num_samples, np.int32),
        logprobs=np.empty(num_samples, np.float32),
        top_ids=np.empty((num_samples, num_top), np.int32),
        top_logprobs=np.empty((num_samples, num_top), np.float32),
        is_finite=np.empty(num_samples, np.bool_),
    )
