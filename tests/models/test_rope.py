"""Rotations equal those of transformers, for each kind of scaling and each of its settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvarto.models.config_keys import ConfigKeys
from kvarto.models.rope import Rope, RopeDefaults, read_rope

ULP = 2.0**-23
"""Both sides compute in float32; their powers may differ in the last bit or two."""

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 8192},
    "llama3-other": {**LLAMA3, "original_max_position_embeddings": 1024, "low_freq_factor": 0.5, "factor": 32.0},
    "yarn": YARN,
    "yarn-narrow": {**YARN, "beta_fast": 8, "beta_slow": 2},
    "yarn-untruncated": {**YARN, "truncate": False},
    "yarn-attention-factor": {**YARN, "attention_factor": 0.7},
    "yarn-mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn-zero-mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0},
    "yarn-no-ramp": {**YARN, "beta_fast": 4, "beta_slow": 4, "truncate": False},
}


def rope_of_transformers(settings: dict[str, Any], theta: float, head_dim: int) -> tuple[np.ndarray, float]:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=32768,
        rope_parameters={**settings, "rope_theta": theta},
    )
    kind = settings["rope_type"]
    init = LlamaRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    inv_freq, attention_factor = init(config)
    return inv_freq.numpy(), attention_factor


def read(settings: dict[str, Any], theta: float, head_dim: int) -> Rope:
    keys = ConfigKeys({"rope_theta": theta, "rope_scaling": settings}, "llama")
    return read_rope(keys, RopeDefaults(head_dim, 32768))


@pytest.mark.parametrize("head_dim", [8, 64, 96, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_equal_those_of_transformers(name: str, theta: float, head_dim: int) -> None:
    ours = read(SETTINGS[name], theta, head_dim)
    inv_freq, attention_factor = rope_of_transformers(SETTINGS[name], theta, head_dim)
    assert len(ours.inv_freq) == head_dim // 2
    np.testing.assert_allclose(ours.inv_freq, inv_freq, rtol=4 * ULP)
    assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    assert all(float(np.float32(value)) == value for value in ours.inv_freq)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("linear", "factor", 3.0),
        ("llama3", "factor", 9.0),
        ("llama3", "low_freq_factor", 1.5),
        ("llama3", "high_freq_factor", 5.0),
        ("llama3", "original_max_position_embeddings", 4096),
        ("yarn", "factor", 5.0),
        ("yarn", "original_max_position_embeddings", 1024),
        ("yarn", "beta_fast", 8),
        ("yarn", "beta_slow", 4),
        ("yarn", "truncate", False),
        ("yarn", "attention_factor", 2.0),
        ("yarn-mscale", "mscale", 2.0),
        ("yarn-mscale", "mscale_all_dim", 2.0),
    ],
)
def test_every_setting_matters(name: str, key: str, value: Any) -> None:
    assert read({**SETTINGS[name], key: value}, 10_000.0, 64) != read(SETTINGS[name], 10_000.0, 64)


def test_original_length_falls_back_to_the_context_length_and_the_top_level_wins() -> None:
    without = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    explicit = {**YARN, "original_max_position_embeddings": 32768}
    assert read(without, 10_000.0, 64) == read(explicit, 10_000.0, 64)
    keys = ConfigKeys({"rope_scaling": YARN, "original_max_position_embeddings": 1024}, "llama")
    other = {**YARN, "original_max_position_embeddings": 1024}
    assert read_rope(keys, RopeDefaults(64, 32768)) == read(other, 10_000.0, 64)


def test_a_part_of_the_head_rotates_only_in_families_that_say_so() -> None:
    keys = ConfigKeys({"partial_rotary_factor": 0.5}, "phi3")
    assert len(read_rope(keys, RopeDefaults(64, 4096, is_partial=True)).inv_freq) == 16
