"""plan(): regions back to back, no two live buffers overlap, exact sums; and what the default budget is."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarto.cache.kv_cache import KVCache
from kvarto.core.buffers import StepLimits
from kvarto.core.clock import VirtualClock
from kvarto.core.dtype import DType
from kvarto.core.errors import BudgetTooSmall
from kvarto.core.kv_format import KVFormat, LayerGroup
from kvarto.core.layout import Budget, Layout
from kvarto.core.ops import GatedActivation, Linear, Logits, Op
from kvarto.core.program import Program
from kvarto.core.units import GIB, MIB, ceil_div
from kvarto.memory.arbiter import Arbiter
from kvarto.memory.executors import VirtualExecutor
from kvarto.memory.page_pool import PagePool
from kvarto.memory.transfers import Transfers
from kvarto.planning.fixed import plan_fixed
from kvarto.planning.host_bytes import POOL_BYTES_PER_PAGE, host_bytes, record_bytes
from kvarto.planning.page_count import pages_for_sequence
from kvarto.planning.plan import default_device_bytes, plan
from tests.planning.programs import FAMILIES, LIMITS, family, tiny


def check_layout(layout: Layout, program: Program, scratch_bytes: dict[int, int]) -> None:
    """The laws of a layout, from the arena's bytes down to each op; shares no code with the planner."""
    assert layout.weights.offset == 0
    assert layout.weights.end == layout.activations.offset
    assert layout.activations.end == layout.pages.offset
    assert layout.pages.size_bytes == layout.num_pages * layout.kv_format.page_bytes
    sizes = [region.size_bytes for region in (layout.weights, layout.activations, layout.pages)]
    assert sum(sizes) == layout.total_bytes <= layout.budget.device_bytes
    assert all(region.offset % 4096 == 0 for region in (layout.activations, layout.pages))
    assert set(layout.weight_offsets) == set(program.weights)
    assert set(layout.buffer_offsets) == set(program.buffers)
    assert set(layout.scratch_offsets) == {index for index, size in scratch_bytes.items() if size}
    offsets = [*layout.weight_offsets.values(), *layout.buffer_offsets.values(), *layout.scratch_offsets.values()]
    assert all(offset % 64 == 0 for offset in offsets)
    check_weights(layout, program)
    check_activations(layout, program, scratch_bytes)


def check_weights(layout: Layout, program: Program) -> None:
    """Weights lie apart, inside their region, which is no larger than they and their alignment need."""
    spans = sorted(
        (offset, offset + program.weights[name].size_bytes) for name, offset in layout.weight_offsets.items()
    )
    assert all(0 <= after[0] - before[1] < 64 for before, after in pairwise(spans))
    assert spans[0][0] == 0
    assert 0 <= layout.weights.end - spans[-1][1] < 4096


def outlives(op: Op, following: Op) -> bool:
    """Whether the scratch of an op must be left alone by the one behind it."""
    return isinstance(op, Logits) or (isinstance(op, Linear) and isinstance(following, GatedActivation))


def lives_on(name: str, program: Program, index: int) -> bool:
    """Whether the linear before reads a buffer while it writes what is made of its gates."""
    before = program.ops[index - 1] if index > 0 else None
    return isinstance(before, Linear) and isinstance(program.ops[index], GatedActivation) and before.x == name


def check_activations(layout: Layout, program: Program, scratch_bytes: dict[int, int]) -> None:
    """At every op, what is live lies apart and inside the region."""
    lifespans = program.lifespans()
    fullest_bytes = 0
    for index in range(len(program.ops)):
        spans = [
            (offset, offset + program.buffers[name].size_bytes(layout.limits))
            for name, offset in layout.buffer_offsets.items()
            if lifespans[name][0] <= index < lifespans[name][1] or lives_on(name, program, index)
        ]
        spans += [
            (offset, offset + scratch_bytes[owner])
            for owner, offset in layout.scratch_offsets.items()
            if owner == index or (owner == index - 1 and outlives(program.ops[owner], program.ops[index]))
        ]
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans)), f"overlap at op {index}"
        assert all(layout.activations.offset <= start and end <= layout.activations.end for start, end in spans)
        fullest_bytes = max(fullest_bytes, sum(end - start for start, end in spans))
    assert layout.activation_lower_bound_bytes == fullest_bytes


@settings(max_examples=60, deadline=None)
@given(
    limits=st.builds(
        StepLimits,
        max_tokens=st.integers(1, 300),
        max_seqs=st.integers(1, 40),
        max_samples=st.integers(1, 100),
        max_context=st.integers(1, 512),
    ),
    num_layers=st.integers(1, 4),
    windows=st.sampled_from([(None,), (None, 24), (8, 40), (None, None, 100)]),
    scratch_bytes=st.dictionaries(st.integers(0, 12), st.integers(0, 70_000), max_size=6),
    page_size=st.sampled_from([8, 16, 64, 256]),
    kv_dtype=st.sampled_from([DType.F32, DType.BF16]),
    extra_bytes=st.integers(0, 3 * MIB),
)
def test_every_accepted_plan_keeps_the_laws(
    limits: StepLimits,
    num_layers: int,
    windows: tuple[int | None, ...],
    scratch_bytes: dict[int, int],
    page_size: int,
    kv_dtype: DType,
    extra_bytes: int,
) -> None:
    program = tiny(num_layers, windows=windows)
    needed = pages_for_sequence(program.layer_groups, page_size, limits.max_context, limits.max_tokens)
    page_bytes = program.kv_format(kv_dtype, page_size).page_bytes
    least = plan_fixed(program, limits, scratch_bytes).size_bytes + needed * page_bytes
    layout = plan(program, Budget(least + extra_bytes, "test"), limits, kv_dtype, page_size, scratch_bytes)
    check_layout(layout, program, scratch_bytes)
    assert layout.budget.device_bytes - layout.total_bytes < page_bytes, "a page more would fit"
    with pytest.raises(BudgetTooSmall):
        plan(program, Budget(least - 1, "test"), limits, kv_dtype, page_size, scratch_bytes)


def scratch_of(kind: str, program: Program, limits: StepLimits) -> dict[int, int]:
    """Scratch by op: none, some of any size, or what the reference backend asks for."""
    if kind == "none":
        return {}
    if kind == "some":
        return {index: 1000 * (index * 7919 % 97) for index in range(len(program.ops))}
    backend = pytest.importorskip("kvarto.ops.reference.backend").ReferenceBackend("cpu", 1)
    kv_format = program.kv_format(DType.F32, 16)
    return {index: backend.scratch_bytes(op, program, limits, kv_format) for index, op in enumerate(program.ops)}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("scratch", ["none", "some", "reference"])
def test_activation_peak_of_real_decoders_is_within_a_percent_of_its_bound(name: str, scratch: str) -> None:
    program = family(name)
    for max_tokens in (1, 16, 512, 2048):
        limits = StepLimits(max_tokens, 32, 32, program.max_positions)
        fixed = plan_fixed(program, limits, scratch_of(scratch, program, limits))
        assert fixed.activation_peak_bytes <= 1.01 * fixed.activation_lower_bound_bytes


@pytest.mark.parametrize("name", FAMILIES)
def test_real_decoders_keep_the_laws(name: str) -> None:
    program = family(name)
    limits = StepLimits(512, 32, 32, program.max_positions)
    scratch_bytes = dict.fromkeys(range(0, len(program.ops), 3), 65536)
    layout = plan(program, Budget(4 * GIB, "test"), limits, DType.F32, 16, scratch_bytes)
    check_layout(layout, program, scratch_bytes)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_default_is_two_thousand_tokens_per_sequence(name: str) -> None:
    program = family(name)
    limits = StepLimits(512, 32, 32, program.max_positions)
    default_bytes = default_device_bytes(program, limits, DType.F32, 16, {})
    layout = plan(program, Budget(default_bytes, "default"), limits, DType.F32, 16, {})
    assert layout.total_bytes == default_bytes
    per_sequence = pages_for_sequence(program.layer_groups, 16, 2048, 512)
    assert layout.num_pages == 32 * per_sequence
    assert per_sequence == (128 if name == "llama" else 128 + 97)  # a window keeps 1,023 + 512 tokens: 97 pages


def test_the_default_is_never_more_than_all_sequences_at_full_length() -> None:
    program = tiny()
    limits = replace(LIMITS, max_context=100)
    default_bytes = default_device_bytes(program, limits, DType.F32, 16, {})
    assert plan(program, Budget(default_bytes, "default"), limits, DType.F32, 16, {}).num_pages == 4 * 7


def test_the_default_holds_one_sequence_of_the_longest() -> None:
    program = family("llama")
    limits = StepLimits(512, 1, 1, 8192)
    default_bytes = default_device_bytes(program, limits, DType.F32, 16, {})
    assert plan(program, Budget(default_bytes, "default"), limits, DType.F32, 16, {}).num_pages == 512


def test_pages_take_exactly_what_was_asked_for_them() -> None:
    program = tiny()
    page_bytes = program.kv_format(DType.F32, 16).page_bytes
    layout = plan(program, Budget(GIB, "test", kv_bytes=100 * page_bytes + 5), LIMITS, DType.F32, 16, {})
    assert layout.num_pages == 100


def test_pages_can_be_capped_below_the_budget() -> None:
    layout = plan(tiny(), Budget(GIB, "test"), LIMITS, DType.F32, 16, {}, max_num_pages=40)
    assert layout.num_pages == 40


def test_plans_are_equal_when_asked_twice() -> None:
    budget = Budget(GIB, "test")
    assert plan(tiny(), budget, LIMITS, DType.F32, 16, {3: 999}) == plan(
        tiny(), budget, LIMITS, DType.F32, 16, {3: 999}
    )


def test_bookkeeping_counts_the_pool_as_it_is() -> None:
    pool = PagePool(10_000)
    arrays = (pool._free, pool._ref_count, pool._pin_count, pool._is_cached, pool._owner)
    assert sum(array.nbytes for array in arrays) == POOL_BYTES_PER_PAGE * pool.num_pages


def test_bookkeeping_counts_page_tables() -> None:
    long = replace(LIMITS, max_context=LIMITS.max_context * 2)
    more_bytes = host_bytes(2, 100, long, 16) - host_bytes(2, 100, LIMITS, 16)
    assert more_bytes == 2 * (2 * LIMITS.max_seqs * ceil_div(LIMITS.max_context, 16) * 4)


@pytest.mark.parametrize(("page_size", "num_pages"), [(8, 2048), (16, 1536), (64, 640), (256, 200)])
def test_bookkeeping_bounds_what_a_full_prefix_cache_takes(page_size: int, num_pages: int) -> None:
    groups = (LayerGroup((0,), 1, 1, 16, None),)
    clock = VirtualClock()
    transfers = Transfers(lambda source, target: None, clock, executor=VirtualExecutor(clock, lambda: 0.0))
    pool = PagePool(num_pages)
    cache = KVCache(
        pool=pool,
        arbiter=Arbiter(pool),
        transfers=transfers,
        groups=groups,
        kv_format=KVFormat(DType.F32, page_size, 1, 1, 16),
        identity=b"test",
        key=b"k" * 32,
        enable_prefix_caching=True,
        recompute_cost_s=lambda first_token, num_tokens: 1e-3,
    )
    tracemalloc.start()
    try:
        for number in range(num_pages * page_size // 2048):
            token_ids = list(range(number * 2048, (number + 1) * 2048))
            sequence = cache.open(token_ids, salt=None)
            cache.grow(sequence, 2048)
            cache.commit(sequence, token_ids)
            cache.close(sequence)
        del sequence, token_ids
        gc.collect()
        taken_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert pool.num_evictable > 0.9 * num_pages
    assert taken_bytes <= record_bytes(pool.num_evictable, page_size)
