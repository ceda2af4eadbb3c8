"""An adapter of codes gives, bit for bit, what the bfloat16 adapter of the values gives that its codes stand for: on
both backends, in every op, alone and beside others, and where only some of its strips have codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.quantised import quantised
from kvarto.adapters.targets import BaseTargets, Role, Target, targets_of
from kvarto.core.dtype import DType
from kvarto.core.ops import Embed, Linear, Logits
from kvarto.core.step import Step
from kvarto.core.strip_type import StripType
from tests.ops.adapted import Request, alone, mixed
from tests.ops.adapters import Draw, base_of, bfloat16_twin, drawn, scales, stored, with_adapters, with_tokens
from tests.ops.native.native_op import ISAS, NativeOp
from tests.ops.one_op import NO_KV, OneOp, assert_same_bits
from tests.ops.opened import LIMITS, LLAMA, Opened, open_backend
from tests.ops.steps import paged_step, sampling_rows

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
Q8, Q4 = StripType.Q8, StripType.Q4
KINDS = ["reference", *(f"{isa} {threads}" for isa in dict.fromkeys((ISAS[0], *ISAS[-2:])) for threads in (1, 3))]
LENGTHS, CONTEXTS = [20, 1, 1, 3, 33, 1, 6, 1], [20, 9, 30, 3, 40, 7, 60, 1]
IN, OUT, VOCAB, HIDDEN = 544, 1600, 320, 96
RNG = np.random.default_rng(17)
WEIGHT = RNG.normal(size=(OUT, IN)).astype(np.float32)
TABLE = RNG.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
WHOLE = Target("w", Role.LINEAR, 0, OUT, IN)
BANDS = tuple(Target("w", Role.LINEAR, first, width, IN) for first, width in ((0, 1024), (1024, 288), (1312, 150)))


def of_linear() -> list[Adapter]:
    """The last band of 150 rows is no whole blocks: only its A has codes. Zeros have a scale of zero."""
    both = quantised(drawn([WHOLE], Draw(5, (F16, F32), seed=9)), Q8)
    (update,) = both.updates
    return [
        quantised(drawn([WHOLE], Draw(1, seed=1)), Q8),
        quantised(drawn([WHOLE], Draw(3, (F16, BF16), seed=2)), Q4),
        quantised(drawn(BANDS, Draw(8, (BF16, F16), seed=3)), Q8),
        quantised(drawn([WHOLE], Draw(64, (F32, BF16), scaling=2.0, spread=0.05, has_bias=True, seed=4)), Q4),
        quantised(drawn(BANDS[1:], Draw(17, (F16, F32), scaling=-1.5, has_bias=True, has_magnitude=True, seed=5)), Q4),
        quantised(drawn([WHOLE], Draw(6, spread=0.0)), Q4),
        replace(both, updates=(replace(update, lora_b=replace(update.lora_b, codes=None)),)),
        replace(both, updates=(replace(update, lora_a=replace(update.lora_a, codes=None)),)),
    ]


def of_table(role: Role) -> list[Adapter]:
    target = Target("w", role, 0, *((HIDDEN, VOCAB) if role is Role.EMBED else (VOCAB, HIDDEN)))
    return [
        quantised(drawn([target], Draw(5, (F16, BF16), 1.5, seed=1)), Q8),
        quantised(drawn([target], Draw(33, (BF16, F32), -0.5, has_bias=role is Role.LOGITS, seed=2)), Q4),
        with_tokens(quantised(drawn([target], Draw(4, seed=3)), Q4), "w", (role,), (300, 4, 17), HIDDEN),
        quantised(drawn([target], Draw(4, has_magnitude=True, seed=4)), Q8),
    ]


CASES = {
    Linear: (Linear("x", "y", "w"), WEIGHT, of_linear),
    Logits: (Logits("x", "y", "w", softcap=9.0), TABLE, lambda: of_table(Role.LOGITS)),
    Embed: (Embed("y", "w", 3.5), TABLE, lambda: of_table(Role.EMBED)),
}


def bench_of(kind: str, op_type: type, adapters: Sequence[Adapter]) -> OneOp | NativeOp:
    op, weight, _ = CASES[op_type]
    free = np.random.default_rng(5).permutation(900).tolist()
    base = base_of(op, weight.shape)
    stores = [stored(each, base, NO_KV.page_bytes, free, scales(weight)) for each in adapters]
    bound: Mapping[int, object] = dict(enumerate(stores))
    samples = ("x", "y") if op_type is Logits else ()
    widths = {"y": HIDDEN if op_type is Embed else len(weight)}
    one = OneOp(op, {"w": weight}, widths, num_pages=900, vocab_size=VOCAB, sample_buffers=samples,
                adapters=bound, max_lora_rank=64)  # type: ignore[arg-type]  # fmt: skip
    if kind == "reference":
        return one
    isa, threads = kind.split()
    return NativeOp.like(one, isa=isa, num_threads=int(threads), adapters=bound, max_lora_rank=64, num_pages=900)


def step_of(lengths: Sequence[int], contexts: Sequence[int], handles: Sequence[int | None]) -> Step:
    num_tokens = sum(lengths)
    tokens = np.random.default_rng(num_tokens).integers(0, VOCAB, num_tokens)
    step = paged_step(
        lengths, contexts, [[]] * len(lengths), 16, token_ids=tokens, sample_rows=list(range(num_tokens)),
        sampling=sampling_rows(num_tokens),
    )  # fmt: skip
    return with_adapters(step, handles)


@pytest.mark.parametrize("op_type", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_op_gives_the_bits_of_bfloat16(kind: str, op_type: type) -> None:
    adapters = CASES[op_type][2]()
    coded, twins = (bench_of(kind, op_type, each) for each in (adapters, [bfloat16_twin(each) for each in adapters]))
    width = IN if op_type is Linear else HIDDEN
    handles = [(*range(len(adapters)), None)[s % (len(adapters) + 1)] for s in range(len(LENGTHS))]
    steps = [step_of(LENGTHS, CONTEXTS, handles)]
    for handle in range(len(adapters)):
        steps += [step_of([count], [count], [handle]) for count in (1, 37)]
    for step in steps:
        x = np.random.default_rng(2).normal(size=(step.num_tokens, width)).astype(np.float32)
        rows = {} if op_type is Embed else {"x": x}
        got, want = (bench.run(rows, step)["y"] for bench in (coded, twins))
        assert_same_bits(got, want)
        bare = coded.run(rows, with_adapters(step, [None] * step.num_seqs))["y"]
        assert np.abs(got - bare).max() > 0.1 or step.adapters.tolist() == [5]


MODULES = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
WIDE = LLAMA | {"hidden_size": 288, "num_hidden_layers": 2}
PROGRAMS = ["reference", "native", "native int8"] + ["native bf16"] * ("amx" in ISAS)


def of_program(base: BaseTargets) -> list[Adapter]:
    def of(draw: Draw, codes: StripType, modules: Sequence[str] = MODULES) -> Adapter:
        targets = [base.find(f"model.layers.{layer}.{name}") for layer in range(2) for name in modules]
        return quantised(drawn(targets, draw), codes)

    tables = drawn([base.find("model.embed_tokens"), base.find("lm_head")], Draw(3, (F32, BF16), seed=5))
    return [
        of(Draw(8, (BF16, BF16), 0.4, 0.15, seed=1), Q8),
        of(Draw(9, (F32, F16), 0.5, has_bias=True, seed=2), Q4),
        of(Draw(5, (BF16, F32), 0.6, has_magnitude=True, seed=3), Q4),
        of(Draw(4, (F16, F32), seed=4), Q8, ("self_attn.qkv_proj", "mlp.gate_up_proj")),
        quantised(tables, Q4),
        drawn([base.find("model.layers.1.mlp.down_proj")], Draw(2, (BF16, F16), seed=6)),
    ]


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_model_gives_the_bits_of_bfloat16(kind: str) -> None:
    rng = np.random.default_rng(8)
    asked = [
        Request(rng.integers(0, LLAMA["vocab_size"], length), handle)
        for length, handle in ((40, 0), (1, 1), (33, 2), (5, None), (2, 3), (50, 1), (9, 4), (17, 5), (70, 0))
    ]

    def opened(twins: bool, page_size: int, threads: int) -> Opened:
        limits = replace(LIMITS, max_lora_rank=9)
        program = open_backend(WIDE, kind, limits=limits, page_size=page_size, threads=threads, num_slots=16_000)
        shelf = program.shelf()
        for adapter in of_program(targets_of(program.program)):
            shelf.bind(bfloat16_twin(adapter) if twins else adapter)
        return program

    want = opened(True, 16, 1)
    logits = [alone(want, request) for request in asked]
    want.backend.close()
    for page_size, threads in ((16, 1), (32, 1 if kind == "reference" else 2)):
        got = opened(False, page_size, threads)
        for one, each in zip(logits, asked, strict=True):
            assert_same_bits(alone(got, each), one)
        for one, other in zip(logits, mixed(got, asked, 25), strict=True):
            assert_same_bits(other, one)
        got.backend.close()
