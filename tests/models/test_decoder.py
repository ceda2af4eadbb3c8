"""Laws of built programs: sound, sized as the config says, cheap in FLOPs and in live activations, grouped well."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarto.core.buffers import Rows, StepLimits, StepShape
from kvarto.core.dtype import DType
from kvarto.core.ops import Attention, Embed, HeadShape, Linear, Logits, Op
from kvarto.core.program import Program
from kvarto.models.config import parse_config
from kvarto.models.decoder import build_program
from kvarto.models.layer_groups import MAX_PADDING_FRACTION, group_layers, num_padding_slots
from tests.models.test_config import GEMMA2, GEMMA3, GPT2, LLAMA32, PUBLISHED, QWEN3_MOE, SMOLLM2, Config

NUM_PARAMETERS = {
    "smollm2": 134_515_008,
    "smollm3": 3_075_098_624,
    "llama2": 6_738_415_616,
    "llama3.2": 1_235_814_400,
    "mistral": 7_241_732_096,
    "qwen2.5": 494_032_768,
    "qwen3": 596_049_920,
    "qwen3_moe": 30_532_122_624,
    "gemma2": 2_614_341_888,
    "gemma3": 999_885_952,
    "gpt2": 124_439_808,
    "phi3": 3_821_079_552,
    "mixtral": 46_702_792_704,
}
"""As published for these very configurations."""


def program_of(name: str) -> Program:
    return build_program(parse_config(PUBLISHED[name]), DType.BF16)


@pytest.mark.parametrize("name", PUBLISHED)
def test_programs_are_sound(name: str) -> None:
    config = parse_config(PUBLISHED[name])
    program = program_of(name)
    program.check()
    assert program.max_positions == config.max_positions
    slots = {(op.group, op.layer_slot): op for op in program.ops if isinstance(op, Attention)}
    assert len(slots) == len(config.layers)
    for (group, slot), op in slots.items():
        layer = program.layer_groups[group].layers[slot]
        assert op.window == program.layer_groups[group].window == config.layers[layer].window


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_programs_have_the_published_number_of_parameters(name: str) -> None:
    assert sum(weight.num_elements for weight in program_of(name).weights.values()) == NUM_PARAMETERS[name]


def test_matrices_take_the_dtype_norms_and_biases_stay_f32() -> None:
    for weight in program_of("gpt2").weights.values():
        assert weight.dtype is (DType.BF16 if len(weight.shape) > 1 else DType.F32)


@pytest.mark.parametrize("name", ["smollm2", "llama2", "gemma2", "gemma3", "phi3", "gpt2"])
def test_a_token_costs_two_flops_per_parameter_in_use(name: str) -> None:
    """Within 1 %: norms, rotations and activations are the rest. Attention and sampling are counted apart."""
    program = program_of(name)
    shape = StepShape(num_tokens=1, num_samples=1, context_tokens=0, unique_context_tokens=0)
    ops: list[Op] = [op for op in program.ops if not isinstance(op, Embed)]
    flops = sum(op.cost(program, shape).flops for op in ops) - 20 * program.vocab_size
    used = {op.weight for op in ops if isinstance(op, Linear | Logits)}
    expected = 2 * sum(program.weights[name].num_elements for name in used)
    assert expected <= flops <= 1.01 * expected


def test_a_mixture_costs_only_the_experts_in_use() -> None:
    program = build_program(parse_config(QWEN3_MOE), DType.BF16)
    shape = StepShape(num_tokens=1, num_samples=1, context_tokens=0, unique_context_tokens=0)
    flops = sum(op.cost(program, shape).flops for op in program.ops) - 20 * program.vocab_size
    experts = sum(weight.num_elements for name, weight in program.weights.items() if ".experts_" in name)
    others = sum(
        weight.num_elements for name, weight in program.weights.items() if ".experts_" not in name and name != "embed"
    )
    assert flops == pytest.approx(2 * (others + experts * 8 / 128), rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED)
def test_live_activations_are_the_residual_stream_and_one_block(name: str) -> None:
    """More layers need no more bytes, and the peak is what a feed-forward block or the logits cannot do without."""
    config = parse_config(PUBLISHED[name])
    program = program_of(name)
    limits = StepLimits(max_tokens=512, max_seqs=8, max_samples=8, max_context=2048)
    spans = program.lifespans()
    num_rows = {Rows.TOKENS: limits.max_tokens, Rows.SAMPLES: limits.max_samples}
    sizes = {name: buffer.row_bytes * num_rows[buffer.rows] for name, buffer in program.buffers.items()}  # no gaps
    peak = max(
        sum(sizes[name] for name, (first, last) in spans.items() if first <= index < last)
        for index in range(len(program.ops))
    )
    # Next to the residual stream: a block's widest moment, or the residual stream alone next to the logits.
    width = config.hidden_size
    moments = [width + config.heads.width + config.heads.num_qo_heads * config.heads.head_dim, 3 * width]
    if not all(layer.has_experts for layer in config.layers):
        moments.append(width + config.ffn_size * (3 if config.is_gated else 2))
    if config.experts:
        moments.append(3 * width + 2 * config.experts.top_k)
    assert peak == 4 * max(512 * max(moments), 8 * (width + config.vocab_size))


@pytest.mark.parametrize("name", PUBLISHED)
def test_after_the_last_attention_there_are_only_the_rows_to_sample(name: str) -> None:
    program = program_of(name)
    last = max(index for index, op in enumerate(program.ops) if isinstance(op, Attention))

    def rows(ops: Sequence[Op]) -> set[Rows]:
        return {program.buffers[name].rows for op in ops for name in op.writes}

    assert rows(program.ops[: last + 1]) == {Rows.TOKENS}
    assert rows(program.ops[last + 1 :]) == {Rows.SAMPLES}


def test_a_tied_table_is_one_weight() -> None:
    program = program_of("smollm2")
    embed = next(op for op in program.ops if isinstance(op, Embed))
    logits = next(op for op in program.ops if isinstance(op, Logits))
    assert embed.table == logits.weight
    untied = build_program(parse_config(SMOLLM2 | {"tie_word_embeddings": False}), DType.BF16)
    assert set(untied.weights) - set(program.weights) == {"logits"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [(LLAMA32, [16]), (GPT2, [12]), (GEMMA2, [13, 13]), (GEMMA3, [2] * 13)],
    ids=["llama3.2", "gpt2", "gemma2", "gemma3"],
)
def test_published_models_group_without_padding(config: Config, expected: list[int]) -> None:
    program = build_program(parse_config(config), DType.F32)
    assert [group.num_layer_slots for group in program.layer_groups] == expected
    assert program.num_padding_layer_slots == 0


@given(windows=st.lists(st.sampled_from([None, 128, 512]), min_size=1, max_size=80))
def test_layer_groups_hold_every_layer_once_and_waste_little(windows: list[int | None]) -> None:
    groups = group_layers(windows, HeadShape(8, 2, 64))
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    num_slots = groups[0].num_layer_slots
    assert {group.num_layer_slots for group in groups} == {num_slots}
    total = num_slots * len(groups)
    assert num_padding_slots(groups) <= MAX_PADDING_FRACTION * total
    for larger in range(num_slots + 1, len(windows) + 1):
        classes = [windows.count(window) for window in set(windows)]
        padded = sum(-(-size // larger) * larger for size in classes)
        assert padded - len(windows) > MAX_PADDING_FRACTION * padded or larger > max(classes)
