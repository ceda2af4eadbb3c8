"""Every spelling of a name means the same module; what is another format is refused by its name."""

from __future__ import annotations

import itertools
import random

import pytest

from kvarto.adapters.tensor_names import TensorKind, TensorName, parse_tensor_name
from kvarto.core.errors import AdapterError, UnsupportedAdapter

Q = "model.layers.0.self_attn.q_proj"
ENDS = {
    TensorKind.LORA_A: ["lora_A.weight", "lora_A.default.weight", "lora_A.my-adapter.weight"],
    TensorKind.LORA_B: ["lora_B.weight", "lora_B.default.weight"],
    TensorKind.BIAS: ["lora_B.bias", "lora_B.default.bias"],
    TensorKind.EMBEDDING_A: ["lora_embedding_A", "lora_embedding_A.default"],
    TensorKind.EMBEDDING_B: ["lora_embedding_B", "lora_embedding_B.default"],
    TensorKind.MAGNITUDE: [
        "lora_magnitude_vector",
        "lora_magnitude_vector.default",
        "lora_magnitude_vector.weight",
        "lora_magnitude_vector.default.weight",
    ],
    TensorKind.TOKEN_ROWS: ["token_adapter.trainable_tokens_delta", "token_adapter.trainable_tokens_delta.default"],
    TensorKind.BASE_COPY: ["base_layer.weight"],
}
PREFIXES = [
    "",
    "base_model.model.",
    "base_model.model.base_model.model.",
    "_orig_mod.base_model.model.",
    "base_model.model._orig_mod.",
    "module.base_model.model.",
    "_fsdp_wrapped_module.base_model.model._fsdp_wrapped_module.",
]


@pytest.mark.parametrize("kind", ENDS)
def test_all_spellings_are_one_name(kind: TensorKind) -> None:
    for prefix, end in itertools.product(PREFIXES, ENDS[kind]):
        assert parse_tensor_name(f"{prefix}{Q}.{end}") == TensorName(Q, kind, Q), (prefix, end)


def test_wrappers_inside_the_path_are_cut_out() -> None:
    name = "base_model.model.model.layers.0._fsdp_wrapped_module.self_attn._orig_mod.q_proj.lora_A.weight"
    assert parse_tensor_name(name).module == Q


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("model.language_model.layers.0.self_attn.q_proj", Q),
        ("language_model.model.layers.0.self_attn.q_proj", Q),
        ("language_model.lm_head", "lm_head"),
        ("model.vision_tower.blocks.0.attn", "model.vision_tower.blocks.0.attn"),
    ],
)
def test_multimodal_paths_come_down_to_the_language_model(path: str, module: str) -> None:
    assert parse_tensor_name(f"base_model.model.{path}.lora_A.weight") == TensorName(module, TensorKind.LORA_A, path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lora_unet_down_blocks_0.lora_up.weight", "kohya"),
        (f"{Q}.lora_down.weight", "kohya"),
        (f"{Q}.alpha", "kohya"),
        (f"{Q}.lora_a", "MLX"),
        ("blk.0.attn_q.weight.lora_a", "GGUF"),
        (f"{Q}.weight", "whole weight"),
        ("base_model.model.score.modules_to_save.default.weight", "whole weight"),
        (f"{Q}.base_layer.bias", "whole weight"),
        (f"{Q}.lora_A", "none that"),
        (f"{Q}.lora_diag.default", "none that"),
        (f"{Q}.ia3_l", "none that"),
        ("model.layers.0.mlp.experts.base_layer.lora_A.weight", "nested"),
        (f"{Q}.lora_A.a.b.weight", "none that"),
        ("lora_A.weight", "none that"),
    ],
)
def test_others_are_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(UnsupportedAdapter, match=why) as caught:
        parse_tensor_name(name)
    assert name in str(caught.value)


def test_saved_embeddings_are_known_as_copies() -> None:
    for path in ("model.embed_tokens", "lm_head", "transformer.wte"):
        assert parse_tensor_name(f"base_model.model.{path}.weight").kind is TensorKind.BASE_COPY


def test_any_text_is_a_name_or_an_adapter_error() -> None:
    rng = random.Random(3)
    pieces = [
        "base_model.model.",
        "module.",
        "_orig_mod.",
        Q,
        ".",
        "lora_A",
        ".weight",
        "lora_embedding_A",
        "\0",
        "é",
        "x",
    ]
    for _ in range(3000):
        name = "".join(rng.choices(pieces, k=rng.randint(0, 8)))
        try:
            assert parse_tensor_name(name).module
        except AdapterError:
            pass
    for name in ("", "x" * 600, "module." * 70, "." * 500, "a." * 260):
        with pytest.raises(AdapterError):
            parse_tensor_name(name)
