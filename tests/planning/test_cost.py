"""Costs: what is known in closed form, additivity, and the fast form against the walk over all ops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarto.core.buffers import Cost, StepShape
from kvarto.planning.cost import RecomputeCost, chunk_shape, cost, recompute_seconds, step_seconds
from tests.planning.programs import FAMILIES, FFN, HEADS, HIDDEN, family, tiny

PROGRAM = tiny()


def test_attention_of_a_chunk_is_a_triangle_on_a_rectangle() -> None:
    for first, length in [(0, 0), (0, 1), (0, 5), (7, 4)]:
        shape = chunk_shape(first, length)
        assert shape.context_tokens == sum(position + 1 for position in range(first, first + length))
    assert chunk_shape(7, 4).unique_context_tokens == 11


def test_flops_of_one_more_token_are_two_per_weight_and_small_change() -> None:
    one, two = (cost(PROGRAM, StepShape(n, 0, 0, 0)).flops for n in (1, 2))
    per_layer = HIDDEN * HEADS.width + HIDDEN * HIDDEN + 3 * HIDDEN * FFN
    assert 1.0 <= (two - one) / (2 * 3 * per_layer) < 1.05


def test_the_bytes_read_contain_every_weight_that_is_no_table() -> None:
    weights = sum(weight.size_bytes for name, weight in PROGRAM.weights.items() if name != "embed")
    nothing = cost(PROGRAM, StepShape(0, 0, 0, 0))
    assert nothing.bytes_read - PROGRAM.weights["embed"].size_bytes == weights  # the logits read the tied table
    assert (nothing.flops, nothing.bytes_written) == (0, 0)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_a_chunk_costs_what_its_halves_cost_but_for_weights(first: int, left: int, right: int) -> None:
    whole = cost(PROGRAM, chunk_shape(first, left + right)).flops
    parts = [cost(PROGRAM, chunk_shape(first, left)), cost(PROGRAM, chunk_shape(first + left, right))]
    assert whole == parts[0].flops + parts[1].flops


def test_the_slower_of_arithmetic_and_memory_decides() -> None:
    shape = chunk_shape(0, 64)
    total = cost(PROGRAM, shape)
    moved = total.bytes_read + total.bytes_written
    assert step_seconds(PROGRAM, shape, 1e9, 1e30) == pytest.approx(total.flops / 1e9)
    assert step_seconds(PROGRAM, shape, 1e30, 1e9) == pytest.approx(moved / 1e9)
    both = step_seconds(PROGRAM, shape, 1e9, 1e9)
    assert max(total.flops, moved) / 1e9 <= both <= (total.flops + moved) / 1e9


@pytest.mark.parametrize("name", [*FAMILIES, "tiny"])
def test_the_fast_form_equals_the_walk(name: str) -> None:
    program = PROGRAM if name == "tiny" else family(name)
    fast = RecomputeCost.of(program, 1e9)
    for first, length in [(0, 16), (16, 16), (480, 7), (3, 512)]:
        walked = cost(program, chunk_shape(first, length)).flops
        assert fast(first, length) == pytest.approx(walked / 1e9, rel=1e-12)


def test_later_tokens_cost_more_to_compute_again() -> None:
    fast = RecomputeCost.of(PROGRAM, 1e9)
    assert fast(1000, 16) > fast(0, 16) > 0
    early, late = (recompute_seconds(PROGRAM, 16, 1e9, 1e12, first_token=first) for first in (0, 1000))
    assert late > early


def test_costs_add() -> None:
    assert Cost(1, 2, 3) + Cost(10, 20, 30) == Cost(11, 22, 33)
