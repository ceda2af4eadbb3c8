"""From GGUF metadata to the `config.json` that the same model would have at Hugging Face.

A key under the architecture's own prefix that we do not know is refused by name: it may change the arithmetic. What
llama.cpp keeps in code instead of metadata (Gemma's score scale and pattern, SmolLM3's layers without rotation,
Qwen3-MoE's normalised shares) is spelt out here. Source: llama.cpp, convert_hf_to_gguf.py and src/llama-model.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.models.gguf_container import GGUFTensor
from kvarto.models.gguf_keys import MetadataKeys
from kvarto.models.gguf_rope import RopeFactors, rope_scaling

Config = dict[str, Any]

_WITHOUT_EFFECT = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "vocab_size"})
"""The vocabulary's size is that of the embedding table."""


def config_of(metadata: dict[str, Any], tensors: dict[str, GGUFTensor], factors: RopeFactors) -> Config:
    """The config in Hugging Face form. Raises UnsupportedModel by architecture or key, BadFile for wrong values."""
    architecture = metadata.get("general.architecture")
    family = _FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise UnsupportedModel(
            f"the GGUF architecture `{architecture!s:.60}` is not built in; built in are {', '.join(sorted(_FAMILIES))}"
        )
    if "token_embd.weight" not in tensors:
        raise BadFile("tensor `token_embd.weight` is missing; convert the model again")
    keys = MetadataKeys(metadata, f"{architecture}.")
    config = family(keys, tensors, factors)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(token) is int:
            config[name] = token
    keys.refuse_unknown(_WITHOUT_EFFECT)
    return config


def _common(keys: MetadataKeys, tensors: dict[str, GGUFTensor], factors: RopeFactors) -> Config:
    """What all families with rotary positions and RMS norms share."""
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", max(1, hidden // heads))
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"heads of {head_dim} for k and of another width for v are not built in")
    if not keys.flag("attention.causal", True):
        raise UnsupportedModel("attention in both directions (`attention.causal` = false) is not built in")
    config: Config = {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "hidden_act": "silu",
    }
    rotary_dim = keys.count("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    scaling = rope_scaling(keys, config, rotary_dim, factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _llama(keys: MetadataKeys, tensors: dict[str, GGUFTensor], factors: RopeFactors) -> Config:
    config = _common(keys, tensors, factors) | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if keys.has("expert_count"):
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        config |= {"num_local_experts": keys.count("expert_count")}
        config |= {"num_experts_per_tok": keys.count("expert_used_count")}
        del config["attention_bias"], config["mlp_bias"]
    return config


def _qwen2(keys: MetadataKeys, tensors: dict[str, GGUFTensor], factors: RopeFactors) -> Config:
    config = _common(keys, tensors, factors)
    return config | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}


def _qwen3(keys: MetadataKeys, tensors: dict[str, GGUFTensor], factors: RopeFactors) -> Config:
    config = _common(keys, tensors, factors)
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    return config | {"attention_bias": False, "use_sliding_window": False}


def _qwen3moe(keys: MetadataKeys, tensors: dict[str, GGUFTensor], factors: RopeFactors) -> Config:
    config = _qwen3(keys, tensors, factors)
    config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    config |= {"num_experts": keys.count("expert_count"), "num_experts_per_tok": keys.count("expert_used_count")}
    config |= {"moe_intermediate_size": keys.count("expert_feed_forward_length"), "norm_topk_prob": True}
    return config | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _smollm3(keys: MetadataKeys, tensors: dict[str, GGUFTensor], factors: RopeFactors) -> Config:
    config = _common(keys, tensors, factors)
    config |= {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}
    config |= {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    return config | {"no_rope_layers": [int((n + 1) % 4 != 0) for n in range(config["num_hidden_layers"])]}


def _phi3(keys: MetadataKeys, tensors: dict[str, GGUFTensor], factors: RopeFactors) -> Config:
    config = _common(keys, tensors, factors) | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
    del config["head_dim"]
    config["original_max_position_embeddings"] = keys.count(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    # 0 and absent mean full attention.
    if keys.number("attention.sliding_window", 0) != 0:
        config["sliding_window"] = keys.count("attention.sliding_window")
    return config


def _gemma(keys: MetadataKeys, tensors: dict[str, GGUFTensor], factors: RopeFactors, largest: int) -> Config:
    config = _common(keys, tensors, factors) | {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
    del config["hidden_act"]
    is_largest = config["num_hidden_layers"] == largest
    # Gemma's 27B scales scores by the width per head of the model, the others by that of the head.
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    )
    config["sliding_window"] = keys.count("attention.sliding_window")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config[name] = keys.optional_number(name)
    return config


def _gemma2(keys: MetadataKeys, tensors: dict[str, GGUFTensor], factors: RopeFactors) -> Config:
    config = _gemma(keys, tensors, factors, largest=46)
    return config | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}


def _gemma3(keys: MetadataKeys, tensors: dict[str, GGUFTensor], factors: RopeFactors) -> Config:
    config = _gemma(keys, tensors, factors, largest=62)
    if not keys.has("rope.freq_base"):
        config["rope_theta"] = 1_000_000.0
    config |= {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
    config |= {"rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0)}
    return config | {"sliding_window_pattern": keys.count("attention.sliding_window_pattern", 6)}


def _gpt2(keys: MetadataKeys, tensors: dict[str, GGUFTensor], factors: RopeFactors) -> Config:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "n_embd": keys.count("embedding_length"),
        "n_inner": keys.count("feed_forward_length"),
        "n_layer": keys.count("block_count"),
        "n_head": keys.count("attention.head_count"),
        "n_positions": keys.count("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


_FAMILIES: dict[str, Callable[[MetadataKeys, dict[str, GGUFTensor], RopeFactors], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "smollm3": _smollm3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
}
