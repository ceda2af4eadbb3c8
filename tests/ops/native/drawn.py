"""Runs native `Sample` on plain rows of logits, in memory that holds NaN wherever nothing was put."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvarto.core import _native
from kvarto.core.step import SamplingRows, StepResult
from tests.ops.native.red_zones import RED_ZONE_BYTES, poison_gaps
from tests.ops.steps import decode_step

Array = np.ndarray[Any, Any]
_ALIGNMENT = 64


def sampled(logits: Array, rows: SamplingRows, *, isa: str, num_threads: int = 1) -> StepResult:
    """`logits: [num_rows, vocab_size]`, which are left as they are."""
    num_rows, vocab_size = logits.shape
    row_bytes = 4 * vocab_size
    scratch_at = -(-num_rows * row_bytes // _ALIGNMENT) * _ALIGNMENT + RED_ZONE_BYTES
    scratch_bytes = _native.ops.sample_scratch_bytes(vocab_size, num_threads)
    arena = aligned(scratch_at + scratch_bytes + RED_ZONE_BYTES)
    poison_gaps(arena, [(0, num_rows * row_bytes), (scratch_at, scratch_bytes)])
    arena[: num_rows * row_bytes] = np.ascontiguousarray(logits).view(np.uint8).reshape(-1)
    bounds = _native.ops.StepBounds(num_rows, max(num_rows, 1), num_rows, 1 << 20, vocab_size, 1, 1, 16)
    program = _native.ops.Program(isa, num_threads, arena.ctypes.data, arena.nbytes, bounds)
    rows_at = _native.ops.Rows(0, row_bytes, vocab_size, num_rows, per_sample=True)
    program.add_sample(rows_at, None, _native.ops.Bytes(scratch_at, scratch_bytes))
    step = replace(
        decode_step([1] * num_rows, sample_rows=range(num_rows), sampling=rows),
        page_tables=np.zeros((1, num_rows, 1), np.int32),
    )
    result = no_result(num_rows, int(rows.num_logprobs.max(initial=0)))
    program.run(step, step.page_tables, step.slot_mapping, result)
    assert (arena[: num_rows * row_bytes].view(np.uint32) == logits.view(np.uint32).reshape(-1)).all()
    return result


def aligned(size_bytes: int) -> Array:
    """Bytes that start at a cache line, all bits one."""
    padded = np.full(size_bytes + _ALIGNMENT, 0xFF, np.uint8)
    start = -padded.ctypes.data % _ALIGNMENT
    return padded[start : start + size_bytes]


def no_result(num_rows: int, num_top: int) -> StepResult:
    """Arrays that hold what no draw yields."""
    return StepResult(
        token_ids=np.full(num_rows, -7, np.int32),
        logprobs=np.full(num_rows, 7.0, np.float32),
        top_ids=np.full((num_rows, num_top), -7, np.int32),
        top_logprobs=np.full((num_rows, num_top), 7.0, np.float32),
        is_finite=np.ones(num_rows, np.bool_),
    )
