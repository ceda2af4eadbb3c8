"""How each family names its tensors, and which of them becomes which weight.

Names are those of published Hugging Face checkpoints; readers map those of other files to them. `{layer}` and
`{expert}` are filled in; the root comes before all but the output matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvarto.core.buffers import Transform


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Templates without root and without `.weight` or `.bias`; a tuple's tensors are stacked in that order."""

    root: str = "model."
    embed: str = "embed_tokens"
    position_table: str | None = None
    attention_norm: str = "layers.{layer}.input_layernorm"
    qkv: tuple[str, ...] = (
        "layers.{layer}.self_attn.q_proj",
        "layers.{layer}.self_attn.k_proj",
        "layers.{layer}.self_attn.v_proj",
    )
    q_norm: str = "layers.{layer}.self_attn.q_norm"
    k_norm: str = "layers.{layer}.self_attn.k_norm"
    attention_out: str = "layers.{layer}.self_attn.o_proj"
    post_attention_norm: str = "layers.{layer}.post_attention_layernorm"
    """Only where blocks end with a norm of their own."""
    mlp_norm: str = "layers.{layer}.post_attention_layernorm"
    gate_up: tuple[str, ...] = ("layers.{layer}.mlp.gate_proj", "layers.{layer}.mlp.up_proj")
    down: str = "layers.{layer}.mlp.down_proj"
    post_mlp_norm: str = "layers.{layer}.post_feedforward_layernorm"
    """Only where blocks end with a norm of their own."""
    router: str = "layers.{layer}.mlp.gate"
    expert_gate_up: tuple[str, ...] = (
        "layers.{layer}.mlp.experts.{expert}.gate_proj",
        "layers.{layer}.mlp.experts.{expert}.up_proj",
    )
    expert_down: str = "layers.{layer}.mlp.experts.{expert}.down_proj"
    final_norm: str = "norm"
    logits: str = "lm_head"
    """Without root."""
    matrix_transform: Transform = Transform.NONE
    """Of the matrices inside layers."""


LLAMA = TensorNames()
PHI3 = replace(LLAMA, qkv=("layers.{layer}.self_attn.qkv_proj",), gate_up=("layers.{layer}.mlp.gate_up_proj",))
GEMMA = replace(LLAMA, mlp_norm="layers.{layer}.pre_feedforward_layernorm")
MIXTRAL = replace(
    LLAMA,
    router="layers.{layer}.block_sparse_moe.gate",
    expert_gate_up=(
        "layers.{layer}.block_sparse_moe.experts.{expert}.w1",
        "layers.{layer}.block_sparse_moe.experts.{expert}.w3",
    ),
    expert_down="layers.{layer}.block_sparse_moe.experts.{expert}.w2",
)
GPT2 = TensorNames(
    root="transformer.",
    embed="wte",
    position_table="wpe",
    attention_norm="h.{layer}.ln_1",
    qkv=("h.{layer}.attn.c_attn",),
    attention_out="h.{layer}.attn.c_proj",
    mlp_norm="h.{layer}.ln_2",
    gate_up=("h.{layer}.mlp.c_fc",),
    down="h.{layer}.mlp.c_proj",
    final_norm="ln_f",
    matrix_transform=Transform.TRANSPOSE,
)

UNUSED_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names that older files carry along: constants, not parameters."""
