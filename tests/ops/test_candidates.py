"""Laws of top-k and top-p, on random rows with and without equals."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarto.ops.reference.candidates import filtered, likeliest

rows = st.tuples(st.integers(1, 600), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 3.0, 20.0]), st.booleans())


def _logits(size: int, seed: int, spread: float, has_equals: bool) -> torch.Tensor:
    logits = np.random.default_rng(seed).standard_normal(size) * spread
    if has_equals:
        logits = np.round(logits)
    logits[np.random.default_rng(seed + 1).random(size) < 0.05] = -np.inf
    logits[seed % size] = max(0.0, float(logits.max()))
    return torch.from_numpy((logits - logits.max()).astype(np.float32))


def _order(logits: torch.Tensor) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))


@given(rows, st.integers(1, 700))
def test_likeliest_is_a_stable_sort(row: tuple[int, int, float, bool], count: int) -> None:
    logits = _logits(*row)
    assert likeliest(logits, count).tolist() == _order(logits)[:count]


@given(rows, st.integers(0, 700), st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]))
@settings(max_examples=300)
def test_filters_keep_the_smallest_set(row: tuple[int, int, float, bool], top_k: int, top_p: float) -> None:
    logits = _logits(*row)
    ids = filtered(logits, float(logits.exp().sum()), top_k, top_p)
    if top_p == 1.0 and not 0 < top_k < len(logits):
        assert ids is None
        return
    assert ids is not None
    limit = top_k if 0 < top_k < len(logits) else len(logits)
    order = _order(logits)[:limit]
    assert ids.tolist() == order[: len(ids)], "a prefix of the order"
    mass = np.exp(logits.double().numpy())[order]
    share = np.cumsum(mass) / mass.sum()
    if top_p == 1.0:
        assert len(ids) == limit
        return
    slack = 1e-6  # the total is a float32 sum
    assert share[len(ids) - 1] >= top_p - slack or len(ids) == limit
    assert len(ids) == 1 or share[len(ids) - 2] < top_p + slack, "one less would do"


def test_top_p_looks_as_far_as_it_must() -> None:
    flat = torch.zeros(5000)
    ids = filtered(flat, 5000.0, 0, 0.9)
    assert ids is not None
    assert ids.tolist() == list(range(4500))
