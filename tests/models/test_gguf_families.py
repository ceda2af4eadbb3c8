"""A model written as a Hugging Face folder and as GGUF opens to the same config, program and values.

The converter below follows llama.cpp's: names by the `gguf` package's own tables, metadata keys by its constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Quant

from kvarto.core.dtype import DType
from kvarto.core.errors import UnsupportedModel
from kvarto.models.config import parse_config
from kvarto.models.decoder import build_program
from kvarto.models.files import open_weights
from kvarto.models.loader import check_tensors, load_weights
from tests.models.gguf_bytes import write_gguf
from tests.models.memory_store import MemoryStore

Array = np.ndarray[Any, np.dtype[np.float32]]

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GEMMA = SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 12, "num_hidden_layers": 7}


def rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0} | settings}


CASES: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "llama2": ("llama", transformers.LlamaConfig, SIZES | rope()),
    "llama-bias-tied": (
        "llama", transformers.LlamaConfig,
        SIZES | rope() | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama3": (
        "llama", transformers.LlamaConfig,
        SIZES | {"head_dim": 64, "max_position_embeddings": 131_072, "rope_parameters": LLAMA3},
    ),
    "llama-linear": ("llama", transformers.LlamaConfig, SIZES | rope(rope_type="linear", factor=4.0)),
    "llama-yarn": (
        "llama", transformers.LlamaConfig,
        SIZES | rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "mistral-wide-heads": ("llama", transformers.LlamaConfig, SIZES | rope() | {"head_dim": 16}),
    "mixtral": (
        "llama", transformers.MixtralConfig, SIZES | rope() | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2": ("qwen2", transformers.Qwen2Config, SIZES | rope()),
    "qwen3": ("qwen3", transformers.Qwen3Config, SIZES | rope() | {"head_dim": 16}),
    "qwen3moe": (
        "qwen3moe", transformers.Qwen3MoeConfig,
        SIZES | rope() | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
        | {"norm_topk_prob": True},
    ),
    "smollm3": ("smollm3", transformers.SmolLM3Config, SIZES | rope() | {"num_hidden_layers": 5}),
    "phi3": ("phi3", transformers.Phi3Config, SIZES | rope() | {"sliding_window": 12}),
    "phi4-mini": ("phi3", transformers.Phi3Config, SIZES | rope(partial_rotary_factor=0.5) | {"sliding_window": 12}),
    "gemma2": (
        "gemma2", transformers.Gemma2Config,
        GEMMA | rope() | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "gemma3", transformers.Gemma3TextConfig,
        GEMMA | {
            "sliding_window_pattern": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gpt2": (
        "gpt2", transformers.GPT2Config,
        {"vocab_size": 96, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 128, "n_inner": 80}
        | {"bos_token_id": None, "eos_token_id": None},
    ),
}  # fmt: skip


def permuted(weight: Array, num_heads: int) -> Array:
    shape = weight.shape
    return weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def convert(folder: Path, architecture: str, config: Any, target: Path) -> Path:
    """The weights in `folder`, as llama.cpp's converter would write them."""
    files = open_weights(folder)
    is_gpt2 = architecture == "gpt2"
    names = gguf.get_tensor_name_map(_arch(architecture), config.num_hidden_layers)
    tensors: dict[str, tuple[Array, Quant]] = {}
    experts: dict[str, list[Array]] = {}
    for name, info in files.tensors.items():
        value = files.read_rows(name, 0, info.num_rows).reshape(info.shape)
        if architecture in ("llama", "smollm3") and ".q_proj." in name:
            value = permuted(value, config.num_attention_heads)
        if architecture in ("llama", "smollm3") and ".k_proj." in name:
            value = permuted(value, config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            value = value + np.float32(1)
        if is_gpt2 and len(info.shape) == 2 and ".h." in name:
            value = value.T
        parts = name.split(".")
        if "experts" in parts:
            at = parts.index("experts")
            assert int(parts[at + 1]) == len(experts.setdefault(".".join(parts[: at + 1] + parts[at + 2 :]), []))
            experts[".".join(parts[: at + 1] + parts[at + 2 :])].append(value)
            continue
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        tensors[mapped] = (value, Quant.F32)
    for name, values in experts.items():
        mapped = names.get_name(name, try_suffixes=(".weight",))
        assert mapped is not None, name
        tensors[mapped] = (np.stack(values), Quant.F32)
    files.close()
    if getattr(config, "rope_parameters", {}).get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = (llama3_divisors(config), Quant.F32)
    return write_gguf(target, metadata_of(architecture, config), tensors)


def _arch(architecture: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def llama3_divisors(config: Any) -> Array:
    """One divisor per pair of dims, one after the other as the converter computes them."""
    settings = config.rope_parameters
    divisors = []
    for pair in range(config.head_dim // 2):
        wavelength = 2 * np.pi * settings["rope_theta"] ** (2 * pair / config.head_dim)
        low, high = settings["low_freq_factor"], settings["high_freq_factor"]
        turns = settings["original_max_position_embeddings"] / wavelength
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1.0 / ((1 - share) / settings["factor"] + share))
    return np.array(divisors, np.float32)


def metadata_of(architecture: str, config: Any) -> dict[str, Any]:
    if architecture == "gpt2":
        own: dict[str, Any] = {
            "block_count": config.n_layer, "context_length": config.n_positions, "embedding_length": config.n_embd,
            "feed_forward_length": config.n_inner, "attention.head_count": config.n_head,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }  # fmt: skip
        return {"general.architecture": architecture} | {f"gpt2.{key}": value for key, value in own.items()}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    params = config.rope_parameters
    full = params.get("full_attention", params)
    own = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": float(full["rope_theta"]),
        "rope.dimension_count": int(head_dim * full.get("partial_rotary_factor", 1.0)),
        "vocab_size": config.vocab_size,
    }  # fmt: skip
    if architecture != "phi3":
        own |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    else:
        own |= {"rope.scaling.original_context_length": config.max_position_embeddings}
    if full["rope_type"] in ("linear", "yarn"):
        own |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": float(full["factor"])}
    if full["rope_type"] == "yarn":
        own |= {"rope.scaling.original_context_length": full["original_max_position_embeddings"]}
    if architecture in ("phi3", "gemma2", "gemma3"):
        own |= {"attention.sliding_window": config.sliding_window}
    if architecture == "gemma2":
        own |= {"attn_logit_softcapping": config.attn_logit_softcapping}
        own |= {"final_logit_softcapping": config.final_logit_softcapping}
    if config.model_type == "mixtral":
        own |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    if architecture == "qwen3moe":
        own |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        own |= {"expert_feed_forward_length": config.moe_intermediate_size}
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in own.items()}


@pytest.mark.parametrize("case", CASES)
def test_folder_and_gguf_are_one_model(case: str, tmp_path: Path) -> None:
    architecture, make_config, settings = CASES[case]
    config = make_config(**settings)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(tmp_path / "folder", max_shard_size="40KB")
    path = convert(tmp_path / "folder", architecture, config, tmp_path / "m.gguf")
    ours, theirs = open_weights(path), open_weights(tmp_path / "folder")

    ours_config = dataclasses.replace(parse_config(ours.config), model_type="", unknown_keys=())
    assert ours_config == dataclasses.replace(parse_config(theirs.config), model_type="", unknown_keys=())
    assert set(ours.tensors) == set(theirs.tensors)
    program = build_program(parse_config(ours.config), DType.F32)
    check_tensors(program, ours)
    assert stored(program, ours) == stored(program, theirs)
    ours.close()
    theirs.close()


def stored(program: Any, files: Any) -> dict[str, bytes]:
    store = MemoryStore(program)
    load_weights(program, files, store)
    # Gemma's norms pass through w + 1 in float32 on the way to GGUF and back, which keeps what the model uses: w + 1.
    return {name: bytes(raw) for name, raw in store.row_major.items()}


@pytest.mark.parametrize("seed", range(20))
def test_llama3_settings_are_found_again(seed: int, tmp_path: Path) -> None:
    """Whatever the settings: the frequencies that come out are those that the divisors were made from."""
    rng = np.random.default_rng(seed)
    settings = LLAMA3 | {
        "factor": float(rng.choice([2.0, 8.0, 13.5])), "low_freq_factor": float(rng.uniform(0.5, 2)),
        "high_freq_factor": float(rng.uniform(3, 9)), "rope_theta": float(rng.choice([10_000.0, 500_000.0])),
        "original_max_position_embeddings": int(rng.integers(512, 20_000)),
    }  # fmt: skip
    sizes = SIZES | {"head_dim": 128, "num_hidden_layers": 1, "max_position_embeddings": 65_536}
    config = transformers.LlamaConfig(**sizes, rope_parameters=settings)
    keys = metadata_of("llama", config)
    keys["llama.rope.scaling.original_context_length"] = settings["original_max_position_embeddings"]
    tensors = {
        "token_embd.weight": (np.zeros((96, 32), np.float32), Quant.F32),
        "rope_freqs.weight": (llama3_divisors(config), Quant.F32),
    }
    files = open_weights(write_gguf(tmp_path / "m.gguf", keys, tensors))
    found = parse_config(files.config).layers[0].rope
    expected = parse_config(config.to_dict() | {"architectures": None}).layers[0].rope
    files.close()
    assert found is not None
    assert expected is not None
    np.testing.assert_allclose(found.inv_freq, expected.inv_freq, rtol=2e-5)


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES | {"head_dim": 64, "rope_parameters": LLAMA3})
    divisors = llama3_divisors(config)
    divisors[20] *= np.float32(1.01)
    tensors = {
        "token_embd.weight": (np.zeros((96, 32), np.float32), Quant.F32),
        "rope_freqs.weight": (divisors, Quant.F32),
    }
    path = write_gguf(tmp_path / "m.gguf", metadata_of("llama", config), tensors)
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        open_weights(path)
