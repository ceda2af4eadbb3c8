"""Builds small GGUF files byte by byte, and remembers where every number lies so that tests can change each one."""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quantize

from kvarto.core.units import align_up

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
    raws = []
    for array, quant in tensors.values():
        raw = quantize(np.ascontiguousarray(array, np.float32), quant).tobytes()
        assert len(raw) == size_bytes(array.shape, quant)
        raws.append(raw + bytes(-len(raw) % alignment))
    out = gguf_head(metadata, {name: (array.shape, quant) for name, (array, quant) in tensors.items()}, alignment)
    out.data += b"".join(raws)
    return out


def gguf_head(
    metadata: dict[str, Any],
    shapes: dict[str, tuple[tuple[int, ...], GGMLQuantizationType]],
    alignment: int = 32,
) -> GGUFBytes:
    """All that comes before the data."""
    out = GGUFBytes(bytearray(b"GGUF"))
    out.number("version", "<I", 3)
    out.number("tensor count", "<Q", len(shapes))
    out.number("key count", "<Q", len(metadata))
    for key, value in metadata.items():
        out.string(f"key {key}", key)
        out.value(key, value)
    offset = 0
    for name, (shape, quant) in shapes.items():
        out.string(f"name of tensor {name}", name)
        out.number(f"rank of tensor {name}", "<I", len(shape))
        for axis, extent in enumerate(reversed(shape)):
            out.number(f"dim {axis} of tensor {name}", "<Q", extent)
        out.number(f"type of tensor {name}", "<I", int(quant))
        out.number(f"offset of tensor {name}", "<Q", offset)
        offset += align_up(size_bytes(shape, quant), alignment)
    out.data += bytes(-len(out.data) % alignment)
    return out


def size_bytes(shape: tuple[int, ...], quant: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[quant]
    return math.prod(shape) // block * block_bytes


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType]]
) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors).data)
    return path


def write_sparse_gguf(
    path: Path, metadata: dict[str, Any], shapes: dict[str, tuple[tuple[int, ...], GGMLQuantizationType]]
) -> Path:
    """A file of any size that takes no room: its data is a hole."""
    head = gguf_head(metadata, shapes).data
    path.write_bytes(head)
    os.truncate(path, len(head) + sum(align_up(size_bytes(*tensor), 32) for tensor in shapes.values()))
    return path
