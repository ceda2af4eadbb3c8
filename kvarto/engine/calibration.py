"""Calibration: the first step of a fresh engine, which warms it up, and a second one, which is timed.

Both write to pages that nobody owns yet. The speed is what the prefix cache weighs recomputing by.
"""

from __future__ import annotations

import numpy as np

from kvarto.core.clock import Clock
from kvarto.core.ids import NO_PAGE
from kvarto.core.layout import Layout
from kvarto.core.program import Program
from kvarto.core.step import SamplingRows, Step
from kvarto.core.units import ceil_div
from kvarto.ops.base import Backend
from kvarto.planning.cost import chunk_shape, cost

PROBE_TOKENS = 32
"""Enough to be dominated by arithmetic, as prompts are; few enough to take a moment."""


def measure_flops_per_s(backend: Backend, program: Program, layout: Layout, clock: Clock) -> float:
    """Run two steps and time the second. Raises what the backend raises when it cannot run at all."""
    num_tokens = min(PROBE_TOKENS, layout.limits.max_tokens, layout.limits.max_context)
    step = probe_step(layout, len(program.layer_groups), num_tokens)
    backend.run(step)
    start = clock.now()
    backend.run(step)
    seconds = max(clock.now() - start, 1e-6)
    return cost(program, chunk_shape(0, num_tokens, 1)).flops / seconds


def probe_step(layout: Layout, num_groups: int, num_tokens: int) -> Step:
    """One sequence of token 0, on the first pages, with one greedy row."""
    page_size = layout.kv_format.page_size
    pages_per_group = ceil_div(num_tokens, page_size)
    tables = np.arange(num_groups * pages_per_group, dtype=np.int32).reshape(num_groups, 1, pages_per_group)
    assert tables.max(initial=NO_PAGE) < layout.num_pages, "the pool is smaller than one short sequence"
    positions = np.arange(num_tokens, dtype=np.int32)
    slots = tables[:, 0, positions // page_size].astype(np.int64) * page_size + positions % page_size
    return Step(
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        positions=positions,
        cu_seqlens=np.array([0, num_tokens], dtype=np.int32),
        context_lens=np.array([num_tokens], dtype=np.int32),
        page_tables=tables,
        slot_mapping=slots,
        sample_rows=np.array([num_tokens - 1], dtype=np.int32),
        sampling=_greedy_row(num_tokens),
    )


def _greedy_row(position: int) -> SamplingRows:
    zero, one = np.zeros(1, dtype=np.float32), np.ones(1, dtype=np.float32)
    zero_int = np.zeros(1, dtype=np.int32)
    return SamplingRows(
        temperature=zero,
        top_k=zero_int,
        top_p=one,
        min_p=zero,
        repetition_penalty=one,
        presence_penalty=zero,
        frequency_penalty=zero,
        seed=np.zeros(1, dtype=np.int64),
        choice=zero_int,
        position=np.array([position], dtype=np.int32),
        num_logprobs=zero_int,
        target=np.array([-1], dtype=np.int32),
        bias_indptr=np.zeros(2, dtype=np.int32),
        bias_ids=np.empty(0, dtype=np.int32),
        bias_values=np.empty(0, dtype=np.float32),
        seen_indptr=np.zeros(2, dtype=np.int32),
        seen_ids=np.empty(0, dtype=np.int32),
        seen_output_counts=np.empty(0, dtype=np.int32),
    )
