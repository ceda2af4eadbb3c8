"""The embedding and the output matrix with adapters: updates and replaced tokens, on both backends, against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.targets import Role, Target
from kvarto.core.dtype import DType
from kvarto.core.ops import Embed, Logits
from kvarto.core.step import Step
from tests.ops.adapters import Draw, base_of, drawn, merged, scales, stored, with_adapters, with_tokens
from tests.ops.native.native_op import ISAS, NativeOp
from tests.ops.one_op import NO_KV, OneOp, assert_same_bits
from tests.ops.steps import paged_step, sampling_rows

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(21)
VOCAB, HIDDEN = 333, 88
TABLE = RNG.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
POSITIONS = RNG.normal(size=(64, HIDDEN)).astype(np.float32)
BIAS = RNG.normal(size=VOCAB).astype(np.float32)
EMBED = Embed("y", "w", 3.5, "p")
LOGITS = Logits("x", "y", "w", bias="b", scale=0.7, softcap=9.0)
LENGTHS, CONTEXTS = [20, 1, 1, 3, 33, 1, 6], [20, 9, 30, 3, 40, 7, 60]
IDS = (300, 4, 17, 332, 0, 90, 5)


def adapters_of(role: Role) -> dict[str, Adapter]:
    target = Target("w", role, 0, *((HIDDEN, VOCAB) if role is Role.EMBED else (VOCAB, HIDDEN)))
    update = drawn([target], Draw(5, (DType.F16, DType.BF16), 1.5, seed=1))
    biased = drawn([target], Draw(33, (DType.BF16, DType.F32), -0.5, has_bias=role is Role.LOGITS, seed=2))
    return {
        "update": update,
        "biased": biased,
        "tokens": with_tokens(Adapter(()), "w", (role,), IDS, HIDDEN),
        "dora": drawn([target], Draw(4, (DType.F32, DType.F16), has_magnitude=True, seed=3)),
        "both": with_tokens(update, "w", (role,), IDS[:2], HIDDEN),
    }


Bench = OneOp | NativeOp
KINDS = ["reference", *(f"{isa} {threads}" for isa in dict.fromkeys((ISAS[0], ISAS[-1])) for threads in (1, 3))]


def bench_of(kind: str, role: Role) -> Bench:
    free = np.random.default_rng(5).permutation(300).tolist()
    op = EMBED if role is Role.EMBED else LOGITS
    base = base_of(op, (VOCAB, HIDDEN))
    every = [stored(each, base, NO_KV.page_bytes, free, scales(TABLE)) for each in adapters_of(role).values()]
    bound = dict(enumerate(every))
    weights = {"w": TABLE, "p": POSITIONS} if role is Role.EMBED else {"w": TABLE, "b": BIAS}
    samples = () if role is Role.EMBED else ("x", "y")
    widths = {"y": HIDDEN if role is Role.EMBED else VOCAB}
    one = OneOp(
        op, weights, widths, num_pages=300, vocab_size=VOCAB, sample_buffers=samples, adapters=bound, max_lora_rank=33
    )
    if kind == "reference":
        return one
    isa, threads = kind.split()
    return NativeOp.like(one, isa=isa, num_threads=int(threads), adapters=bound, max_lora_rank=33, num_pages=300)


def logits_of(x: Array, adapter: Adapter | None) -> Array:
    z = x @ (TABLE if adapter is None else merged(adapter, "w", TABLE)).T.astype(np.float64) + BIAS
    for update in adapter.updates if adapter is not None else ():
        if update.bias is not None:
            z += update.scaling * update.bias.values()
    return 9.0 * np.tanh(z * 0.7 / 9.0)


def embeddings_of(tokens: Array, positions: Array, adapter: Adapter | None) -> Array:
    table = TABLE if adapter is None else merged(adapter, "w", TABLE)
    return table[tokens] * 3.5 + POSITIONS[positions]


def step_of(tokens: Array, names: Sequence[str | None], role: Role, starts: Sequence[int] | None = None) -> Step:
    rows = np.arange(len(tokens))[::-1]  # samples in another order than rows
    rows = np.concatenate((rows, rows[:3]))
    step = paged_step(
        LENGTHS, CONTEXTS, [[]] * len(LENGTHS), 16, token_ids=tokens, sample_rows=rows.tolist(),
        sampling=sampling_rows(len(rows)),
    )  # fmt: skip
    handles = list(adapters_of(role))
    return with_adapters(step, [None if name is None else handles.index(name) for name in names], starts)


NAMES = ("update", "biased", None, "tokens", "both", "update", "dora")


def of_sequences(step: Step) -> Array:
    """The sequence of each token."""
    return np.repeat(np.arange(step.num_seqs), np.diff(step.cu_seqlens))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_numpy(kind: str) -> None:
    tokens = RNG.integers(0, VOCAB, sum(LENGTHS))
    starts = [11, 0, 0, 1, 0, 8, 55]
    step = step_of(tokens, NAMES, Role.LOGITS, starts)
    x = np.random.default_rng(3).normal(size=(step.num_samples, HIDDEN)).astype(np.float32)
    y = bench_of(kind, Role.LOGITS).run({"x": x}, step)["y"]
    seqs, every = of_sequences(step)[step.sample_rows], adapters_of(Role.LOGITS)
    for sample, (row, seq) in enumerate(zip(step.sample_rows, seqs, strict=True)):
        name = NAMES[seq]
        is_active = name is not None and step.positions[row] >= starts[seq]
        want = logits_of(x[sample : sample + 1], every[name] if is_active and name is not None else None)
        np.testing.assert_allclose(y[sample : sample + 1], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_equal_numpy(kind: str) -> None:
    tokens = RNG.integers(0, VOCAB, sum(LENGTHS))
    tokens[::3] = RNG.choice(IDS, len(tokens[::3]))
    starts = [11, 0, 0, 1, 0, 8, 55]
    step = step_of(tokens, NAMES, Role.EMBED, starts)
    y = bench_of(kind, Role.EMBED).run({}, step)["y"]
    every = adapters_of(Role.EMBED)
    for row, seq in enumerate(of_sequences(step)):
        name = NAMES[seq]
        is_active = name is not None and step.positions[row] >= starts[seq]
        adapter = every[name] if is_active and name is not None else None
        want = embeddings_of(tokens[row : row + 1], step.positions[row : row + 1], adapter)
        np.testing.assert_allclose(y[row : row + 1], want, rtol=0, atol=1e-5 * np.abs(want).max())


def _logits(bench: Bench, x: Array, step: Step) -> Array:
    return bench.run({"x": x[: step.num_samples]}, step)["y"]


def _embeddings(bench: Bench, x: Array, step: Step) -> Array:
    return bench.run({}, step)["y"][step.sample_rows]


@pytest.mark.parametrize("role", [Role.LOGITS, Role.EMBED])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_bits_whatever_their_neighbours_use(kind: str, role: Role) -> None:
    rows_of: Callable[[Bench, Array, Step], Array] = _logits if role is Role.LOGITS else _embeddings
    tokens = RNG.choice(IDS, sum(LENGTHS))
    bench = bench_of(kind, role)
    mixed = step_of(tokens, NAMES, role)
    x = np.random.default_rng(4).normal(size=(mixed.num_samples, HIDDEN)).astype(np.float32)
    got = rows_of(bench, x, mixed)
    seqs = of_sequences(mixed)[mixed.sample_rows]
    for name in (None, *adapters_of(role)):
        alone = rows_of(bench, x, step_of(tokens, [name] * len(NAMES), role))
        of_name = [NAMES[seq] == name for seq in seqs]
        assert any(of_name)
        assert_same_bits(got[of_name], alone[of_name])
