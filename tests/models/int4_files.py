"""Folders of small models quantised to 4 bits, packed here one code at a time, and what their weights mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

Array = np.ndarray[Any, Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
HIDDEN, FFN, VOCAB = 128, 256, 48
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": VOCAB, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
}  # fmt: skip


@dataclass(frozen=True)
class Quantised:
    """A weight: `codes [rows, columns]`, `scales` and `zeros [rows, groups]`, `groups [columns]`."""

    codes: Array
    scales: Array
    zeros: Array
    groups: Array

    def values(self) -> Array:
        """`scale * (code - zero)` in float32, rounded once."""
        differences: Array = (self.codes - self.zeros[:, self.groups]).astype(np.float32)
        return differences * self.scales.astype(np.float32)[:, self.groups]


def quantised(shape: tuple[int, int], group_size: int, rng: np.random.Generator, zero: int | None) -> Quantised:
    num_rows, num_columns = shape
    num_groups = num_columns // group_size
    scales = rng.uniform(0.001, 0.1, (num_rows, num_groups)).astype(np.float16)
    zeros = rng.integers(0, 16, (num_rows, num_groups)) if zero is None else np.full((num_rows, num_groups), zero)
    groups = np.arange(num_columns) // group_size
    return Quantised(rng.integers(0, 16, shape), scales, zeros, groups)


def pack(codes: Array, axis: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight neighbours along `axis` into an int32: the nibble at place i is neighbour `order[i]`."""
    lines = np.moveaxis(np.asarray(codes, np.int64), axis, -1)
    lines = np.concatenate([lines, np.zeros((*lines.shape[:-1], -lines.shape[-1] % 8), np.int64)], axis=-1)
    words = np.zeros((*lines.shape[:-1], lines.shape[-1] // 8), np.uint32)
    for word in range(words.shape[-1]):
        for place in range(8):
            words[..., word] |= (lines[..., 8 * word + order[place]] << (4 * place)).astype(np.uint32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


def half(array: Array, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).astype(np.float32)).to(dtype)


def awq(weight: Quantised) -> dict[str, torch.Tensor]:
    return {
        "qweight": pack(weight.codes.T, 1, AWQ_ORDER),
        "qzeros": pack(weight.zeros.T, 1, AWQ_ORDER),
        "scales": half(weight.scales.T),
    }


def gptq(weight: Quantised, zero_offset: int = 1) -> dict[str, torch.Tensor]:
    return {
        "qweight": pack(weight.codes.T, 0),
        "qzeros": pack((weight.zeros.T - zero_offset) % 16, 1),
        "scales": half(weight.scales.T),
        "g_idx": torch.from_numpy(weight.groups.astype(np.int32)),
    }


def gptq_v2(weight: Quantised) -> dict[str, torch.Tensor]:
    return gptq(weight, 0)


def pack_quantized(weight: Quantised) -> dict[str, torch.Tensor]:
    tensors = {
        "weight_packed": pack(weight.codes, 1),
        "weight_scale": half(weight.scales),
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if (weight.zeros != 8).any():
        tensors["weight_zero_point"] = pack(weight.zeros, 0)
    return tensors


def write_model(
    folder: Path,
    config: dict[str, Any],
    write: Callable[[Quantised], dict[str, torch.Tensor]],
    weights: dict[str, Quantised],
    extra: dict[str, torch.Tensor] | None = None,
) -> Path:
    """A one-layer llama whose projections are `weights`, by their names in the layer."""
    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN).half(), "model.norm.weight": torch.ones(HIDDEN)}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.0.{norm}.weight"] = torch.ones(HIDDEN)
    for name, weight in weights.items():
        tensors |= {f"model.layers.0.{name}.{part}": tensor for part, tensor in write(weight).items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": config}))
    safetensors.torch.save_file(tensors | (extra or {}), folder / "model.safetensors")
    return folder


def all_weights(group_size: int, *, zero: int | None = None) -> dict[str, Quantised]:
    rng = np.random.default_rng(abs(group_size))
    return {
        name: quantised(shape, group_size if group_size > 0 else shape[1], rng, zero)
        for name, shape in SHAPES.items()
    }
