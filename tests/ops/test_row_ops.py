"""Ops that treat rows apart: each against a formula in float64, and bit for bit whatever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvarto.core import ops
from kvarto.core.dtype import DType
from kvarto.core.step import Step
from tests.ops.one_op import Array, OneOp, assert_same_bits
from tests.ops.steps import decode_step

HEADS = ops.HeadShape(num_qo_heads=6, num_kv_heads=2, head_dim=24)
INV_FREQ = tuple(float(np.float32(x)) for x in 1e4 ** -(np.arange(10) / 10))
VOCAB = 333
EXPERTS, FFN, HIDDEN = 6, 40, 72
Rows = dict[str, Array]


@dataclass(frozen=True)
class Case:
    """One op, the rows it gets, and what it should make of them."""

    bench: OneOp
    make_rows: Callable[[np.random.Generator, int], Rows]
    formula: Callable[[Rows, Step], Rows]
    is_per_sample: bool = False


def _normal(*widths: int) -> Callable[[np.random.Generator, int], Rows]:
    names = ("x", "residual") if len(widths) == 2 else ("x",)
    return lambda rng, n: {
        name: (rng.standard_normal((n, width)) * rng.choice([0.01, 1, 30], (n, 1))).astype(np.float32)
        for name, width in zip(names, widths, strict=True)
    }


def _weight(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _rounded(weight: Array, dtype: DType) -> Array:
    torch_dtype = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}[dtype]
    return torch.from_numpy(weight.astype(np.float32)).to(torch_dtype).double().numpy()


def _rms(x: Array, weight: Array, eps: float) -> Array:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _layer(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    x = x.astype(np.float64)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * weight + bias


def _act(name: ops.Activation, x: Array) -> Array:
    x = x.astype(np.float64)
    if name is ops.Activation.SILU:
        return x / (1 + np.exp(-x))
    if name is ops.Activation.GELU:
        return x / 2 * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _linear(dtype: DType, shape: tuple[int, int], *, has_bias: bool) -> Case:
    weights = {"w": _weight(*shape)} | ({"b": _weight(shape[0], seed=1)} if has_bias else {})
    op = ops.Linear("x", "out", "w", "b" if has_bias else None)
    w = _rounded(weights["w"], dtype)
    return Case(
        OneOp(op, weights, {"out": shape[0]}, weight_dtype=dtype),
        _normal(shape[1]),
        lambda rows, _: {"out": rows["x"].astype(np.float64) @ w.T + weights.get("b", 0)},
    )


def _embed(dtype: DType, *, has_positions: bool) -> Case:
    weights = {"table": _weight(VOCAB, 50)} | ({"pos": _weight(64, 50, seed=1)} if has_positions else {})
    table, positions = _rounded(weights["table"], dtype), _rounded(weights.get("pos", np.zeros((64, 50))), dtype)
    op = ops.Embed("out", "table", 3.5, "pos" if has_positions else None)
    return Case(
        OneOp(op, weights, {"out": 50}, weight_dtype=dtype),
        lambda rng, n: {},
        lambda rows, step: {"out": table[step.token_ids] * 3.5 + positions[step.positions]},
    )


def _norm(kind: ops.NormKind, width: int, *, has_residual: bool) -> Case:
    weights = {"w": _weight(width), "b": _weight(width, seed=1)}
    is_rms = kind is ops.NormKind.RMS
    op = ops.Norm("x", "out", "w", kind, 1e-5, None if is_rms else "b", "residual" if has_residual else None)

    def formula(rows: Rows, _: Step) -> Rows:
        x = rows["x"] + rows["residual"] if has_residual else rows["x"]
        out = _rms(x, weights["w"], 1e-5) if is_rms else _layer(x, weights["w"], weights["b"], 1e-5)
        return {"out": out} | ({"residual": x} if has_residual else {})

    return Case(OneOp(op, weights, {"out": width}), _normal(*[width] * (2 if has_residual else 1)), formula)


def _head_norm() -> Case:
    weights = {"q": _weight(24), "k": _weight(24, seed=1)}

    def formula(rows: Rows, _: Step) -> Rows:
        heads = rows["x"].reshape(len(rows["x"]), 10, 24).astype(np.float64)
        heads[:, :6] = _rms(heads[:, :6], weights["q"], 1e-6)
        heads[:, 6:8] = _rms(heads[:, 6:8], weights["k"], 1e-6)
        return {"x": heads.reshape(len(heads), HEADS.width)}

    return Case(OneOp(ops.HeadNorm("x", "q", "k", HEADS, 1e-6), weights), _normal(HEADS.width), formula)


def _rope() -> Case:
    def formula(rows: Rows, step: Step) -> Rows:
        heads = rows["x"].reshape(len(rows["x"]), 10, 24).astype(np.float64)
        angle = step.positions[:, None, None] * np.array(INV_FREQ, np.float32)
        cos, sin = 1.25 * np.cos(angle.astype(np.float64)), 1.25 * np.sin(angle.astype(np.float64))
        low, high = heads[:, :8, :10].copy(), heads[:, :8, 10:20].copy()
        heads[:, :8, :10] = low * cos - high * sin
        heads[:, :8, 10:20] = high * cos + low * sin
        return {"x": heads.reshape(len(heads), HEADS.width)}

    return Case(OneOp(ops.Rope("x", HEADS, INV_FREQ, 1.25)), _normal(HEADS.width), formula)


def _activate(activation: ops.Activation, width: int, *, is_gated: bool) -> Case:
    op = (ops.GatedActivation if is_gated else ops.Activate)("x", "out", activation)

    def formula(rows: Rows, _: Step) -> Rows:
        x = rows["x"]
        return {"out": _act(activation, x[:, :width]) * x[:, width:] if is_gated else _act(activation, x)}

    return Case(OneOp(op, {}, {"out": width}), _normal(2 * width if is_gated else width), formula)


def _route(dtype: DType, *, normalise: bool) -> Case:
    weight = _weight(EXPERTS, HIDDEN)
    op = ops.Route("x", "ids", "shares", "w", 3, normalise)

    def formula(rows: Rows, _: Step) -> Rows:
        logits = rows["x"].astype(np.float64) @ _rounded(weight, dtype).T
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        ids = np.argsort(-shares, axis=-1, kind="stable")[:, :3]
        chosen = np.take_along_axis(shares, ids, -1)
        return {"ids": ids, "shares": chosen / chosen.sum(-1, keepdims=True) if normalise else chosen}

    bench = OneOp(op, {"w": weight}, {"ids": 3, "shares": 3}, weight_dtype=dtype, i32_buffers=("ids",))
    # Small numbers: close shares would make the order a matter of rounding.
    return Case(bench, lambda rng, n: {"x": rng.standard_normal((n, HIDDEN)).astype(np.float32) / 4}, formula)


def _experts(dtype: DType) -> Case:
    weights = {"gate_up": _weight(EXPERTS, 2 * FFN, HIDDEN) / 8, "down": _weight(EXPERTS, HIDDEN, FFN, seed=1) / 8}
    gate_up, down = (_rounded(w, dtype) for w in weights.values())
    op = ops.Experts("x", "ids", "shares", "out", "gate_up", "down", ops.Activation.SILU, 2)

    def make_rows(rng: np.random.Generator, n: int) -> Rows:
        ids = np.argsort(rng.random((n, EXPERTS)), axis=1)[:, :2].astype(np.int32)
        return _normal(HIDDEN)(rng, n) | {"ids": ids, "shares": rng.random((n, 2)).astype(np.float32)}

    def formula(rows: Rows, _: Step) -> Rows:
        out = np.zeros((len(rows["x"]), HIDDEN))
        for choice in range(2):
            chosen, share = rows["ids"][:, choice], rows["shares"][:, choice : choice + 1].astype(np.float64)
            raised = np.einsum("nh,nfh->nf", rows["x"].astype(np.float64), gate_up[chosen])
            activated = _act(ops.Activation.SILU, raised[:, :FFN]) * raised[:, FFN:]
            out += share * np.einsum("nf,nhf->nh", activated, down[chosen])
        return {"out": out}

    bench = OneOp(op, weights, {"out": HIDDEN}, weight_dtype=dtype, i32_buffers=("ids",))
    return Case(bench, make_rows, formula)


def _gather() -> Case:
    def formula(rows: Rows, step: Step) -> Rows:
        return {"out": rows["x"][step.sample_rows]}

    bench = OneOp(ops.Gather("x", "out"), {}, {"out": 30}, sample_buffers=("out",))
    return Case(bench, _normal(30), formula, is_per_sample=True)


def _logits(softcap: float | None) -> Case:
    weights = {"w": _weight(VOCAB, 40) / 4, "b": _weight(VOCAB, seed=1)}
    op = ops.Logits("x", "out", "w", "b", 0.5, softcap)

    def formula(rows: Rows, _: Step) -> Rows:
        out = (rows["x"].astype(np.float64) @ weights["w"].T + weights["b"]) * 0.5
        return {"out": out if softcap is None else softcap * np.tanh(out / softcap)}

    bench = OneOp(op, weights, {"out": VOCAB}, sample_buffers=("x", "out"))
    return Case(bench, _normal(40), formula, is_per_sample=True)


CASES = {
    "embed f32": _embed(DType.F32, has_positions=True),
    "embed f16": _embed(DType.F16, has_positions=False),
    "embed bf16": _embed(DType.BF16, has_positions=True),
    "rms": _norm(ops.NormKind.RMS, 100, has_residual=False),
    "rms residual": _norm(ops.NormKind.RMS, 2048, has_residual=True),
    "layer": _norm(ops.NormKind.LAYER, 77, has_residual=False),
    "layer residual": _norm(ops.NormKind.LAYER, 64, has_residual=True),
    "head norm": _head_norm(),
    "linear f32": _linear(DType.F32, (200, 130), has_bias=True),
    "linear f32 one block": _linear(DType.F32, (16, 33), has_bias=False),
    "linear f16 blocks": _linear(DType.F16, (1100, 1025), has_bias=True),
    "linear f32 blocks": _linear(DType.F32, (1100, 1025), has_bias=False),
    "linear bf16": _linear(DType.BF16, (96, 64), has_bias=False),
    "rope": _rope(),
    "silu": _activate(ops.Activation.SILU, 130, is_gated=False),
    "gelu": _activate(ops.Activation.GELU, 129, is_gated=False),
    "gelu tanh": _activate(ops.Activation.GELU_TANH, 3, is_gated=False),
    "gated silu": _activate(ops.Activation.SILU, 77, is_gated=True),
    "gated gelu tanh wide": _activate(ops.Activation.GELU_TANH, 20_000, is_gated=True),
    "gated gelu": _activate(ops.Activation.GELU, 64, is_gated=True),
    "route": _route(DType.F32, normalise=True),
    "route bf16": _route(DType.BF16, normalise=False),
    "experts": _experts(DType.F32),
    "experts f16": _experts(DType.F16),
    "gather": _gather(),
    "logits": _logits(None),
    "logits softcap": _logits(5.0),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def _step(rng: np.random.Generator, num_rows: int, case: Case) -> Step:
    sample_rows = range(num_rows) if case.is_per_sample else ()
    token_ids = rng.integers(0, VOCAB, num_rows)
    return decode_step(list(rng.integers(1, 64, num_rows)), token_ids=token_ids, sample_rows=sample_rows)


def _some_rows(step: Step, rows: Array, case: Case) -> Step:
    sample_rows = range(len(rows)) if case.is_per_sample else ()
    context_lens = [int(c) for c in step.context_lens[rows]]
    return decode_step(context_lens, token_ids=step.token_ids[rows], sample_rows=sample_rows)


@each_case
@pytest.mark.parametrize("num_rows", [0, 1, 31, 67])
def test_equals_the_formula(case: Case, num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    step = _step(rng, num_rows, case)
    rows = case.make_rows(rng, num_rows)
    want = case.formula(rows, step)
    got = case.bench.run(rows, step)
    assert got.keys() == want.keys()
    for name, values in got.items():
        assert values.shape == want[name].shape
        # float32 sums of up to 2,048 terms in trees or blocks: relative errors stay below 2^-24 times a few dozen.
        scale = np.abs(want[name]).max(initial=1e-6)
        np.testing.assert_allclose(values, want[name], rtol=2e-5, atol=4e-6 * scale)


@each_case
def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(case: Case) -> None:
    rng = np.random.default_rng(7)
    num_rows = 70
    step, rows = _step(rng, num_rows, case), case.make_rows(rng, num_rows)
    whole = case.bench.run(rows, step)
    for size in (1, 2, 5, 31, 32, 33, 64, 70):
        chosen = rng.permutation(num_rows)[:size]
        part = case.bench.run({name: values[chosen] for name, values in rows.items()}, _some_rows(step, chosen, case))
        for name, values in part.items():
            assert_same_bits(values, whole[name][chosen])


@pytest.mark.parametrize("case", [case for name, case in CASES.items() if not name.startswith("embed")])
def test_a_row_of_nan_stays_alone(case: Case) -> None:
    rng = np.random.default_rng(8)
    step, rows = _step(rng, 40, case), case.make_rows(rng, 40)
    whole = case.bench.run(rows, step)
    rows["x"][13] = np.nan
    for name, values in case.bench.run(rows, step).items():
        others = np.arange(40) != 13
        assert_same_bits(values[others], whole[name][others])


def test_equal_shares_choose_the_lower_expert() -> None:
    bench = OneOp(
        ops.Route("x", "ids", "shares", "w", 3, True),
        {"w": np.zeros((EXPERTS, 8), np.float32)},
        {"ids": 3, "shares": 3},
        i32_buffers=("ids",),
    )
    out = bench.run({"x": np.ones((5, 8), np.float32)})
    np.testing.assert_array_equal(out["ids"], [[0, 1, 2]] * 5)
    np.testing.assert_allclose(out["shares"], 1 / 3, rtol=1e-6)


def test_a_norm_may_write_where_it_reads() -> None:
    x = _weight(40, 100)
    weights = {"w": _weight(100), "b": _weight(100, seed=1)}
    for kind in ops.NormKind:
        in_place = OneOp(ops.Norm("x", "x", "w", kind, 1e-5, "b"), weights).run({"x": x})
        apart = OneOp(ops.Norm("x", "out", "w", kind, 1e-5, "b"), weights, {"out": 100}).run({"x": x})
        assert_same_bits(in_place["x"], apart["out"])
