"""Config laws: what is built in resolves as transformers would, what is not is refused by name, nothing crashes."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.core.ops import Activation, HeadShape
from kvarto.models.config import parse_config
from kvarto.models.families import FAMILIES

Config = dict[str, Any]

# As published, less what says nothing about the model's form.
SMOLLM2: Config = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype": {}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
LLAMA2: Config = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
LLAMA32: Config = LLAMA2 | {
    "head_dim": 64, "hidden_size": 2048, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "num_hidden_layers": 16, "intermediate_size": 8192, "vocab_size": 128256,
    "mlp_bias": False, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
MISTRAL: Config = LLAMA2 | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096, "num_key_value_heads": 8,
    "intermediate_size": 14336, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN25: Config = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 896,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2",
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3: Config = QWEN25 | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "sliding_window": None, "rope_scaling": None,
}  # fmt: skip
QWEN3_MOE: Config = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
    "num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    "hidden_size": 2048, "intermediate_size": 6144,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 48, "tie_word_embeddings": False,
}  # fmt: skip
SMOLLM3: Config = SMOLLM2 | {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 4, "num_hidden_layers": 36, "no_rope_layer_interval": 4, "intermediate_size": 11008,
    "no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36, "max_window_layers": 28,
    "mlp_bias": False, "sliding_window": None, "use_sliding_window": False, "rope_theta": 5000000.0,
    "vocab_size": 128256,
}  # fmt: skip
PHI3: Config = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0, "hidden_act": "silu",
    "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False, "vocab_size": 32064,
}  # fmt: skip
GEMMA2: Config = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096, "vocab_size": 256000,
}  # fmt: skip
GEMMA3: Config = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
    "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "vocab_size": 262144,
}  # fmt: skip
GEMMA3_4B: Config = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": 262144,
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}  # fmt: skip
GPT2: Config = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768,
    "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True}}, "vocab_size": 50257,
}  # fmt: skip
MIXTRAL: Config = MISTRAL | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8,
    "router_aux_loss_coef": 0.02, "sliding_window": None, "rope_theta": 1000000.0,
}  # fmt: skip
PUBLISHED = {
    "smollm2": SMOLLM2, "llama2": LLAMA2, "llama3.2": LLAMA32, "mistral": MISTRAL, "qwen2.5": QWEN25, "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE, "smollm3": SMOLLM3, "phi3": PHI3, "gemma2": GEMMA2, "gemma3": GEMMA3,
    "gemma3-4b": GEMMA3_4B, "gpt2": GPT2, "mixtral": MIXTRAL,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_resolve_with_nothing_unknown(name: str) -> None:
    assert parse_config(PUBLISHED[name]).unknown_keys == ()


def test_a_published_config_stands_for_each_family() -> None:
    assert {parse_config(config).model_type for config in PUBLISHED.values()} == set(FAMILIES) - {"ministral"}


def test_sizes_and_switches_land_where_they_belong() -> None:
    smollm2 = parse_config(SMOLLM2)
    assert smollm2.heads == HeadShape(9, 3, 64)
    assert (smollm2.is_tied, smollm2.activation, smollm2.norm_eps) == (True, Activation.SILU, 1e-5)
    assert parse_config(LLAMA2).heads == HeadShape(32, 32, 128)
    assert parse_config(QWEN25).has_qkv_bias
    assert not parse_config(QWEN25).has_out_bias
    assert parse_config(QWEN3).has_head_norm
    assert [layer.rope is None for layer in parse_config(SMOLLM3).layers] == [False, False, False, True] * 9
    assert {layer.window for layer in parse_config(PHI3).layers} == {2047}
    assert [layer.window for layer in parse_config(GEMMA2).layers[:4]] == [4096, None, 4096, None]
    gemma3 = parse_config(GEMMA3)
    assert [layer.window for layer in gemma3.layers] == ([512] * 5 + [None]) * 4 + [512] * 2
    assert gemma3.layers[0].rope != gemma3.layers[5].rope
    assert math.isclose(gemma3.embed_scale, 1152**0.5)
    moe = parse_config(QWEN3_MOE).experts
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.ffn_size, moe.is_normalised) == (128, 8, 768, True)


def test_gemma3_inside_a_multimodal_config_takes_the_defaults_of_its_family() -> None:
    config = parse_config(GEMMA3_4B)
    assert (config.vocab_size, config.heads, len(config.layers)) == (262_208, HeadShape(8, 4, 256), 34)
    full, sliding = config.layers[5].rope, config.layers[0].rope
    assert full is not None
    assert sliding is not None
    assert math.isclose(full.inv_freq[0], 1 / 8)
    assert sliding.inv_freq[0] == 1.0


def test_both_spellings_of_rope_are_one_model() -> None:
    new = {key: value for key, value in LLAMA32.items() if key not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {**LLAMA32["rope_scaling"], "rope_theta": 500000.0}
    assert parse_config(new) == parse_config(LLAMA32)
    nested = {k: v for k, v in GEMMA3.items() if k not in ("rope_scaling", "rope_theta", "rope_local_base_freq")}
    nested["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    assert parse_config(nested) == parse_config(GEMMA3)


REFUSED: list[tuple[Config, Config, str]] = [
    (LLAMA2, {"model_type": "falcon"}, "falcon"),
    (LLAMA2, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    (LLAMA2, {"hidden_act": "relu"}, "hidden_act"),
    (LLAMA2, {"rope_interleaved": True}, "rope_interleaved"),
    (LLAMA2, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type"),
    (LLAMA2, {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope_scaling.rope_type"),
    (LLAMA2, {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "rope_scaling.mrope_section"),
    (LLAMA2, {"rope_scaling": {"rope_type": "default", "factor": 8.0}}, "rope_scaling.factor"),
    (LLAMA2, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
    (LLAMA2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA2, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    (LLAMA2, {"sliding_window": 4096}, "sliding_window"),
    (LLAMA2, {"layer_types": ["sliding_attention"] * 32}, "layer_types"),
    (LLAMA2, {"embedding_multiplier": 12.0}, "embedding_multiplier"),
    (LLAMA2, {"num_local_experts": 8}, "num_local_experts"),
    (MISTRAL, {"attention_bias": True}, "attention_bias"),
    (QWEN25, {"attention_bias": False}, "attention_bias"),
    (MISTRAL, {"layer_types": ["chunked_attention"] * 32}, "layer_types"),
    (QWEN25, {"use_mrope": True}, "use_mrope"),
    (QWEN25, {"qk_layernorm": True}, "qk_layernorm"),
    (PHI3, {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "rope_scaling.type"),
    (PHI3, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling.type"),
    (PHI3, {"partial_rotary_factor": 0.7605}, "partial_rotary_factor"),
    (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    (GEMMA3, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_parameters.rope_theta"),
    (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
    (GEMMA3_4B, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
]


@pytest.mark.parametrize(("config", "change", "named"), REFUSED, ids=[f"{c['model_type']}-{n}" for c, _, n in REFUSED])
def test_what_is_not_built_in_is_refused_by_name(config: Config, change: Config, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"`{named}`"):
        parse_config(config | change)


def test_a_refusal_says_what_would_work() -> None:
    with pytest.raises(UnsupportedModel, match=r"built in: .*`llama`.*`smollm3`"):
        parse_config({"model_type": "falcon"})
    with pytest.raises(UnsupportedModel, match="= 'dynamic' is not built in; supported: `default`, `linear`"):
        parse_config(LLAMA2 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})


BROKEN: list[tuple[Config, Config, str]] = [
    (LLAMA2, {"model_type": 3}, "model_type"),
    (LLAMA2, {"hidden_size": None}, "hidden_size"),
    (LLAMA2, {"hidden_size": "4096"}, "hidden_size"),
    (LLAMA2, {"hidden_size": True}, "hidden_size"),
    (LLAMA2, {"hidden_size": 1 << 60}, "hidden_size"),
    (LLAMA2, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    (LLAMA2, {"num_hidden_layers": 0}, "num_hidden_layers"),
    (LLAMA2, {"num_key_value_heads": 5}, "num_attention_heads"),
    (LLAMA2, {"num_attention_heads": 33}, "hidden_size"),
    (LLAMA2, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    (LLAMA2, {"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    (LLAMA2, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    (LLAMA2, {"rope_theta": float("inf")}, "rope_theta"),
    (LLAMA2, {"rope_scaling": "linear"}, "rope_scaling"),
    (LLAMA2, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    (LLAMA2, {"architectures": "LlamaForCausalLM"}, "architectures"),
    (MISTRAL, {"layer_types": ["full_attention"] * 3}, "layer_types"),
    (MISTRAL, {"sliding_window": 0}, "sliding_window"),
    (QWEN25, {"layer_types": ["sliding_attention"] * 24}, "sliding_window"),
    (SMOLLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    (GEMMA3_4B, {"text_config": None}, "text_config"),
    (GPT2, {"n_head": 7}, "n_embd"),
    (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    (QWEN3_MOE, {"num_experts": 10**9}, "num_experts"),
]


@pytest.mark.parametrize(("config", "change", "named"), BROKEN, ids=[f"{c['model_type']}-{n}" for c, _, n in BROKEN])
def test_broken_values_are_named(config: Config, change: Config, named: str) -> None:
    with pytest.raises(BadFile, match=f"`{named}`"):
        parse_config(config | change)


def test_unknown_keys_pass_and_are_listed() -> None:
    config = parse_config(LLAMA2 | {"favourite_colour": "blue", "quantization_config": None, "logits_scaling": 1.0})
    assert config.unknown_keys == ("favourite_colour",)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_json_resolves_or_raises_our_own_errors(data: st.DataObject) -> None:
    config = copy.deepcopy(PUBLISHED[data.draw(st.sampled_from(sorted(PUBLISHED)))])
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[key] = data.draw(JSON)
    with contextlib.suppress(BadFile, UnsupportedModel):
        parse_config(config)


NUMBERS = st.floats() | st.sampled_from([0, 1, -1, 2, 1e-320, 1e308, 10**400, None, True, "4"]) | st.floats(0.01, 100.0)
ROPE_KEYS = (
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
)  # fmt: skip
ROPE_SETTINGS = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn"])}, optional=dict.fromkeys(ROPE_KEYS, NUMBERS)
)


@settings(max_examples=200, deadline=None)
@given(rope_settings=ROPE_SETTINGS, fraction=NUMBERS)
def test_any_rotation_is_finite_or_refused(rope_settings: Config, fraction: object) -> None:
    with contextlib.suppress(BadFile, UnsupportedModel):
        for layer in parse_config(LLAMA2 | {"rope_scaling": rope_settings}).layers:
            assert layer.rope is not None
            assert all(math.isfinite(value) for value in layer.rope.inv_freq)
            assert math.isfinite(layer.rope.attention_factor)
    with contextlib.suppress(BadFile, UnsupportedModel):
        parse_config(PHI3 | {"partial_rotary_factor": fraction})
