"""One native `Linear` or `Logits` on plain rows, in memory that holds NaN wherever nothing was put."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvarto.core import _native
from kvarto.core.step import SamplingRows, Step, StepResult
from kvarto.core.weight_format import WeightFormat
from tests.ops.native.drawn import aligned, no_result
from tests.ops.native.file_rows import meaning, random_rows
from tests.ops.native.red_zones import RED_ZONE_BYTES, poison_gaps
from tests.ops.steps import decode_step, sampling_rows

Array = np.ndarray[Any, Any]
_ALIGNMENT = 64


@dataclass
class Matrix:
    """Random rows by bands of a format each, as files keep them, and what they mean: `dense: [rows, columns]`."""

    bands: Sequence[tuple[WeightFormat, int]]
    num_columns: int
    seed: int = 0
    raw: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        for format, num_rows in self.bands:
            self.raw.append(random_rows(format, num_rows, self.num_columns, rng, group_size(format)))
        bands = zip(self.bands, self.raw, strict=True)
        self.dense = np.concatenate([meaning(format, raw, group_size(format)) for (format, _), raw in bands])

    @property
    def num_rows(self) -> int:
        """Of all bands."""
        return len(self.dense)


def group_size(format: WeightFormat) -> int:
    """Of int4 in these tests."""
    return 64 if format is WeightFormat.INT4 else 0


class ProductArena:
    """x | out | bias | panels | scratch, one behind the other, and a program that multiplies."""

    def __init__(self, matrix: Matrix, bias: Array | None, max_rows: int, *, isa: str, num_threads: int = 1) -> None:
        self._matrix, self._max_rows = matrix, max_rows
        self._places: dict[str, int] = {}
        self._used: list[tuple[int, int]] = []
        self._size_bytes = 0
        self._reserve("x", 4 * max_rows * matrix.num_columns)
        self._reserve("out", 4 * max_rows * matrix.num_rows)
        self._reserve("bias", 4 * matrix.num_rows)
        self._summary_bytes = _native.ops.summary_row_bytes(matrix.num_rows)
        self._reserve("summaries", self._summary_bytes * max_rows)
        self._scratch_bytes = _native.ops.sample_scratch_bytes(matrix.num_rows, num_threads)
        self._reserve("scratch", self._scratch_bytes)
        parts = [self._part(index) for index in range(len(matrix.bands))]
        self._arena = aligned(self._size_bytes)
        self._store(bias)
        poison_gaps(self._arena, self._used)
        bounds = _native.ops.StepBounds(
            max_rows, max_rows, max_rows, 1 << 20, matrix.num_rows, 1, 1, 16
        )  # tokens, sequences, samples, positions, vocabulary, groups, pages, page size
        self.program = _native.ops.Program(isa, num_threads, self._arena.ctypes.data, self._arena.nbytes, bounds)
        self.weight = _native.ops.Weight(matrix.num_rows, matrix.num_columns, parts)
        self.bias_at = None if bias is None else self._places["bias"]
        self.num_top = 0

    def _reserve(self, name: str, size_bytes: int) -> None:
        self._places[name] = self._size_bytes
        self._used.append((self._size_bytes, size_bytes))
        self._size_bytes += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT + RED_ZONE_BYTES

    def _part(self, index: int) -> _native.ops.Part:
        format, num_rows = self._matrix.bands[index]
        size = group_size(format)
        self._reserve(str(index), _native.weights.part_bytes(format.code, size, num_rows, self._matrix.num_columns))
        return _native.ops.Part(format.code, size, num_rows, self._places[str(index)])

    def _store(self, bias: Array | None) -> None:
        if bias is not None:
            self._view("bias", 1, self._matrix.num_rows)[:] = bias
        for index, ((format, num_rows), raw) in enumerate(zip(self._matrix.bands, self._matrix.raw, strict=True)):
            size, start = group_size(format), self._places[str(index)]
            size_bytes = _native.weights.part_bytes(format.code, size, num_rows, self._matrix.num_columns)
            panels = self._arena[start : start + size_bytes]
            _native.weights.repack_rows(format.code, size, self._matrix.num_columns, raw, panels)

    def _view(self, name: str, num_rows: int, width: int) -> Array:
        start = self._places[name]
        return self._arena[start : start + 4 * num_rows * width].view(np.float32).reshape(num_rows, width)

    def rows(self, name: str, width: int, *, per_sample: bool) -> _native.ops.Rows:
        """A float32 buffer of this arena."""
        return _native.ops.Rows(self._places[name], 4 * width, width, self._max_rows, per_sample=per_sample)

    def add_linear(self) -> None:
        """`out = x @ weight.T (+ bias)`, a row per token."""
        x = self.rows("x", self._matrix.num_columns, per_sample=False)
        out = self.rows("out", self._matrix.num_rows, per_sample=False)
        self.program.add_linear(x, out, self.weight, self.bias_at, 0, _native.ops.Bytes(0, 0))

    def add_logits(self, *, scale: float = 1.0, softcap: float = 0.0, samples: bool = True) -> None:
        """The product with the vocabulary, and a draw from it."""
        x = self.rows("x", self._matrix.num_columns, per_sample=True)
        out = self.rows("out", self._matrix.num_rows, per_sample=True)
        summaries = _native.ops.Rows(self._places["summaries"], self._summary_bytes, 0, self._max_rows, per_sample=True)
        none = _native.ops.Bytes(0, 0)
        self.program.add_logits(x, out, self.weight, self.bias_at, scale, softcap, False, none, summaries)
        if samples:
            scratch = _native.ops.Bytes(self._places["scratch"], self._scratch_bytes)
            self.program.add_sample(out, summaries, scratch)

    def run(self, x: Array, sampling: SamplingRows | None = None) -> tuple[Array, StepResult]:
        """The rows of `out`, and what was drawn."""
        self._view("x", *x.shape)[:] = x
        sampling = sampling or sampling_rows(len(x))
        step = _step(len(x), sampling)
        result = no_result(len(x), int(sampling.num_logprobs.max(initial=0)))
        self.program.run(step, step.page_tables, step.slot_mapping, result)
        return self._view("out", len(x), self._matrix.num_rows).copy(), result


def _step(num_rows: int, sampling: SamplingRows) -> Step:
    step = decode_step([1] * num_rows, sample_rows=range(num_rows), sampling=sampling)
    return replace(step, page_tables=np.zeros((1, num_rows, 1), np.int32))
