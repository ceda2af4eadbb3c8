"""Products of quantised rows with every quantised format: against the law in float64, and bit for bit between
instruction sets, numbers of rows and threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvarto.core import _native
from kvarto.core.step import StepResult
from kvarto.core.weight_format import WeightFormat
from tests.ops.native.file_rows import QUANTS, meaning, random_rows
from tests.ops.native.paged_ops import nan_bytes
from tests.ops.steps import decode_step, sampling_rows

Array = np.ndarray[Any, Any]
GROUP = 32
MAX_ROWS = 70
ISAS: list[str] = _native.ops.isas()
FUSED_SETS = [isa for isa in ISAS if isa != "portable"]
"""The plain one rounds products too where the machine's baseline has no fused multiply-add."""


@dataclass(frozen=True)
class Band:
    """Rows of a matrix in one format."""

    format: WeightFormat
    num_rows: int
    group_size: int = 0


@dataclass(frozen=True)
class Case:
    """A matrix of one or several bands, and the width of x."""

    name: str
    bands: tuple[Band, ...]
    width: int
    has_bias: bool = False

    @property
    def num_rows(self) -> int:
        return sum(band.num_rows for band in self.bands)


def _width(format: WeightFormat) -> int:
    return 1024 if format.value.endswith("_k") else 800  # more than one chunk of columns, and an odd number of groups


_CASES = [
    *(Case(format.value, (Band(format, 40),), _width(format)) for format in QUANTS),
    *(Case(f"int4 by {size}", (Band(WeightFormat.INT4, 33, size),), 1024) for size in (32, 64, 128, 1024)),
    Case("three bands", (Band(WeightFormat.Q4_1, 48), Band(WeightFormat.Q8_0, 17), Band(WeightFormat.Q5_0, 5)), 96, True),
    Case("one row of weights", (Band(WeightFormat.Q4_0, 1),), 32, True),
    Case("wide", (Band(WeightFormat.Q6_K, 16), Band(WeightFormat.Q4_K, 16)), 2048, True),
]
each_case = pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
each_isa = pytest.mark.parametrize("isa", ISAS)


class Linear:
    """One linear in an arena: `multiply` gives it float32 rows, which it quantises itself, or rows quantised before."""

    def __init__(self, case: Case, seed: int, isa: str, num_threads: int = 1, *, is_quantised: bool = False) -> None:
        rng = np.random.default_rng(seed)
        raw = [random_rows(band.format, band.num_rows, case.width, rng, band.group_size) for band in case.bands]
        self.bias = rng.standard_normal(case.num_rows).astype(np.float32)
        bands = zip(case.bands, raw, strict=True)
        self.weight: Array = np.concatenate([meaning(band.format, rows, band.group_size) for band, rows in bands])
        self._case, self._is_quantised = case, is_quantised
        self._build(raw, isa, num_threads)

    def _build(self, raw: list[Array], isa: str, num_threads: int) -> None:
        case, ops = self._case, _native.ops
        panels = [
            _native.weights.part_bytes(band.format.code, band.group_size, band.num_rows, case.width)
            for band in case.bands
        ]
        scratch = ops.linear_int8_scratch_bytes(MAX_ROWS, case.width, not self._is_quantised)
        sizes = [4 * MAX_ROWS * case.width, ops.quantised_row_bytes(case.width) * MAX_ROWS,
                 4 * MAX_ROWS * case.num_rows, 4 * case.num_rows, scratch, *panels]  # fmt: skip
        starts = [int(start) for start in np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])]
        self._arena = nan_bytes(starts[-1])
        self._x, self._out = (self._arena[starts[i] : starts[i] + sizes[i]].view(np.float32) for i in (0, 2))
        self._arena[starts[3] : starts[3] + sizes[3]].view(np.float32)[:] = self.bias
        for band, rows, start, size in zip(case.bands, raw, starts[5:], panels, strict=False):
            target = self._arena[start : start + size]
            _native.weights.repack_rows(band.format.code, band.group_size, case.width, rows, target)
        bounds = ops.StepBounds(
            max_tokens=MAX_ROWS, max_seqs=MAX_ROWS, max_samples=MAX_ROWS, max_positions=1 << 20, vocab_size=1 << 20,
            num_groups=1, num_pages=1, page_size=16,
        )  # fmt: skip
        self._program = ops.Program(isa, num_threads, self._arena.ctypes.data, self._arena.nbytes, bounds)
        x = ops.Rows(starts[0], 4 * case.width, case.width, MAX_ROWS)
        if self._is_quantised:
            quantised = ops.Rows(starts[1], ops.quantised_row_bytes(case.width), case.width, MAX_ROWS, True, True)
            self._program.add_gather(x, quantised, None)
            x = quantised
        out = ops.Rows(starts[2], 4 * case.num_rows, case.num_rows, MAX_ROWS, False, self._is_quantised)
        parts = [
            ops.Part(band.format.code, band.group_size, band.num_rows, start)
            for band, start in zip(case.bands, starts[5:], strict=False)
        ]
        weight = ops.Weight(case.num_rows, case.width, parts)
        bias = starts[3] if case.has_bias else None
        self._program.add_linear(x, out, weight, bias, True, ops.Bytes(starts[4], scratch))

    def multiply(self, x: Array) -> Array:
        """`[num_rows, num weight rows]`."""
        n = len(x)
        self._x[: x.size] = x.reshape(-1)
        self._out[:] = np.nan
        step = decode_step([1] * n, sample_rows=range(n), sampling=sampling_rows(n))
        none = np.zeros((n, 0), np.int32)
        result = StepResult(np.zeros(n, np.int32), np.zeros(n, np.float32), none, none.astype(np.float32), np.zeros(n, bool))
        self._program.run(step, np.zeros((1, n, 1), np.int32), np.zeros((1, n), np.int64), result)
        return self._out[: n * self._case.num_rows].reshape(n, self._case.num_rows).copy()


def _quantised(x: Array) -> Array:
    """What the codes of x mean, in float64."""
    groups = x.reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(largest > 0, np.rint(groups * (np.float32(127) / largest)), 0)
    means: Array = (codes * (largest / np.float32(127)).astype(np.float64)).reshape(len(x), -1)
    return means


def _rows(num_rows: int, width: int, seed: int = 5) -> Array:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, width)).astype(np.float32)
    x[:, ::37] *= 30  # outliers, as activations have them
    x[num_rows // 2, :GROUP] = 0
    return x


@each_case
@each_isa
def test_equals_the_law(case: Case, isa: str) -> None:
    linear = Linear(case, 1, isa)
    x = _rows(MAX_ROWS, case.width)
    means, weight = _quantised(x), linear.weight.astype(np.float64)
    want = means @ weight.T + (linear.bias if case.has_bias else 0)
    # Each float step rounds once; codes with a minimum are up to three times as large as the weight they make.
    largest_sum = 3 * (np.abs(means) @ np.abs(weight).T) + np.abs(linear.bias)
    assert (np.abs(linear.multiply(x) - want) <= largest_sum * (case.width / 16 + 4) * 2.0**-24).all()


@each_case
def test_bits_are_one_for_all_sets_rows_and_threads(case: Case) -> None:
    x = _rows(MAX_ROWS, case.width)
    whole = Linear(case, 2, FUSED_SETS[0]).multiply(x)
    for isa in FUSED_SETS:
        for num_threads in (1, 3):
            linear = Linear(case, 2, isa, num_threads, is_quantised=num_threads == 3)
            for num_rows in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, MAX_ROWS):
                rows = np.random.default_rng(num_rows).permutation(MAX_ROWS)[:num_rows]
                np.testing.assert_array_equal(linear.multiply(x[rows]), whole[rows], err_msg=f"{isa}, {num_rows} rows")


@each_isa
def test_one_rows_nan_stays_in_its_row(isa: str) -> None:
    case = Case("nan", (Band(WeightFormat.Q4_1, 20),), 64)
    for num_rows in (2, 20):
        linear, x = Linear(case, 3, isa), _rows(num_rows, 64)
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
        width = _width(format)
        case = Case(format.value, (Band(format, 16),), width)
        linear = Linear(case, 4, isa)
        for signs in (np.ones(width), -np.ones(width), np.sign(linear.weight[3])):
            x = np.repeat(signs.astype(np.float32)[None], 9, axis=0)
            want = _quantised(x) @ linear.weight.astype(np.float64).T
            bound = 3 * (np.abs(x) @ np.abs(linear.weight).T) * (width / 16 + 4) * 2.0**-24
            assert (np.abs(linear.multiply(x) - want) <= bound).all()


def test_a_step_without_rows_does_nothing() -> None:
    case = _CASES[0]
    assert Linear(case, 1, ISAS[-1]).multiply(np.zeros((0, case.width), np.float32)).shape == (0, case.num_rows)
