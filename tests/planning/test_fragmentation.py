"""A replay loses nothing, refuses only what can't fit, and wastes exactly what the lengths say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvarto.planning.allocation_policies import AllocationPolicy, Pages, Reservation
from kvarto.planning.allocators import Buddy, Compacting, FirstFit
from kvarto.planning.fragmentation import Replay, ReplayResult, expected_waste_fraction, saturating_rate_scale
from kvarto.planning.paging_study import StudySettings, run_study
from kvarto.planning.shared_pages import SharedPages
from kvarto.planning.traces import Trace
from tests.traces import azure_excerpt, complete, mooncake_excerpt

TOKEN_BYTES = 512  # eight tokens make 4 KiB: pages have no padding
STEP_S = 0.03


def random_trace(seed: int, num_requests: int = 120, num_blocks: int = 8) -> Trace:
    """Short requests, so that a small budget has thousands of events. Prompts begin alike, and some are repeated."""
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.integers(1, 200, num_requests), rng.integers(1, 60, num_requests)
    arrivals = np.sort(rng.uniform(0, 3, num_requests))
    block = 32
    ids = []
    for request in range(num_requests):
        if rng.random() < 0.2 and request:
            earlier = int(rng.integers(request))
            prompts[request] = prompts[earlier]
            ids.append(ids[earlier])
            continue
        own = 1000 * (num_blocks + request) + np.arange(-(-prompts[request] // block))
        if prompts[request] >= block:
            own[0] = request % num_blocks
        ids.append(own)
    return Trace("random", arrivals - arrivals[0], prompts, outputs, tuple(ids), block)


def replay(trace: Trace, policy: AllocationPolicy, budget_bytes: int, token_bytes: int = TOKEN_BYTES) -> ReplayResult:
    scale = saturating_rate_scale(trace, budget_bytes, token_bytes, STEP_S)
    arrival_step = (trace.arrival_s / scale / STEP_S).astype(np.int64)
    return Replay(trace, policy, budget_bytes, token_bytes, arrival_step).run()


def make_policies(trace: Trace, budget: int, token_bytes: int = TOKEN_BYTES) -> list[AllocationPolicy]:
    def exactly(max_tokens: int) -> int:
        return max_tokens

    made: list[AllocationPolicy] = [
        Reservation("max", FirstFit(budget), token_bytes, lambda n: 256 if n <= 256 else None),
        Reservation("first fit", FirstFit(budget), token_bytes, exactly),
        Reservation("buddy", Buddy(budget), token_bytes, exactly),
        Reservation("compacting", Compacting(budget), token_bytes, exactly),
        Pages(budget, token_bytes, 8),
        Pages(budget, token_bytes, 32),
    ]
    if trace.block_ids is not None:
        made += [SharedPages(budget, token_bytes, size, trace) for size in (8, 32)]
    return made


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget_tokens", [300, 1100, 5000])
def test_every_request_is_served_once_and_every_byte_accounted_for(seed: int, budget_tokens: int) -> None:
    trace, budget = random_trace(seed), budget_tokens * TOKEN_BYTES
    for policy in make_policies(trace, budget):
        result = replay(trace, policy, budget)
        assert result.num_served + result.num_refused == len(trace), policy.name
        assert policy.held_bytes == 0, f"{policy.name} still holds memory when nobody runs"
        assert policy.free_bytes + policy.cached_bytes <= budget
        tally = result.whole
        parts = (tally.used_bytes, tally.internal_bytes, tally.external_bytes, tally.cached_bytes)
        assert all(part >= 0 for part in parts)
        assert sum(parts) <= budget * tally.num_steps, f"{policy.name} holds more than the budget"
        if isinstance(policy, SharedPages):
            policy.check()


def test_pages_refuse_only_what_the_whole_pool_cannot_hold() -> None:
    trace = random_trace(1)
    budget = 200 * TOKEN_BYTES
    policy = Pages(budget, TOKEN_BYTES, 8)
    longest = trace.num_prompt_tokens + trace.num_output_tokens - 1
    assert replay(trace, policy, budget).num_refused == int((longest > 200).sum())


def brute_force_waste(trace: Trace, page_size: int) -> float:
    """Every request at every step, one page table at a time."""
    wasted = held = 0
    for prompt, output in zip(trace.num_prompt_tokens.tolist(), trace.num_output_tokens.tolist(), strict=True):
        for num_tokens in range(prompt, prompt + output):
            num_pages = -(-num_tokens // page_size)
            held += num_pages * page_size
            wasted += num_pages * page_size - num_tokens
    return wasted / held


@pytest.mark.parametrize("page_size", [1, 8, 16, 32, 64, 128, 7])
@pytest.mark.parametrize("make", [azure_excerpt, mooncake_excerpt, lambda: random_trace(5)])
def test_the_formula_for_waste_is_exact(make: Callable[[], Trace], page_size: int) -> None:
    trace = make()
    assert expected_waste_fraction(trace, page_size) == pytest.approx(brute_force_waste(trace, page_size), rel=1e-12)


@pytest.mark.parametrize("budget_tokens", [270, 1100, 100_000])
@pytest.mark.parametrize("page_size", [8, 16, 32, 64])
def test_pages_waste_what_the_formula_says_also_when_requests_are_preempted(budget_tokens: int, page_size: int) -> None:
    trace, budget = random_trace(2), budget_tokens * TOKEN_BYTES
    # Without headroom, so that growth does run into the end of the pool.
    policy = Pages(budget, TOKEN_BYTES, page_size)
    policy._headroom = 0
    result = replay(trace, policy, budget)
    if result.num_refused == 0:
        assert result.waste_fraction == pytest.approx(expected_waste_fraction(trace, page_size), rel=1e-12)
    assert (result.num_preemptions > 0) == (budget_tokens < 100_000)
    assert (result.num_recomputed_tokens > 0) == (result.num_preemptions > 0)


def test_a_reservation_uses_what_its_lengths_say() -> None:
    """Reserving 256 of everybody: used is the mean of the tokens over their life."""
    trace = random_trace(3)
    budget = 16 * 256 * TOKEN_BYTES
    policy = Reservation("max", FirstFit(budget), TOKEN_BYTES, lambda n: 256 if n <= 256 else None)
    result = replay(trace, policy, budget)
    fits = trace.num_prompt_tokens + trace.num_output_tokens - 1 <= 256
    prompts, outputs = trace.num_prompt_tokens[fits], trace.num_output_tokens[fits]
    tokens = (outputs * (2 * prompts + outputs - 1) // 2).sum()
    assert result.waste_fraction == pytest.approx(1 - tokens / (256 * outputs.sum()), rel=1e-12)
    assert result.peak_running <= 16


def test_pages_reach_the_best_oracle_and_reservations_do_not() -> None:
    trace = azure_excerpt()
    study = run_study(trace, StudySettings(budget_bytes=512 << 20))
    shares = {row.policy: row.oracle_share for row in study.rows}
    assert max(row.oracle_share for row in study.rows if row.kind == "oracle") == 1
    assert all(row.oracle_share >= 0.97 for row in study.rows if row.kind == "pages")
    assert shares["reserve 16,384"] < 0.2
    for row in study.rows:
        parts = row.used_fraction, row.internal_fraction, row.external_fraction, row.cached_fraction, row.idle_fraction
        assert sum(parts) == pytest.approx(1)
        assert min(parts) >= -1e-12


def test_only_contiguous_ranges_fragment_externally() -> None:
    study = run_study(azure_excerpt(), StudySettings(budget_bytes=512 << 20))
    external = {row.policy: row.external_fraction for row in study.rows}
    assert external["exact, first fit"] > 0.01
    assert external["exact, compacting"] == 0
    assert all(row.external_fraction == 0 for row in study.rows if row.kind == "pages")


# What the whole conversation trace must give, in percent, by pages of that many tokens.
KNOWN_WASTE = {8: 0.28, 16: 0.61, 32: 1.25, 64: 2.50, 128: 4.95}


@pytest.mark.parametrize("page_size", KNOWN_WASTE)
def test_waste_on_the_complete_conversation_trace(page_size: int) -> None:
    trace, budget = complete("azure_llm_2023_conv.csv"), 8 << 30
    result = replay(trace, Pages(budget, 23_040, page_size), budget, 23_040)
    assert result.num_served == len(trace)
    assert 100 * result.waste_fraction == pytest.approx(KNOWN_WASTE[page_size], abs=0.05)
    assert result.waste_fraction == pytest.approx(expected_waste_fraction(trace, page_size), rel=1e-12)


def test_concurrency_on_the_complete_conversation_trace() -> None:
    trace = complete("azure_llm_2023_conv.csv")
    study = run_study(trace, StudySettings(reserved_lengths=(2048, 16384), page_sizes=(128,)))
    shares = {row.policy: row.oracle_share for row in study.rows}
    assert shares["pages of 128"] >= 0.97
    assert shares["exact, first fit"] < 0.90
    assert shares["reserve 2,048"] < 0.75
    assert shares["reserve 16,384"] < 0.10
