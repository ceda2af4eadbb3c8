"""Rotary scaling of GGUF files in the spelling of a Hugging Face config.

GGUF keeps "llama3" scaling as a tensor of divisors, one per pair of dims (`rope_freqs.weight`), and "longrope" as two
of them. The divisors of "llama3" are `1 / (share + (1 - share) / factor)` with `share` linear in the frequency and
clipped to 0..1, so the settings can be found again; where they do not reproduce the tensor, the model is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.models.base import Float32
from kvarto.models.gguf_keys import MetadataKeys

TOLERANCE = 1e-5
"""Relative. The divisors were computed in float32 by a chain of five operations: about 1e-6."""


@dataclass(frozen=True, slots=True)
class RopeFactors:
    """Divisors of frequencies that the file carries as tensors, `[rotary_dim / 2]` each."""

    freqs: Float32 | None = None
    long: Float32 | None = None
    short: Float32 | None = None


def rope_scaling(
    keys: MetadataKeys, config: dict[str, Any], rotary_dim: int, factors: RopeFactors
) -> dict[str, Any] | None:
    """The `rope_scaling` of the config, None for none."""
    original = keys.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    attention_factor = keys.optional_number("rope.scaling.attn_factor")
    if attention_factor is None:
        attention_factor = keys.optional_number("rope.scaling.yarn_attn_factor")
    ramp = {name: keys.optional_number(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    kind = keys.text("rope.scaling.type", "linear" if keys.has("rope.scale_linear") else "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if factors.long is not None and factors.short is not None:
        return _longrope(factors.long, factors.short, original, attention_factor)
    if factors.freqs is not None:
        return _llama3(config["rope_theta"], rotary_dim, original, factors.freqs)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(f"rope scaling `{kind:.40}` is not built in; built in are linear, yarn and llama3")
    # llama.cpp multiplies `attn_factor` by the temperature that YaRN prescribes; 1 leaves that alone.
    if attention_factor not in (None, 1.0):
        raise UnsupportedModel(f"yarn with `rope.scaling.attn_factor` = {attention_factor} is not built in; 1 is")
    settings = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return settings | {name: value for name, value in ramp.items() if value is not None}


def _longrope(long: Float32, short: Float32, original: int, attention_factor: float | None) -> dict[str, Any]:
    settings = {
        "rope_type": "longrope",
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        "original_max_position_embeddings": original,
    }
    return settings if attention_factor is None else settings | {"attention_factor": attention_factor}


def _llama3(theta: float, rotary_dim: int, original: int, divisors: Float32) -> dict[str, Any] | None:
    if divisors.shape != (rotary_dim // 2,) or not np.isfinite(divisors).all() or (divisors <= 0).any():
        raise BadFile(f"`rope_freqs.weight` must hold {rotary_dim // 2} positive numbers, one per pair of dims")
    if np.allclose(divisors, 1.0, rtol=TOLERANCE):
        return None
    if theta <= 0:
        raise BadFile(f"`rope.freq_base` is {theta}; a number greater than 0 is needed")
    factor = float(divisors.max())
    waves = theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim) / (2 * math.pi)
    for original_positions, low, high in _candidates(waves, divisors.astype(np.float64), factor, original):
        share = np.clip((original_positions * waves - low) / (high - low), 0.0, 1.0)
        if np.allclose(1 / (share + (1 - share) / factor), divisors, rtol=TOLERANCE):
            settings = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            return settings | {"original_max_position_embeddings": original_positions}
    raise UnsupportedModel("the divisors in `rope_freqs.weight` are not those of llama3 scaling, which is built in")


def _candidates(
    waves: np.ndarray[Any, np.dtype[np.float64]],
    divisors: np.ndarray[Any, np.dtype[np.float64]],
    factor: float,
    original: int,
) -> list[tuple[int, float, float]]:
    """Settings to try: the published ones (Llama 3.1 to 3.3), then those of the line through the blended pairs."""
    found: list[tuple[int, float, float]] = [(8192, 1.0, 4.0)]
    share = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    blended = (share > 1e-3) & (share < 1 - 1e-3)
    if blended.sum() >= 2:
        slope, offset = np.polyfit(waves[blended], share[blended], 1)
        # Only the ratios to `original` matter; the file does not tell them apart from it.
        width = original / slope
        found.append((original, float(-offset * width), float((1 - offset) * width)))
    return found
