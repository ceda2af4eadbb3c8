"""One product and what adapters add to it, on both backends: against NumPy, and bit for bit against itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.targets import Role, Target
from kvarto.core.dtype import DType
from kvarto.core.ops import Linear
from kvarto.core.step import Step
from tests.ops.adapters import Draw, base_of, drawn, merged, scales, stored, with_adapters
from tests.ops.native.native_op import ISAS, NativeOp
from tests.ops.one_op import NO_KV, OneOp, assert_same_bits
from tests.ops.steps import paged_step

Array = np.ndarray[Any, Any]
F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
OP = Linear("x", "y", "w")
RNG = np.random.default_rng(11)
IN, OUT = 200, 1330
WEIGHT = RNG.normal(size=(OUT, IN)).astype(np.float32)
WHOLE = Target("w", Role.LINEAR, 0, OUT, IN)
BANDS = tuple(Target("w", Role.LINEAR, first, width, IN) for first, width in ((0, 1024), (1024, 153), (1177, 153)))
ADAPTERS: dict[str, Adapter] = {
    "rank 1": drawn([WHOLE], Draw(1, seed=1)),
    "rank 3, f16": drawn([WHOLE], Draw(3, (F16, F16), seed=2)),
    "rank 8, bands": drawn(BANDS, Draw(8, (BF16, BF16), seed=3)),
    "rank 64, mixed": drawn([WHOLE], Draw(64, (F32, BF16), scaling=2.0, spread=0.05, has_bias=True, seed=4)),
    "rank 17, one band": drawn(BANDS[1:2], Draw(17, (F16, F32), scaling=-1.5, has_bias=True, seed=5)),
    "dora": drawn(BANDS[:2], Draw(6, (BF16, F16), scaling=0.7, has_magnitude=True, seed=7)),
    "zeros": drawn([WHOLE], Draw(5, spread=0.0, seed=6)),
}
HANDLES = {name: 7 * index for index, name in enumerate(ADAPTERS)}
LENGTHS, CONTEXTS = [40, 1, 1, 3, 33, 1, 2, 5, 1, 1], [40, 9, 30, 3, 64, 7, 2, 17, 50, 1]
NAMES = (
    "rank 1", "rank 3, f16", "rank 8, bands", None, "rank 64, mixed", "rank 17, one band", "dora", "rank 64, mixed",
    "zeros", None,
)  # fmt: skip


NATIVE = [f"{isa} {threads}" for isa in dict.fromkeys((ISAS[0], ISAS[-1])) for threads in (1, 3)]
Bench = OneOp | NativeOp


@pytest.fixture(params=["reference", *NATIVE])
def bench(request: pytest.FixtureRequest) -> Bench:
    return bench_of(request.param)


def bench_of(kind: str) -> Bench:
    """The op with all adapters bound: the reference, or an instruction set and a number of threads."""
    page_bytes = NO_KV.page_bytes
    assert page_bytes == 4096, "a strip of 1330 columns of float32 straddles pages"
    free = np.random.default_rng(5).permutation(900).tolist()
    base = base_of(OP, (OUT, IN))
    bound = {
        HANDLES[name]: stored(adapter, base, page_bytes, free, scales(WEIGHT)) for name, adapter in ADAPTERS.items()
    }
    one = OneOp(OP, {"w": WEIGHT}, {"y": OUT}, num_pages=900, adapters=bound, max_lora_rank=64)
    if kind == "reference":
        return one
    isa, threads = kind.split()
    return NativeOp.like(one, isa=isa, num_threads=int(threads), adapters=bound, max_lora_rank=64, num_pages=900)


def step_of(lengths: Sequence[int], contexts: Sequence[int]) -> Step:
    return paged_step(lengths, contexts, [[]] * len(lengths), 16)


def expected(x: Array, adapter: Adapter | None) -> Array:
    y = x.astype(np.float64) @ (WEIGHT if adapter is None else merged(adapter, "w", WEIGHT)).T.astype(np.float64)
    for update in adapter.updates if adapter is not None else ():
        if update.bias is not None:
            band = slice(update.target.first_row, update.target.first_row + update.target.out_width)
            y[:, band] += update.scaling * update.bias.values()
    return y


def run(
    bench: Bench,
    x: Array,
    lengths: Sequence[int],
    names: Sequence[str | None],
    starts: Mapping[int, int] | None = None,
) -> Array:
    step = step_of(lengths, CONTEXTS[: len(lengths)] if len(lengths) == len(CONTEXTS) else list(lengths))
    handles = [None if name is None else HANDLES[name] for name in names]
    asked = [(starts or {}).get(s, 0) for s in range(len(lengths))]
    return bench.run({"x": x}, with_adapters(step, handles, asked))["y"]


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_alone_equals_numpy(bench: Bench, name: str) -> None:
    x = np.random.default_rng(1).normal(size=(37, IN)).astype(np.float32)
    y = run(bench, x, [37], [name])
    want = expected(x, ADAPTERS[name])
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-6 * np.abs(want).max() * 10)


def test_zeros_change_nothing(bench: Bench) -> None:
    x = np.random.default_rng(1).normal(size=(37, IN)).astype(np.float32)
    assert_same_bits(run(bench, x, [37], ["zeros"]), run(bench, x, [37], [None]))


def test_rows_of_a_mixed_batch_have_the_bits_that_they_have_alone(bench: Bench) -> None:
    x = np.random.default_rng(2).normal(size=(sum(LENGTHS), IN)).astype(np.float32)
    y = run(bench, x, LENGTHS, NAMES)
    ends = np.cumsum(LENGTHS)
    for name, start, end in zip(NAMES, ends - LENGTHS, ends, strict=True):
        part = x[start:end]
        np.testing.assert_allclose(y[start:end], expected(part, None if name is None else ADAPTERS[name]), atol=1e-3)
        assert_same_bits(y[start:end], run(bench, part, [len(part)], [name]))
        for row in range(0, len(part), 7):
            assert_same_bits(y[start + row : start + row + 1], run(bench, part[row : row + 1], [1], [name]))


def test_rows_before_the_start_of_their_adapter_are_the_bases(bench: Bench) -> None:
    x = np.random.default_rng(3).normal(size=(sum(LENGTHS), IN)).astype(np.float32)
    names = ["rank 8, bands"] * len(LENGTHS)
    bare, all_rows = run(bench, x, LENGTHS, [None] * len(LENGTHS)), run(bench, x, LENGTHS, names)
    starts = {0: 13, 1: 8, 2: 30, 4: 31, 7: 15}
    y = run(bench, x, LENGTHS, names, starts)
    first = 0
    for s, (length, context) in enumerate(zip(LENGTHS, CONTEXTS, strict=True)):
        for row in range(length):
            is_active = context - length + row >= starts.get(s, 0)
            assert_same_bits(y[first + row], (all_rows if is_active else bare)[first + row])
        first += length


def test_a_handle_that_is_not_bound_is_refused(bench: Bench) -> None:
    x = np.zeros((1, IN), np.float32)
    with pytest.raises((AssertionError, ValueError), match=r"3, which is not bound"):
        bench.run({"x": x}, with_adapters(step_of([1], [1]), [3]))


def test_native_bits_depend_on_no_threads_and_only_on_fused_multiply_add() -> None:
    x = np.random.default_rng(4).normal(size=(sum(LENGTHS), IN)).astype(np.float32)
    want = run(bench_of(f"{ISAS[-1]} 1"), x, LENGTHS, NAMES)
    assert_same_bits(run(bench_of(f"{ISAS[-1]} 2"), x, LENGTHS, NAMES), want)
    for isa in ISAS[:-1]:
        got = run(bench_of(f"{isa} 2"), x, LENGTHS, NAMES)
        if isa == "portable":
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
        else:
            assert_same_bits(got, want)
