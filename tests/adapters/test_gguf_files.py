"""A GGUF adapter is the PEFT adapter that it was converted from: same bands, same rows of B, same scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from kvarto.adapters.gguf_files import open_gguf_adapter
from kvarto.adapters.peft_files import open_peft_adapter
from kvarto.adapters.targets import BaseTargets, Role, targets_of
from kvarto.core.errors import AdapterError, AdapterMismatch, BadAdapter, UnsupportedAdapter
from tests.adapters.bases import GPT2, MIXTRAL, program_of
from tests.adapters.held import held
from tests.adapters.writer import ALL_LINEAR, Options, write_adapter
from tests.models.gguf_bytes import write_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0,
}  # fmt: skip
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
BASE = targets_of(program_of())


def pair(name: str, a: tuple[int, ...], b: tuple[int, ...], layer: int = 0) -> dict[str, tuple[int, ...]]:
    return {f"blk.{layer}.{name}.weight.lora_a": a, f"blk.{layer}.{name}.weight.lora_b": b}


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to rows of q and k."""
    head_dim = rows.shape[0] // num_heads
    return rows.reshape(num_heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def converted(
    folder: Path,
    base: BaseTargets,
    updates: dict[str, Any],
    kind: Q = Q.F32,
    *,
    is_permuted: bool = True,
    **metadata: Any,
) -> Path:
    tensors = {}
    for module, update in updates.items():
        layer, _, name = module.removeprefix("model.layers.").partition(".")
        a, b = update.lora_a, update.lora_b
        if base.find(module).role is Role.EMBED:
            gguf_name, a = "token_embd", a.T
        elif module == "lm_head":
            gguf_name = "output"
        else:
            gguf_name = f"blk.{layer}.{NAMES[name]}"
        if is_permuted and name[-6:] in ("q_proj", "k_proj"):
            b = interleaved(b, base.heads.num_qo_heads if name.endswith("q_proj") else base.heads.num_kv_heads)
        tensors |= {f"{gguf_name}.weight.lora_a": (a, kind), f"{gguf_name}.weight.lora_b": (b, kind)}
    path = folder / "adapter.gguf"
    write_gguf(path, METADATA | metadata, tensors)
    return path


@pytest.mark.parametrize(
    ("model_type", "architecture", "is_permuted"),
    [("llama", "llama", True), ("mistral", "llama", True), ("qwen2", "qwen2", False)],
)
def test_it_is_the_peft_adapter(model_type: str, architecture: str, is_permuted: bool, tmp_path: Path) -> None:
    base = targets_of(program_of(model_type=model_type))
    written = write_adapter(tmp_path / "a", base, Options(("model.embed_tokens", "lm_head", *ALL_LINEAR), rank=6))
    path = converted(tmp_path, base, written.updates, is_permuted=is_permuted, **{"general.architecture": architecture})
    ours = held(open_gguf_adapter(path, base, [tmp_path]))
    theirs = held(open_peft_adapter(written.folder, base, [tmp_path]))
    assert [(u.target, u.rank, u.scaling) for u in ours.updates] == [
        (u.target, u.rank, u.scaling) for u in theirs.updates
    ]
    for one, two in zip(ours.updates, theirs.updates, strict=True):
        np.testing.assert_array_equal(one.lora_a.read(), two.lora_a.read())
        np.testing.assert_array_equal(one.lora_b.read(), two.lora_b.read())


@pytest.mark.parametrize(
    ("kind", "dtype", "error"), [(Q.F16, "f16", 1e-3), (Q.BF16, "bf16", 1e-2), (Q.Q8_0, "f32", 2e-2)]
)
def test_types_are_kept_or_widened(kind: Q, dtype: str, error: float, tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASE, Options(("model.layers.1.self_attn.q_proj",), rank=32))
    path = converted(tmp_path, BASE, written.updates, kind)
    (update,) = held(open_gguf_adapter(path, BASE, [tmp_path])).updates
    expected = written.updates["model.layers.1.self_attn.q_proj"]
    assert (update.lora_a.dtype, update.lora_b.dtype) == (dtype, dtype)
    np.testing.assert_allclose(update.lora_a.values(), expected.lora_a, atol=error)
    np.testing.assert_allclose(update.lora_b.values(), expected.lora_b, atol=error)


def test_alpha_of_zero_is_a_scaling_of_one(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASE)
    tokens = {"adapter.alora.invocation_tokens": [5, 6]}
    path = converted(tmp_path, BASE, written.updates, **{"adapter.lora.alpha": 0.0, **tokens})
    adapter = open_gguf_adapter(path, BASE, [tmp_path]).adapter
    assert {update.scaling for update in adapter.updates} == {1.0}
    assert adapter.invocation_tokens == (5, 6)


@pytest.mark.parametrize(
    ("metadata", "error", "why"),
    [
        ({"general.type": "model"}, UnsupportedAdapter, "general.type"),
        ({"adapter.type": "control_vector"}, UnsupportedAdapter, "adapter.type"),
        ({"general.architecture": "qwen2"}, AdapterMismatch, "general.architecture"),
        ({"adapter.lora.alpha": "8"}, BadAdapter, "alpha"),
        ({"adapter.lora.alpha": float("nan")}, BadAdapter, "alpha"),
        ({"adapter.lora.rslora": True}, UnsupportedAdapter, "rslora"),
        ({"adapter.alora.invocation_tokens": [-1]}, BadAdapter, "invocation"),
        ({"adapter.alora.invocation_tokens": "a"}, BadAdapter, "invocation"),
        ({"split.count": 2}, UnsupportedAdapter, "parts"),
    ],
)
def test_other_files_are_refused(metadata: Any, error: type[AdapterError], why: str, tmp_path: Path) -> None:
    path = converted(tmp_path, BASE, write_adapter(tmp_path / "a", BASE).updates, **metadata)
    with pytest.raises(error, match=why):
        open_gguf_adapter(path, BASE, [tmp_path])


@pytest.mark.parametrize(
    ("tensors", "error", "why"),
    [
        ({"blk.0.attn_q.weight.lora_a": (4, 32)}, BadAdapter, "stands alone"),
        ({"blk.0.attn_norm.weight": (32,)}, UnsupportedAdapter, "whole tensor"),
        (pair("attn_x", (4, 32), (32, 4)), UnsupportedAdapter, "no place"),
        (pair("attn_v", (4, 32), (16, 4), layer=5), AdapterMismatch, "no module"),
        (pair("attn_q", (4, 32), (30, 4)), BadAdapter, "heads"),
        (pair("attn_v", (4, 32), (30, 4)), AdapterMismatch, "features"),
        (pair("ffn_up_exps", (4, 4, 32), (4, 8, 4)), UnsupportedAdapter, "two axes"),
    ],
)
def test_wrong_tensors_are_refused(tensors: Any, error: type[AdapterError], why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, METADATA, {name: (np.zeros(shape), Q.F32) for name, shape in tensors.items()})
    with pytest.raises(error, match=why):
        open_gguf_adapter(path, BASE, [tmp_path])


def test_other_types_other_bases_and_links_are_refused(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASE, Options(("model.layers.1.self_attn.q_proj",), rank=32))
    path = converted(tmp_path, BASE, written.updates, Q.Q4_0)
    with pytest.raises(UnsupportedAdapter, match="Q4_0"):
        open_gguf_adapter(path, BASE, [tmp_path])
    with pytest.raises(AdapterMismatch, match="gpt2"):
        open_gguf_adapter(path, targets_of(program_of(GPT2)), [tmp_path])
    with pytest.raises(BadAdapter, match="outside of"):
        open_gguf_adapter(path, BASE, [tmp_path / "a"])
    mixtral = targets_of(program_of(MIXTRAL))
    assert open_gguf_adapter(converted(tmp_path, BASE, written.updates), mixtral, [tmp_path]).adapter.updates
