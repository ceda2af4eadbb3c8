"""Why a plan does not fit, by region, and which flags would make it fit: each suggestion is computed, not guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvarto.core.errors import BudgetTooSmall
from kvarto.core.units import MIB, ceil_div, format_bytes
from kvarto.planning.fixed import FixedRegions
from kvarto.planning.request import PlanRequest


def refusal(request: PlanRequest, fixed: FixedRegions) -> BudgetTooSmall:
    """The error to raise: what is needed, what there is, what would work."""
    page_bytes, limits = request.kv_format.page_bytes, request.limits
    num_pages = request.pages_needed(limits)
    needs = (
        f"{format_bytes(fixed.size_bytes + num_pages * page_bytes)} needed: "
        f"weights {format_bytes(fixed.weights.size_bytes)}, "
        f"activations {format_bytes(fixed.activations.size_bytes)} (steps of {limits.max_tokens:,} tokens), "
        f"pages {format_bytes(num_pages * page_bytes)} (one sequence of {limits.max_context:,} tokens takes "
        f"{num_pages:,} of {format_bytes(page_bytes)})"
    )
    budget = request.budget
    has = f"the budget is {format_bytes(budget.device_bytes)} ({budget.source})"
    if budget.kv_bytes is not None:
        has += f", of which pages may take {format_bytes(budget.kv_bytes)}"
    if request.max_num_pages is not None:
        has += f" with at most {request.max_num_pages:,} pages"
    return BudgetTooSmall(f"{needs}; {has}. {_what_works(request, fixed)}")


def _what_works(request: PlanRequest, fixed: FixedRegions) -> str:
    suggestions = [*_more_memory(request, fixed), *_smaller_steps(request)]
    if suggestions:
        return "What would work: " + ", or ".join(f"`{flags}`" for flags in suggestions)
    most = "" if request.usable_bytes is None else f" in the {format_bytes(request.usable_bytes)} of this process"
    return f"No setting of memory, context or step size works{most}: take a smaller model, or `--dtype bf16`"


def _more_memory(request: PlanRequest, fixed: FixedRegions) -> Iterator[str]:
    """The smallest budget that holds what was asked."""
    num_pages = request.pages_needed(request.limits)
    if request.max_num_pages is not None and num_pages > request.max_num_pages:
        return
    flags = []
    pages_bytes = num_pages * request.kv_format.page_bytes
    kv_bytes = request.budget.kv_bytes
    if kv_bytes is not None and kv_bytes < pages_bytes:
        flags.append(f"--kv-cache-memory-bytes {pages_bytes}")
    needed_bytes = ceil_div(fixed.size_bytes + max(pages_bytes, kv_bytes or 0), MIB) * MIB
    if needed_bytes > request.budget.device_bytes:
        flags.append(f"--device-memory {needed_bytes // MIB}MiB")
    if request.usable_bytes is None or needed_bytes <= request.usable_bytes:
        yield " ".join(flags)


def _smaller_steps(request: PlanRequest) -> Iterator[str]:
    """Within the same budget: the shortest way down in context, and the one in step size that keeps the context."""
    is_first = True
    num_tokens = request.limits.max_tokens
    while num_tokens >= request.limits.max_seqs:  # a step must have room for one token of each sequence
        limits = replace(request.limits, max_tokens=num_tokens)
        length = request.longest(limits, request.fixed(limits))
        if length > 0 and (is_first or length == limits.max_context):
            is_first = False
            yield _flags(request, num_tokens, length)
        if length == limits.max_context:
            return
        num_tokens //= 2


def _flags(request: PlanRequest, num_tokens: int, length: int) -> str:
    flags = []
    if num_tokens < request.limits.max_tokens:
        flags.append(f"--max-num-batched-tokens {num_tokens}")
    if length < request.limits.max_context:
        flags.append(f"--max-model-len {length}")
    return " ".join(flags)
