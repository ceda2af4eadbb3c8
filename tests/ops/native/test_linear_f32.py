"""Float32 products: every format against dequantised rows, and one chain of fused steps per element, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvarto.core import _native
from kvarto.core.weight_format import WeightFormat
from tests.ops.native.products import Matrix, ProductArena
from tests.ops.one_op import assert_same_bits

Array = np.ndarray[Any, Any]
ISAS: list[str] = _native.ops.isas()
FUSED = [isa for isa in ISAS if isa != "portable"]
FLOATS = [WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16]
EPSILON = 2.0**-24


def rows(num_rows: int, num_columns: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal((num_rows, num_columns)).astype(np.float32)


def multiply(matrix: Matrix, x: Array, bias: Array | None = None, *, isa: str, num_threads: int = 1) -> Array:
    arena = ProductArena(matrix, bias, max(len(x), 1), isa=isa, num_threads=num_threads)
    arena.add_linear()
    return arena.run(x)[0]


def assert_close(got: Array, x: Array, matrix: Matrix, bias: Array | None) -> None:
    """A chain of k rounded steps, and what unpacking rounds: (k + 3) ulps of the sum of magnitudes."""
    wide_x, wide_w = x.astype(np.float64), matrix.dense.astype(np.float64)
    want = wide_x @ wide_w.T + (0.0 if bias is None else bias)
    size = np.abs(wide_x) @ np.abs(wide_w).T + (0.0 if bias is None else np.abs(bias))
    assert (np.abs(got - want) <= 2 * EPSILON * (matrix.num_columns + 3) * size).all()


@pytest.mark.parametrize("format", list(WeightFormat))
def test_every_format_is_multiplied_as_what_it_means(format: WeightFormat) -> None:
    matrix = Matrix([(format, 100)], 768)
    bias = rows(1, 100)[0]
    for isa in ISAS:
        for num_rows in (1, 7):
            x = rows(num_rows, 768, num_rows)
            assert_close(multiply(matrix, x, bias, isa=isa), x, matrix, bias)


@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("num_columns", [1, 2, 31, 127, 128, 129, 333, 1601])
@pytest.mark.parametrize("num_features", [1, 15, 16, 17, 67])
def test_ragged_shapes(format: WeightFormat, num_columns: int, num_features: int) -> None:
    matrix = Matrix([(format, num_features)], num_columns)
    for isa in ISAS:
        x = rows(8, num_columns)
        assert_close(multiply(matrix, x, isa=isa), x, matrix, None)


def test_bands_lie_side_by_side() -> None:
    bands = [(WeightFormat.F16, 19), (WeightFormat.Q4_1, 33), (WeightFormat.F32, 70), (WeightFormat.Q6_K, 5)]
    matrix = Matrix(bands, 512)
    bias = rows(1, matrix.num_rows)[0]
    for isa in ISAS:
        for num_threads in (1, 3):
            x = rows(13, 512)
            assert_close(multiply(matrix, x, bias, isa=isa, num_threads=num_threads), x, matrix, bias)


@pytest.mark.parametrize("isa", FUSED)
@pytest.mark.parametrize("num_rows", [1, 9])
def test_an_element_is_one_chain_of_fused_steps(isa: str, num_rows: int) -> None:
    """float64 holds a product exactly; that its sum is rounded twice shows once in 2^29 steps, not with this seed."""
    matrix = Matrix([(WeightFormat.F32, 40)], 300)
    x, bias = rows(num_rows, 300), rows(1, 40)[0]
    want = np.zeros((num_rows, 40), np.float32)
    for k in range(300):
        product = x[:, k : k + 1].astype(np.float64) * matrix.dense[:, k].astype(np.float64)
        want = (product + want).astype(np.float32)
    assert_same_bits(multiply(matrix, x, bias, isa=isa), want + bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", [WeightFormat.F32, WeightFormat.BF16, WeightFormat.Q4_K])
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_thread(isa: str, format: WeightFormat) -> None:
    matrix = Matrix([(format, 90)], 512)
    x = rows(600, 512)
    whole = multiply(matrix, x, isa=isa, num_threads=2)
    rng = np.random.default_rng(3)
    for num_rows in (*range(1, 14), 31, 70, 193, 385):
        chosen = rng.permutation(600)[:num_rows]
        part = multiply(matrix, x[chosen], isa=isa, num_threads=1 + num_rows % 3)
        assert_same_bits(part, whole[chosen])


@pytest.mark.parametrize("format", list(WeightFormat))
def test_all_sets_with_fused_steps_give_the_same_bits(format: WeightFormat) -> None:
    matrix = Matrix([(format, 50)], 512)
    x = rows(11, 512)
    results = [multiply(matrix, x, isa=isa) for isa in FUSED]
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_that_is_not_finite_hurts_no_other(isa: str) -> None:
    matrix = Matrix([(WeightFormat.F32, 30)], 200)
    x = rows(20, 200)
    want = multiply(matrix, x, isa=isa)
    x[4], x[11, 100] = np.inf, np.nan
    got = multiply(matrix, x, isa=isa)
    others = np.setdiff1d(np.arange(20), [4, 11])
    assert_same_bits(got[others], want[others])
    assert np.isnan(got[11]).all()
    assert not np.isfinite(got[4]).any()


@pytest.mark.parametrize("isa", ISAS)
def test_no_rows_are_no_work(isa: str) -> None:
    assert multiply(Matrix([(WeightFormat.F32, 30)], 200), rows(0, 200), isa=isa).shape == (0, 30)
