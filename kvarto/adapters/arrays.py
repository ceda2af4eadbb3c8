"""Arrays that are still on disk: their shape and type are known and checked, their values are read when asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarto.core.dtype import DType
from kvarto.core.errors import BadAdapter

Bits = NDArray[Any]
"""float32, float16, or the 16 bits of bfloat16 as uint16."""

_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.F32: np.dtype("<f4"),
    DType.F16: np.dtype("<f2"),
    DType.BF16: np.dtype("<u2"),
}
_EXPONENTS = np.uint16(0x7F80)
"""All ones in a bfloat16 that is infinite or no number."""


@dataclass(frozen=True, slots=True)
class LazyArray:
    """One tensor of an adapter's file."""

    name: str
    """In the file, for messages."""
    shape: tuple[int, ...]
    dtype: DType
    """f32, f16 or bf16, as the file has it."""
    load: Callable[[], bytes | Bits]
    """All values, row-major; called once per read. Raises BadAdapter."""
    load_part: Callable[[int, int], bytes] | None = None
    """From byte, number of bytes; of tensors that lie in the file as they are."""

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        return self.num_elements * self.dtype.itemsize

    def read(self) -> Bits:
        """The values in their own type, of `shape`. Raises BadAdapter where one is not finite."""
        raw = self.load()
        flat = np.frombuffer(raw, _NUMPY[self.dtype]) if isinstance(raw, bytes) else raw
        assert flat.dtype == _NUMPY[self.dtype], f"`{self.name}`: {flat.dtype} was loaded for {self.dtype}"
        bits = flat.reshape(self.shape)
        if not _is_finite(bits, self.dtype):
            raise BadAdapter(
                f"tensor `{self.name}` holds NaN or infinity; training diverged, use an earlier checkpoint"
            )
        return bits

    def values(self) -> NDArray[np.float32]:
        """As `read`, in float32."""
        return _to_float32(self.read(), self.dtype)

    def row_values(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows `[start, stop)` of a matrix as `[stop - start, columns]`, finite or not, without reading the others."""
        assert self.load_part is not None, f"`{self.name}` cannot be read in parts"
        row_bytes = self.shape[1] * self.dtype.itemsize
        raw = self.load_part(start * row_bytes, (stop - start) * row_bytes)
        return _to_float32(np.frombuffer(raw, _NUMPY[self.dtype]).reshape(stop - start, -1), self.dtype)

    def mapped(self, shape: tuple[int, ...], change: Callable[[Bits], Bits]) -> LazyArray:
        """The array after a rearrangement of its values."""

        def load() -> Bits:
            raw = self.load()
            flat = np.frombuffer(raw, _NUMPY[self.dtype]) if isinstance(raw, bytes) else raw
            return np.ascontiguousarray(change(flat.reshape(self.shape)))

        return LazyArray(self.name, shape, self.dtype, load)


def _to_float32(bits: Bits, dtype: DType) -> NDArray[np.float32]:
    if dtype is not DType.BF16:
        return bits.astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _is_finite(bits: Bits, dtype: DType) -> bool:
    if dtype is DType.BF16:
        return not bool(((bits & _EXPONENTS) == _EXPONENTS).any())
    return bool(np.isfinite(bits).all())
