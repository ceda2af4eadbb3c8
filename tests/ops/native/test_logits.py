"""Native `Logits`: the product, scaled and softcapped; and summaries that let `Sample` draw as from the whole row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvarto.core import _native
from kvarto.core.ops import Logits
from kvarto.core.weight_format import WeightFormat
from tests.ops.native.drawn import sampled
from tests.ops.native.products import Matrix, ProductArena
from tests.ops.native.test_sample import varied
from tests.ops.one_op import OneOp, assert_same_bits
from tests.ops.steps import sampling_rows

Array = np.ndarray[Any, Any]
ISAS: list[str] = _native.ops.isas()
WIDTH = 96
each_isa = pytest.mark.parametrize("isa", ISAS)


def rows(num_rows: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal((num_rows, WIDTH)).astype(np.float32)


@each_isa
@pytest.mark.parametrize("vocab_size", [1, 15, 256, 257, 1030])
@pytest.mark.parametrize("options", [{}, {"scale": 0.125}, {"softcap": 30.0}, {"scale": 3.0, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_equal_the_reference(isa: str, vocab_size: int, options: dict[str, Any], has_bias: bool) -> None:
    """Sums of 96 terms of about 1, in another order: 1e-5 of the largest."""
    matrix = Matrix([(WeightFormat.F32, vocab_size)], WIDTH)
    bias = np.random.default_rng(2).standard_normal(vocab_size).astype(np.float32) if has_bias else None
    weights = {"w": matrix.dense} | ({"b": bias} if bias is not None else {})
    op = Logits("x", "y", "w", bias="b" if has_bias else None, **options)
    bench = OneOp(op, weights, {"y": vocab_size}, vocab_size=vocab_size)
    for num_rows in (0, 1, 9):
        want: Array = bench.run({"x": rows(num_rows)})["y"]
        arena = ProductArena(matrix, bias, max(num_rows, 1), isa=isa)
        arena.add_logits(**options)
        got, _ = arena.run(rows(num_rows))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max(initial=1.0))


@each_isa
@pytest.mark.parametrize("vocab_size", [1, 257, 1030])
def test_rows_with_summaries_are_drawn_as_rows_without(isa: str, vocab_size: int) -> None:
    matrix = Matrix([(WeightFormat.Q8_0, vocab_size)], WIDTH)
    sampling = sampling_rows(40, **varied(40, vocab_size))
    arena = ProductArena(matrix, None, 40, isa=isa, num_threads=2)
    arena.add_logits(scale=0.1)
    x = rows(40)
    x[3] = np.nan
    logits, got = arena.run(x, sampling)
    want = sampled(logits, sampling, isa=isa)
    assert got.is_finite.tolist() == [s != 3 for s in range(40)]
    for name in ("token_ids", "logprobs", "top_ids", "top_logprobs", "is_finite"):
        assert_same_bits(getattr(got, name), getattr(want, name))


@each_isa
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_thread(isa: str) -> None:
    matrix = Matrix([(WeightFormat.F16, 1030)], WIDTH)
    columns = varied(200, 1030)
    x = rows(200)
    whole = ProductArena(matrix, None, 200, isa=isa, num_threads=2)
    whole.add_logits(softcap=20.0)
    logits, drawn = whole.run(x, sampling_rows(200, **columns))
    rng = np.random.default_rng(4)
    for num_rows in (1, 2, 7, 50):
        chosen = rng.permutation(200)[:num_rows]
        arena = ProductArena(matrix, None, num_rows, isa=isa, num_threads=1 + num_rows % 3)
        arena.add_logits(softcap=20.0)
        sampling = sampling_rows(num_rows, **{name: [values[i] for i in chosen] for name, values in columns.items()})
        got, result = arena.run(x[chosen], sampling)
        assert_same_bits(got, logits[chosen])
        assert_same_bits(result.token_ids, drawn.token_ids[chosen])
        assert_same_bits(result.logprobs, drawn.logprobs[chosen])
