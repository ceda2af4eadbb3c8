"""A small random Llama on disk: weights and configuration, no tokenizer, which an engine does not need."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB_SIZE, LAYERS = 32, 48, 4, 2, 97, 2
MAX_POSITIONS = 512


def write_tiny_model(folder: Path) -> Path:
    """Write it to `folder`; the same bytes each time."""
    rng = np.random.default_rng(5)

    def weight(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    head_dim = HIDDEN // HEADS
    tensors = {"model.embed_tokens.weight": weight(VOCAB_SIZE, HIDDEN) * 3, "model.norm.weight": weight(HIDDEN) + 1}
    tensors["lm_head.weight"] = weight(VOCAB_SIZE, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": weight(HIDDEN) + 1,
            f"{prefix}post_attention_layernorm.weight": weight(HIDDEN) + 1,
            f"{prefix}self_attn.q_proj.weight": weight(HIDDEN, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": weight(KV_HEADS * head_dim, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": weight(KV_HEADS * head_dim, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": weight(HIDDEN, HIDDEN),
            f"{prefix}mlp.gate_proj.weight": weight(FFN, HIDDEN),
            f"{prefix}mlp.up_proj.weight": weight(FFN, HIDDEN),
            f"{prefix}mlp.down_proj.weight": weight(HIDDEN, FFN),
        }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_POSITIONS, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder
