"""Builds small GGUF files byte by byte, and remembers where every number lies so that tests can change each one."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quantize

STRING, ARRAY, U32, F32, I32, BOOL = 8, 9, 4, 6, 5, 7


@dataclass
class Number:
    """A number in the head of the file that decides how the rest is read."""

    name: str
    offset: int
    layout: str


@dataclass
class GGUFBytes:
    data: bytearray = field(default_factory=bytearray)
    numbers: list[Number] = field(default_factory=list)

    def number(self, name: str, layout: str, value: int) -> None:
        self.numbers.append(Number(name, len(self.data), layout))
        self.data += struct.pack(layout, value)

    def string(self, name: str, text: str) -> None:
        self.number(f"length of {name}", "<Q", len(text.encode()))
        self.data += text.encode()

    def value(self, key: str, value: Any) -> None:
        kind, write = _kind(value)
        self.number(f"type of {key}", "<I", kind)
        write(self, key, value)


def _kind(value: Any) -> tuple[int, Any]:
    if isinstance(value, bool):
        return BOOL, lambda out, key, v: out.data.extend(struct.pack("<?", v))
    if isinstance(value, int):
        return U32, lambda out, key, v: out.data.extend(struct.pack("<I", v))
    if isinstance(value, float):
        return F32, lambda out, key, v: out.data.extend(struct.pack("<f", v))
    if isinstance(value, str):
        return STRING, lambda out, key, v: out.string(key, v)
    return ARRAY, _write_array


def _write_array(out: GGUFBytes, key: str, values: list[Any]) -> None:
    kind = STRING if isinstance(values[0], str) else F32 if isinstance(values[0], float) else I32
    out.number(f"element type of {key}", "<I", kind)
    out.number(f"count of {key}", "<Q", len(values))
    for value in values:
        if kind == STRING:
            out.string(f"element of {key}", value)
        else:
            out.data += struct.pack("<f" if kind == F32 else "<i", value)


def gguf_bytes(
    metadata: dict[str, Any],
    tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType]],
    alignment: int = 32,
) -> GGUFBytes:
    """A valid file. Tensors are given as float32 arrays and their type on file."""
    out = GGUFBytes(bytearray(b"GGUF"))
    out.number("version", "<I", 3)
    out.number("tensor count", "<Q", len(tensors))
    out.number("key count", "<Q", len(metadata))
    for key, value in metadata.items():
        out.string(f"key {key}", key)
        out.value(key, value)
    raws, offset = [], 0
    for name, (array, quant) in tensors.items():
        raw = quantize(np.ascontiguousarray(array, np.float32), quant).tobytes()
        assert len(raw) == array.size // GGML_QUANT_SIZES[quant][0] * GGML_QUANT_SIZES[quant][1]
        out.string(f"name of tensor {name}", name)
        out.number(f"rank of tensor {name}", "<I", array.ndim)
        for axis, extent in enumerate(reversed(array.shape)):
            out.number(f"dim {axis} of tensor {name}", "<Q", extent)
        out.number(f"type of tensor {name}", "<I", int(quant))
        out.number(f"offset of tensor {name}", "<Q", offset)
        padding = -len(raw) % alignment
        raws.append(raw + bytes(padding))
        offset += len(raw) + padding
    out.data += bytes(-len(out.data) % alignment) + b"".join(raws)
    return out


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType]]
) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors).data)
    return path
