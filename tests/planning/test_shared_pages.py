"""Shared pages: an unbounded pool finds every block that was ever there, a bounded one no more than fits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvarto.planning.fragmentation import Replay
from kvarto.planning.paging_study import hit_curve
from kvarto.planning.shared_pages import SharedPages, lru_hit_fraction
from kvarto.planning.traces import Trace
from tests.planning.test_fragmentation import random_trace
from tests.traces import complete, mooncake_excerpt

TOKEN_BYTES = 512


def ideal_hit_fraction(trace: Trace) -> float:
    """Blocks whose id came before, over all blocks."""
    assert trace.block_ids is not None
    seen: set[int] = set()
    num_hits = num_blocks = 0
    for ids in trace.block_ids:
        num_hits += sum(block_id in seen for block_id in ids.tolist())
        num_blocks += len(ids)
        seen.update(ids.tolist())
    return num_hits / num_blocks


def plain_lru(trace: Trace, num_blocks: int) -> float:
    """The same cache as a list, most recent first."""
    assert trace.block_ids is not None
    cache: list[int] = []
    num_hits = num_queries = 0
    for ids in map(np.ndarray.tolist, trace.block_ids):
        num_queries += len(ids)
        is_prefix = True
        for block_id in ids:
            is_prefix = is_prefix and block_id in cache
            num_hits += is_prefix
        for block_id in reversed(ids):
            if block_id in cache:
                cache.remove(block_id)
            cache.insert(0, block_id)
        del cache[num_blocks:]
    return num_hits / num_queries


def replay(trace: Trace, policy: SharedPages, budget_bytes: int) -> None:
    Replay(trace, policy, budget_bytes, TOKEN_BYTES, np.arange(len(trace)) * 3).run()
    policy.check()


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("make", [mooncake_excerpt, lambda: random_trace(4)])
def test_an_unbounded_pool_finds_every_block_that_came_before(make: Callable[[], Trace], page_size: int) -> None:
    trace = make()
    page_size = min(page_size, trace.block_tokens)
    budget = 4 * int(trace.num_prompt_tokens.sum() + trace.num_output_tokens.sum()) * TOKEN_BYTES
    policy = SharedPages(budget, TOKEN_BYTES, page_size, trace)
    replay(trace, policy, budget)
    assert policy.hit_fraction == ideal_hit_fraction(trace) == lru_hit_fraction(trace, None)
    assert policy.hit_fraction > 0


@pytest.mark.parametrize("num_pages", [60, 200, 1000])
def test_a_bounded_pool_finds_fewer_and_loses_no_page(num_pages: int) -> None:
    trace = random_trace(6)
    budget = num_pages * 8 * TOKEN_BYTES
    policy = SharedPages(budget, TOKEN_BYTES, 8, trace)
    replay(trace, policy, budget)
    assert policy.hit_fraction <= ideal_hit_fraction(trace)
    assert policy.pool.num_free + policy.pool.num_evictable == num_pages


@pytest.mark.parametrize("num_blocks", [1, 5, 40, 150, 10_000])
def test_the_curve_is_that_of_a_plain_lru(num_blocks: int) -> None:
    for trace in (random_trace(8), mooncake_excerpt()):
        assert lru_hit_fraction(trace, num_blocks) == plain_lru(trace, num_blocks)


def test_the_curve_never_falls_and_ends_at_the_ideal() -> None:
    curve = hit_curve(mooncake_excerpt(), TOKEN_BYTES)
    hits = [point.hit_fraction for point in curve]
    assert hits == sorted(hits)
    assert hits[-1] == ideal_hit_fraction(mooncake_excerpt())
    assert hits[0] < hits[-1]


def test_the_complete_mooncake_trace_hits_the_ideal_share_of_blocks() -> None:
    trace = complete("mooncake_conversation.jsonl")
    assert ideal_hit_fraction(trace) == pytest.approx(0.366, abs=0.0005)
    num_blocks = len(np.unique(np.concatenate(trace.block_ids or ())))
    budget = 2 * num_blocks * trace.block_tokens * TOKEN_BYTES
    policy = SharedPages(budget, TOKEN_BYTES, 128, trace)
    Replay(trace, policy, budget, TOKEN_BYTES, (trace.arrival_s / 0.03).astype(np.int64)).run()
    policy.check()
    assert policy.hit_fraction == ideal_hit_fraction(trace) == lru_hit_fraction(trace, num_blocks)


def test_equal_ids_of_partial_blocks_with_other_lengths_are_no_hit() -> None:
    """A file may say so, wrongly; pages are then not shared, and none is lost."""
    ids = (np.array([1, 2]), np.array([1, 2]), np.array([1, 2]))
    trace = Trace("t", np.zeros(3), np.array([40, 60, 40]), np.array([3, 3, 3]), ids, block_tokens=32)
    policy = SharedPages(100 * 8 * TOKEN_BYTES, TOKEN_BYTES, 8, trace)
    replay(trace, policy, 100 * 8 * TOKEN_BYTES)
    assert policy.num_hit_blocks == 0 + 1 + 2
