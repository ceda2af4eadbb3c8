"""The families to compare with transformers: a tiny configuration each, and a change of value for every key of it.

A change is made in our config alone, the weights stay. It must change the logits (`changes`), or be refused because
the files do not fit it or the value is not built in (`refused`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import transformers

DELETE = object()
"""The key is taken out."""

Change = dict[str, Any]
"""Values by dotted key; applied together."""

VOCAB_SIZE = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    config: Callable[..., transformers.PretrainedConfig]
    settings: dict[str, Any]
    changes: dict[str, Change] = field(default_factory=dict)
    refused: dict[str, Change] = field(default_factory=dict)
    score_gain: float = 1.0
    """Scales q and k, so that scores reach a softcap."""


def one(key: str, value: Any) -> dict[str, Change]:
    return {key: {key: value}}


def rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1000.0, "rope_type": "default", **settings}}


# Keys that all families but GPT-2 share.
CHANGES: dict[str, Change] = {
    **one("hidden_act", "gelu_pytorch_tanh"),
    **one("rms_norm_eps", 0.2),
    **one("rope_parameters.rope_theta", 100.0),
    "rope_parameters": {"rope_parameters": {"rope_theta": 100.0}},
    "rope_parameters.rope_type": {"rope_parameters": {"rope_theta": 1000.0, "rope_type": "linear", "factor": 3.0}},
    "rope_parameters.type": {"rope_parameters": {"rope_theta": 1000.0, "type": "linear", "factor": 3.0}},
    "rope_parameters.factor": {"rope_parameters": {"rope_theta": 1000.0, "rope_type": "linear", "factor": 9.0}},
    "rope_scaling": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "rope_theta": {"rope_parameters": DELETE, "rope_theta": 100.0},
}  # fmt: skip
HEADS: dict[str, Change] = {
    # The same tensors, cut into fewer and wider heads.
    "num_attention_heads": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    "num_key_value_heads": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    "head_dim": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
}
MULTI_HEADS: dict[str, Change] = {
    key: {"num_attention_heads": num_heads, "num_key_value_heads": num_heads, "head_dim": 32 // num_heads}
    for key, num_heads in (("num_attention_heads", 2), ("num_key_value_heads", 2), ("head_dim", 8))
}
"""Where every query head has a KV head of its own."""
REFUSED: dict[str, Change] = {
    **one("vocab_size", VOCAB_SIZE - 1),
    **one("hidden_size", 64),
    **one("intermediate_size", 40),
    **one("num_hidden_layers", 2),
    **one("rope_parameters.full_attention", {"rope_type": "default"}),
    **one("rope_parameters.sliding_attention", {"rope_type": "default"}),
    **one("rope_parameters.partial_rotary_factor", 0.5),
    **one("partial_rotary_factor", 0.5),
}
UNTIED = {"tie_word_embeddings": {"tie_word_embeddings": True}}
TIED = {"tie_word_embeddings": {"tie_word_embeddings": False}}
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW_OFF_BY_ONE = {"sliding_window": {"sliding_window": 13}}

LLAMA3 = rope(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24
)
YARN = rope(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=24, beta_fast=2, beta_slow=1, rope_theta=150.0
)
YARN_SIZES = SIZES | {"head_dim": 16}
"""Enough pairs of dims for a ramp."""


def without(changes: dict[str, Change], *keys: str) -> dict[str, Change]:
    return {key: change for key, change in changes.items() if key not in keys}


GEMMA_CHANGES = without(CHANGES, "hidden_act") | one("hidden_activation", "silu") | one("query_pre_attn_scalar", 2)
GEMMA_SETTINGS = SIZES | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 12, "num_hidden_layers": 4}

CASES: dict[str, Case] = {
    "llama2": Case(
        transformers.LlamaConfig,
        SIZES | rope() | {"num_key_value_heads": 4},
        {**CHANGES, **MULTI_HEADS, **UNTIED},
        {**REFUSED, **one("attention_bias", True), **one("mlp_bias", True), **one("rope_interleaved", True)},
    ),
    "llama3": Case(
        transformers.LlamaConfig,
        SIZES | LLAMA3 | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {
            **CHANGES,
            **HEADS,
            **one("rope_parameters.factor", 2.0),
            **one("rope_parameters.low_freq_factor", 3.0),
            **one("rope_parameters.high_freq_factor", 1.5),
            **one("rope_parameters.original_max_position_embeddings", 128),
            **one("original_max_position_embeddings", 128),
        },
        {**REFUSED, **TIED, **one("attention_bias", False), **one("mlp_bias", False)},
    ),
    "llama-linear": Case(
        transformers.LlamaConfig,
        SIZES | rope(rope_type="linear", factor=4.0),
        {**CHANGES, **one("rope_parameters.factor", 2.0)},
    ),
    "llama-yarn": Case(
        transformers.LlamaConfig,
        YARN_SIZES | YARN,
        {
            **CHANGES,
            **one("rope_parameters.factor", 2.0),
            **one("rope_parameters.beta_fast", 5),
            **one("rope_parameters.beta_slow", 0.5),
            **one("rope_parameters.truncate", False),
            **one("rope_parameters.attention_factor", 1.3),
            **one("rope_parameters.original_max_position_embeddings", 96),
            **one("original_max_position_embeddings", 96),
            "max_position_embeddings": {"max_position_embeddings": 999, "rope_parameters.factor": DELETE},
            "rope_parameters.mscale": {"rope_parameters.mscale": 4.0, "rope_parameters.mscale_all_dim": 1.0},
            "rope_parameters.mscale_all_dim": {"rope_parameters.mscale": 1.0, "rope_parameters.mscale_all_dim": 4.0},
        },
    ),
    "llama-yarn-mscale": Case(
        transformers.LlamaConfig,
        YARN_SIZES | rope(**{**YARN["rope_parameters"], "mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False}),
        {
            **one("rope_parameters.mscale", 1.0),
            **one("rope_parameters.mscale_all_dim", 2.0),
            **one("rope_parameters.truncate", True),
        },
    ),
    "llama-yarn-attention-factor": Case(
        transformers.LlamaConfig,
        YARN_SIZES | rope(**{**YARN["rope_parameters"], "attention_factor": 1.5}),
        {**one("rope_parameters.attention_factor", 1.0)},
    ),
    "mistral": Case(
        transformers.MistralConfig,
        SIZES | rope() | {"sliding_window": 12, "head_dim": 8},
        {**CHANGES, **HEADS, **UNTIED, **WINDOW_OFF_BY_ONE, **one("layer_types", [SLIDING, SLIDING, FULL])},
        REFUSED,
    ),
    "ministral": Case(
        transformers.MinistralConfig,
        SIZES | rope() | {"head_dim": 8, "sliding_window": 12, "layer_types": [SLIDING, FULL, SLIDING]},
        {**CHANGES, **HEADS, **UNTIED, **WINDOW_OFF_BY_ONE, **one("layer_types", [SLIDING, SLIDING, FULL])},
        REFUSED,
    ),
    "qwen2": Case(
        transformers.Qwen2Config,
        SIZES | rope() | {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 2},
        {
            **CHANGES,
            **HEADS,
            **UNTIED,
            **WINDOW_OFF_BY_ONE,
            **one("layer_types", [SLIDING, SLIDING, FULL]),
            "max_window_layers": {"max_window_layers": 1, "layer_types": DELETE},
            "use_sliding_window": {"use_sliding_window": False, "layer_types": DELETE},
        },
        {**REFUSED, **one("attention_bias", False)},
    ),
    "qwen3": Case(
        transformers.Qwen3Config,
        SIZES
        | rope()
        | {"head_dim": 16, "sliding_window": 12, "use_sliding_window": True, "max_window_layers": 2}
        | {"attention_bias": True},
        {
            **CHANGES,
            **UNTIED,
            **WINDOW_OFF_BY_ONE,
            **one("layer_types", [SLIDING, SLIDING, FULL]),
            "max_window_layers": {"max_window_layers": 1, "layer_types": DELETE},
            "use_sliding_window": {"use_sliding_window": False, "layer_types": DELETE},
        },
        {
            **REFUSED,
            **one("attention_bias", False),
            # Head norms are as wide as a head, so other cuts do not fit the files.
            **HEADS,
        },
    ),
    "smollm3": Case(
        transformers.SmolLM3Config,
        SIZES
        | rope()
        | {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 12},
        {
            **CHANGES,
            **HEADS,
            **WINDOW_OFF_BY_ONE,
            **one("layer_types", [FULL, FULL, FULL, SLIDING]),
            **one("no_rope_layers", [1, 1, 1, 1]),
            "no_rope_layer_interval": {"no_rope_layers": DELETE, "no_rope_layer_interval": 3},
            "use_sliding_window": {"use_sliding_window": False, "layer_types": DELETE},
        },
        {**REFUSED, **TIED, **one("attention_bias", True), **one("mlp_bias", True)},
    ),
    "phi3": Case(
        transformers.Phi3Config,
        SIZES | rope(partial_rotary_factor=0.5) | {"sliding_window": 12},
        {
            **without(CHANGES, *(key for key in CHANGES if key.startswith("rope_parameters.")), "rope_scaling"),
            **one("rope_parameters.rope_theta", 100.0),
            **HEADS,
            **UNTIED,
            **WINDOW_OFF_BY_ONE,
            **one("rope_parameters.partial_rotary_factor", 1.0),
            "partial_rotary_factor": {"rope_parameters.partial_rotary_factor": DELETE, "partial_rotary_factor": 0.25},
        },
        {
            **without(REFUSED, "rope_parameters.partial_rotary_factor", "partial_rotary_factor"),
            **one("rope_parameters.rope_type", "longrope"),
            **one("rope_parameters.type", "su"),
            **one("rope_scaling", {"type": "yarn", "factor": 2.0}),
        },
    ),
    "gemma2": Case(
        transformers.Gemma2Config,
        GEMMA_SETTINGS | rope() | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0},
        {
            **GEMMA_CHANGES,
            **HEADS,
            **WINDOW_OFF_BY_ONE,
            **one("layer_types", [FULL, SLIDING, FULL, SLIDING]),
            **one("attn_logit_softcapping", None),
            **one("final_logit_softcapping", None),
        },
        {**REFUSED, **TIED, **one("attention_bias", True), **one("use_bidirectional_attention", True)},
        score_gain=2.0,
    ),
    "gemma3": Case(
        transformers.Gemma3TextConfig,
        GEMMA_SETTINGS
        | {"sliding_window_pattern": 3, "final_logit_softcapping": 8.0, "attention_bias": True, "head_dim": 16}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            }
        },
        {
            **without(GEMMA_CHANGES, *CHANGES),
            **one("rms_norm_eps", 0.2),
            **WINDOW_OFF_BY_ONE,
            **one("layer_types", [FULL, SLIDING, FULL, SLIDING]),
            **one("final_logit_softcapping", None),
            "sliding_window_pattern": {"layer_types": DELETE, "sliding_window_pattern": 2},
            **one("rope_parameters.full_attention.factor", 2.0),
            **one("rope_parameters.full_attention.rope_theta", 100.0),
            **one("rope_parameters.sliding_attention.rope_theta", 10.0),
            "rope_parameters.full_attention.rope_type": {"rope_parameters.full_attention": {"rope_theta": 1000.0}},
            "rope_parameters.full_attention.type": {"rope_parameters.full_attention": {"rope_theta": 1000.0}},
            "rope_parameters.full_attention": {"rope_parameters.full_attention": DELETE},
            "rope_parameters.sliding_attention": {"rope_parameters.sliding_attention": DELETE},
            "rope_parameters.sliding_attention.rope_type": {
                "rope_parameters.sliding_attention.rope_type": "linear",
                "rope_parameters.sliding_attention.factor": 2.0,
            },
            "rope_parameters.sliding_attention.factor": {
                "rope_parameters.sliding_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}
            },
            "rope_parameters.sliding_attention.type": {
                "rope_parameters.sliding_attention": {"type": "linear", "factor": 2.0, "rope_theta": 50.0}
            },
            "rope_parameters": {"rope_parameters": DELETE},
            "rope_scaling": {"rope_parameters": DELETE, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            "rope_theta": {"rope_parameters": DELETE, "rope_theta": 100.0},
            "rope_local_base_freq": {"rope_parameters": DELETE, "rope_local_base_freq": 10.0},
        },
        {
            **without(REFUSED, *(key for key in REFUSED if key.startswith("rope_parameters"))),
            **HEADS,
            **TIED,
            **one("attention_bias", False),
            **one("use_bidirectional_attention", True),
            **one("attn_logit_softcapping", 50.0),
            **one("rope_parameters.full_attention.partial_rotary_factor", 0.5),
            **one("rope_parameters.sliding_attention.partial_rotary_factor", 0.5),
        },
    ),
    "gpt2": Case(
        transformers.GPT2Config,
        {
            "vocab_size": VOCAB_SIZE, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 128, "n_inner": 80,
            "scale_attn_by_inverse_layer_idx": True, "bos_token_id": None, "eos_token_id": None,
        },
        {
            **one("n_head", 2),
            **one("activation_function", "silu"),
            **one("layer_norm_epsilon", 0.2),
            **one("scale_attn_weights", False),
            **one("scale_attn_by_inverse_layer_idx", False),
        },
        {
            **one("vocab_size", VOCAB_SIZE - 1),
            **one("n_embd", 64),
            **one("n_layer", 2),
            **one("n_inner", 96),
            **one("n_positions", 64),
            **one("add_cross_attention", True),
            **TIED,
        },
    ),
    "mixtral": Case(
        transformers.MixtralConfig,
        SIZES | rope() | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
        {**CHANGES, **HEADS, **UNTIED, **WINDOW_OFF_BY_ONE, **one("num_experts_per_tok", 3)},
        {**REFUSED, **one("num_local_experts", 3)},
    ),
    "qwen3_moe": Case(
        transformers.Qwen3MoeConfig,
        SIZES
        | rope()
        | {"head_dim": 8, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"decoder_sparse_step": 2, "norm_topk_prob": False, "mlp_only_layers": [3], "num_hidden_layers": 4}
        | {"use_sliding_window": True, "sliding_window": 12, "attention_bias": True},
        {
            **CHANGES,
            **UNTIED,
            **WINDOW_OFF_BY_ONE,
            **one("use_sliding_window", False),
            **one("num_experts_per_tok", 2),
            **one("norm_topk_prob", True),
        },
        {
            **REFUSED,
            **HEADS,
            **one("attention_bias", False),
            **one("num_local_experts", 4),
            "num_experts": {"num_local_experts": DELETE, "num_experts": 4},
            **one("moe_intermediate_size", 16),
            **one("decoder_sparse_step", 1),
            **one("mlp_only_layers", [1]),
        },
    ),
}  # fmt: skip
