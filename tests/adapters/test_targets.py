"""Bands: parts of a fused weight tile it, and other spellings are the same rows."""

from __future__ import annotations

import pytest

from kvarto.adapters.targets import FUSED_QKV, Role, Target, targets_of
from kvarto.core.errors import AdapterMismatch, UnsupportedAdapter
from tests.adapters.bases import GPT2, MIXTRAL, PUBLISHED, TINY, program_of

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")


def test_modules_of_a_split_base() -> None:
    targets = targets_of(program_of())
    assert targets.find(f"{ATTENTION}.q_proj") == Target("layer0.qkv", Role.LINEAR, 0, 32, 32)
    assert targets.find(f"{ATTENTION}.k_proj") == Target("layer0.qkv", Role.LINEAR, 32, 16, 32)
    assert targets.find(f"{ATTENTION}.v_proj") == Target("layer0.qkv", Role.LINEAR, 48, 16, 32)
    assert targets.find(f"{ATTENTION}.o_proj") == Target("layer0.out", Role.LINEAR, 0, 32, 32)
    assert targets.find(f"{MLP}.up_proj") == Target("layer0.gate_up", Role.LINEAR, 48, 48, 32)
    assert targets.find(f"{MLP}.down_proj") == Target("layer0.down", Role.LINEAR, 0, 32, 48)
    assert targets.find("lm_head") == Target("logits", Role.LOGITS, 0, 97, 32)
    assert targets.find("model.embed_tokens") == Target("embed", Role.EMBED, 0, 32, 97)
    assert not targets.is_tied


@pytest.mark.parametrize("name", FUSED_QKV)
def test_a_fused_adapter_on_a_split_base_is_all_rows(name: str) -> None:
    targets = targets_of(program_of())
    assert targets.find(f"{ATTENTION}.{name}") == Target("layer0.qkv", Role.LINEAR, 0, 64, 32)
    assert targets.find(f"{MLP}.gate_up_proj") == Target("layer0.gate_up", Role.LINEAR, 0, 96, 32)


def test_split_adapters_on_a_fused_base_are_the_bands_of_a_split_one() -> None:
    split, fused = targets_of(program_of()), targets_of(program_of(model_type="phi3", pad_token_id=0))
    for module in (*(f"{ATTENTION}.{name}" for name in LINEARS), *(f"{MLP}.{name}_proj" for name in ("gate", "up"))):
        assert fused.find(module) == split.find(module)
    assert fused.find(f"{ATTENTION}.qkv_proj") == split.find(f"{ATTENTION}.qkv_proj")


def test_a_tied_output_matrix_is_another_op_on_the_same_weight() -> None:
    targets = targets_of(program_of(TINY | {"model_type": "llama", "tie_word_embeddings": True}))
    assert targets.is_tied
    assert targets.find("lm_head") == Target("embed", Role.LOGITS, 0, 97, 32)
    assert targets.find("model.embed_tokens").role is Role.EMBED


def test_gpt2_has_its_modules_in_the_usual_direction() -> None:
    targets = targets_of(program_of(GPT2))
    assert targets.find("transformer.h.1.attn.c_attn") == Target("layer1.qkv", Role.LINEAR, 0, 96, 32)
    assert targets.find("transformer.h.1.mlp.c_fc") == Target("layer1.gate_up", Role.LINEAR, 0, 128, 32)
    assert targets.find("transformer.h.1.mlp.c_proj") == Target("layer1.down", Role.LINEAR, 0, 32, 128)
    assert targets.find("transformer.wte").role is Role.EMBED
    assert targets.find("h.1.attn.c_proj") == targets.find("transformer.h.1.attn.c_proj")


@pytest.mark.parametrize("config", [*PUBLISHED.values(), GPT2, MIXTRAL])
def test_modules_of_the_base_tile_each_weight(config: dict[str, object]) -> None:
    program = program_of(config)
    targets = targets_of(program)
    own = {s.name.removesuffix(".weight") for weight in program.weights.values() for s in weight.sources}
    rows: dict[str, int] = {}
    for module in own & set(targets.by_module):
        target = targets.find(module)
        if target.role is Role.LINEAR:
            rows[target.weight] = rows.get(target.weight, 0) + target.out_width
            assert target.in_width == program.weights[target.weight].shape[1]
    assert rows
    assert rows == {name: program.weights[name].shape[0] for name in rows}
    for target in targets.by_module.values():
        if target.role is Role.LINEAR:
            assert target.first_row + target.out_width <= program.weights[target.weight].shape[0]


def test_targets_are_sorted_as_a_step_meets_them() -> None:
    program = program_of(TINY | {"model_type": "llama", "num_hidden_layers": 11, "tie_word_embeddings": True})
    targets = targets_of(program)
    found = sorted({*targets.by_module.values()}, key=targets.order_of)
    weights = list(dict.fromkeys(target.weight for target in found))
    layers = [f"layer{layer}.{name}" for layer in range(11) for name in ("qkv", "out", "gate_up", "down")]
    assert weights == ["embed", *layers]
    assert (found[0].role, found[-1].role) == (Role.EMBED, Role.LOGITS)


def test_what_the_base_lacks_is_named() -> None:
    targets = targets_of(program_of(MIXTRAL))
    with pytest.raises(AdapterMismatch, match="`model.layers.7.self_attn.q_proj`"):
        targets.find("model.layers.7.self_attn.q_proj")
    for module in ("gate", "experts.3.w1", "experts.0.w2"):
        with pytest.raises(UnsupportedAdapter, match="expert"):
            targets.find(f"model.layers.0.block_sparse_moe.{module}")
