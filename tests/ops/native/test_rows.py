"""Row ops: each against the reference's own formula in float64, and bit for bit whatever runs beside a row."""

from __future__ import annotations

import numpy as np
import pytest

from kvarto.core import ops
from tests.ops.native.native_op import ISAS, NativeOp
from tests.ops.native.quantised_rows import FINE_BELOW, FINE_STEPS, GROUP, parse, quantise
from tests.ops.one_op import assert_same_bits
from tests.ops.steps import decode_step
from tests.ops.test_row_ops import CASES, Case, _some_rows, _step

ROW_OPS = {
    name: case
    for name, case in CASES.items()
    if isinstance(
        case.bench.op,
        ops.Embed | ops.Norm | ops.HeadNorm | ops.Rope | ops.Activate | ops.GatedActivation | ops.Gather,
    )
}
FUSED_SETS = [isa for isa in ISAS if isa != "portable"] or ISAS
each_case = pytest.mark.parametrize("case", ROW_OPS.values(), ids=ROW_OPS.keys())
each_isa = pytest.mark.parametrize("isa", ISAS)


@each_case
@each_isa
@pytest.mark.parametrize("num_rows", [0, 1, 67])
def test_equals_the_formula(case: Case, isa: str, num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    step = _step(rng, num_rows, case)
    rows = case.make_rows(rng, num_rows)
    want = case.formula(rows, step)
    got = NativeOp.like(case.bench, isa=isa).run(rows, step)
    assert got.keys() == want.keys()
    for name, values in got.items():
        assert values.shape == want[name].shape
        # float32 sums of up to 2,048 terms in 64 chains, and functions exact to 2 units in the last place.
        scale = np.abs(want[name]).max(initial=1e-6)
        np.testing.assert_allclose(values, want[name], rtol=2e-6, atol=1e-6 * scale)


@each_case
def test_every_set_with_fused_steps_gives_the_same_bits(case: Case) -> None:
    rng = np.random.default_rng(3)
    step, rows = _step(rng, 9, case), case.make_rows(rng, 9)
    first, *others = (NativeOp.like(case.bench, isa=isa).run(rows, step) for isa in FUSED_SETS)
    for other in others:
        for name, values in other.items():
            assert_same_bits(values, first[name])


@each_case
def test_a_row_has_the_same_bits_whatever_runs_beside_it(case: Case) -> None:
    rng = np.random.default_rng(7)
    step, rows = _step(rng, 70, case), case.make_rows(rng, 70)
    whole = NativeOp.like(case.bench).run(rows, step)
    for size, num_threads in ((1, 1), (2, 2), (33, 3), (70, 2)):
        chosen = rng.permutation(70)[:size]
        part = NativeOp.like(case.bench, num_threads=num_threads).run(
            {name: values[chosen] for name, values in rows.items()}, _some_rows(step, chosen, case)
        )
        for name, values in part.items():
            assert_same_bits(values, whole[name][chosen])


def test_a_row_of_nan_stays_alone_and_is_seen() -> None:
    for case in ROW_OPS.values():
        rng = np.random.default_rng(8)
        step, rows = _step(rng, 20, case), case.make_rows(rng, 20)
        if not rows:
            continue
        whole = NativeOp.like(case.bench).run(rows, step)
        rows["x"][13] = np.nan
        for name, values in NativeOp.like(case.bench).run(rows, step).items():
            others = np.arange(20) != 13
            assert_same_bits(values[others], whole[name][others])
            assert np.isnan(values[13]).any()


@pytest.mark.parametrize("activation", ops.Activation)
@each_isa
def test_activations_are_accurate_everywhere(activation: ops.Activation, isa: str) -> None:
    x = np.concatenate([np.linspace(-30, 30, 4001), np.logspace(-30, 30, 200), -np.logspace(-30, 30, 200), [0.0, -0.0]])
    rows = {"x": x.astype(np.float32)[None]}
    case = CASES[{"silu": "silu", "gelu_tanh": "gelu tanh", "gelu": "gelu"}[activation]]
    bench = NativeOp(case.bench.op, {}, {"out": x.size}, isa=isa)
    got = bench.run(rows, decode_step([1]))["out"]
    with np.errstate(over="ignore"):
        want = case.formula(rows, decode_step([1]))["out"]
    # Far below 0 the results vanish, in float32 to something below 1e-36 times x; see `exp` in vec16.h.
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


QUANTISERS = {
    "norm": (ops.Norm("x", "out", "w", ops.NormKind.RMS, 1e-5), {"w": 1056}, 1056, ()),
    "layer norm": (ops.Norm("x", "out", "w", ops.NormKind.LAYER, 1e-5, "b"), {"w": 96, "b": 96}, 96, ()),
    "activate": (ops.Activate("x", "out", ops.Activation.GELU), {}, 544, ()),
    "gated": (ops.GatedActivation("x", "out", ops.Activation.SILU), {}, 2080, ()),
    "gather": (ops.Gather("x", "out"), {}, 32, ("out",)),
}


@pytest.mark.parametrize("name", QUANTISERS)
@each_isa
def test_quantised_rows_are_the_float_ones_to_half_a_step(name: str, isa: str) -> None:
    op, weights, width, sample_buffers = QUANTISERS[name]
    rng = np.random.default_rng(4)
    values = {weight: rng.standard_normal(size).astype(np.float32) for weight, size in weights.items()}
    x = rng.standard_normal((5, 2 * width if name == "gated" else width)).astype(np.float32)
    x[:, ::70] *= 20
    step = decode_step([1] * 5, sample_rows=range(5) if sample_buffers else ())
    options = {"sample_buffers": sample_buffers, "isa": isa}
    floats = NativeOp(op, values, {"out": width}, **options).run({"x": x}, step)["out"]
    raw = NativeOp(op, values, {"out": width}, int8_buffers=frozenset({"out"}), **options).run({"x": x}, step)["out"]
    rows, law = parse(raw, width), quantise(floats)
    np.testing.assert_allclose(rows.scales, law.scales, rtol=1e-6)
    np.testing.assert_array_equal(rows.is_fine, np.abs(rows.codes).sum(axis=2) < FINE_BELOW)
    assert rows.is_fine.any()
    steps = np.where(rows.is_fine, rows.scales / FINE_STEPS, rows.scales).repeat(GROUP, axis=1)
    # Half a step, and what the product with the inverse scale rounds: 127 units in the last place of a fine code.
    assert (np.abs(rows.values - floats) <= 0.5001 * steps + 127 * 2.0**-23 * rows.scales.repeat(GROUP, axis=1)).all()
    total = (rows.codes + rows.fine_codes / FINE_STEPS).sum(axis=2)
    np.testing.assert_allclose(rows.sums, rows.scales * total, rtol=1e-6)


@each_isa
def test_quantised_rows_obey_the_law_to_the_bit(isa: str) -> None:
    """From groups like spikes to flat ones, of all magnitudes, around the bound between both kinds."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((40, 1056)).astype(np.float32)
    x[:, ::32] *= rng.uniform(0, 30, (40, 33)).astype(np.float32)
    x *= np.logspace(-24, 30, 40, dtype=np.float32)[:, None]
    x[3, 64:96], x[4, :32] = 0, np.float32(1e-27)
    op = ops.Gather("x", "out")
    native = NativeOp(op, {}, {"out": 1056}, sample_buffers=("out",), isa=isa, int8_buffers=frozenset({"out"}))
    rows = parse(native.run({"x": x}, decode_step([1] * 40, sample_rows=range(40)))["out"], 1056)
    x[4, :32] = 0
    law = quantise(x)
    for name in ("codes", "fine_codes", "scales", "sums", "is_fine"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(law, name), err_msg=name)
    assert 0.2 < law.is_fine.mean() < 0.8
