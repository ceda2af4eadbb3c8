"""WriteKV and Attention of the native backend on plain arrays, in memory that holds NaN wherever nothing was put."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarto.core import _native
from kvarto.core.dtype import DType
from kvarto.core.kv_format import KVFormat
from kvarto.core.ops import Attention
from kvarto.core.step import Step, StepResult
from tests.ops.native.quantised_rows import parse
from tests.ops.native.red_zones import RED_ZONE_BYTES, poison_gaps

Array = np.ndarray[Any, Any]

ISAS: list[str] = _native.ops.isas()
KV_TYPES = (DType.F32, DType.F16, DType.BF16, DType.I8)
"""In the order of the native enumeration."""
_MAX_POSITIONS = 1 << 20
_GUARD_BYTES = 1 << 16
"""Behind the scratch; never written."""


@dataclass(frozen=True)
class Limits:
    """The largest step."""

    max_tokens: int
    max_seqs: int
    max_context: int


class PagedOps:
    """One arena with a `qkv` buffer, an `out` buffer, pages and scratch; a program for each of the two ops."""

    def __init__(
        self,
        isa: str,
        op: Attention,
        kv: KVFormat,
        num_pages: int,
        limits: Limits,
        *,
        num_threads: int = 1,
        is_exact: bool = True,
        is_int8_out: bool = False,
    ) -> None:
        heads, width = op.heads, op.heads.num_qo_heads * op.heads.head_dim
        native_heads = _native.ops.Heads(heads.num_qo_heads, heads.num_kv_heads, heads.head_dim)
        scratch_bytes = _native.ops.attention_scratch_bytes(
            native_heads, limits.max_tokens, limits.max_seqs, limits.max_context, num_threads
        )
        sizes = [limits.max_tokens * 4 * heads.width, limits.max_tokens * 4 * width, num_pages * kv.page_bytes]
        starts = [int(start) for start in np.cumsum([0, *(-(-size // 64) * 64 + RED_ZONE_BYTES for size in sizes)])]
        self._arena = nan_bytes(starts[-1] + scratch_bytes + _GUARD_BYTES)
        poison_gaps(self._arena, zip(starts, [*sizes, scratch_bytes], strict=True))
        self._kv, self._num_pages, self._width, self._is_int8 = kv, num_pages, width, is_int8_out
        qkv = _native.ops.Rows(starts[0], 4 * heads.width, heads.width, limits.max_tokens)
        out = _native.ops.Rows(starts[1], 4 * width, width, limits.max_tokens, is_int8_out)
        pages = _native.ops.Pages(starts[2], kv.page_bytes, kv.layer_bytes, kv.page_size, KV_TYPES.index(kv.dtype))
        self._qkv = self._arena[starts[0] : starts[0] + sizes[0]].view(np.float32)
        self._out = self._arena[starts[1] : starts[1] + sizes[1]]
        self.pages = self._arena[starts[2] : starts[2] + sizes[2]].reshape(num_pages, -1)
        """`[num_pages, page_bytes]`, shared."""
        self._write, self._attend = (self._program(isa, num_threads, limits) for _ in range(2))
        self._write.add_write_kv(qkv, native_heads, op.group, op.layer_slot, pages)
        self._attend.add_attention(
            qkv, out, native_heads, op.group, op.layer_slot, op.scale, op.window or 0, op.softcap or 0.0, is_exact,
            pages, _native.ops.Bytes(starts[3], scratch_bytes),
        )  # fmt: skip

    def _program(self, isa: str, num_threads: int, limits: Limits) -> Any:
        bounds = _native.ops.StepBounds(
            max_tokens=limits.max_tokens, max_seqs=limits.max_seqs, max_samples=1, max_positions=_MAX_POSITIONS,
            vocab_size=1, num_groups=1, num_pages=self._num_pages, page_size=self._kv.page_size,
        )  # fmt: skip
        return _native.ops.Program(isa, num_threads, self._arena.ctypes.data, self._arena.nbytes, bounds)

    def write(self, qkv: Array, step: Step) -> None:
        """Store the k and v heads of the rows."""
        self._load(qkv)
        _run(self._write, step)

    def attend(self, qkv: Array, step: Step) -> Array:
        """`[num_tokens, width]` float32; where `out` is quantised, what its codes mean."""
        self._load(qkv)
        _run(self._attend, step)
        assert (self._arena[-_GUARD_BYTES:] == 0xFF).all(), "attention wrote beyond its scratch"
        return self._float_rows(step.num_tokens)

    def planes(self, page: int, layer_slot: int) -> tuple[Array, Array]:
        """Elements or codes `[plane, kv head, token, dim]`; and scales `[plane, kv head, token]`, if any."""
        kv = self._kv
        layer = self.pages[page, layer_slot * kv.layer_bytes :][: kv.layer_bytes].reshape(2, -1)
        shape = (2, kv.num_kv_heads, kv.page_size, kv.head_dim)
        element = {DType.F32: np.float32, DType.F16: np.float16, DType.BF16: np.uint16, DType.I8: np.int8}[kv.dtype]
        size_bytes = int(np.prod(shape[1:])) * kv.dtype.itemsize
        elements = np.ascontiguousarray(layer[:, :size_bytes]).view(element).reshape(shape)
        scales = np.ascontiguousarray(layer[:, size_bytes:]).view(np.float32)
        return elements, scales.reshape(2, kv.num_kv_heads, -1)

    def _load(self, qkv: Array) -> None:
        self._qkv[: qkv.size] = np.ascontiguousarray(qkv, np.float32).reshape(-1)
        self._out[:] = 0xFF

    def _float_rows(self, num_tokens: int) -> Array:
        rows = self._out[: num_tokens * 4 * self._width].reshape(num_tokens, -1).copy()
        if not self._is_int8:
            return rows.view(np.float32)
        return parse(rows, self._width).values.astype(np.float32)


def _run(program: Any, step: Step) -> None:
    ids, floats = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
    result = StepResult(ids.reshape(0), floats.reshape(0), ids, floats, np.zeros(0, bool))
    program.run(step, step.page_tables, step.slot_mapping, result)


def nan_bytes(size_bytes: int) -> Array:
    """All bits one, which is NaN in every float type; 64-byte aligned."""
    padded = np.full(size_bytes + 64, 0xFF, np.uint8)
    start = -padded.ctypes.data % 64
    return padded[start : start + size_bytes]
