"""Chains that leave the base's where an adapter begins: what comes before is shared with it, no more and no less."""

from __future__ import annotations

import random

import pytest

from kvarto.cache.digests import MATCH_UNIT
from kvarto.cache.kv_cache import KV_OWNER
from tests.cache.test_prefix import common, compute
from tests.cache.world import Scene, World

PAGE_SIZES = (8, 16, 64)
TOKENS = [index * index % 7 for index in range(400)]


def serve(world: World, tokens: list[int], adapter: bytes = b"", start: int = 0, salt: str | None = None) -> int:
    """A whole request; returns what was cached of it."""
    choice = compute(world, world.open(tokens, salt, adapter, start=start))
    world.close(choice)
    world.check()
    return choice.sequence.num_cached_tokens


def whole_units(num_tokens: int) -> int:
    return num_tokens // MATCH_UNIT * MATCH_UNIT


@pytest.mark.parametrize("start", [5, 16, 64, 100, 128, 199])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_what_the_base_computed_serves_until_the_adapter_begins(page_size: int, start: int) -> None:
    world = World(Scene(page_size=page_size, num_pages=200))
    serve(world, TOKENS[:200])
    assert serve(world, TOKENS[:200], b"a", start) == min(start, whole_units(200))
    assert serve(world, TOKENS[:300], b"a", start) == whole_units(200)
    assert serve(world, TOKENS[:300], b"b", start) == min(start, whole_units(200))
    assert serve(world, TOKENS[:300], b"a", start, salt="tenant") == 0


@pytest.mark.parametrize("start", [5, 64, 100, 199])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_base_is_served_by_whole_pages_before_the_adapter_begins(page_size: int, start: int) -> None:
    world = World(Scene(page_size=page_size, num_pages=200))
    serve(world, TOKENS[:200], b"a", start)
    entry = max(page_size, MATCH_UNIT)
    assert serve(world, TOKENS[:200]) == start // entry * entry
    assert serve(world, TOKENS[:200], b"a") == 0, "active from the first token, it is another chain"
    assert serve(world, TOKENS[:200], b"b", start) == min(start, whole_units(200))


def test_another_place_of_the_same_adapter_is_another_chain() -> None:
    world = World(Scene(num_pages=200))
    serve(world, TOKENS[:300], b"a", 100)
    assert serve(world, TOKENS[:300], b"a", 180) == 96, "up to the page in which it began before"
    assert serve(world, TOKENS[:300], b"a", 50) == 50
    assert serve(world, TOKENS[:300], b"a", 100) == whole_units(300)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("windows", [(None,), (None, 24), (40,)])
def test_hits_are_never_more_than_the_same_kv_in_any_order(page_size: int, windows: tuple[int | None, ...]) -> None:
    """The world compares each number that attention would read; here, that nothing cached is missed either."""
    world = World(Scene(page_size=page_size, windows=windows, num_pages=4000))
    rng = random.Random(page_size)
    served: list[tuple[list[int], bytes, int]] = []
    for _ in range(60):
        base = rng.choice(served)[0][: rng.randrange(300)] if served and rng.random() < 0.8 else []
        tokens = base + [rng.randrange(3) for _ in range(rng.randrange(2, 200))]
        adapter = rng.choice((b"", b"a", b"b"))
        start = rng.randrange(1, len(tokens)) if adapter else 0
        hits = serve(world, tokens, adapter, start)
        if windows == (None,):
            assert hits == max((_shared(tokens, adapter, start, *each, page_size) for each in served), default=0)
        served.append((tokens, adapter, start))


def _shared(
    tokens: list[int], adapter: bytes, start: int, old: list[int], old_adapter: bytes, old_start: int, page_size: int
) -> int:
    """Tokens of a request that one before it has in the cache: all of them, or those before either's adapter begins,
    which the older one has as the base's in whole pages.
    """
    entry = max(page_size, MATCH_UNIT)
    same = min(len(tokens) - 1, common(tokens, old[: whole_units(len(old))]))
    if (adapter, start) == (old_adapter, old_start):
        return same
    of_base = same if not old_adapter else min(same, old_start // entry * entry)
    return of_base if not adapter else min(of_base, start)


def test_kv_of_an_adapter_goes_before_it_and_before_the_kv_of_the_base_that_it_follows() -> None:
    world = World(Scene(num_pages=40, has_adapters=True))
    serve(world, TOKENS[:200], b"a", 100)
    adapter = world.adapters.loaded["a"]
    assert adapter.num_dependents == 1, "the first page of the adapter"
    while world.pool.num_evictable:
        world.arbiter.reclaim(1, KV_OWNER)
        world.check()
        num_left = sum(1 for _ in world.cache._index.entries())
        assert not world.adapters.evicted or num_left <= 6, "KV is there that nobody can use without its adapter"
    assert world.adapters.evicted == ["a"]
    assert world.pool.num_free == 40


def test_an_adapter_that_is_dropped_takes_its_kv_along_and_leaves_the_bases() -> None:
    world = World(Scene(num_pages=60, has_adapters=True))
    serve(world, TOKENS[:200], b"a", 100)
    serve(world, TOKENS[:200], b"b", 70)
    world.drop_adapter("a")
    world.check()
    assert serve(world, TOKENS[:200]) == 96
    assert serve(world, TOKENS[:200], b"b", 70) == whole_units(200)
    world.drop_adapter("b")
    world.drain()
