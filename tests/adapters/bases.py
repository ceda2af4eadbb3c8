"""Base models as Programs: tiny ones to calculate with, and published sizes to plan with."""

from __future__ import annotations

from typing import Any

from kvarto.core.dtype import DType
from kvarto.core.program import Program
from kvarto.models.config import parse_config
from kvarto.models.decoder import build_program

TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 97, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip

GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_ctx": 64, "vocab_size": 97,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip

MIXTRAL = TINY | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def _sizes(hidden: int, ffn: int, heads: int, kv_heads: int, layers: int, vocab: int, is_tied: bool) -> dict[str, Any]:
    return TINY | {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "num_hidden_layers": layers, "vocab_size": vocab,
        "tie_word_embeddings": is_tied,
    }  # fmt: skip


PUBLISHED = {
    "Llama-3-8B": _sizes(4096, 14336, 32, 8, 32, 128_256, False),
    "Qwen2.5-0.5B": _sizes(896, 4864, 14, 2, 24, 151_936, True) | {"model_type": "qwen2"},
    "SmolLM2-135M": _sizes(576, 1536, 9, 3, 30, 49_152, True),
}


def program_of(config: dict[str, Any] | None = None, **changes: Any) -> Program:
    """The Program of a config; a tiny Llama where none is given."""
    return build_program(parse_config((config or TINY | {"model_type": "llama"}) | changes), DType.BF16)
