"""Refusals name the bytes by region, and every suggestion, when followed, is accepted by the planner."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvarto.core.buffers import StepLimits
from kvarto.core.dtype import DType
from kvarto.core.errors import BudgetTooSmall
from kvarto.core.layout import Budget
from kvarto.core.units import GIB, KIB, MIB, format_bytes, parse_bytes
from kvarto.planning.fixed import plan_fixed
from kvarto.planning.plan import plan
from tests.planning.programs import LIMITS, family, tiny

PROGRAM = tiny()
FIXED_BYTES = plan_fixed(PROGRAM, LIMITS, {}).size_bytes
PAGE_BYTES = PROGRAM.kv_format(DType.F32, 16).page_bytes
NEEDED_BYTES = FIXED_BYTES + 32 * PAGE_BYTES  # 512 tokens


def refused(budget: Budget, limits: StepLimits = LIMITS, **options: int | None) -> str:
    """The message of a plan that must be refused."""
    with pytest.raises(BudgetTooSmall) as error:
        plan(PROGRAM, budget, limits, DType.F32, 16, {}, **options)
    return str(error.value)


def suggestions(message: str) -> list[dict[str, int]]:
    """The flags of each suggestion, by name."""
    _, _, works = message.partition("What would work: ")
    return [
        {name: parse_bytes(value) for name, value in re.findall(r"--([a-z-]+) (\S+)", flags)}
        for flags in re.findall(r"`([^`]*)`", works)
    ]


def follow(flags: dict[str, int], budget: Budget, limits: StepLimits) -> tuple[Budget, StepLimits]:
    """What the flags of a suggestion change."""
    assert flags, "a suggestion without flags"
    budget = replace(
        budget,
        device_bytes=flags.pop("device-memory", budget.device_bytes),
        kv_bytes=flags.pop("kv-cache-memory-bytes", budget.kv_bytes),
    )
    limits = replace(
        limits,
        max_context=flags.pop("max-model-len", limits.max_context),
        max_tokens=flags.pop("max-num-batched-tokens", limits.max_tokens),
    )
    assert not flags, f"unknown flags {flags}"
    return budget, limits


@settings(max_examples=100, deadline=None)
@given(
    device_bytes=st.integers(1, NEEDED_BYTES - 1),
    kv_bytes=st.one_of(st.none(), st.integers(1, NEEDED_BYTES)),
    usable_bytes=st.one_of(st.none(), st.integers(1, 2 * NEEDED_BYTES)),
)
def test_every_suggestion_works(device_bytes: int, kv_bytes: int | None, usable_bytes: int | None) -> None:
    budget = Budget(device_bytes, "test", kv_bytes)
    message = refused(budget, usable_bytes=usable_bytes)
    for flags in suggestions(message):
        if usable_bytes is not None:
            assert flags.get("device-memory", 0) <= usable_bytes, "suggests more than the process can be given"
        changed_budget, changed_limits = follow(flags, budget, LIMITS)
        plan(PROGRAM, changed_budget, changed_limits, DType.F32, 16, {})
    assert suggestions(message) or "No setting of memory, context or step size works" in message


@settings(max_examples=50, deadline=None)
@given(st.integers(FIXED_BYTES, NEEDED_BYTES - 1))
def test_the_context_suggested_is_the_longest(device_bytes: int) -> None:
    budget = Budget(device_bytes, "test")
    lengths = [flags["max-model-len"] for flags in suggestions(refused(budget)) if set(flags) == {"max-model-len"}]
    assume(lengths)
    with pytest.raises(BudgetTooSmall):
        plan(PROGRAM, budget, replace(LIMITS, max_context=lengths[0] + 1), DType.F32, 16, {})


def test_the_budget_suggested_is_the_smallest_in_whole_mebibytes() -> None:
    budget = Budget(FIXED_BYTES, "test")
    (device_bytes,) = (flags["device-memory"] for flags in suggestions(refused(budget)) if "device-memory" in flags)
    assert 0 <= device_bytes - NEEDED_BYTES < MIB


def test_the_message_names_the_bytes_by_region() -> None:
    message = refused(Budget(FIXED_BYTES + 5 * PAGE_BYTES, "`--device-memory 1MiB`"))
    fixed = plan_fixed(PROGRAM, LIMITS, {})
    assert f"weights {format_bytes(fixed.weights.size_bytes)}" in message
    assert f"activations {format_bytes(fixed.activations.size_bytes)} (steps of 64 tokens)" in message
    assert f"pages {format_bytes(32 * PAGE_BYTES)} (one sequence of 512 tokens takes 32 of" in message
    assert f"the budget is {format_bytes(FIXED_BYTES + 5 * PAGE_BYTES)} (`--device-memory 1MiB`)" in message
    assert message.endswith("`--max-model-len 80`")


def test_the_message_names_the_limit_of_the_pages() -> None:
    message = refused(Budget(100 * MIB, "`--kv-cache-memory-bytes 1MiB` within what is free", MIB // 64))
    assert "of which pages may take 16.00 KiB" in message


def test_smaller_steps_are_suggested_where_activations_are_the_trouble() -> None:
    limits = replace(LIMITS, max_tokens=2048)
    small = plan_fixed(PROGRAM, replace(limits, max_tokens=256), {})
    message = refused(Budget(small.size_bytes + 32 * PAGE_BYTES, "test"), limits)
    assert message.endswith("`--max-num-batched-tokens 256`")


def test_nothing_is_suggested_when_weights_alone_exceed_the_machine() -> None:
    message = refused(Budget(100 * KIB, "test"), usable_bytes=200 * KIB)
    assert "No setting of memory, context or step size works in the 200.00 KiB of this process" in message
    assert "--device-memory" not in message


def test_pages_asked_for_are_part_of_the_budget_suggested() -> None:
    budget = Budget(MIB, "test", kv_bytes=50 * MIB)
    (flags,) = (flags for flags in suggestions(refused(budget)) if "device-memory" in flags)
    assert plan(PROGRAM, *follow(flags, budget, LIMITS), DType.F32, 16, {}).num_pages == 50 * MIB // PAGE_BYTES


def test_capped_pages_are_not_cured_by_memory() -> None:
    message = refused(Budget(GIB, "test"), max_num_pages=10)
    assert "with at most 10 pages" in message
    assert suggestions(message) == [{"max-model-len": 160}]


def test_a_real_model_says_what_would_work() -> None:
    program = family("gemma2")
    limits = StepLimits(512, 32, 32, 8192)
    budget = Budget(700 * MIB, "test")
    with pytest.raises(BudgetTooSmall) as error:
        plan(program, budget, limits, DType.F32, 16, {})
    found = suggestions(str(error.value))
    assert found
    for flags in found:
        changed_budget, changed_limits = follow(flags, budget, limits)
        plan(program, changed_budget, changed_limits, DType.F32, 16, {})
