"""Adapters of random numbers in PEFT's form, to measure with: right in shape, size and type, and of no other use."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.targets import BaseTargets

QV = ("q_proj", "v_proj")
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ITEM_BYTES = 2
_SIGN_AND_FRACTION, _EXPONENT = 0x807F, 0x3C80
"""Of bfloat16: values from 2^-6 up to 2^-5, and their negatives."""


@dataclass(frozen=True, slots=True)
class RandomAdapter:
    """What is written: bfloat16 on every module whose path ends with one of these names."""

    module_ends: Sequence[str]
    rank: int
    seed: int
    is_hole: bool = False
    """The header alone, and zeros that take no room on the disk: for adapters that are named and never used."""

    def tensors(self, base: BaseTargets) -> list[tuple[str, tuple[int, int]]]:
        """Names and shapes, in the order of the file."""
        found = []
        for module, target in base.by_module.items():
            if module.rpartition(".")[2] in self.module_ends:
                prefix = f"base_model.model.{module}"
                found.append((f"{prefix}.lora_A.weight", (self.rank, target.in_width)))
                found.append((f"{prefix}.lora_B.weight", (target.out_width, self.rank)))
        return found

    def write(self, folder: Path, base: BaseTargets) -> None:
        """Make the folder and its two files."""
        tensors = self.tensors(base)
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps(self._config()))
        with (folder / "adapter_model.safetensors").open("wb") as file:
            header = _header(tensors)
            file.write(header)
            if self.is_hole:
                file.truncate(len(header) + sum(_size(shape) for _, shape in tensors))
                return
            for values in self._values(tensors):
                file.write(values.tobytes())

    def _values(self, tensors: Sequence[tuple[str, tuple[int, int]]]) -> Iterator[NDArray[np.uint16]]:
        """Bits rather than numbers: thousands of adapters are to be made about as fast as a disk takes them."""
        random = np.random.default_rng(self.seed)
        for _, shape in tensors:
            bits = np.frombuffer(random.bytes(_size(shape)), np.uint16).reshape(shape)
            yield bits & np.uint16(_SIGN_AND_FRACTION) | np.uint16(_EXPONENT)

    def _config(self) -> dict[str, object]:
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.rank,
            "target_modules": list(self.module_ends),
            "bias": "none",
        }


def _size(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] * _ITEM_BYTES


def _header(tensors: Sequence[tuple[str, tuple[int, int]]]) -> bytes:
    entries: dict[str, object] = {}
    position = 0
    for name, shape in tensors:
        end = position + _size(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text
