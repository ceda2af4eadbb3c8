"""Rotary position embedding: from the settings of a `config.json` to one frequency per pair of dims.

Two spellings are read: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (before). The
arithmetic is float32 in the order that checkpoints were trained with. Sources: RoFormer (arXiv:2104.09864), YaRN
(arXiv:2309.00071), "llama3" scaling as published with Llama 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvarto.core.errors import BadFile
from kvarto.models.config_keys import ConfigKeys

Float32 = NDArray[np.float32]

SMALLEST_THETA = 1.01
"""Bases are 10,000 and more; at 1 nothing would rotate slower than anything else."""
BUILT_IN = "`default`, `linear`, `llama3`, `yarn`"
IRRELEVANT = frozenset({"finetuned", "original_max_position_embeddings", "type"})
"""Where a kind of scaling does not read them: they say how a model came to be."""


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of one layer."""

    inv_freq: tuple[float, ...]
    """Radians per position for each pair of dims; float32 values."""
    attention_factor: float = 1.0
    """Multiplies cos and sin."""


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """What a family takes for granted where its config says nothing."""

    head_dim: int
    max_positions: int
    theta: float = 10_000.0
    is_partial: bool = False
    """Whether the family reads `partial_rotary_factor`; the others rotate whole heads."""


def read_rope(keys: ConfigKeys, defaults: RopeDefaults) -> Rope:
    """One rotation for all layers. Raises UnsupportedModel for kinds and settings that are not built in."""
    old, new = keys.level("rope_scaling"), keys.level("rope_parameters")
    level = old or new or ConfigKeys({}, keys.model_type)
    for layer_type in ("full_attention", "sliding_attention"):
        if level.has(layer_type):
            raise level.unsupported(layer_type, "one set of parameters for all layers")
    return rope_of_level(keys, level, defaults, theta_key="rope_theta")


def read_layer_type_ropes(keys: ConfigKeys, full: RopeDefaults, sliding: RopeDefaults) -> dict[str, Rope]:
    """A rotation for each layer type (Gemma 3). In the older spelling `rope_scaling` is for full attention alone."""
    nested = keys.level("rope_parameters")
    if nested is None:
        nothing = ConfigKeys({}, keys.model_type)
        full_level, sliding_level = keys.level("rope_scaling") or nothing, nothing
    else:
        keys.fix("rope_scaling")
        full_level = nested.level("full_attention") or ConfigKeys({}, keys.model_type)
        sliding_level = nested.level("sliding_attention") or ConfigKeys({}, keys.model_type)
        nested.refuse_unread(irrelevant=frozenset())
    return {
        "full_attention": rope_of_level(keys, full_level, full, theta_key="rope_theta"),
        "sliding_attention": rope_of_level(keys, sliding_level, sliding, theta_key="rope_local_base_freq"),
    }


def rope_of_level(keys: ConfigKeys, level: ConfigKeys, defaults: RopeDefaults, *, theta_key: str) -> Rope:
    """Read one object of settings; `theta_key` of the top level stands in for its theta."""
    theta_elsewhere = keys.number(theta_key, defaults.theta, minimum=SMALLEST_THETA)
    theta = level.number("rope_theta", theta_elsewhere, minimum=SMALLEST_THETA)
    with np.errstate(all="ignore"):
        rope = _scaled(keys, level, defaults, theta, _rotary_dim(keys, level, defaults))
    if not np.isfinite(rope.inv_freq).all():
        raise BadFile("config.json: the rotation's settings give frequencies beyond float32; check its factors")
    return rope


def _scaled(keys: ConfigKeys, level: ConfigKeys, defaults: RopeDefaults, theta: float, dim: int) -> Rope:
    kind = level.text("rope_type", level.text("type", "default"))
    frequencies = np.float32(1.0) / _powers(dim, theta)
    if kind == "default":
        rope = Rope(_floats(frequencies))
    elif kind == "linear":
        rope = Rope(_floats(frequencies / np.float32(level.number("factor"))))
    elif kind == "llama3":
        rope = Rope(_floats(_llama3(level, frequencies, _original_positions(keys, level, defaults))))
    elif kind == "yarn":
        rope = _yarn(level, theta, dim, _original_positions(keys, level, defaults), defaults.max_positions)
    else:
        raise level.unsupported("rope_type" if level.has("rope_type") else "type", BUILT_IN)
    level.refuse_unread(irrelevant=IRRELEVANT)
    return rope


def _rotary_dim(keys: ConfigKeys, level: ConfigKeys, defaults: RopeDefaults) -> int:
    if not defaults.is_partial:
        level.fix("partial_rotary_factor", 1)
        keys.fix("partial_rotary_factor", 1)
        fraction, source = 1.0, keys
    else:
        source = level if level.has("partial_rotary_factor") else keys
        fraction = source.number("partial_rotary_factor", 1.0)
    dim = int(defaults.head_dim * fraction)
    if dim % 2 or not 0 < dim <= defaults.head_dim:
        raise source.unsupported("partial_rotary_factor", f"an even share of the {defaults.head_dim} dims of a head")
    return dim


def _original_positions(keys: ConfigKeys, level: ConfigKeys, defaults: RopeDefaults) -> int:
    # A value at the top level wins over the one beside the factor: transformers reads it so.
    fallback = level.optional_integer("original_max_position_embeddings") or defaults.max_positions
    return keys.integer("original_max_position_embeddings", fallback)


def _floats(values: Float32) -> tuple[float, ...]:
    return tuple(float(value) for value in values.astype(np.float32))


def _powers(dim: int, theta: float) -> Float32:
    """`theta ** (2i / dim)`: float32 exponents, and a power rounded once."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(theta, exponents.astype(np.float64)).astype(np.float32)


def _llama3(level: ConfigKeys, frequencies: Float32, original_positions: int) -> Float32:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended."""
    factor = np.float32(level.number("factor"))
    low, high = level.number("low_freq_factor"), level.number("high_freq_factor")
    if high <= low:
        raise level.unsupported("high_freq_factor", f"a number greater than `low_freq_factor` ({low:g})")
    wavelength = np.float32(2 * math.pi) / frequencies
    blend = (np.float32(original_positions) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - blend) * frequencies / factor + blend * frequencies
    slow = wavelength > original_positions / low
    fast = wavelength < original_positions / high
    return np.where(slow, frequencies / factor, np.where(fast, frequencies, blended)).astype(np.float32)


def _yarn(level: ConfigKeys, theta: float, dim: int, original_positions: int, max_positions: int) -> Rope:
    """Dims that turn often keep their frequency, dims that turn rarely are stretched, with a ramp between."""
    factor = level.number("factor", max_positions / original_positions)
    low, high = _yarn_ramp(level, theta, dim, original_positions)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = np.float32(1) - ramp.astype(np.float32)
    powers = _powers(dim, theta)
    stretched = np.float32(1) / (np.float32(factor) * powers)
    frequencies = stretched * (np.float32(1) - kept) + np.float32(1) / powers * kept
    return Rope(_floats(frequencies), _yarn_attention_factor(level, factor))


def _yarn_ramp(level: ConfigKeys, theta: float, dim: int, original_positions: int) -> tuple[float, float]:
    """First and last pair of the ramp: those that turn `beta_fast` and `beta_slow` times in the original context."""

    def pair(num_turns: float) -> float:
        return dim * math.log(original_positions / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(level.number("beta_fast", 32.0)), pair(level.number("beta_slow", 1.0))
    if level.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high if high != low else high + 0.001


def _yarn_attention_factor(level: ConfigKeys, factor: float) -> float:
    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    explicit = level.optional_number("attention_factor")
    # Zero is a value that files carry; it counts as absent.
    mscale, mscale_all_dim = (level.optional_number(key, minimum=0.0) for key in ("mscale", "mscale_all_dim"))
    if explicit is not None:
        return explicit
    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)
