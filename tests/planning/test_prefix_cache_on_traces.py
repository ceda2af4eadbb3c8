"""The server's own prefix cache on Mooncake's prompts: with room for everything it finds what was there before."""

from __future__ import annotations

import time
from array import array

import numpy as np
import pytest

from kvarto.cache.kv_cache import KVCache
from kvarto.core.clock import MonotonicClock
from kvarto.core.dtype import DType
from kvarto.core.kv_format import KVFormat, LayerGroup
from kvarto.memory.arbiter import Arbiter
from kvarto.memory.page_pool import PagePool
from kvarto.memory.transfers import Transfers
from kvarto.planning.traces import Trace
from tests.traces import complete, mooncake_excerpt

PAGE_SIZE = 128
MATCH_TOKENS = 16


def block_tokens(trace: Trace, block_id: int) -> array[int]:
    rng = np.random.default_rng(block_id)
    return array("i", rng.integers(0, 50_000, trace.block_tokens, dtype=np.int32).tobytes())


def prompt(trace: Trace, request: int) -> array[int]:
    assert trace.block_ids is not None
    tokens = array("i")
    for block_id in trace.block_ids[request].tolist():
        tokens.extend(block_tokens(trace, block_id))
    return tokens[: int(trace.num_prompt_tokens[request])]


def known_tokens(trace: Trace) -> list[int]:
    """Of each prompt, the tokens in blocks that came before; the last token of a prompt is always computed."""
    assert trace.block_ids is not None
    seen: set[int] = set()
    known = []
    for ids, length in zip(trace.block_ids, trace.num_prompt_tokens.tolist(), strict=True):
        num_blocks = sum(block_id in seen for block_id in ids.tolist())
        known.append(min(num_blocks * trace.block_tokens, length - 1))
        seen.update(ids.tolist())
    return known


def cached_tokens(trace: Trace) -> list[int]:
    """What the cache says of each prompt, one request after the other, in a pool that holds all blocks."""
    num_blocks = len(np.unique(np.concatenate(trace.block_ids or ())))
    num_pages = (num_blocks + 2 * len(trace)) * trace.block_tokens // PAGE_SIZE
    pool, group = PagePool(num_pages), LayerGroup((0,), 1, 1, 1, None)
    transfers = Transfers(lambda source, target: None, MonotonicClock())
    kv_format = KVFormat(DType.F32, PAGE_SIZE, 1, 1, 1)
    cache = KVCache(
        pool=pool, arbiter=Arbiter(pool), transfers=transfers, groups=(group,), kv_format=kv_format, identity=b"trace",
        key=bytes(32), enable_prefix_caching=True, recompute_cost_s=lambda first, count: count * 1e-6,
    )  # fmt: skip
    found = []
    try:
        for request in range(len(trace)):
            tokens = prompt(trace, request)
            sequence = cache.open(tokens, salt=None)
            while not cache.is_ready(sequence):
                time.sleep(0)  # the copy thread's turn
            found.append(sequence.num_computed_tokens)
            cache.grow(sequence, len(tokens))
            cache.commit(sequence, tokens[sequence.num_computed_tokens :])
            cache.close(sequence)
        cache.check()
    finally:
        transfers.close()
    return found


def compare(trace: Trace) -> None:
    found, known = np.array(cached_tokens(trace)), np.array(known_tokens(trace))
    assert known.sum() > 0
    # Only the last few tokens of a prompt that came before whole can be missing: less than a match unit.
    is_whole_prompt = known == trace.num_prompt_tokens - 1
    assert (found >= np.where(is_whole_prompt, known - MATCH_TOKENS + 1, known)).all()
    # A token more where a new block happens to begin like a known one.
    assert found.sum() <= known.sum() * 1.001


def test_it_finds_every_block_of_the_excerpt_that_came_before() -> None:
    compare(mooncake_excerpt())


@pytest.mark.heavy
def test_it_finds_every_block_of_the_complete_trace_that_came_before() -> None:
    compare(complete("mooncake_conversation.jsonl"))
