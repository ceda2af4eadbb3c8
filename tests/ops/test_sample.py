"""Sample: log-probabilities, penalties, filters and draws; each row for itself."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from kvarto.core.ops import Sample
from kvarto.core.step import SamplingRows, StepResult
from tests.ops.one_op import Array, OneOp, assert_same_bits
from tests.ops.steps import decode_step, sampling_rows

VOCAB = 1000


def sample(logits: Array, **columns: Any) -> StepResult:
    return _sample(logits, sampling_rows(len(logits), **columns))


def _sample(logits: Array, rows: SamplingRows) -> StepResult:
    bench = OneOp(Sample("logits"), vocab_size=logits.shape[1], sample_buffers=("logits",))
    num_rows = len(logits)
    bench.run({"logits": logits}, decode_step([1] * num_rows, sample_rows=range(num_rows), sampling=rows))
    assert bench.result is not None
    return bench.result


def _logits(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> Array:
    return (np.random.default_rng(seed).standard_normal((num_rows, vocab)) * 3).astype(np.float32)


def _log_softmax(logits: Array) -> Array:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _varied(num_rows: int) -> dict[str, Any]:
    """Columns that make rows of every kind."""
    rng = np.random.default_rng(5)
    return {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.0], num_rows),
        "top_k": rng.choice([0, 1, 40], num_rows),
        "top_p": rng.choice([0.3, 0.95, 1.0], num_rows),
        "min_p": rng.choice([0.0, 0.1], num_rows),
        "repetition_penalty": rng.choice([1.0, 1.3], num_rows),
        "presence_penalty": rng.choice([0.0, 0.7], num_rows),
        "frequency_penalty": rng.choice([0.0, 0.2], num_rows),
        "seed": rng.integers(0, 2**63, num_rows),
        "choice": rng.integers(0, 4, num_rows),
        "position": rng.integers(1, 9000, num_rows),
        "num_logprobs": rng.choice([0, 3, 20], num_rows),
        "target": rng.choice([-1, 7], num_rows),
        "bias": [{int(i): float(i % 5) - 2 for i in rng.integers(0, VOCAB, 6)} for _ in range(num_rows)],
        "seen": [{int(i): int(i) % 3 for i in rng.integers(0, VOCAB, 30)} for _ in range(num_rows)],
    }


def test_greedy_takes_the_largest_and_the_lowest_among_equals() -> None:
    logits = _logits(40)
    logits[7, [300, 200, 900]] = 50.0
    logits[8] = 0.0
    result = sample(logits)
    np.testing.assert_array_equal(result.token_ids, logits.argmax(1))
    assert result.token_ids[7:9].tolist() == [200, 0]
    assert result.is_finite.all()
    assert result.top_ids.shape == (40, 0)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = _logits(30)
    logits[3, ::2] = -np.inf
    columns = _varied(30)
    result = sample(logits, **columns)
    want = _log_softmax(logits)
    asked = np.where(columns["target"] >= 0, columns["target"], result.token_ids)
    np.testing.assert_allclose(result.logprobs, want[np.arange(30), asked], rtol=1e-6, atol=2e-6)
    assert result.top_ids.shape == (30, 20)
    for s, count in enumerate(columns["num_logprobs"]):
        ids = np.argsort(-logits[s], kind="stable")[:count]
        np.testing.assert_array_equal(result.top_ids[s, :count], ids)
        np.testing.assert_allclose(result.top_logprobs[s, :count], want[s, ids], rtol=1e-6, atol=2e-6)


def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch() -> None:
    num_rows = 40
    logits, columns = _logits(num_rows), _varied(num_rows)
    whole = sample(logits, **columns)
    rng = np.random.default_rng(6)
    for size in (1, 3, 17, 40):
        chosen = rng.permutation(num_rows)[:size]
        part = sample(logits[chosen], **{name: [values[i] for i in chosen] for name, values in columns.items()})
        for name in ("token_ids", "logprobs", "is_finite"):
            assert_same_bits(getattr(part, name), getattr(whole, name)[chosen])
        for s, original in enumerate(chosen):
            count = columns["num_logprobs"][original]
            assert_same_bits(part.top_ids[s, :count], whole.top_ids[original, :count])
            assert_same_bits(part.top_logprobs[s, :count], whole.top_logprobs[original, :count])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_flagged_and_hurts_no_other(poison: float) -> None:
    logits, columns = _logits(12), _varied(12)
    want = sample(logits, **columns)
    logits[5, 900] = poison
    logits[6] = -np.inf
    got = sample(logits, **columns)
    assert np.flatnonzero(~got.is_finite).tolist() == [5, 6]
    others = got.is_finite
    assert_same_bits(got.token_ids[others], want.token_ids[others])
    assert_same_bits(got.logprobs[others], want.logprobs[others])
    assert np.isnan(got.logprobs[~others]).all()
    assert (got.token_ids[~others] == 0).all()


def test_penalties_and_bias_follow_their_formula() -> None:
    logits = _logits(200)
    columns = _varied(200) | {"temperature": 0.0}
    result = sample(logits, **columns)
    for s in range(200):
        x = logits[s].astype(np.float64)
        for i, value in columns["bias"][s].items():
            x[i] += value
        for i, count in columns["seen"][s].items():
            x[i] = x[i] / columns["repetition_penalty"][s] if x[i] > 0 else x[i] * columns["repetition_penalty"][s]
            x[i] -= count * columns["frequency_penalty"][s] + (count > 0) * columns["presence_penalty"][s]
        assert x[result.token_ids[s]] >= x.max() - 1e-5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forbidden_token_is_never_drawn(temperature: float) -> None:
    logits = np.zeros((300, 4), np.float32)
    logits[:, 2] = 30.0
    result = sample(
        logits, temperature=temperature, seed=np.arange(300), bias=[{2: -math.inf, 1: -math.inf}] * 300, top_p=0.999
    )
    assert set(result.token_ids) <= {0, 3}
    np.testing.assert_allclose(result.logprobs, _log_softmax(logits)[0, 0], rtol=1e-6)


def test_ids_outside_the_vocabulary_break_an_invariant() -> None:
    for columns in ({"bias": [{VOCAB: 1.0}]}, {"seen": [{VOCAB: 1}]}, {"target": VOCAB}):
        with pytest.raises(AssertionError, match=str(VOCAB)):
            sample(_logits(1), **columns)


def test_a_tiny_temperature_is_greedy_and_never_overflows() -> None:
    logits = _logits(20) * 1000
    result = sample(logits, temperature=1e-30, seed=np.arange(20))
    np.testing.assert_array_equal(result.token_ids, logits.argmax(1))
    assert result.is_finite.all()


@pytest.mark.parametrize(
    "columns",
    [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.8, "min_p": 0.1}],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_they_should(columns: dict[str, float]) -> None:
    """Chi-square over 4,000 draws; the seeds are fixed, so that the test always sees the same draws."""
    row = np.array([2.0, 1.0, 1.5, 0.0, -1.0, 1.0, -0.5, 0.3, -4.0, -np.inf], np.float32)
    num_draws = 4000
    result = sample(np.tile(row, (num_draws, 1)), **({"temperature": 1.0} | columns), seed=np.arange(num_draws))
    expected = num_draws * _probabilities(row, **columns)
    counts = np.bincount(result.token_ids, minlength=len(row))
    assert (counts[expected == 0] == 0).all(), "a filtered token was drawn"
    kept = expected > 0
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def _probabilities(
    row: Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Array:
    order = np.argsort(-row, kind="stable")
    mass = np.exp(row[order].astype(np.float64) / temperature)
    if top_k:
        mass[top_k:] = 0
    before = np.cumsum(mass) - mass
    mass[before >= top_p * mass.sum()] = 0
    mass[mass < min_p * mass[0]] = 0
    probabilities = np.zeros(len(row))
    probabilities[order] = mass / mass.sum()
    return probabilities


def test_choice_and_position_draw_independently() -> None:
    num_draws = 3000
    logits = np.zeros((num_draws, 3), np.float32)
    by_choice = sample(logits, temperature=1.0, seed=11, choice=np.arange(num_draws)).token_ids
    by_position = sample(logits, temperature=1.0, seed=11, position=np.arange(num_draws)).token_ids
    for drawn in (by_choice, by_position):
        pairs = np.bincount(drawn[:-1] * 3 + drawn[1:], minlength=9)
        expected = (num_draws - 1) / 9
        assert ((pairs - expected) ** 2 / expected).sum() < 8 + 4 * 4


def test_an_empty_batch_yields_an_empty_result() -> None:
    result = _sample(np.zeros((0, VOCAB), np.float32), sampling_rows(0))
    for field in dataclasses.fields(result):
        assert len(getattr(result, field.name)) == 0
