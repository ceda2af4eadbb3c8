"""Products in bfloat16, where there are matrix tiles: near the exact products, equal to them where nothing is rounded,
and bit for bit the same whatever the rows beside and the threads.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvarto.core import _native
from kvarto.core.weight_format import WeightFormat
from tests.ops.native.one_linear import CASES, MAX_ROWS, Band, Case, Linear, some_rows

pytestmark = pytest.mark.skipif("amx" not in _native.ops.isas(), reason="needs matrix tiles")
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_is_near_the_exact_products(case: Case) -> None:
    linear, x = Linear(case, 1, "amx", products="bf16"), some_rows(MAX_ROWS, case.width)
    want = x.astype(np.float64) @ linear.weight.astype(np.float64).T + (linear.bias if case.has_bias else 0)
    terms = np.abs(x).astype(np.float64) @ np.abs(linear.weight).astype(np.float64).T + np.abs(linear.bias)
    errors = np.abs(linear.multiply(x) - want) / terms
    # Rows are rounded by up to 2^-9, weights cut by up to 2^-7.5 less the mean; most errors cancel each other.
    assert errors.max() < 2.0**-6.5
    assert np.sqrt((errors**2).mean()) < 2.0**-9


@pytest.mark.parametrize("group_size", [32, 128])
def test_is_all_but_exact_where_nothing_is_rounded(group_size: int) -> None:
    """Weights and rows of few bits. What is left: a code's 128, which float32 takes off again to within 2^-16."""
    case = Case("int4", (Band(WeightFormat.INT4, 48, group_size),), 1024)
    linear = Linear(case, 2, "amx", products="bf16", has_unit_scales=True)
    for num_rows in (1, 3, 16, 17, 33, MAX_ROWS):
        x = np.random.default_rng(num_rows).integers(-100, 101, (num_rows, case.width)).astype(np.float32)
        bound = 2.0**-15 * np.abs(x).sum(axis=1, keepdims=True)
        assert (np.abs(linear.multiply(x) - x @ linear.weight.T) <= bound).all()


@each_case
def test_bits_are_one_for_all_rows_and_threads(case: Case) -> None:
    x = some_rows(MAX_ROWS, case.width)
    whole = Linear(case, 3, "amx", products="bf16").multiply(x)
    for num_threads in (1, 3):
        linear = Linear(case, 3, "amx", num_threads, products="bf16", is_narrow=num_threads == 3)
        for num_rows in (1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 48, 64, MAX_ROWS):
            rows = np.random.default_rng(num_rows).permutation(MAX_ROWS)[:num_rows]
            np.testing.assert_array_equal(linear.multiply(x[rows]), whole[rows], err_msg=f"{num_rows} rows")


def test_one_rows_nan_stays_in_its_row() -> None:
    case = Case("nan", (Band(WeightFormat.Q4_1, 20),), 64)
    for num_rows in (2, 20, 40):
        linear, x = Linear(case, 4, "amx", products="bf16"), some_rows(num_rows, 64)
        good = linear.multiply(x)
        x[1, 40] = np.nan
        got = linear.multiply(x)
        assert np.isnan(got[1]).all()
        np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(good, 1, 0))


def test_narrow_rows_are_refused_for_other_products_and_without_room() -> None:
    ops, width = _native.ops, 64
    arena = np.zeros(1 << 16, np.uint8)
    bounds = ops.StepBounds(8, 8, 8, 16, 16, 1, 1, 16)
    program = ops.Program("amx", 1, arena.ctypes.data, arena.nbytes, bounds)
    weight = ops.Weight(16, width, [ops.Part(WeightFormat.Q4_1.code, 0, 16, 0)])
    out, scratch = ops.Rows(4096, 64, 16, 8), ops.Bytes(8192, 8192)
    for form in range(3):
        x = ops.Rows(20480, 4 * width, width, 8, form)
        for products in range(3):
            if form in (0, products):
                program.add_linear(x, out, weight, None, products, scratch)
                continue
            with pytest.raises(ValueError, match="narrowed for other products"):
                program.add_linear(x, out, weight, None, products, scratch)
    with pytest.raises(ValueError, match="7 rows of 64 elements cannot be narrowed in place"):
        program.add_linear(ops.Rows(20480, 4 * width, width, 7, 2), out, weight, None, 2, scratch)
    with pytest.raises(ValueError, match="no room in scratch for 8 rows"):
        program.add_linear(ops.Rows(20480, 4 * width, width, 8), out, weight, None, 2, ops.Bytes(8192, 2047))


def test_other_sets_refuse() -> None:
    for isa in _native.ops.isas():
        if isa != "amx":
            with pytest.raises(ValueError, match="matrix tiles"):
                Linear(CASES[0], 5, isa, products="bf16")
