"""Writes small adapters as PEFT does, over the matrix of its options, and remembers what they mean."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvarto.adapters.targets import BaseTargets, Role
from kvarto.models.convert import to_bfloat16

Array = np.ndarray[Any, Any]
LAYER = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
)
QV = tuple(f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qv")
ALL_LINEAR = tuple(f"model.layers.{layer}.{name}" for layer in range(2) for name in LAYER)


@dataclass
class Update:
    """What one module's tensors mean, in float64."""

    scaling: float
    lora_a: Array
    lora_b: Array
    bias: Array | None = None
    magnitude: Array | None = None


@dataclass
class Written:
    """One adapter on disk."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, tuple[str, Array]]
    updates: dict[str, Update] = field(default_factory=dict)

    def save(self) -> Path:
        """Write config and tensors as they are now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "adapter_config.json").write_text(json.dumps(self.config))
        (self.folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(self.tensors))
        return self.folder


@dataclass(frozen=True)
class Options:
    """The matrix."""

    modules: Sequence[str] = QV
    rank: int = 4
    alpha: float = 8
    dtypes: tuple[str, str] = ("F32", "F32")
    """Of A and of B."""
    prefix: str = "base_model.model."
    adapter: str = ""
    """`.default` where the adapter's name is inside."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


def as_type(values: Array, dtype: str) -> tuple[tuple[str, Array], Array]:
    """The tensor as a file has it, and its values after rounding, in float64."""
    values = np.asarray(values, np.float32)
    if dtype == "F32":
        return (dtype, values), values.astype(np.float64)
    if dtype == "F16":
        half = values.astype(np.float16)
        return (dtype, half), half.astype(np.float64)
    bits = to_bfloat16(values)
    return (dtype, bits), (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def write_adapter(folder: Path, base: BaseTargets, options: Options | None = None) -> Written:
    """Random matrices for each module. Patterns are ends of module paths."""
    o = options or Options()
    rng = np.random.default_rng(o.seed)
    config = {
        "peft_type": "LORA", "r": o.rank, "lora_alpha": o.alpha, "use_rslora": o.use_rslora, "use_dora": o.use_dora,
        "lora_bias": o.lora_bias, "rank_pattern": dict(o.rank_pattern), "alpha_pattern": dict(o.alpha_pattern),
        "target_modules": sorted({module.rpartition(".")[2] for module in o.modules}), "bias": "none",
        "init_lora_weights": True, "modules_to_save": None, "base_model_name_or_path": "/somewhere/else",
    }  # fmt: skip
    written = Written(folder, config | dict(o.config), {})
    for module in o.modules:
        target = base.find(module)
        rank = next((r for end, r in o.rank_pattern.items() if module.endswith(end)), o.rank)
        alpha = next((a for end, a in o.alpha_pattern.items() if module.endswith(end)), o.alpha)

        def tensor(end: str, shape: tuple[int, ...], dtype: str, module: str = module) -> Array:
            stored, values = as_type(rng.normal(0, 0.5, shape), dtype)
            written.tensors[f"{o.prefix}{module}.{end}"] = stored
            return values

        is_table = target.role is Role.EMBED
        a, b = (f"lora{'_embedding' if is_table else ''}_{letter}{o.adapter}" for letter in "AB")
        end = "" if is_table else ".weight"
        update = Update(
            alpha / (math.sqrt(rank) if o.use_rslora else rank),
            tensor(f"{a}{end}", (rank, target.in_width), o.dtypes[0]),
            tensor(f"{b}{end}", (target.out_width, rank), o.dtypes[1]),
        )
        if o.lora_bias and not is_table:
            update.bias = tensor(f"{b}.bias", (target.out_width,), o.dtypes[1])
        if o.use_dora and not is_table:
            update.magnitude = tensor(f"lora_magnitude_vector{o.adapter}", (target.out_width,), o.dtypes[1])
        written.updates[module] = update
    written.save()
    return written


def safetensors_bytes(tensors: Mapping[str, tuple[str, Array]]) -> bytes:
    """A valid file, tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
