"""From GGUF's tensor names to Hugging Face's, and what each tensor goes through to have that layout.

llama.cpp interleaves the two halves of rotated heads (q and k of the `llama` architecture and its kin), stores
Gemma's norm weights plus one, GPT-2's matrices transposed, and all experts of a layer as one tensor.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.models.gguf_container import GGUFTensor

NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that become part of the config."""

_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_PHI3_LAYER = _LLAMA_LAYER | {"ffn_up": "mlp.gate_up_proj"}
_MIXTRAL_LAYER = _LLAMA_LAYER | {"ffn_gate_inp": "block_sparse_moe.gate"}
_GEMMA_LAYER = _LLAMA_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_LAYERS = {"phi3": _PHI3_LAYER, "mixtral": _MIXTRAL_LAYER, "gemma2": _GEMMA_LAYER, "gemma3_text": _GEMMA_LAYER}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_EXPERTS = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_MIXTRAL_EXPERTS = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}
_LAYER_NAME = re.compile(r"blk\.(\d{1,5})\.([a-z_]+)\.(?:(\d{1,5})\.)?(weight|bias)")
_TOP_NAME = re.compile(r"([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Placement:
    """How a Hugging Face tensor comes out of a GGUF tensor."""

    tensor: GGUFTensor
    shape: tuple[int, ...]
    """At Hugging Face."""
    first_row: int = 0
    """Of the GGUF tensor's rows, for one expert of many."""
    num_permuted_heads: int = 0
    """Heads whose two halves are interleaved on file; 0 for none."""
    is_plus_one: bool = False
    """The file holds w + 1."""
    is_transposed: bool = False

    @property
    def file_bytes(self) -> int:
        """Bytes of its share of the GGUF tensor."""
        return self.tensor.size_bytes * math.prod(self.shape) // math.prod(self.tensor.shape)


def place_tensors(tensors: dict[str, GGUFTensor], config: dict[str, Any]) -> dict[str, Placement]:
    """Every tensor by its Hugging Face name. Raises UnsupportedModel naming a tensor that has none."""
    placed: dict[str, Placement] = {}
    for tensor in tensors.values():
        if tensor.name in NOT_WEIGHTS:
            continue
        for name, placement in _placements(tensor, config):
            if name in placed:
                raise BadFile(f"tensors `{placed[name].tensor.name}` and `{tensor.name}` are both `{name}`")
            placed[name] = placement
    return placed


def _placements(tensor: GGUFTensor, config: dict[str, Any]) -> list[tuple[str, Placement]]:
    is_gpt2 = config["model_type"] == "gpt2"
    if match := _TOP_NAME.fullmatch(tensor.name):
        top = (_GPT2_TOP if is_gpt2 else _TOP).get(match[1])
        if top is not None:
            return [(f"{top}.{match[2]}", _plain(tensor, config))]
    elif match := _LAYER_NAME.fullmatch(tensor.name):
        layer, kind, expert, suffix = match.groups()
        if kind.removesuffix("_exps") in _EXPERTS and (kind.endswith("_exps") or expert is not None):
            return _expert_placements(tensor, layer, kind.removesuffix("_exps"), expert, config)
        names = _GPT2_LAYER if is_gpt2 else _LAYERS.get(config["model_type"], _LLAMA_LAYER)
        if kind in names and expert is None:
            root = "transformer.h" if is_gpt2 else "model.layers"
            return [(f"{root}.{layer}.{names[kind]}.{suffix}", _plain(tensor, config))]
    raise UnsupportedModel(f"the GGUF tensor `{tensor.name}` has no place in `{config['model_type']}`")


def _plain(tensor: GGUFTensor, config: dict[str, Any]) -> Placement:
    model_type = config["model_type"]
    is_layer = tensor.name.startswith("blk.")
    if model_type in ("llama", "mixtral", "smollm3") and ".attn_q." in tensor.name:
        return Placement(tensor, tensor.shape, num_permuted_heads=_heads(tensor, config["num_attention_heads"]))
    if model_type in ("llama", "mixtral", "smollm3") and ".attn_k." in tensor.name:
        return Placement(tensor, tensor.shape, num_permuted_heads=_heads(tensor, config["num_key_value_heads"]))
    if model_type.startswith("gemma") and tensor.name.endswith("norm.weight"):
        return Placement(tensor, tensor.shape, is_plus_one=True)
    if model_type == "gpt2" and is_layer and len(tensor.shape) == 2:
        return Placement(tensor, tensor.shape[::-1], is_transposed=True)
    return Placement(tensor, tensor.shape)


def _heads(tensor: GGUFTensor, num_heads: int) -> int:
    if tensor.shape[0] % (2 * num_heads):
        raise BadFile(f"tensor `{tensor.name}` has {tensor.shape[0]} rows, which {num_heads} heads cannot divide")
    return num_heads


def _expert_placements(
    tensor: GGUFTensor, layer: str, kind: str, expert: str | None, config: dict[str, Any]
) -> list[tuple[str, Placement]]:
    if config["model_type"] == "mixtral":
        name = f"model.layers.{layer}.block_sparse_moe.experts.%d.{_MIXTRAL_EXPERTS[kind]}.weight"
    else:
        name = f"model.layers.{layer}.mlp.experts.%d.{_EXPERTS[kind]}.weight"
    if expert is not None:
        return [(name % int(expert), Placement(tensor, tensor.shape))]
    num_experts = config.get("num_local_experts", config.get("num_experts"))
    if len(tensor.shape) != 3 or tensor.shape[0] != num_experts:
        raise BadFile(f"tensor `{tensor.name}` has shape {list(tensor.shape)}, {num_experts} experts were announced")
    rows = tensor.shape[1]
    return [(name % e, Placement(tensor, tensor.shape[1:], first_row=e * rows)) for e in range(tensor.shape[0])]
