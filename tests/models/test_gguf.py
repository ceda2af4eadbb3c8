"""GGUF weights come out with Hugging Face's names, layout and values, whatever band of rows is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant

from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.models import base
from kvarto.models.gguf import GGUFFiles
from kvarto.models.gguf_types import OTHERS, READABLE
from tests.models.gguf_bytes import write_gguf

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 256, 4, 2, 64, 512, 40
RNG = np.random.default_rng(3)


def metadata(architecture: str = "llama", **extra: Any) -> dict[str, Any]:
    shared = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": HEAD_DIM,
    }
    own = {key.replace("__", "."): value for key, value in extra.items()}
    return {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in (shared | own).items()}


def normal(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return RNG.standard_normal(shape, dtype=np.float32)


def read_all(files: GGUFFiles, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    return files.read_rows(name, 0, files.tensors[name].num_rows)


def open_with(path: Path, keys: dict[str, Any], tensors: dict[str, Any]) -> GGUFFiles:
    tensors = {"token_embd.weight": (normal(VOCAB, HIDDEN), Quant.F16)} | tensors
    return GGUFFiles(write_gguf(path / "m.gguf", keys, tensors))


def can_quantise(quant: str) -> bool:
    try:
        gguf.quantize(normal(1, 256), Quant[quant])
    except NotImplementedError:
        return False
    return True


def test_types_are_the_packages() -> None:
    for quant in Quant:
        found = READABLE.get(quant.value)
        if found is None:
            assert OTHERS.get(quant.value, quant.name) == quant.name
        else:
            assert found.name == quant.name
            assert (found.block_columns, found.block_bytes) == gguf.GGML_QUANT_SIZES[quant]


@pytest.mark.parametrize("quant", [type.name for type in READABLE.values()])
def test_values_are_the_packages(quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any band of rows, read in small blocks, equals the same rows of the whole tensor dequantised at once."""
    kind = Quant[quant]
    if can_quantise(quant):
        raw = gguf.quantize(normal(37, 512), kind)
    else:
        # The package cannot write these; finite scales and random bits are a tensor like any other.
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = RNG.integers(0, 60, (37, 512 // block * block_bytes), dtype=np.uint8)
    whole = gguf.dequantize(raw, kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in metadata().items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = GGUFFiles(tmp_path / "m.gguf")
    monkeypatch.setattr(base, "BLOCK_BYTES", 5 * 512 * 4)
    for start, stop in ((0, 37), (0, 1), (36, 37), (3, 19), (5, 5)):
        rows = files.read_rows("model.embed_tokens.weight", start, stop)
        assert rows.dtype == np.float32
        assert np.array_equal(rows, whole[start:stop], equal_nan=True)
    assert np.array_equal(files.read_columns("model.embed_tokens.weight", 7, 300), whole[:, 7:300], equal_nan=True)
    files.close()


def permuted(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to q and k: row (head, half, pair) goes to (head, pair, half)."""
    out = np.empty_like(weight)
    head_dim = weight.shape[0] // num_heads
    for row in range(weight.shape[0]):
        head, rest = divmod(row, head_dim)
        half, pair = divmod(rest, head_dim // 2)
        out[head * head_dim + 2 * pair + half] = weight[row]
    return out


@pytest.mark.parametrize("architecture", ["llama", "smollm3"])
def test_rotated_heads_come_apart(architecture: str, tmp_path: Path) -> None:
    q, k, bias = normal(HEADS * HEAD_DIM, HIDDEN), normal(KV_HEADS * HEAD_DIM, HIDDEN), normal(HEADS * HEAD_DIM)
    files = open_with(
        tmp_path,
        metadata(architecture),
        {
            "blk.0.attn_q.weight": (permuted(q, HEADS), Quant.F32),
            "blk.0.attn_k.weight": (permuted(k, KV_HEADS), Quant.F32),
            "blk.0.attn_q.bias": (permuted(bias, HEADS), Quant.F32),
        },
    )
    prefix = "model.layers.0.self_attn"
    assert np.array_equal(read_all(files, f"{prefix}.q_proj.weight"), q)
    assert np.array_equal(read_all(files, f"{prefix}.k_proj.weight"), k)
    assert np.array_equal(files.read_rows(f"{prefix}.q_proj.bias", 0, 1)[0], bias)
    for start, stop in ((0, 1), (63, 65), (10, 200), (128, 256), (90, 91)):
        assert np.array_equal(files.read_rows(f"{prefix}.q_proj.weight", start, stop), q[start:stop])
    assert np.array_equal(files.read_columns(f"{prefix}.k_proj.weight", 5, 9), k[:, 5:9])
    files.close()


def test_qwen_heads_are_left_alone(tmp_path: Path) -> None:
    q = normal(HEADS * HEAD_DIM, HIDDEN)
    files = open_with(tmp_path, metadata("qwen2"), {"blk.0.attn_q.weight": (q, Quant.F32)})
    assert np.array_equal(read_all(files, "model.layers.0.self_attn.q_proj.weight"), q)
    files.close()


def test_gemma_norms_lose_their_one(tmp_path: Path) -> None:
    weight = normal(HIDDEN)
    keys = metadata("gemma2", attention__sliding_window=32, attention__key_length=HEAD_DIM)
    names = {
        "blk.0.attn_norm": "input_layernorm",
        "blk.0.post_attention_norm": "post_attention_layernorm",
        "blk.0.ffn_norm": "pre_feedforward_layernorm",
        "blk.0.post_ffw_norm": "post_feedforward_layernorm",
    }
    stored = weight + np.float32(1)
    files = open_with(tmp_path, keys, {f"{name}.weight": (stored, Quant.F32) for name in names})
    for name in names.values():
        found = files.read_rows(f"model.layers.0.{name}.weight", 0, 1)[0]
        # The file holds w + 1, rounded; what the model computes with is that again.
        assert np.array_equal(found + np.float32(1), stored)
        assert np.abs(found - weight).max() <= 2**-23
    files.close()


def test_gpt2_matrices_are_transposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BLOCK_BYTES", 7 * HIDDEN * 4)
    keys = {k: v for k, v in metadata("gpt2", attention__layer_norm_epsilon=1e-5).items() if "rms" not in k}
    keys = {k: v for k, v in keys.items() if "rope" not in k and "_kv" not in k}
    matrix, bias = normal(3 * HIDDEN, HIDDEN), normal(3 * HIDDEN)
    files = open_with(
        tmp_path,
        keys,
        {
            "blk.0.attn_qkv.weight": (matrix, Quant.F32),
            "blk.0.attn_qkv.bias": (bias, Quant.F32),
            "position_embd.weight": (normal(128, HIDDEN), Quant.F32),
        },
    )
    name = "transformer.h.0.attn.c_attn.weight"
    assert files.tensors[name].shape == (HIDDEN, 3 * HIDDEN)
    assert np.array_equal(read_all(files, name), matrix.T)
    assert np.array_equal(files.read_rows(name, 9, 31), matrix.T[9:31])
    assert np.array_equal(files.read_columns(name, 100, 140), matrix.T[:, 100:140])
    assert files.tensors["transformer.wpe.weight"].shape == (128, HIDDEN)
    files.close()


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_come_one_by_one(model_type: str, tmp_path: Path) -> None:
    experts = normal(3, FFN, HIDDEN)
    architecture = "llama" if model_type == "mixtral" else "qwen3moe"
    keys = metadata(architecture, expert_count=3, expert_used_count=2)
    if architecture == "qwen3moe":
        keys["qwen3moe.expert_feed_forward_length"] = FFN
    files = open_with(tmp_path, keys, {"blk.0.ffn_gate_exps.weight": (experts, Quant.Q8_0)})
    whole = gguf.dequantize(gguf.quantize(experts, Quant.Q8_0), Quant.Q8_0)
    template = "block_sparse_moe.experts.%d.w1" if model_type == "mixtral" else "mlp.experts.%d.gate_proj"
    for expert in range(3):
        name = f"model.layers.0.{template % expert}.weight"
        assert files.tensors[name].shape == (FFN, HIDDEN)
        assert np.array_equal(read_all(files, name), whole[expert])
        assert np.array_equal(files.read_rows(name, 4, 6), whole[expert][4:6])
    files.close()


def test_unknown_tensors_and_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ssm_a"):
        open_with(tmp_path, metadata(), {"blk.0.ssm_a.weight": (normal(HIDDEN), Quant.F32)})
    with pytest.raises(UnsupportedModel, match=r"llama\.logit_scale"):
        open_with(tmp_path, metadata(logit_scale=0.5), {})
    with pytest.raises(UnsupportedModel, match="architecture `mamba`"):
        open_with(tmp_path, metadata("mamba"), {})
    with pytest.raises(BadFile, match="head_count"):
        open_with(tmp_path, metadata(attention__head_count=0), {})
    with pytest.raises(BadFile, match="heads cannot divide"):
        open_with(tmp_path, metadata(), {"blk.0.attn_q.weight": (normal(HIDDEN - 2, HIDDEN), Quant.F32)})
    keys = metadata(expert_count=4, expert_used_count=2)
    with pytest.raises(BadFile, match="experts were announced"):
        open_with(tmp_path, keys, {"blk.0.ffn_gate_exps.weight": (normal(3, FFN, HIDDEN), Quant.F32)})
