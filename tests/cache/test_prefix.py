"""What the prefix cache finds: exactly what it may, never what it must not, whatever the page size."""

from __future__ import annotations

import random

import pytest

from kvarto.cache.digests import MATCH_UNIT
from kvarto.cache.kv_cache import KV_OWNER
from kvarto.planning.page_count import pages_for_sequence
from tests.cache.world import Choice, Scene, World, confused_digests, truncated_digests

PAGE_SIZES = (8, 16, 32, 64, 128, 256)


def compute(world: World, choice: Choice, chunk: int = 512, is_checked: bool = True) -> Choice:
    """All its tokens, waiting for copies."""
    while choice.num_computed < len(choice.tokens):
        if world.advance(choice, min(chunk, len(choice.tokens) - choice.num_computed)) == "waits":
            world.tick(0.5)
    if is_checked:
        world.check()
    return choice


def serve(
    world: World, tokens: list[int], salt: str | None = None, adapter: bytes = b"", is_checked: bool = True
) -> int:
    """A whole request; returns what was cached of it."""
    choice = compute(world, world.open(tokens, salt, adapter), is_checked=False)
    world.close(choice)
    if is_checked:
        world.check()
    return choice.sequence.num_cached_tokens


def common(a: list[int], b: list[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


@pytest.mark.parametrize("windows", [(None,), (None, None)])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_hits_are_the_longest_common_prefix_at_any_page_size(page_size: int, windows: tuple[None, ...]) -> None:
    """Token by token: with everything still cached, the whole match units of all earlier requests can be reused."""
    world = World(Scene(page_size=page_size, windows=windows, num_pages=4000))
    rng = random.Random(page_size)
    served: list[list[int]] = []
    for _ in range(40):
        base = rng.choice(served)[: rng.randrange(400)] if served and rng.random() < 0.8 else []
        tokens = base + [rng.randrange(3) for _ in range(rng.randrange(1, 300))]
        cached = [old[: len(old) // MATCH_UNIT * MATCH_UNIT] for old in served]
        ideal = min(len(tokens) - 1, max((common(tokens, old) for old in cached), default=0))
        assert serve(world, tokens) == ideal
        served.append(tokens)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_many_siblings_hide_no_match_unit(page_size: int) -> None:
    """More prompts that differ early than are compared token by token: whole units are found all the same."""
    world = World(Scene(page_size=page_size, num_pages=4000))
    prompts = [[1] * 40 + [index // 16, index % 16] * 20 for index in range(160)]
    for prompt in prompts:
        serve(world, prompt, is_checked=False)
    for prompt in prompts[:5]:
        assert serve(world, prompt[:70] + [7] * 9) >= 70 // MATCH_UNIT * MATCH_UNIT


def test_units_of_a_running_sequence_are_shared() -> None:
    world = World(Scene(page_size=64, num_pages=20))
    first = compute(world, world.open([1] * 100))
    second = world.open([1] * 100)
    assert second.sequence.num_cached_tokens == 96
    compute(world, second)
    world.close(first)
    world.drain()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_one_token_is_always_computed(page_size: int) -> None:
    world = World(Scene(page_size=page_size, num_pages=200))
    for length in (1, 15, 16, 17, 256, 512):
        serve(world, [5] * length)
        assert serve(world, [5] * length) <= length - 1


def test_salt_and_adapter_separate() -> None:
    world = World(Scene(num_pages=400))
    keys = [(salt, adapter) for salt in (None, "", "a", "b", "A\x00") for adapter in (b"", b"a", b"b", b"\x00")]
    for salt, adapter in keys:
        assert serve(world, [1] * 64, salt, adapter) == 0
    for salt, adapter in keys:
        assert serve(world, [1] * 64, salt, adapter) == 63


@pytest.mark.parametrize("num_values", [1, 2, 5])
@pytest.mark.parametrize(("page_size", "windows"), [(8, (None,)), (16, (None,)), (16, (40,)), (64, (None, 24))])
def test_a_collision_of_digests_never_serves_other_tokens(
    page_size: int, windows: tuple[int | None, ...], num_values: int
) -> None:
    """The world compares every number that attention would read; and equal prompts may still meet."""
    with truncated_digests(num_values):
        world = World(Scene(page_size=page_size, windows=windows, num_pages=200))
        rng = random.Random(num_values)
        prompts = [[rng.randrange(2) for _ in range(rng.randrange(1, 150))] for _ in range(20)]
        for _ in range(100):
            serve(world, rng.choice(prompts), rng.choice((None, "a", "b")))
        world.drain()


def test_the_second_copy_of_the_same_tokens_is_not_cached_and_its_rest_is() -> None:
    world = World(Scene(num_pages=100))
    first, second = world.open([1] * 64 + [2] * 64), world.open([1] * 64 + [3] * 64)
    compute(world, first, 32)
    compute(world, second, 32)
    assert world.pool.num_held == 16, "page tables are not rewritten"
    world.close(first)
    world.close(second)
    assert world.pool.num_evictable == 12
    assert serve(world, [1] * 64 + [2] * 64) == 127
    assert serve(world, [1] * 64 + [3] * 64) == 127
    world.drain()


def test_a_collision_when_a_sequence_closes_leads_to_no_other_chain() -> None:
    """Published late, under the digest of other tokens with the same parent: what follows must not land below them."""
    with confused_digests([1] * 16, [2] * 16):
        world = World(Scene(page_size=16, num_pages=100))
        serve(world, [1] * 16 + [9] * 16)
        serve(world, [2] * 16 + [5] * 16)
        serve(world, [2] * 16 + [5] * 16)
        assert serve(world, [1] * 16 + [5] * 17) == 16
        world.drain()


def test_without_prefix_caching_nothing_stays() -> None:
    world = World(Scene(num_pages=100, is_caching=False))
    assert serve(world, [1] * 200) == serve(world, [1] * 200) == 0
    assert world.pool.num_free == 100


def test_use_prefix_false_computes_again_and_does_not_spoil_the_cache() -> None:
    world = World(Scene(num_pages=100))
    serve(world, [1] * 64)
    choice = compute(world, world.open([1] * 64 + [2] * 32, use_prefix=False))
    assert choice.sequence.num_cached_tokens == 0
    world.close(choice)
    assert serve(world, [1] * 64 + [2] * 32) == 95
    assert world.cache.stats.query_tokens == 64 + 96
    assert world.cache.stats.hit_tokens == 95


def test_chains_are_evicted_from_their_ends_and_the_prefix_in_use_stays() -> None:
    world = World(Scene(num_pages=64))
    shared = [1] * 160
    for index in range(40):
        serve(world, shared + [10 + index] * 160)
    assert serve(world, shared + [99] * 16) >= 160


def test_a_partial_match_is_given_up_when_pages_are_short() -> None:
    world = World(Scene(page_size=16, num_pages=8))
    serve(world, [1] * 32)
    other = compute(world, world.open([2] * 96))
    choice = world.open([1] * 24)
    assert choice.sequence.num_cached_tokens == 16
    world.check()
    world.close(other)
    compute(world, choice)
    world.drain()


def test_the_source_of_a_partial_match_stays_until_it_is_copied() -> None:
    world = World(Scene(page_size=16, num_pages=4, copy_s=2.0))
    serve(world, [1] * 32)
    choice = world.open([1] * 24)
    assert choice.sequence.num_cached_tokens == 23
    world.close(choice)
    assert world.pool.num_draining == 2
    assert world.arbiter.reclaim(4, KV_OWNER) == 0, "the copied page cannot go, nor the page below it"
    world.tick(2.0)
    world.tick(0.0)
    assert world.pool.num_draining == 0
    assert world.arbiter.reclaim(4, KV_OWNER) == 2
    world.drain()


@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize("windows", [(None, 24), (40,), (7, 40, None), (1, None), (100, 100, None)])
@pytest.mark.parametrize("chunk", [1, 13, 64])
def test_a_window_keeps_no_more_pages_than_planned(page_size: int, windows: tuple[int | None, ...], chunk: int) -> None:
    world = World(Scene(page_size=page_size, windows=windows, num_pages=400, is_caching=False))
    choice = world.open([0] * 300)
    peak = 0
    planned = pages_for_sequence(world.groups, page_size, 300, chunk)
    while choice.num_computed < 300:
        need = min(300, choice.num_computed + chunk)
        assert world.pool.num_held + world.cache.pages_to_reach(choice.sequence, 300, chunk) == planned
        world.cache.grow(choice.sequence, need)
        peak = max(peak, world.pool.num_held)
        assert world.pool.num_held <= pages_for_sequence(world.groups, page_size, need, chunk)
        world.cache.commit(choice.sequence, choice.tokens[choice.num_computed : need])
        world.check()
    if chunk == 1:
        assert peak == planned, "the plan counts pages that never are"


@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize("windows", [(None, 24), (40,), (7, 40, None)])
def test_a_windowed_prefix_matches_up_to_where_its_window_is_cached(
    page_size: int, windows: tuple[int | None, ...]
) -> None:
    world = World(Scene(page_size=page_size, windows=windows, num_pages=400))
    serve(world, [1] * 300)
    assert serve(world, [1] * 300 + [2] * 100) == 288
    assert serve(world, [1] * 100 + [3] * 10) == 100, "pages behind the window are still cached, while there is room"
    world.drain()


def test_a_match_ends_where_a_windows_pages_are_gone() -> None:
    """Pages in the middle went first, since a window let go of them first; the end of the chain still matches."""
    world = World(Scene(page_size=16, windows=(None, 32), num_pages=40))
    serve(world, [1] * 256)
    world.arbiter.reclaim(8, KV_OWNER)
    assert serve(world, [1] * 256 + [2]) == 256
    assert serve(world, [1] * 64 + [3]) == 0
    world.drain()


@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize("windows", [(None,), (None, 24), (40, 16), (None, None)])
@pytest.mark.parametrize("chunk", [1, 32])
def test_the_longest_sequence_fits_alone_and_no_longer_one(
    page_size: int, windows: tuple[int | None, ...], chunk: int
) -> None:
    world = World(Scene(page_size=page_size, windows=windows, num_pages=24))
    most = world.cache.max_tokens(chunk)
    for others in (0, 5, 30):
        longest = world.cache.max_tokens(chunk, others)
        near = range(max(0, min(longest, 1 << 40) - 70), longest + 70)
        assert all(world.cache.fits(length, chunk, others) == (length <= longest) for length in near)
    for trial in (1, 2):  # the second time against a full prefix cache
        tokens = [trial] * min(most, 2000)
        choice = compute(world, world.open(tokens), chunk)
        if most < 2000:
            assert world.cache.pages_to_grow(choice.sequence, most + chunk) > world.cache.num_available_pages
        world.close(choice)
    world.drain()
