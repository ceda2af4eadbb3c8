"""Formats of matrices: what the files have is kept, row by row, whatever their layout; all else is converted, named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
from gguf import GGMLQuantizationType as Quant

from kvarto.core.buffers import StepLimits
from kvarto.core.dtype import DType
from kvarto.core.errors import UnsupportedModel
from kvarto.core.program import Program
from kvarto.core.weight_format import WeightFormat
from kvarto.models import base
from kvarto.models.base import WeightFiles
from kvarto.models.config import parse_config
from kvarto.models.decoder import build_program
from kvarto.models.files import open_weights
from kvarto.models.loader import check_tensors, load_weights
from kvarto.models.packing import format_names, matrix_names, pack_matrices
from kvarto.planning.fixed import plan_fixed
from tests.models.gguf_bytes import size_bytes, write_gguf, write_sparse_gguf
from tests.models.memory_store import MemoryStore
from tests.models.test_gguf import metadata, permuted

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 256, 4, 2, 64, 512, 40
ROTATED = {"attn_q": HEADS, "attn_k": KV_HEADS}


def keep_files(file_format: str) -> WeightFormat:
    """What a backend with a loop for every format does."""
    return {format.name: format for format in WeightFormat}.get(file_format, WeightFormat.Q8_0)


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def llama_tensors(quants: dict[str, Quant]) -> dict[str, tuple[np.ndarray[Any, Any], Quant]]:
    """One layer; each matrix in the type that `quants` names, F16 without."""
    shapes = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN), "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
    }  # fmt: skip
    tensors = {"token_embd.weight": (normal(VOCAB, HIDDEN), quants.get("token_embd", Quant.F16))}
    for seed, (name, shape) in enumerate(shapes.items()):
        weight = normal(*shape, seed=seed)
        if name in ROTATED:
            weight = permuted(weight, ROTATED[name])
        tensors[f"blk.0.{name}.weight"] = (weight, quants.get(name, Quant.F16))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        tensors[f"{name}.weight"] = (normal(HIDDEN), Quant.F32)
    return tensors


def packed(path: Path, keep: Any = keep_files) -> tuple[Program, WeightFiles]:
    files = open_weights(path)
    program = build_program(parse_config(files.config), DType.F32)
    check_tensors(program, files)
    return pack_matrices(program, files, keep), files


def loaded(program: Program, files: WeightFiles) -> MemoryStore:
    store, stored = MemoryStore(program), list[int]()
    load_weights(program, files, store, stored.append)
    assert all(size > 0 for size in stored)
    return store


def values_of(store: MemoryStore, name: str) -> np.ndarray[Any, Any]:
    """All parts of a matrix in float32, one below the other."""
    parts = store.program.weights[name].parts
    rows = [gguf.dequantize(store.rows(name, i), Quant[part.format.name]) for i, part in enumerate(parts)]
    return np.concatenate(rows)


def test_each_source_keeps_its_own_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused projections too, with q and k put back into Hugging Face's order; norms stay float32."""
    monkeypatch.setattr(base, "BLOCK_BYTES", 48 * 144)
    quants = {"attn_q": Quant.Q4_1, "attn_k": Quant.Q8_0, "ffn_gate": Quant.Q5_0, "ffn_down": Quant.BF16}
    path = write_gguf(tmp_path / "m.gguf", metadata(), llama_tensors(quants))
    program, files = packed(path)
    formats = {name: [part.format for part in program.weights[name].parts] for name in matrix_names(program)}
    f16, q4_1, q8_0 = WeightFormat.F16, WeightFormat.Q4_1, WeightFormat.Q8_0
    assert formats == {
        "embed": [f16],
        "layer0.qkv": [q4_1, q8_0, f16],
        "layer0.out": [f16],
        "layer0.gate_up": [WeightFormat.Q5_0, f16],
        "layer0.down": [WeightFormat.BF16],
    }
    assert format_names(program) == "bf16+f16+q4_1+q5_0+q8_0"
    store = loaded(program, files)
    for name in formats:
        sources = program.weights[name].sources
        expected = [files.read_rows(s.name, 0, files.tensors[s.name].num_rows) for s in sources]
        assert np.array_equal(values_of(store, name), np.concatenate(expected)), name
    assert set(store.row_major) == {"layer0.attention_norm", "layer0.mlp_norm", "final_norm"}
    assert all(len(raw) == HIDDEN * 4 for raw in store.row_major.values())
    files.close()


@pytest.mark.parametrize("num_rows_per_block", [16, 48, 128, 10_000])
def test_blocks_do_not_matter(num_rows_per_block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata(), llama_tensors({"attn_q": Quant.Q4_0}))
    program, files = packed(path)
    monkeypatch.setattr(base, "BLOCK_BYTES", num_rows_per_block * 144)
    rows = loaded(program, files).rows("layer0.qkv", 0)
    q = normal(HEADS * HEAD_DIM, HIDDEN, seed=0)
    assert np.array_equal(rows, gguf.quantize(q, Quant.Q4_0))
    files.close()


def test_types_without_a_loop_are_widened(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata(), llama_tensors({}))
    program, files = packed(path, lambda file_format: WeightFormat.Q8_0)
    store = loaded(program, files)
    assert format_names(program) == "q8_0"
    q = files.read_rows("model.layers.0.self_attn.q_proj.weight", 0, HEADS * HEAD_DIM)
    assert np.array_equal(store.rows("layer0.qkv", 0), gguf.quantize(q, Quant.Q8_0))
    files.close()


@pytest.mark.parametrize("format", [WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16])
def test_a_type_may_be_asked_for(format: WeightFormat, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata(), llama_tensors({"ffn_down": Quant.Q4_1, "ffn_up": Quant.F32}))
    program, files = packed(path, lambda file_format: format)
    store = loaded(program, files)
    assert format_names(program) == format
    down = files.read_rows("model.layers.0.mlp.down_proj.weight", 0, HIDDEN)
    assert np.array_equal(store.rows("layer0.down", 0), gguf.quantize(down, Quant[format.name]).view(np.uint8))
    files.close()


def test_a_backend_without_formats_gets_row_major_weights(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata(), llama_tensors({"ffn_down": Quant.Q4_1}))
    program, files = packed(path, lambda file_format: None)
    assert all(weight.parts == () for weight in program.weights.values())
    assert format_names(program) == "f32"
    files.close()


def test_values_beyond_f16_are_refused(tmp_path: Path) -> None:
    tensors = llama_tensors({"ffn_down": Quant.F32})
    tensors["blk.0.ffn_down.weight"][0][3, 4] = 1e5
    program, files = packed(write_gguf(tmp_path / "m.gguf", metadata(), tensors), lambda file_format: WeightFormat.F16)
    with pytest.raises(UnsupportedModel, match=r"`layer0\.down` has values beyond the range of f16"):
        loaded(program, files)
    files.close()


@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.F32])
def test_experts_are_parts_by_source(quant: Quant, tmp_path: Path) -> None:
    num_experts = 3
    keys = metadata("qwen3moe", expert_count=num_experts, expert_used_count=2, expert_feed_forward_length=FFN)
    keys |= {"qwen3moe.attention.key_length": HEAD_DIM}
    tensors = llama_tensors({})
    for name in ("attn_q", "attn_k"):  # this family's heads are not interleaved; any values do
        tensors[f"blk.0.{name}_norm.weight"] = (normal(HEAD_DIM), Quant.F32)
    for name in ("ffn_gate", "ffn_up", "ffn_down"):
        weight, _ = tensors.pop(f"blk.0.{name}.weight")
        experts = np.stack([weight + np.float32(e) for e in range(num_experts)])
        tensors[f"blk.0.{name}_exps.weight"] = (experts, quant)
    tensors["blk.0.ffn_gate_inp.weight"] = (normal(num_experts, HIDDEN), Quant.F32)
    program, files = packed(write_gguf(tmp_path / "m.gguf", keys, tensors))
    gate_up, down = program.weights["layer0.experts_gate_up"], program.weights["layer0.experts_down"]
    assert [part.num_rows for part in gate_up.parts] == [FFN, FFN] * num_experts
    assert [part.num_rows for part in down.parts] == [HIDDEN] * num_experts
    assert {part.format for part in (*gate_up.parts, *down.parts)} == {WeightFormat(quant.name.lower())}
    store = loaded(program, files)
    template = "model.layers.0.mlp.experts.%d.%s.weight"
    for expert in range(num_experts):
        for index, kind in ((2 * expert, "gate_proj"), (2 * expert + 1, "up_proj")):
            expected = files.read_rows(template % (expert, kind), 0, FFN)
            assert np.array_equal(gguf.dequantize(store.rows(gate_up.name, index), quant), expected)
        expected = files.read_rows(template % (expert, "down_proj"), 0, HIDDEN)
        assert np.array_equal(gguf.dequantize(store.rows(down.name, expert), quant), expected)
    files.close()


GPT2 = {
    "model_type": "gpt2", "n_embd": HIDDEN, "n_layer": 1, "n_head": HEADS, "n_positions": 32, "vocab_size": VOCAB,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip
GPT2_MATRICES = {
    "attn.c_attn": ("attn_qkv", (HIDDEN, 3 * HIDDEN)), "attn.c_proj": ("attn_output", (HIDDEN, HIDDEN)),
    "mlp.c_fc": ("ffn_up", (HIDDEN, 4 * HIDDEN)), "mlp.c_proj": ("ffn_down", (4 * HIDDEN, HIDDEN)),
}  # fmt: skip


def gpt2_tensors(dtype: Any) -> dict[str, np.ndarray[Any, Any]]:
    tensors = {"transformer.wte.weight": normal(VOCAB, HIDDEN), "transformer.wpe.weight": normal(32, HIDDEN)}
    for norm in ("transformer.ln_f", "transformer.h.0.ln_1", "transformer.h.0.ln_2"):
        tensors |= {f"{norm}.weight": normal(HIDDEN), f"{norm}.bias": normal(HIDDEN)}
    for seed, (name, (_, shape)) in enumerate(GPT2_MATRICES.items()):
        tensors[f"transformer.h.0.{name}.weight"] = normal(*shape, seed=seed)
        tensors[f"transformer.h.0.{name}.bias"] = normal(shape[1])
    return {name: array.astype(dtype) for name, array in tensors.items()}


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_transposed_matrices_keep_their_bits(dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BLOCK_BYTES", 32 * 4 * HIDDEN)
    tensors = gpt2_tensors(dtype)
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    program, files = packed(tmp_path)
    store = loaded(program, files)
    for name, source in (("qkv", "attn.c_attn"), ("gate_up", "mlp.c_fc"), ("down", "mlp.c_proj")):
        expected = np.ascontiguousarray(tensors[f"transformer.h.0.{source}.weight"].T)
        assert np.array_equal(store.rows(f"layer0.{name}", 0), expected.view(np.uint8))
    assert program.weights["positions"].parts == ()
    assert store.row_major["positions"] == tensors["transformer.wpe.weight"].astype(np.float32).tobytes()
    files.close()


def test_matrices_that_lie_transposed_in_gguf_are_kept_as_they_are(tmp_path: Path) -> None:
    """GPT-2's products take the transpose of what Hugging Face has, which is what GGUF has."""
    keys = {k: v for k, v in metadata("gpt2", attention__layer_norm_epsilon=1e-5).items() if "rms" not in k}
    keys = {k: v for k, v in keys.items() if "rope" not in k and "_kv" not in k}
    keys |= {"gpt2.context_length": 32, "gpt2.feed_forward_length": 4 * HIDDEN}
    theirs = gpt2_tensors(np.float32)
    tensors = {"token_embd.weight": (theirs["transformer.wte.weight"], Quant.Q8_0)}
    tensors["position_embd.weight"] = (theirs["transformer.wpe.weight"], Quant.F32)
    for name, norm in (("output_norm", "ln_f"), ("blk.0.attn_norm", "h.0.ln_1"), ("blk.0.ffn_norm", "h.0.ln_2")):
        for suffix in ("weight", "bias"):
            tensors[f"{name}.{suffix}"] = (theirs[f"transformer.{norm}.{suffix}"], Quant.F32)
    for source, (name, _) in GPT2_MATRICES.items():
        tensors[f"blk.0.{name}.weight"] = (theirs[f"transformer.h.0.{source}.weight"].T, Quant.Q4_1)
        tensors[f"blk.0.{name}.bias"] = (theirs[f"transformer.h.0.{source}.bias"], Quant.F32)
    program, files = packed(write_gguf(tmp_path / "m.gguf", keys, tensors))
    store = loaded(program, files)
    assert format_names(program) == "q4_1+q8_0"
    expected = gguf.quantize(np.ascontiguousarray(theirs["transformer.h.0.mlp.c_fc.weight"].T), Quant.Q4_1)
    assert np.array_equal(store.rows("layer0.gate_up", 0), expected)
    files.close()


def test_tied_tables_are_stored_once(tmp_path: Path) -> None:
    program, files = packed(write_gguf(tmp_path / "m.gguf", metadata(), llama_tensors({"token_embd": Quant.Q8_0})))
    assert "logits" not in program.weights
    assert program.weights["embed"].size_bytes == 48 * HIDDEN * 34 // 32  # 40 rows, padded to whole panels
    files.close()


@pytest.mark.parametrize("quant", [Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.Q8_0])
@pytest.mark.parametrize("vocab", [32_003, 49_152])
def test_small_models_do_not_grow(quant: Quant, vocab: int, tmp_path: Path) -> None:
    """SmolLM2's sizes: heads and feed-forward blocks are whole panels, a vocabulary need not be."""
    assert_no_growth(tmp_path, quant, hidden=576, kv_rows=192, ffn=1536, vocab=vocab)


@pytest.mark.parametrize("quant", [Quant.Q4_K, Quant.Q5_K, Quant.Q6_K, Quant.Q8_0, Quant.Q4_1])
@pytest.mark.parametrize(("hidden", "kv_rows", "ffn", "vocab"), [(2048, 256, 5632, 32_000), (896, 128, 4864, 151_936)])
def test_larger_models_do_not_grow(
    quant: Quant, hidden: int, kv_rows: int, ffn: int, vocab: int, tmp_path: Path
) -> None:
    """TinyLlama's and Qwen2.5-0.5B's sizes; K-quants need columns in 256s, so the second keeps its width as Q8_0."""
    assert_no_growth(tmp_path, quant, hidden=hidden, kv_rows=kv_rows, ffn=ffn, vocab=vocab)


def assert_no_growth(tmp_path: Path, quant: Quant, *, hidden: int, kv_rows: int, ffn: int, vocab: int) -> None:
    """At most 2 % over the whole file, embedding table and norms included."""
    heads = {"attention.head_count": hidden // 64, "attention.head_count_kv": kv_rows // 64}
    sizes = {"embedding_length": hidden, "feed_forward_length": ffn, "block_count": 2, **heads}
    keys = metadata() | {f"llama.{key}": value for key, value in sizes.items()}
    shapes: dict[str, tuple[tuple[int, ...], Quant]] = {
        "token_embd.weight": ((vocab, hidden), Quant.Q8_0), "output_norm.weight": ((hidden,), Quant.F32),
    }  # fmt: skip
    for layer in range(2):
        for name, shape in (
            ("attn_q", (hidden, hidden)), ("attn_k", (kv_rows, hidden)), ("attn_v", (kv_rows, hidden)),
            ("attn_output", (hidden, hidden)), ("ffn_gate", (ffn, hidden)), ("ffn_up", (ffn, hidden)),
            ("ffn_down", (hidden, ffn)),
        ):  # fmt: skip
            is_whole = shape[1] % gguf.GGML_QUANT_SIZES[quant][0] == 0
            shapes[f"blk.{layer}.{name}.weight"] = (shape, quant if is_whole else Quant.Q8_0)
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{name}.weight"] = ((hidden,), Quant.F32)
    path = write_sparse_gguf(tmp_path / "m.gguf", keys, shapes)
    program, files = packed(path)
    files.close()
    assert quant.name.lower() in format_names(program)
    region = plan_fixed(program, StepLimits(64, 4, 4, 128), {}).weights
    assert region.size_bytes <= 1.02 * path.stat().st_size
    on_file = sum(weight.file_bytes or 0 for weight in program.weights.values())
    assert on_file == sum(size_bytes(*tensor) for tensor in shapes.values())
