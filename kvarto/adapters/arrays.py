"""Arrays that are still on disk: where each lies in its adapter's file, how, and what it is once it was read.

A place knows no file: adapters of one shape share their places, and each is read through the file at hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvarto.core.dtype import DType
from kvarto.core.errors import BadAdapter
from kvarto.core.strip_type import StripType
from kvarto.models.gguf import unpermute_heads

Bits = NDArray[Any]
"""float32, float16, or the 16 bits of bfloat16 as uint16."""

_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.F32: np.dtype("<f4"),
    DType.F16: np.dtype("<f2"),
    DType.BF16: np.dtype("<u2"),
}
_EXPONENTS = np.uint16(0x7F80)
"""All ones in a bfloat16 that is infinite or no number."""
_BLOCK_VALUES, _BLOCK_BYTES = 32, 34
"""Of Q8_0: a float16, then a byte for each value."""


class Encoding(IntEnum):
    """How a file has values. In the order of `enum class FileType` in native/adapters/pack_plan.h."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q8_0 = 3
    """Products of a float16 and a byte, which only float32 holds exactly."""

    @property
    def dtype(self) -> DType:
        """What values are once they were read."""
        return _DTYPES[self]


_DTYPES = {Encoding.F32: DType.F32, Encoding.F16: DType.F16, Encoding.BF16: DType.BF16, Encoding.Q8_0: DType.F32}


class Bytes(Protocol):
    """A file, or what tests have in its place."""

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Exactly these bytes. Raises where they are not there."""
        ...


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One tensor of an adapter's file: its place, and how it becomes what is wanted."""

    name: str
    """In the file, for messages."""
    shape: tuple[int, ...]
    """Wanted."""
    encoding: Encoding
    offset: int
    """Of the first byte, in the file."""
    is_transposed: bool = False
    """The file has rows where columns are wanted."""
    num_permuted_heads: int = 0
    """Not 0: the two halves of each of so many heads lie row by row in turns, as llama.cpp has them."""
    codes: StripType | None = None
    """What values become in pages, where they don't stay what they are."""

    @property
    def dtype(self) -> DType:
        """f32, f16 or bf16."""
        return _DTYPES[self.encoding]

    @property
    def strip_type(self) -> StripType:
        """As pages have it."""
        return self.codes or StripType(self.dtype.value)

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the values, once they were read."""
        return self.num_elements * self.dtype.itemsize

    @property
    def strip_bytes(self) -> int:
        """Bytes in pages."""
        return self.strip_type.size_bytes(self.num_elements)

    @property
    def file_shape(self) -> tuple[int, int]:
        """Rows and columns as they lie in the file; a vector is a row."""
        rows, columns = self.shape if len(self.shape) == 2 else (1, self.num_elements)
        return (columns, rows) if self.is_transposed else (rows, columns)

    @property
    def file_bytes(self) -> int:
        """Bytes in the file."""
        if self.encoding is Encoding.Q8_0:
            return self.num_elements // _BLOCK_VALUES * _BLOCK_BYTES
        return self.size_bytes

    def reshaped(self, shape: tuple[int, ...]) -> StoredArray:
        """The same values in the same order."""
        assert math.prod(shape) == self.num_elements, f"`{self.name}` of {self.shape} as {shape}"
        return replace(self, shape=shape)

    def read(self, file: Bytes) -> Bits:
        """The values in their own type, of `shape`. Raises BadAdapter where one is not finite."""
        bits = _decoded(file.read(self.offset, self.file_bytes), self.encoding).reshape(self.file_shape)
        if not _is_finite(bits, self.dtype):
            raise not_finite(self.name)
        if self.num_permuted_heads:
            bits = unpermute_heads(bits, self.num_permuted_heads)
        if self.is_transposed:
            bits = bits.T
        return bits.reshape(self.shape)

    def values(self, file: Bytes) -> NDArray[np.float32]:
        """As `read`, in float32."""
        return to_float32(self.read(file), self.dtype)

    def row_values(self, file: Bytes, start: int, stop: int) -> NDArray[np.float32]:
        """Rows `[start, stop)` of a matrix as `[stop - start, columns]`, finite or not, without reading the others."""
        assert self.encoding is not Encoding.Q8_0, f"`{self.name}` cannot be read in parts"
        assert not self.is_transposed, f"`{self.name}` cannot be read in parts"
        assert not self.num_permuted_heads, f"`{self.name}` cannot be read in parts"
        row_bytes = self.shape[1] * self.dtype.itemsize
        raw = file.read(self.offset + start * row_bytes, (stop - start) * row_bytes)
        return to_float32(_decoded(raw, self.encoding).reshape(stop - start, -1), self.dtype)


def not_finite(name: str) -> BadAdapter:
    """What is raised where a tensor holds such a value."""
    return BadAdapter(f"tensor `{name}` holds NaN or infinity; training diverged, use an earlier checkpoint")


def to_float32(bits: Bits, dtype: DType) -> NDArray[np.float32]:
    """A new array of the same shape."""
    if dtype is not DType.BF16:
        return bits.astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bits_of(raw: NDArray[np.uint8], dtype: DType) -> Bits:
    """Bytes, flat, as values of a type."""
    return raw.view(_NUMPY[dtype])


def _decoded(raw: bytes, encoding: Encoding) -> Bits:
    if encoding is not Encoding.Q8_0:
        return np.frombuffer(raw, _NUMPY[encoding.dtype])
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, _BLOCK_BYTES)
    scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
    with np.errstate(invalid="ignore"):  # an infinite scale; found below
        return (scales * blocks[:, 2:].view(np.int8)).reshape(-1)


def _is_finite(bits: Bits, dtype: DType) -> bool:
    if dtype is DType.BF16:
        return not bool(((bits & _EXPONENTS) == _EXPONENTS).any())
    return bool(np.isfinite(bits).all())
