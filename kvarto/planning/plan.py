"""plan(): Program + Budget -> Layout. Where every byte of the arena goes, before the first one is allocated.

    [ weights ................ | activations .. | page 0 | page 1 | ...... ]
      64-byte aligned tensors    packed by life   page_bytes each, from a 4 KiB boundary

Weights and activations are fixed by the model and the step limits; pages get the rest of the budget, or exactly what
was asked for them. What cannot work is refused here, with numbers. Pure: knows no machine, allocates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvarto.core.buffers import StepLimits
from kvarto.core.dtype import DType
from kvarto.core.layout import Budget, Layout, Region
from kvarto.core.program import Program
from kvarto.planning.fixed import plan_fixed
from kvarto.planning.host_bytes import host_bytes, record_bytes
from kvarto.planning.page_count import default_num_pages
from kvarto.planning.refusal import refusal
from kvarto.planning.request import PlanRequest

DEFAULT_TOKENS_PER_SEQ = 2048
"""Pages of the default budget are for this many tokens of each sequence that may run."""


def plan(
    program: Program,
    budget: Budget,
    limits: StepLimits,
    kv_dtype: DType,
    page_size: int,
    scratch_bytes: Mapping[int, int],
    max_num_pages: int | None = None,
    *,
    usable_bytes: int | None = None,
) -> Layout:
    """Lay out the arena. Raises BudgetTooSmall, ending with flags that would work, when it cannot work.

    `scratch_bytes` is by op index, at the largest step. `max_num_pages` caps the pages, also below the budget.
    `usable_bytes` is what this process could be given at most; a refusal suggests nothing beyond it.
    """
    kv_format = program.kv_format(kv_dtype, page_size)
    request = PlanRequest(program, budget, limits, kv_format, scratch_bytes, max_num_pages, usable_bytes)
    fixed = request.fixed(limits)
    num_pages = request.num_pages(fixed)
    if num_pages is None or num_pages < request.pages_needed(limits):
        raise refusal(request, fixed)
    return Layout(
        budget=budget,
        limits=limits,
        kv_format=kv_format,
        num_pages=num_pages,
        weights=fixed.weights,
        activations=fixed.activations,
        pages=Region("pages", fixed.size_bytes, num_pages * kv_format.page_bytes),
        weight_offsets=fixed.weight_offsets,
        buffer_offsets=fixed.buffer_offsets,
        scratch_offsets=fixed.scratch_offsets,
        activation_lower_bound_bytes=fixed.activation_lower_bound_bytes,
        host_bytes=host_bytes(len(program.layer_groups), num_pages, limits, page_size),
        record_bytes=record_bytes(num_pages, page_size),
    )


def default_device_bytes(
    program: Program,
    limits: StepLimits,
    kv_dtype: DType,
    page_size: int,
    scratch_bytes: Mapping[int, int],
    tokens_per_seq: int = DEFAULT_TOKENS_PER_SEQ,
) -> int:
    """The budget to ask for when nobody named one: weights, activations, and pages for `max_seqs` × `tokens_per_seq`
    tokens (never more than `max_seqs` × `max_context`, never less than one sequence of `max_context`).
    """
    fixed = plan_fixed(program, limits, scratch_bytes)
    num_pages = default_num_pages(program.layer_groups, page_size, limits, tokens_per_seq)
    return fixed.size_bytes + num_pages * program.kv_format(kv_dtype, page_size).page_bytes
