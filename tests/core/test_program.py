"""Program: lifespans follow the ops, and `check` names what is wrong."""

from __future__ import annotations

import dataclasses

import pytest

from kvarto.core.buffers import Buffer, Rows, Source, StepLimits, StepShape, Weight
from kvarto.core.dtype import DType
from kvarto.core.kv_format import LayerGroup
from kvarto.core.ops import Activate, Activation, Embed, Gather, Linear, Logits, Sample
from kvarto.core.program import Program


def weight(name: str, *shape: int) -> Weight:
    return Weight(name, shape, DType.F32, (Source(name),))


def program() -> Program:
    return Program(
        architecture="toy",
        buffers={
            "x": Buffer("x", 8),
            "up": Buffer("up", 16),
            "act": Buffer("act", 16),
            "last": Buffer("last", 16, Rows.SAMPLES),
            "logits": Buffer("logits", 11, Rows.SAMPLES),
        },
        weights={"table": weight("table", 11, 8), "w": weight("w", 16, 8), "head": weight("head", 11, 16)},
        ops=(
            Embed("x", "table"),
            Linear("x", "up", "w"),
            Activate("up", "act", Activation.SILU),
            Gather("act", "last"),
            Logits("last", "logits", "head"),
            Sample("logits"),
        ),
        layer_groups=(LayerGroup((0,), 1, 1, 4, None),),
        hidden_size=8,
        vocab_size=11,
        max_positions=32,
    )


def test_lifespans_run_from_first_writer_to_last_reader() -> None:
    assert program().lifespans() == {"x": (0, 2), "up": (1, 3), "act": (2, 4), "last": (3, 5), "logits": (4, 6)}


def test_buffer_sizes_follow_tokens_or_samples() -> None:
    limits = StepLimits(max_tokens=10, max_seqs=2, max_samples=3, max_context=32)
    buffers = program().buffers
    assert buffers["up"].size_bytes(limits) == 10 * 16 * 4
    assert buffers["logits"].size_bytes(limits) == 3 * 11 * 4


def test_costs_count_weights_once_and_rows_each() -> None:
    toy = program()
    shape = StepShape(num_tokens=5, num_samples=2, context_tokens=15, unique_context_tokens=5)
    linear = toy.ops[1].cost(toy, shape)
    assert linear.flops == 2 * 5 * 16 * 8
    assert linear.bytes_read == 4 * (16 * 8 + 5 * 8)
    assert linear.bytes_written == 4 * 5 * 16


def test_a_sound_program_passes() -> None:
    program().check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ops": program().ops[1:]}, "before it is written"),
        ({"weights": {}}, "unknown weight"),
        ({"weights": program().weights | {"spare": weight("spare", 1)}}, "no op uses.*spare"),
        ({"buffers": program().buffers | {"spare": Buffer("spare", 1)}}, "no op writes.*spare"),
    ],
)
def test_a_broken_program_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        dataclasses.replace(program(), **change).check()  # type: ignore[arg-type]
