"""What a `quantization_config` says: one of three ways to keep weights in 4 bits, or a scheme that is refused by name.

Which tensors are quantised is not read from here: their names in the file tell, and all of them must find a place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from kvarto.core.errors import UnsupportedModel

_KEYS = ("quantization_config", "compression_config")
_BUILT_IN = (
    "built in are AWQ (version `gemm`), GPTQ and compressed-tensors (`pack-quantized`), all with weights of 4 bits: "
    "take the model in one of these, as GGUF (Q8_0 for 8 bits), or unquantised"
)


class Int4Layout(StrEnum):
    """How codes, scales and zero points lie in the file."""

    AWQ = "awq"
    GPTQ = "gptq"
    PACK_QUANTIZED = "pack-quantized"


@dataclass(frozen=True, slots=True)
class Int4Scheme:
    """What the tensors themselves do not tell."""

    layout: Int4Layout
    group_size: int | None
    """Columns that share a scale, as announced; None where each row is one group, or nothing is said."""
    zero_offset: int = 0
    """Added to the file's zero points: GPTQ's first format keeps them less one."""


def int4_scheme(config: Mapping[str, Any]) -> Int4Scheme | None:
    """None for a model that is not quantised. Raises UnsupportedModel for any scheme that is not built in."""
    settings = _settings(config)
    if settings is None:
        return None
    method = settings.get("quant_method")
    if method == "awq":
        return _awq(settings)
    if method == "gptq":
        return _gptq(settings)
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    _refuse(f"`quant_method` = {method!r:.60}")


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the model whose tensors a reader hands out dequantised."""
    plain = {key: value for key, value in config.items() if key not in _KEYS}
    if isinstance(plain.get("text_config"), dict):
        plain["text_config"] = {key: value for key, value in plain["text_config"].items() if key not in _KEYS}
    return plain


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    levels = [config, config.get("text_config")]
    found = [level[key] for level in levels if isinstance(level, Mapping) for key in _KEYS if level.get(key)]
    if not found:
        return None
    if not isinstance(found[0], Mapping):
        _refuse(f"`quantization_config` = {found[0]!r:.60}")
    return found[0]


def _refuse(what: str) -> NoReturn:
    raise UnsupportedModel(f"quantised weights with {what} are not read; {_BUILT_IN}")


def _require(settings: Mapping[str, Any], key: str, *accepted: object) -> None:
    """Absent and null pass where None is accepted."""
    value = settings.get(key)
    if value not in accepted or (isinstance(value, bool) and not any(value is item for item in accepted)):
        _refuse(f"`{key}` = {value!r:.60}")


def _group_size(value: Any) -> int | None:
    if value is None or value == -1:
        return None
    if type(value) is not int or value <= 0:
        _refuse(f"`group_size` = {value!r:.60}")
    return value


def _awq(settings: Mapping[str, Any]) -> Int4Scheme:
    bits = "bits" if "bits" in settings else "w_bit"
    _require(settings, bits, 4)
    _require(settings, "version", None, "gemm", "GEMM")
    group = "group_size" if "group_size" in settings else "q_group_size"
    return Int4Scheme(Int4Layout.AWQ, _group_size(settings.get(group)))


def _gptq(settings: Mapping[str, Any]) -> Int4Scheme:
    _require(settings, "bits", 4)
    _require(settings, "is_marlin_format", None, False)
    _require(settings, "pack_dtype", None, "int32")
    format_key = "format" if settings.get("checkpoint_format") is None else "checkpoint_format"
    _require(settings, format_key, None, "", "gptq", "gptq_v2")
    for name, override in (settings.get("dynamic") or {}).items():
        if isinstance(override, Mapping) and override.get("bits", 4) != 4:
            _refuse(f"{override['bits']!r:.20} bits for `dynamic` modules `{name:.60}`")
    zero_offset = 0 if settings.get(format_key) == "gptq_v2" else 1
    return Int4Scheme(Int4Layout.GPTQ, _group_size(settings.get("group_size")), zero_offset)


def _compressed_tensors(settings: Mapping[str, Any]) -> Int4Scheme:
    _require(settings, "format", Int4Layout.PACK_QUANTIZED)
    _require(settings, "kv_cache_scheme", None)
    sparsity = settings.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        _refuse(f"`sparsity_config.format` = {sparsity['format']!r:.60}")
    if (settings.get("transform_config") or {}).get("config_groups"):
        _refuse("`transform_config`")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        _refuse(f"`config_groups` = {groups!r:.60}")
    sizes = {_config_group(name, group) for name, group in groups.items()}
    return Int4Scheme(Int4Layout.PACK_QUANTIZED, sizes.pop() if len(sizes) == 1 else None)


def _config_group(name: str, group: Any) -> int | None:
    """The group size of one of `config_groups`: settings, or the name of a preset with what it applies to."""
    if name in ("W4A16", "W4A16_ASYM") and isinstance(group, list):
        return 128
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        _refuse(f"`config_groups.{name:.40}` = {group!r:.60}")
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            _refuse(f"quantised activations (`config_groups.{name:.40}.{key}`)")
    _require(group, "format", None, Int4Layout.PACK_QUANTIZED)
    weights = group["weights"]
    _require(weights, "num_bits", 4)
    _require(weights, "type", None, "int")
    _require(weights, "strategy", "group", "channel")
    _require(weights, "dynamic", None, False)
    return None if weights["strategy"] == "channel" else _group_size(weights.get("group_size"))
