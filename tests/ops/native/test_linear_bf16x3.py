"""Products of three parts of bfloat16, where there are matrix tiles: as near the exact products as float32, and bit for
bit the same whatever the rows beside and the threads.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvarto.core import _native
from kvarto.core.weight_format import WeightFormat
from tests.ops.native.one_linear import MAX_ROWS, Band, Case, Linear, some_rows

pytestmark = pytest.mark.skipif("amx" not in _native.ops.isas(), reason="needs matrix tiles")

F32, F16, BF16 = WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16
CASES = [
    *(Case(format.value, (Band(format, 40),), 800) for format in (F32, F16, BF16)),
    Case("three bands", (Band(F32, 48), Band(BF16, 17), Band(F16, 5)), 96, has_bias=True),
    Case("one row of weights", (Band(F32, 1),), 32, has_bias=True),
    Case("wide", (Band(F32, 64), Band(BF16, 16)), 2048, has_bias=True),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
ROWS = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 64, MAX_ROWS)


@each_case
def test_is_as_near_the_exact_products_as_float32(case: Case) -> None:
    linear, x = Linear(case, 1, "amx", products="bf16x3"), some_rows(MAX_ROWS, case.width)
    exact = x.astype(np.float64) @ linear.weight.astype(np.float64).T + (linear.bias if case.has_bias else 0)
    terms = np.abs(x).astype(np.float64) @ np.abs(linear.weight).astype(np.float64).T + np.abs(linear.bias)
    errors = np.abs(linear.multiply(x) - exact) / terms
    chain = np.abs(_chain(x, linear) + (linear.bias if case.has_bias else 0) - exact) / terms
    assert errors.max() < max(chain.max(), 2.0**-22)
    assert np.sqrt((errors**2).mean()) < max(np.sqrt((chain**2).mean()), 2.0**-24.5)


@each_case
def test_is_exact_where_float32_is(case: Case) -> None:
    """Whole numbers, each of more bits than a part holds, whose sums have no more than 24."""
    linear = Linear(case, 2, "amx", products="bf16x3")
    x = np.zeros((MAX_ROWS, case.width), np.float32)
    columns = np.random.default_rng(3).integers(0, case.width, MAX_ROWS)
    x[np.arange(MAX_ROWS), columns] = 2.0 ** (np.arange(MAX_ROWS) % 40 - 20)
    want = x[np.arange(MAX_ROWS), columns][:, None] * linear.weight[:, columns].T
    np.testing.assert_array_equal(linear.multiply(x), want + (linear.bias if case.has_bias else 0))


@each_case
def test_bits_are_one_for_all_rows_and_threads(case: Case) -> None:
    x = some_rows(MAX_ROWS, case.width)
    whole = Linear(case, 3, "amx", products="bf16x3").multiply(x)
    for num_threads in (1, 3):
        linear = Linear(case, 3, "amx", num_threads, products="bf16x3")
        for num_rows in ROWS:
            rows = np.random.default_rng(num_rows).permutation(MAX_ROWS)[:num_rows]
            np.testing.assert_array_equal(linear.multiply(x[rows]), whole[rows], err_msg=f"{num_rows} rows")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_nan_and_stays_in_its_row(bad: float) -> None:
    case = Case("nan", (Band(F32, 20),), 64)
    for num_rows in (2, 20, 40):
        linear, x = Linear(case, 4, "amx", products="bf16x3"), some_rows(num_rows, 64)
        good = linear.multiply(x)
        x[1, 40] = bad
        got = linear.multiply(x)
        assert np.isnan(got[1]).all()
        np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(good, 1, 0))


def test_refusals_name_their_reason() -> None:
    with pytest.raises(ValueError, match="matrices of floats"):
        Linear(Case("codes", (Band(WeightFormat.Q8_0, 16),), 64), 5, "amx", products="bf16x3")
    with pytest.raises(ValueError, match="whole groups"):
        Linear(Case("odd", (Band(F32, 16),), 48), 5, "amx", products="bf16x3")
    for isa in _native.ops.isas():
        if isa != "amx":
            with pytest.raises(ValueError, match="matrix tiles"):
                Linear(CASES[0], 5, isa, products="bf16x3")


def test_no_room_for_parts_is_refused() -> None:
    ops, width = _native.ops, 64
    arena = np.zeros(1 << 16, np.uint8)
    program = ops.Program("amx", 1, arena.ctypes.data, arena.nbytes, ops.StepBounds(8, 8, 8, 16, 16, 1, 1, 16))
    weight = ops.Weight(16, width, [ops.Part(F32.code, 0, 16, 0)])
    x, out = ops.Rows(20480, 4 * width, width, 8), ops.Rows(4096, 64, 16, 8)
    program.add_linear(x, out, weight, None, 3, ops.Bytes(8192, 3 * 2048))
    with pytest.raises(ValueError, match="no room in scratch for three parts of 8 rows"):
        program.add_linear(x, out, weight, None, 3, ops.Bytes(8192, 3 * 2048 - 1))


def _chain(x: np.ndarray, linear: Linear) -> np.ndarray:
    """Sums in float32, one column after the other: what a single register gives."""
    sums = np.zeros((len(x), len(linear.weight)), np.float32)
    for k in range(x.shape[1]):
        sums += x[:, k : k + 1] * linear.weight[:, k]
    return sums
