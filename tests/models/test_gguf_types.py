"""Metadata of the wrong type or of an absurd value: a named error or a model, never another exception."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant

from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.models.config import parse_config
from kvarto.models.files import open_weights
from kvarto.models.gguf import GGUFFiles
from kvarto.models.tokenizer import tokenizer_from_gguf
from tests.models.gguf_bytes import write_gguf

WRONG: tuple[Any, ...] = (
    0, 1, -1 % 2**32, 2**31, "", "x", "0", 0.0, -1.5, float("nan"), float("inf"), True, False,
    [1, 2], [0], [1.5], ["a"], ["a", "b", "a"], ["x y z"] * 3,
)  # fmt: skip
SHARED: dict[str, Any] = {
    "block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8, "attention.head_count": 2,
    "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 4,
    "rope.freq_base": 1e4, "attention.key_length": 4, "attention.value_length": 4, "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0, "rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.0,
    "rope.scale_linear": 1.0,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "llama": {"expert_count": 2, "expert_used_count": 1},
    "qwen3moe": {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 8},
    "gemma2": {"attention.sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3": {"attention.sliding_window": 8, "rope.freq_base_swa": 1e4, "attention.sliding_window_pattern": 6},
    "phi3": {"attention.sliding_window": 8},
}
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.scores": [0.0, -1.0, -2.0], "tokenizer.ggml.token_type": [1, 1, 1],
    "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.padding_token_id": 1, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True,
    "tokenizer.ggml.add_space_prefix": True, "tokenizer.chat_template": "x",
}  # fmt: skip
ROWS = np.zeros((3, 8), np.float32)
FACTORS = np.array([1.0, 4.0], np.float32)


def open_all(path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> bool:
    try:
        files = open_weights(write_gguf(path / "m.gguf", metadata, tensors))
        assert isinstance(files, GGUFFiles)
        files.close()
        parse_config(files.config)
        tokenizer_from_gguf(files.metadata).encode("ab ba")
    except (BadFile, UnsupportedModel):
        return False
    return True


@pytest.mark.parametrize("architecture", OWN)
def test_every_key_of_a_family(architecture: str, tmp_path: Path) -> None:
    own = {f"{architecture}.{key}": value for key, value in (SHARED | OWN[architecture]).items()}
    good = {"general.architecture": architecture} | own | VOCABULARY
    tensors = {"token_embd.weight": (ROWS, Quant.F32)}
    outcomes = [open_all(tmp_path, good | {key: value}, tensors) for key in own for value in WRONG]
    assert outcomes.count(False) > len(outcomes) / 3
    with_factors = tensors | {"rope_freqs.weight": (FACTORS, Quant.F32)}
    for key in own:
        if "rope" in key:
            for value in WRONG:
                open_all(tmp_path, good | {key: value}, with_factors)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_key_of_the_vocabulary(kind: str, tmp_path: Path) -> None:
    good = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in SHARED.items()} | VOCABULARY
    del good["llama.rope.scaling.type"]
    good["tokenizer.ggml.model"] = kind
    if kind == "gpt2":  # a byte alphabet is not needed for what is encoded here
        good["tokenizer.ggml.tokens"] = ["a", "b", "ab", "Ġ"]
        good["tokenizer.ggml.token_type"] = [1, 1, 1, 1]
    tensors = {"token_embd.weight": (ROWS, Quant.F32)}
    assert open_all(tmp_path, good, tensors)
    keys = (*VOCABULARY, "general.architecture", "general.alignment", "split.count")
    outcomes = [open_all(tmp_path, good | {key: value}, tensors) for key in keys for value in WRONG]
    assert outcomes.count(False) > len(outcomes) / 4


@pytest.mark.parametrize("divisors", [[0.0, 1.0], [-1.0, 2.0], [np.nan, 1.0], [np.inf, 1.0], [1.0], [3.0, 9.0]])
def test_divisors_that_make_no_sense(divisors: list[float], tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in SHARED.items()} | VOCABULARY
    tensors = {
        "token_embd.weight": (ROWS, Quant.F32),
        "rope_freqs.weight": (np.array(divisors, np.float32), Quant.F32),
    }
    assert not open_all(tmp_path, metadata, tensors)
