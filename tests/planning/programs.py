"""Programs to plan: two made by hand, and real decoders of several families."""

from __future__ import annotations

from typing import Any

from kvarto.core.buffers import Buffer, Rows, Source, StepLimits, Weight
from kvarto.core.dtype import DType
from kvarto.core.kv_format import LayerGroup
from kvarto.core.ops import (
    Activation,
    Attention,
    Embed,
    GatedActivation,
    Gather,
    HeadShape,
    Linear,
    Logits,
    Norm,
    NormKind,
    Op,
    Rope,
    Sample,
    WriteKV,
)
from kvarto.core.program import Program
from kvarto.models.config import parse_config
from kvarto.models.decoder import build_program

LIMITS = StepLimits(max_tokens=64, max_seqs=4, max_samples=4, max_context=512)
HEADS = HeadShape(num_qo_heads=4, num_kv_heads=2, head_dim=16)
HIDDEN, FFN, VOCAB = 64, 160, 1000

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
"""SmolLM2-135M's shape."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma2": LLAMA
    | {
        "model_type": "gemma2",
        "head_dim": 64,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "qwen3_moe": LLAMA
    | {
        "model_type": "qwen3_moe",
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
    },
}


def family(name: str) -> Program:
    """A real decoder."""
    return build_program(parse_config(FAMILIES[name]), DType.F32)


def tiny(num_layers: int = 3, *, windows: tuple[int | None, ...] = (None,)) -> Program:
    """A decoder by hand; layer i is in group i modulo the number of `windows`."""
    maker = _Maker(num_layers, windows)
    return maker.program()


class _Maker:
    def __init__(self, num_layers: int, windows: tuple[int | None, ...]) -> None:
        self.num_layers, self.windows = num_layers, windows
        self.buffers: dict[str, Buffer] = {}
        self.weights: dict[str, Weight] = {}
        self.ops: list[Op] = []

    def buffer(self, name: str, width: int, rows: Rows = Rows.TOKENS) -> str:
        self.buffers[name] = Buffer(name, width, rows)
        return name

    def weight(self, name: str, *shape: int) -> str:
        self.weights[name] = Weight(name, shape, DType.F32, (Source(name),))
        return name

    def program(self) -> Program:
        table, bias = self.weight("embed", VOCAB, HIDDEN), self.weight("logits_bias", VOCAB)  # no multiple of 64 bytes
        x = residual = self.buffer("residual", HIDDEN)
        self.ops.append(Embed(x, table))
        for layer in range(self.num_layers):
            x = self.layer(layer, x, residual)
        sampled, normed = self.buffer("sampled", HIDDEN, Rows.SAMPLES), self.buffer("normed", HIDDEN, Rows.SAMPLES)
        logits = self.buffer("logits", VOCAB, Rows.SAMPLES)
        self.ops += [
            Gather(x, sampled),
            self.norm("final", sampled, normed),
            Logits(normed, logits, table, bias),
        ]
        self.ops.append(Sample(logits))
        program = Program(
            "tiny", self.buffers, self.weights, tuple(self.ops), self.groups(), HIDDEN, VOCAB, max_positions=512
        )
        program.check()
        return program

    def layer(self, layer: int, x: str, residual: str) -> str:
        a, qkv = self.buffer(f"a{layer}", HIDDEN), self.buffer(f"qkv{layer}", HEADS.width)
        attended, projected = self.buffer(f"attended{layer}", HIDDEN), self.buffer(f"projected{layer}", HIDDEN)
        b, gate_up = self.buffer(f"b{layer}", HIDDEN), self.buffer(f"gate_up{layer}", 2 * FFN)
        gated, down = self.buffer(f"gated{layer}", FFN), self.buffer(f"down{layer}", HIDDEN)
        group, slot = layer % len(self.windows), layer // len(self.windows)
        self.ops += [
            self.norm(f"norm_a{layer}", x, a, residual if layer else None),
            Linear(a, qkv, self.weight(f"w_qkv{layer}", HEADS.width, HIDDEN)),
            Rope(qkv, HEADS, tuple(1.0 / (10 ** (i / 8)) for i in range(8))),
            WriteKV(qkv, HEADS, group, slot),
            Attention(qkv, attended, HEADS, group, slot, scale=0.25, window=self.windows[group]),
            Linear(attended, projected, self.weight(f"w_o{layer}", HIDDEN, HIDDEN)),
            self.norm(f"norm_b{layer}", projected, b, residual),
            Linear(b, gate_up, self.weight(f"w_gate_up{layer}", 2 * FFN, HIDDEN)),
            GatedActivation(gate_up, gated, Activation.SILU),
            Linear(gated, down, self.weight(f"w_down{layer}", HIDDEN, FFN)),
        ]
        return down

    def norm(self, name: str, x: str, out: str, residual: str | None = None) -> Norm:
        return Norm(x, out, self.weight(name, HIDDEN), NormKind.RMS, 1e-5, residual=residual)

    def groups(self) -> tuple[LayerGroup, ...]:
        num_groups = len(self.windows)
        num_slots = -(-self.num_layers // num_groups)
        return tuple(
            LayerGroup(tuple(range(group, self.num_layers, num_groups)), num_slots, 2, 16, window)
            for group, window in enumerate(self.windows)
        )
