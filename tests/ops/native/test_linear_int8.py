"""Products of quantised rows with every quantised format: against the law in float64, and bit for bit between
instruction sets, numbers of rows and threads.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvarto.core import _native
from kvarto.core.weight_format import WeightFormat
from tests.ops.native.file_rows import QUANTS
from tests.ops.native.one_linear import CASES, MAX_ROWS, Band, Case, Linear, some_rows, width_for
from tests.ops.native.quantised_rows import quantise

ISAS: list[str] = _native.ops.isas()
FUSED_SETS = [isa for isa in ISAS if isa != "portable"] or ISAS
"""The plain one rounds products too where the machine's baseline has no fused multiply-add."""
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_isa = pytest.mark.parametrize("isa", ISAS)


@each_case
@each_isa
def test_equals_the_law(case: Case, isa: str) -> None:
    linear = Linear(case, 1, isa)
    x = some_rows(MAX_ROWS, case.width)
    means, weight = quantise(x).values, linear.weight.astype(np.float64)
    want = means @ weight.T + (linear.bias if case.has_bias else 0)
    # Each float step rounds once; codes with a minimum are up to three times as large as the weight they make.
    largest_sum = 3 * (np.abs(means) @ np.abs(weight).T) + np.abs(linear.bias)
    assert (np.abs(linear.multiply(x) - want) <= largest_sum * (case.width / 16 + 4) * 2.0**-24).all()


@each_case
def test_bits_are_one_for_all_sets_rows_and_threads(case: Case) -> None:
    x = some_rows(MAX_ROWS, case.width)
    whole = Linear(case, 2, FUSED_SETS[0]).multiply(x)
    for isa in FUSED_SETS:
        for num_threads in (1, 3):
            linear = Linear(case, 2, isa, num_threads, is_narrow=num_threads == 3)
            for num_rows in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 50, 58, 64, MAX_ROWS):
                rows = np.random.default_rng(num_rows).permutation(MAX_ROWS)[:num_rows]
                np.testing.assert_array_equal(linear.multiply(x[rows]), whole[rows], err_msg=f"{isa}, {num_rows} rows")


@each_case
def test_bits_are_one_at_any_magnitude(case: Case) -> None:
    """Rows whose scales are near the ends of float32 beside others: fine codes of some make no difference to others."""
    x = some_rows(MAX_ROWS, case.width) * np.logspace(-32, 32, MAX_ROWS, dtype=np.float32)[:, None]
    whole = Linear(case, 2, FUSED_SETS[-1]).multiply(x)
    for isa in FUSED_SETS:
        linear = Linear(case, 2, isa)
        for row in range(0, MAX_ROWS, 5):
            np.testing.assert_array_equal(linear.multiply(x[row : row + 1])[0], whole[row], err_msg=f"{isa}, {row}")


def test_rows_here_have_groups_of_both_kinds() -> None:
    shares = [quantise(some_rows(MAX_ROWS, case.width)).is_fine.mean() for case in CASES if case.width > 96]
    assert 0.1 < min(shares) <= max(shares) < 0.9


@each_isa
def test_one_rows_nan_stays_in_its_row(isa: str) -> None:
    case = Case("nan", (Band(WeightFormat.Q4_1, 20),), 64)
    for num_rows in (2, 20, 60):
        linear, x = Linear(case, 3, isa), some_rows(num_rows, 64)
        good = linear.multiply(x)
        for bad in (np.nan, np.inf):
            x[1, 40] = bad
            got = linear.multiply(x)
            assert np.isnan(got[1]).all()
            np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(good, 1, 0))


@each_isa
def test_extreme_codes_do_not_saturate(isa: str) -> None:
    """All codes at their ends: pairs of products are then as large as they can be."""
    for format in QUANTS:
        width = width_for(format)
        case = Case(format.value, (Band(format, 16),), width)
        linear = Linear(case, 4, isa)
        for signs in (np.ones(width), -np.ones(width), np.sign(linear.weight[3])):
            x = np.repeat(signs.astype(np.float32)[None], 9, axis=0)
            want = quantise(x).values @ linear.weight.astype(np.float64).T
            bound = 3 * (np.abs(x) @ np.abs(linear.weight).T) * (width / 16 + 4) * 2.0**-24
            assert (np.abs(linear.multiply(x) - want) <= bound).all()


def test_a_step_without_rows_does_nothing() -> None:
    case = CASES[0]
    assert Linear(case, 1, ISAS[-1]).multiply(np.zeros((0, case.width), np.float32)).shape == (0, case.num_rows)
