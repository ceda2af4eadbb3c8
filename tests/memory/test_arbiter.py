"""Who has to go: the order against a plain sort, dependents, floors, and two owners."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvarto.core.ids import OwnerId
from kvarto.memory.arbiter import Arbiter, Unit
from kvarto.memory.page_pool import PagePool
from tests.cache.adapters import FakeAdapters

KV, ADAPTERS = OwnerId(0), OwnerId(1)


class TwoOwners:
    def __init__(self, num_pages: int = 100, *, kv_floor: int = 0, adapter_floor: int = 0) -> None:
        self.pool = PagePool(num_pages)
        self.arbiter = Arbiter(self.pool)
        self.kv = FakeAdapters(self.pool, self.arbiter, owner=KV, floor_pages=kv_floor)
        self.adapters = FakeAdapters(self.pool, self.arbiter, owner=ADAPTERS, floor_pages=adapter_floor)

    def check(self) -> None:
        self.pool.check()
        self.arbiter.check()


def put(owner: FakeAdapters, name: str, num_pages: int, cost_s: float, depends_on: Unit | None = None) -> Unit:
    """Load, use once and let go."""
    assert owner.load(name, num_pages, cost_s, depends_on)
    owner.release(name)
    return owner.loaded[name]


def test_least_cost_per_page_goes_first_across_owners() -> None:
    both = TwoOwners()
    rng = random.Random(1)
    costs = {}
    for index in range(30):
        owner = both.kv if index % 2 else both.adapters
        num_pages, cost_s = rng.randrange(1, 4), rng.random()
        put(owner, str(index), num_pages, cost_s)
        costs[str(index)] = cost_s / num_pages
    while both.pool.num_evictable:
        expected = min(costs, key=lambda name: costs[name])
        assert both.arbiter.reclaim(1, KV) >= 1
        evicted = both.kv.evicted + both.adapters.evicted
        assert expected in evicted
        del costs[expected]
        assert len(evicted) == 30 - len(costs), "more was evicted than needed"
        both.check()


def test_what_is_used_often_stays_longer() -> None:
    both = TwoOwners()
    put(both.kv, "often", 1, 1.0)
    put(both.kv, "once", 1, 2.0)
    for _ in range(2):
        both.kv.load("often", 1)
        both.kv.release("often")
    both.arbiter.reclaim(1, KV)
    assert both.kv.evicted == ["once"]


def test_old_favourites_fade() -> None:
    """A unit with many uses long ago goes before fresh ones, once enough others came and went."""
    both = TwoOwners(num_pages=4)
    put(both.kv, "favourite", 1, 1.0)
    for _ in range(9):
        both.kv.load("favourite", 1)
        both.kv.release("favourite")
    for index in range(200):
        put(both.kv, str(index), 1, 1.0)
        if "favourite" in both.kv.evicted:
            break
    assert 8 <= index < 40, f"a favourite with ten uses left after {index} others"


def test_equal_units_go_in_the_order_in_which_they_were_let_go() -> None:
    both = TwoOwners()
    for name in "cab":
        put(both.kv, name, 1, 1.0)
    both.arbiter.reclaim(3, KV)
    assert both.kv.evicted == ["c", "a", "b"]


def test_dependents_go_first_across_owners() -> None:
    """The KV of an adapter before the adapter, though the adapter is the cheapest of all."""
    both = TwoOwners()
    adapter = put(both.adapters, "adapter", 4, 0.001)
    prefix = put(both.kv, "prefix", 1, 50.0, adapter)
    put(both.kv, "longer", 1, 90.0, prefix)
    put(both.kv, "other", 1, 10.0)
    order = []
    while both.pool.num_evictable:
        both.arbiter.reclaim(1, KV)
        order.append(both.kv.evicted + both.adapters.evicted)
    assert order[0] == ["other"]
    assert both.kv.evicted == ["other", "longer", "prefix"]
    assert both.adapters.evicted == ["adapter"]


def test_a_unit_in_use_keeps_what_it_depends_on() -> None:
    both = TwoOwners()
    adapter = put(both.adapters, "adapter", 4, 0.001)
    both.kv.load("prefix", 1, 1.0, adapter)
    assert both.arbiter.reclaim(1, KV) == 0
    both.kv.release("prefix")
    assert both.arbiter.reclaim(5, KV) == 5


def test_uses_are_handed_down_to_what_a_unit_depended_on() -> None:
    both = TwoOwners()
    base = put(both.kv, "base", 1, 1.0)
    for name in ("a", "b", "c"):
        put(both.kv, name, 1, 0.5, base)
    put(both.kv, "single", 1, 2.0)
    both.arbiter.reclaim(4, KV)
    assert both.kv.evicted == ["a", "b", "c", "single"], "four uses of `base` outweigh one that costs twice as much"


def test_a_floor_protects_from_others_and_not_from_oneself() -> None:
    both = TwoOwners(num_pages=10, adapter_floor=3)
    for index in range(5):
        put(both.adapters, f"adapter {index}", 1, 0.001)
    assert both.arbiter.num_available(KV) == 5 + 2
    assert both.arbiter.num_available(ADAPTERS) == 10
    assert both.arbiter.reclaim(5, KV) == 2
    assert both.arbiter.reclaim(5, KV) == 0
    assert both.arbiter.num_available(KV) == 7
    assert both.arbiter.reclaim(1, ADAPTERS) == 1
    both.check()


def test_held_pages_count_towards_the_floor() -> None:
    both = TwoOwners(num_pages=10, adapter_floor=3)
    both.adapters.load("used", 2)
    put(both.adapters, "a", 1, 1.0)
    put(both.adapters, "b", 1, 1.0)
    assert both.arbiter.num_available(KV) == 6 + 1
    assert both.arbiter.reclaim(2, KV) == 1


def test_a_pinned_unit_waits_and_is_not_lost() -> None:
    both = TwoOwners()
    unit = put(both.kv, "pinned", 2, 0.1)
    put(both.kv, "other", 1, 9.0)
    pinned = np.array(unit.pages[:1], dtype=np.int32)
    both.pool.pin(pinned)
    assert both.arbiter.reclaim(1, KV) == 1
    assert both.kv.evicted == ["other"]
    assert both.arbiter.reclaim(1, KV) == 0
    both.pool.unpin(pinned)
    assert both.arbiter.reclaim(1, KV) == 2


@pytest.mark.parametrize("seed", range(5))
def test_everything_unused_can_be_reclaimed_and_nothing_else(seed: int) -> None:
    both = TwoOwners(num_pages=40)
    rng = random.Random(seed)
    for _ in range(2000):
        owner = rng.choice((both.kv, both.adapters))
        name = f"{rng.randrange(12)}"
        if owner.num_users.get(name) and rng.random() < 0.6:
            owner.release(name)
        elif sum(owner.num_users.values()) < 6:
            others = list(both.adapters.loaded.values()) if owner is both.kv else []
            owner.load(name, rng.randrange(1, 4), rng.random(), rng.choice([*others, None]))
        if rng.random() < 0.1:
            evictable, wanted = both.pool.num_evictable, rng.randrange(1, 8)
            assert both.arbiter.reclaim(wanted, KV) <= evictable
        both.check()
    for owner in (both.kv, both.adapters):
        for name, users in list(owner.num_users.items()):
            for _ in range(users):
                owner.release(name)
    both.arbiter.reclaim(40, KV)
    assert both.pool.num_free == 40


def test_the_heap_does_not_grow_with_time() -> None:
    both = TwoOwners(num_pages=8)
    for index in range(5000):
        put(both.kv, str(index % 20), 1, 1.0 + index % 7)
    assert len(both.arbiter._heap) < 2000
