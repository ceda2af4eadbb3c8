"""Native `Sample` draws what the reference draws from the same bits, and reports the same log-probabilities."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from kvarto.core import _native
from kvarto.core.ops import Sample
from kvarto.core.step import SamplingRows, StepResult
from tests.ops.native.drawn import sampled
from tests.ops.one_op import Array, OneOp, assert_same_bits
from tests.ops.steps import decode_step, sampling_rows

ISAS: list[str] = _native.ops.isas()
VOCABS = (1, 15, 257, 1000, 5003)


def reference(logits: Array, rows: SamplingRows) -> StepResult:
    bench = OneOp(Sample("logits"), vocab_size=logits.shape[1], sample_buffers=("logits",))
    num_rows = len(logits)
    bench.run({"logits": logits}, decode_step([1] * num_rows, sample_rows=range(num_rows), sampling=rows))
    assert bench.result is not None
    return bench.result


def varied(num_rows: int, vocab_size: int, seed: int = 5) -> dict[str, Any]:
    """Columns that make rows of every kind, alone and together."""
    rng = np.random.default_rng(seed)
    num_bias, num_seen = min(6, vocab_size), min(30, vocab_size)
    return {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.0, 100.0], num_rows),
        "top_k": rng.choice([0, 0, 1, 2, 40, vocab_size - 1, vocab_size, 10 * vocab_size], num_rows),
        "top_p": rng.choice([1e-6, 0.3, 0.95, 0.999999, 1.0, 1.0], num_rows),
        "min_p": rng.choice([0.0, 0.0, 0.1, 1.0], num_rows),
        "repetition_penalty": rng.choice([1.0, 1.3], num_rows),
        "presence_penalty": rng.choice([0.0, 0.7, 1e30], num_rows, p=[0.5, 0.4, 0.1]),
        "frequency_penalty": rng.choice([0.0, 0.2], num_rows),
        "seed": rng.integers(0, 2**63, num_rows),
        "choice": rng.integers(0, 4, num_rows),
        "position": rng.integers(1, 9000, num_rows),
        "num_logprobs": np.minimum(rng.choice([0, 3, 20], num_rows), vocab_size),
        "target": rng.choice([-1, -1, vocab_size - 1], num_rows),
        "bias": [
            {
                int(i): -math.inf if i % 7 == 3 and vocab_size > 2 * num_bias else float(i % 5) - 2
                for i in rng.integers(0, vocab_size, num_bias)
            }
            if rng.random() < 0.5
            else {}
            for _ in range(num_rows)
        ],
        "seen": [
            {int(i): int(i) % 3 for i in rng.integers(0, vocab_size, num_seen)} if rng.random() < 0.5 else {}
            for _ in range(num_rows)
        ],
    }


def rows_of_every_shape(num_rows: int, vocab_size: int, seed: int) -> Array:
    """Peaked, flat, tied, masked, huge and tiny rows."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((num_rows, vocab_size)).astype(np.float32)
    for s in range(num_rows):
        match s % 8:
            case 0:
                logits[s] *= 3
            case 1:
                logits[s] = np.round(logits[s])  # ties everywhere
            case 2:
                logits[s] = logits[s, 0]  # nothing but ties
            case 3:
                logits[s, rng.random(vocab_size) < 0.7] = -np.inf
            case 4:
                logits[s] *= 1e4
            case 5:
                logits[s] *= 1e-4
            case 6:
                logits[s] = np.where(rng.random(vocab_size) < 0.5, np.float32(0.0), np.float32(-0.0))
            case _:
                logits[s] = logits[s] * 2 - 50
        logits[s, rng.integers(vocab_size)] = logits[s].max()  # never all -inf; the maximum is often tied
        if not np.isfinite(logits[s]).any():
            logits[s, 0] = 1.0
    return logits


def assert_equal(got: StepResult, want: StepResult) -> None:
    """Log-probabilities are differences of a float32 and a log of a float32 sum, so 1e-6 of what was subtracted."""
    np.testing.assert_array_equal(got.is_finite, want.is_finite)
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    np.testing.assert_array_equal(got.top_ids, want.top_ids)
    np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got.top_logprobs, want.top_logprobs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_rows_of_every_kind_are_drawn_as_by_the_reference(vocab_size: int) -> None:
    num_rows = 160
    logits = rows_of_every_shape(num_rows, vocab_size, vocab_size)
    rows = sampling_rows(num_rows, **varied(num_rows, vocab_size))
    want = reference(logits, rows)
    for isa in ISAS:
        assert_equal(sampled(logits, rows, isa=isa), want)


@pytest.mark.parametrize(
    "columns",
    [{}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 700}, {"min_p": 0.01}, {"top_k": 50, "top_p": 0.9, "min_p": 0.02}],
    ids=str,
)
def test_large_vocabularies_are_drawn_as_by_the_reference(columns: dict[str, Any]) -> None:
    num_rows, vocab_size = 12, 49_152
    rng = np.random.default_rng(3)
    spread = rng.choice([0.3, 1.5, 4.0], (num_rows, 1))
    logits = (rng.standard_normal((num_rows, vocab_size)) * spread).astype(np.float32)
    rows = sampling_rows(num_rows, temperature=0.8, seed=rng.integers(0, 2**63, num_rows), **columns)
    want = reference(logits, rows)
    for isa in ISAS:
        assert_equal(sampled(logits, rows, isa=isa), want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 700, 999])
def test_a_row_that_is_not_finite_is_flagged_and_hurts_no_other(isa: str, poison: float, place: int) -> None:
    logits = rows_of_every_shape(12, 1000, 1)
    rows = sampling_rows(12, **varied(12, 1000))
    want = sampled(logits, rows, isa=isa)
    logits[5, place] = poison
    logits[6] = -np.inf
    got = sampled(logits, rows, isa=isa)
    assert np.flatnonzero(~got.is_finite).tolist() == [5, 6]
    others = got.is_finite
    assert_same_bits(got.token_ids[others], want.token_ids[others])
    assert_same_bits(got.logprobs[others], want.logprobs[others])
    assert np.isnan(got.logprobs[~others]).all()
    assert np.isnan(got.top_logprobs[~others]).all()
    assert (got.token_ids[~others] == 0).all()
    assert (got.top_ids[~others] == 0).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch_and_on_any_thread(isa: str) -> None:
    num_rows = 40
    logits, columns = rows_of_every_shape(num_rows, 1000, 2), varied(num_rows, 1000)
    whole = sampled(logits, sampling_rows(num_rows, **columns), isa=isa)
    rng = np.random.default_rng(6)
    for size, num_threads in ((1, 1), (1, 3), (3, 2), (17, 2), (40, 3)):
        chosen = rng.permutation(num_rows)[:size]
        rows = sampling_rows(size, **{name: [values[i] for i in chosen] for name, values in columns.items()})
        part = sampled(logits[chosen], rows, isa=isa, num_threads=num_threads)
        for name in ("token_ids", "logprobs", "is_finite"):
            assert_same_bits(getattr(part, name), getattr(whole, name)[chosen])
        for s, original in enumerate(chosen):
            count = columns["num_logprobs"][original]
            assert_same_bits(part.top_ids[s, :count], whole.top_ids[original, :count])
            assert_same_bits(part.top_logprobs[s, :count], whole.top_logprobs[original, :count])


def test_all_sets_with_fused_steps_give_the_same_bits() -> None:
    logits = rows_of_every_shape(60, 1000, 4)
    rows = sampling_rows(60, **varied(60, 1000))
    results = [sampled(logits, rows, isa=isa) for isa in ISAS if isa != "portable"]
    for result in results[1:]:
        for field in dataclasses.fields(result):
            assert_same_bits(getattr(result, field.name), getattr(results[0], field.name))


@pytest.mark.parametrize("isa", ISAS)
def test_nothing_is_reported_where_nothing_is_asked(isa: str) -> None:
    logits = rows_of_every_shape(16, 1000, 7)
    columns = varied(16, 1000)
    want = sampled(logits, sampling_rows(16, **columns), isa=isa)
    silent = sampling_rows(16, **columns | {"num_logprobs": -1})
    for got in (sampled(logits, silent, isa=isa), reference(logits, silent)):
        assert_same_bits(got.token_ids, want.token_ids)
        assert np.isnan(got.logprobs).all()
        assert got.top_ids.shape == (16, 0)


@pytest.mark.parametrize("isa", ISAS)
def test_many_rows_of_one_token_draw_apart(isa: str) -> None:
    """n > 1: the same logits in several rows, which differ by their choice alone."""
    logits = np.tile(rows_of_every_shape(1, 1000, 0), (64, 1))
    rows = sampling_rows(64, temperature=1.0, seed=11, choice=np.arange(64))
    got = sampled(logits, rows, isa=isa)
    assert len(set(got.token_ids.tolist())) > 8
    assert_equal(got, reference(logits, rows))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-5])
def test_a_tiny_temperature_is_greedy(isa: str, temperature: float) -> None:
    logits = (np.random.default_rng(0).standard_normal((20, 1000)) * 3).astype(np.float32)
    for columns in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
        rows = sampling_rows(20, temperature=temperature, seed=np.arange(20), **columns)
        np.testing.assert_array_equal(sampled(logits, rows, isa=isa).token_ids, logits.argmax(1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("columns", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}], ids=str)
def test_a_row_whose_tokens_are_all_forbidden_yields_the_first(isa: str, columns: dict[str, Any]) -> None:
    logits = np.array([[1.0, 2.0, -np.inf]], np.float32)
    rows = sampling_rows(1, bias=[{0: -math.inf, 1: -math.inf}], target=1, **columns)
    result = sampled(logits, rows, isa=isa)
    assert result.token_ids.tolist() == [0]
    assert result.is_finite.all()
    np.testing.assert_allclose(result.logprobs, [-math.log1p(math.exp(-1.0))], rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_an_empty_batch_yields_an_empty_result(isa: str) -> None:
    result = sampled(np.zeros((0, 1000), np.float32), sampling_rows(0), isa=isa)
    for field in dataclasses.fields(result):
        assert len(getattr(result, field.name)) == 0


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(40))
def test_long_runs_of_random_draws_equal_the_reference(seed: int) -> None:
    vocab_size = int(np.random.default_rng(seed).integers(1, 3000))
    logits = rows_of_every_shape(200, vocab_size, seed)
    rows = sampling_rows(200, **varied(200, vocab_size, seed))
    want = reference(logits, rows)
    for isa in ISAS:
        assert_equal(sampled(logits, rows, isa=isa), want)
