"""One linear with products of less than float32, on plain arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarto.core import _native
from kvarto.core.step import StepResult
from kvarto.core.weight_format import WeightFormat
from kvarto.ops.native.numerics import PRODUCTS
from tests.ops.native.file_rows import QUANTS, meaning, random_rows
from tests.ops.native.paged_ops import nan_bytes
from tests.ops.native.red_zones import RED_ZONE_BYTES, poison_gaps
from tests.ops.steps import decode_step, sampling_rows

Array = np.ndarray[Any, Any]
MAX_ROWS = 70


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


def width_for(format: WeightFormat) -> int:
    """More than one chunk of columns; an odd number of groups where the format has it."""
    return 1024 if format.value.endswith("_k") else 800


CASES = [
    *(Case(format.value, (Band(format, 40),), width_for(format)) for format in QUANTS),
    *(Case(f"int4 by {size}", (Band(WeightFormat.INT4, 33, size),), 1024) for size in (32, 64, 128, 1024)),
    Case(
        "three bands",
        (Band(WeightFormat.Q4_1, 48), Band(WeightFormat.Q8_0, 17), Band(WeightFormat.Q5_0, 5)),
        96,
        has_bias=True,
    ),
    Case("blocks of rows", (Band(WeightFormat.Q4_1, 20),), 8192),
    Case("one row of weights", (Band(WeightFormat.Q4_0, 1),), 32, has_bias=True),
    Case("wide", (Band(WeightFormat.Q6_K, 16), Band(WeightFormat.Q4_K, 16)), 2048, has_bias=True),
]


class Linear:
    """One linear in an arena: `multiply` gives it float32 rows, which it narrows itself, or rows narrowed before."""

    def __init__(
        self, case: Case, seed: int, isa: str, num_threads: int = 1, *, products: str = "int8",
        is_narrow: bool = False, has_unit_scales: bool = False,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        raw = [random_rows(band.format, band.num_rows, case.width, rng, band.group_size) for band in case.bands]
        if has_unit_scales:
            for rows in raw:
                rows.reshape(-1, 3 + case.bands[0].group_size // 2)[:, :2] = np.array([1], np.float16).view(np.uint8)
        self.bias = rng.standard_normal(case.num_rows).astype(np.float32)
        bands = zip(case.bands, raw, strict=True)
        self.weight: Array = np.concatenate([meaning(band.format, rows, band.group_size) for band, rows in bands])
        self._case, self._products, self._is_narrow = case, products, is_narrow
        self._build(raw, isa, num_threads)

    def _build(self, raw: list[Array], isa: str, num_threads: int) -> None:
        case, ops = self._case, _native.ops
        panels = [
            _native.weights.part_bytes(band.format.code, band.group_size, band.num_rows, case.width)
            for band in case.bands
        ]
        scratch = {
            "int8": ops.linear_int8_scratch_bytes(MAX_ROWS, case.width, not self._is_narrow),
            "bf16": ops.bf16_bytes(MAX_ROWS, case.width),
            "bf16x3": ops.bf16x3_bytes(MAX_ROWS, case.width),
        }[self._products]
        sizes = [4 * MAX_ROWS * case.width, 4 * MAX_ROWS * case.width,
                 4 * MAX_ROWS * case.num_rows, 4 * case.num_rows, scratch, *panels]  # fmt: skip
        starts = [int(start) for start in np.cumsum([0, *(-(-size // 64) * 64 + RED_ZONE_BYTES for size in sizes)])]
        self._arena = nan_bytes(starts[-1])
        self._x, self._out = (self._arena[starts[i] : starts[i] + sizes[i]].view(np.float32) for i in (0, 2))
        self._arena[starts[3] : starts[3] + sizes[3]].view(np.float32)[:] = self.bias
        for band, rows, start, size in zip(case.bands, raw, starts[5:], panels, strict=False):
            target = self._arena[start : start + size]
            _native.weights.repack_rows(band.format.code, band.group_size, case.width, rows, target)
        poison_gaps(self._arena, zip(starts, sizes, strict=False))
        bounds = ops.StepBounds(
            max_tokens=MAX_ROWS, max_seqs=MAX_ROWS, max_samples=MAX_ROWS, max_positions=1 << 20, vocab_size=1 << 20,
            num_groups=1, num_pages=1, page_size=16,
        )  # fmt: skip
        self._program = ops.Program(isa, num_threads, self._arena.ctypes.data, self._arena.nbytes, bounds)
        x = ops.Rows(starts[0], 4 * case.width, case.width, MAX_ROWS)
        products = PRODUCTS.index(self._products)
        if self._is_narrow:
            narrow = ops.Rows(starts[1], 4 * case.width, case.width, MAX_ROWS, products, True)
            self._program.add_gather(x, narrow)
            x = narrow
        out = ops.Rows(starts[2], 4 * case.num_rows, case.num_rows, MAX_ROWS, 0, self._is_narrow)
        parts = [
            ops.Part(band.format.code, band.group_size, band.num_rows, start)
            for band, start in zip(case.bands, starts[5:], strict=False)
        ]
        weight = ops.Weight(case.num_rows, case.width, parts)
        bias = starts[3] if case.has_bias else None
        self._program.add_linear(x, out, weight, bias, products, ops.Bytes(starts[4], scratch))

    def multiply(self, x: Array) -> Array:
        """`[num_rows, num weight rows]`."""
        n = len(x)
        self._x[: x.size] = x.reshape(-1)
        self._out[:] = np.nan
        step = decode_step([1] * n, sample_rows=range(n), sampling=sampling_rows(n))
        none = np.zeros((n, 0), np.int32)
        ids, logprobs = np.zeros(n, np.int32), np.zeros(n, np.float32)
        result = StepResult(ids, logprobs, none, none.astype(np.float32), np.zeros(n, bool))
        self._program.run(step, np.zeros((1, n, 1), np.int32), np.zeros((1, n), np.int64), result)
        return self._out[: n * self._case.num_rows].reshape(n, self._case.num_rows).copy()


def some_rows(num_rows: int, width: int, seed: int = 5) -> Array:
    """`[num_rows, width]`, with outliers as activations have them, and a group of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, width)).astype(np.float32)
    x[:, ::37] *= 30
    x[num_rows // 2, :32] = 0
    return x
