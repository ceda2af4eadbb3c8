"""The ledger adds up to the arena, whatever happens to the pages."""

from __future__ import annotations

import numpy as np
import pytest

from kvarto.core.buffers import StepLimits
from kvarto.core.dtype import DType
from kvarto.core.ids import OwnerId
from kvarto.core.kv_format import KVFormat
from kvarto.core.layout import Budget, Layout, Region
from kvarto.memory.ledger import Ledger, OwnerKind
from kvarto.memory.page_pool import PagePool

NUM_PAGES = 64


def make_layout(num_pages: int = NUM_PAGES) -> Layout:
    kv_format = KVFormat(DType.F32, page_size=16, num_layer_slots=2, num_kv_heads=2, head_dim=16)
    weights, activations = Region("weights", 0, 3 * 4096), Region("activations", 3 * 4096, 4096)
    pages = Region("pages", activations.end, num_pages * kv_format.page_bytes)
    return Layout(
        budget=Budget(pages.end + 17, "test"),
        limits=StepLimits(16, 2, 2, 64),
        kv_format=kv_format,
        num_pages=num_pages,
        weights=weights,
        activations=activations,
        pages=pages,
        weight_offsets={},
        buffer_offsets={},
        scratch_offsets={},
        activation_lower_bound_bytes=4000,
        host_bytes=0,
        record_bytes=0,
    )


@pytest.fixture
def pool() -> PagePool:
    return PagePool(NUM_PAGES)


@pytest.fixture
def ledger(pool: PagePool) -> Ledger:
    return Ledger(make_layout(), pool)


def sizes(ledger: Ledger) -> dict[tuple[str, str], int]:
    """Pages by kind and state."""
    page_bytes = make_layout().kv_format.page_bytes
    return {(r.kind, r.state): r.size_bytes // page_bytes for r in ledger.rows() if r.region == "pages"}


def test_an_idle_arena_is_fixed_regions_and_free_pages(ledger: Ledger) -> None:
    layout = make_layout()
    assert ledger.region_bytes() == {
        "weights": 3 * 4096,
        "activations": 4096,
        "pages_free": layout.pages.size_bytes,
        "pages_kv": 0,
        "pages_adapter": 0,
    }
    ledger.check()


def test_each_page_is_in_the_row_of_its_owner_and_state(ledger: Ledger, pool: PagePool) -> None:
    kv, adapter = ledger.register("prefix cache", OwnerKind.KV), ledger.register("sql-lora", OwnerKind.ADAPTER)
    kept = pool.allocate(5, kv)
    pool.cache(kept[:3])
    pool.pin(kept[4:])
    pool.free(kept[1:])
    pool.allocate(7, adapter)
    found = sizes(ledger)
    assert found.pop(("free", "free")) == NUM_PAGES - 11
    assert {key: count for key, count in found.items() if count} == {
        ("kv", "held"): 1,
        ("kv", "evictable"): 2,
        ("kv", "draining"): 1,
        ("adapter", "held"): 7,
    }
    assert ledger.owner_bytes(adapter) == 7 * make_layout().kv_format.page_bytes
    assert ledger.region_bytes()["pages_kv"] == 4 * make_layout().kv_format.page_bytes
    ledger.check()


@pytest.mark.parametrize("seed", range(5))
def test_rows_add_up_through_a_random_life(ledger: Ledger, pool: PagePool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    owners = [ledger.register(f"owner {index}", kind) for index, kind in enumerate(list(OwnerKind) * 2)]
    taken: list[np.ndarray] = []
    for _ in range(300):
        if rng.random() < 0.5 and pool.num_free >= 4:
            pages = pool.allocate(int(rng.integers(1, 5)), owners[rng.integers(len(owners))])
            if rng.random() < 0.3:
                pool.cache(pages)
            taken.append(pages)
        elif taken:
            pool.free(taken.pop(rng.integers(len(taken))))
        ledger.check()
        assert sum(ledger.region_bytes().values()) == make_layout().total_bytes
    pool.check()


def test_pages_of_a_stranger_are_noticed(ledger: Ledger, pool: PagePool) -> None:
    pool.allocate(2, OwnerId(3))
    with pytest.raises(AssertionError, match="account for"):
        ledger.check()


def test_an_owner_retires_empty_and_leaves_its_id(ledger: Ledger, pool: PagePool) -> None:
    first, second = ledger.register("a", OwnerKind.ADAPTER), ledger.register("b", OwnerKind.ADAPTER)
    pages = pool.allocate(1, first)
    with pytest.raises(AssertionError, match="retires with 1 pages"):
        ledger.retire(first)
    pool.free(pages)
    ledger.retire(first)
    assert ledger.register("c", OwnerKind.KV) == first
    third = ledger.register("d", OwnerKind.KV)
    assert len({first, second, third}) == 3
    assert [owner.name for _, owner in sorted(ledger.owners.items())] == ["c", "b", "d"]


def test_the_table_ends_with_the_arena(ledger: Ledger, pool: PagePool) -> None:
    pool.allocate(1, ledger.register("prefix cache", OwnerKind.KV))
    lines = ledger.table().splitlines()
    assert [line.split()[0] for line in lines] == ["weights", "activations", "pages", "pages", "arena"]
    assert f"{make_layout().total_bytes:,}" in lines[-1]


def test_a_pool_of_another_size_is_refused() -> None:
    with pytest.raises(AssertionError, match="63 pages in the pool, 64 laid out"):
        Ledger(make_layout(), PagePool(63))
