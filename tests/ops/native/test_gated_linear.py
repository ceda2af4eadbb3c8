"""A linear of gates that writes what its gated activation would: with many rows, the same bits as op by op."""

from __future__ import annotations

import numpy as np
import pytest

from kvarto.core import _native
from kvarto.core.step import StepResult
from kvarto.core.weight_format import WeightFormat
from tests.ops.native.file_rows import random_rows
from tests.ops.native.one_linear import MAX_ROWS, Array, some_rows
from tests.ops.native.paged_ops import nan_bytes
from tests.ops.steps import decode_step, sampling_rows

pytestmark = pytest.mark.skipif("amx" not in _native.ops.isas(), reason="needs matrix tiles")
Q4_1, Q8_0 = WeightFormat.Q4_1, WeightFormat.Q8_0
FFN = 96


class GatedLinear:
    """x · [gate, up].T, then act(gate) · up in bfloat16. `parts` cut the matrix into bands, from above."""

    def __init__(
        self, width: int, parts: list[tuple[WeightFormat, int]], activation: int, *, may_fuse: bool,
        per_sample: bool = False,
    ) -> None:  # fmt: skip
        ops, rng = _native.ops, np.random.default_rng(width)
        sizes = [_native.weights.part_bytes(format.code, 0, num_rows, width) for format, num_rows in parts]
        scratch = ops.bf16_bytes(MAX_ROWS, width)
        wanted = [4 * MAX_ROWS * width, 8 * MAX_ROWS * FFN, 4 * MAX_ROWS * FFN, scratch, *sizes]
        starts = [int(start) for start in np.cumsum([0, *(-(-size // 64) * 64 for size in wanted)])]
        self._arena = nan_bytes(starts[-1])
        self._x = self._arena[: wanted[0]].view(np.float32)
        self._out = self._arena[starts[2] : starts[3]].view(np.uint16)
        bands = []
        for (format, num_rows), start, size in zip(parts, starts[4:], sizes, strict=False):
            raw = random_rows(format, num_rows, width, rng, 0)
            _native.weights.repack_rows(format.code, 0, width, raw, self._arena[start : start + size])
            bands.append(ops.Part(format.code, 0, num_rows, start))
        bounds = ops.StepBounds(MAX_ROWS, MAX_ROWS, MAX_ROWS, 1 << 20, 1 << 20, 1, 1, 16)
        self._program = ops.Program("amx", 2, self._arena.ctypes.data, self._arena.nbytes, bounds)
        gates = ops.Rows(starts[1], 8 * FFN, 2 * FFN, MAX_ROWS, 0, per_sample)
        weight = ops.Weight(2 * FFN, width, bands)
        x = ops.Rows(0, 4 * width, width, MAX_ROWS, 0, per_sample)
        out = ops.Rows(starts[2], 4 * FFN, FFN, MAX_ROWS, 2, per_sample)
        self._program.add_linear(x, gates, weight, None, 2, ops.Bytes(starts[3], scratch))
        self._program.add_gated_activation(gates, out, activation, may_fuse)

    def run(self, x: Array, num_tokens: int | None = None) -> Array:
        """`[num_rows, FFN]`, as bits. Rows are samples of `num_tokens`, or all tokens."""
        n = len(x)
        self._x[: x.size] = x.reshape(-1)
        step = decode_step([1] * (num_tokens or n), sample_rows=range(n), sampling=sampling_rows(n))
        none = np.zeros((n, 0), np.int32)
        ids, logprobs = np.zeros(n, np.int32), np.zeros(n, np.float32)
        result = StepResult(ids, logprobs, none, none.astype(np.float32), np.zeros(n, bool))
        self._program.run(
            step, np.zeros((1, step.num_seqs, 1), np.int32), np.zeros((1, step.num_tokens), np.int64), result
        )
        tiles = self._out[: -(-n // 16) * 16 * FFN].reshape(-1, FFN // 32, 16, 32)
        return tiles.transpose(0, 2, 1, 3).reshape(-1, FFN)[:n]


@pytest.mark.parametrize("activation", range(3))
@pytest.mark.parametrize("width", [64, 1600])
@pytest.mark.parametrize(
    "parts",
    [[(Q4_1, 2 * FFN)], [(Q8_0, FFN), (Q8_0, FFN)], [(Q4_1, FFN), (Q8_0, FFN)], [(Q4_1, 32), (Q4_1, 160)]],
    ids=["one part", "two halves", "two formats", "uneven parts"],
)
def test_many_rows_have_the_bits_of_op_by_op(
    parts: list[tuple[WeightFormat, int]], width: int, activation: int
) -> None:
    fused = GatedLinear(width, parts, activation, may_fuse=True)
    plain = GatedLinear(width, parts, activation, may_fuse=False)
    x = some_rows(MAX_ROWS, width)
    whole = plain.run(x)
    assert not np.isnan((whole.astype(np.uint32) << 16).view(np.float32)).any()
    for num_rows in (1, 2, 16, 32, 33, 34, 48, 49, 64, MAX_ROWS):
        np.testing.assert_array_equal(fused.run(x[:num_rows]), whole[:num_rows], err_msg=f"{num_rows} rows")


def test_rows_of_samples_count_and_not_the_tokens() -> None:
    parts, x = [(Q4_1, 2 * FFN)], some_rows(MAX_ROWS, 64)
    want = GatedLinear(64, parts, 0, may_fuse=False).run(x)
    fused = GatedLinear(64, parts, 0, may_fuse=True, per_sample=True)
    for num_samples in (1, 5, 33, MAX_ROWS):
        np.testing.assert_array_equal(fused.run(x[:num_samples], MAX_ROWS), want[:num_samples])
