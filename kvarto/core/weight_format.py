"""Formats that a matrix may have in the weights region: panels of 16 rows, repacked once at load.

The byte layouts are in `native/weights/format.h`; here are the sizes, for planning before anything native is needed.
"""

from __future__ import annotations

from enum import StrEnum

from kvarto.core.units import align_up, ceil_div

LANES = 16
"""Rows of a panel. The last panel of a part is padded to it with zeros."""
PART_ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector."""


class WeightFormat(StrEnum):
    """A panel format. The order is that of `enum class Format` in native/weights/format.h."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"
    INT4 = "int4"
    """Codes of 4 bits with a scale and a zero point per group: AWQ, GPTQ, compressed-tensors."""

    @property
    def code(self) -> int:
        """The number that native code knows it by."""
        return _CODES[self]

    @property
    def is_float(self) -> bool:
        """Whether it is a plain float type."""
        return self in (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16)


_CODES = {format: code for code, format in enumerate(WeightFormat)}

_BLOCKS: dict[WeightFormat, tuple[int, int, int]] = {
    WeightFormat.F32: (1, 64, 4),
    WeightFormat.F16: (2, 64, 4),
    WeightFormat.BF16: (2, 64, 4),
    WeightFormat.Q8_0: (32, 544, 34),
    WeightFormat.Q4_0: (32, 288, 18),
    WeightFormat.Q4_1: (32, 320, 20),
    WeightFormat.Q5_0: (32, 352, 22),
    WeightFormat.Q5_1: (32, 384, 24),
    WeightFormat.Q4_K: (256, 2304, 144),
    WeightFormat.Q5_K: (256, 2816, 176),
    WeightFormat.Q6_K: (256, 3360, 210),
}
"""Columns of a block, its bytes for 16 rows in a panel, and its bytes for one row on file."""


def block_columns(format: WeightFormat, group_size: int = 0) -> int:
    """Columns that share a block; `group_size` is that of int4, 0 elsewhere."""
    return group_size if format is WeightFormat.INT4 else _BLOCKS[format][0]


def panel_bytes(format: WeightFormat, num_columns: int, group_size: int = 0) -> int:
    """Bytes of 16 rows."""
    if format is WeightFormat.INT4:
        return ceil_div(num_columns, group_size) * (48 + 8 * group_size)
    columns, size_bytes, _ = _BLOCKS[format]
    return ceil_div(num_columns, columns) * size_bytes


def packed_bytes(format: WeightFormat, num_rows: int, num_columns: int, group_size: int = 0) -> int:
    """Bytes of a band of rows in the weights region, padding included; a multiple of 64."""
    return align_up(ceil_div(num_rows, LANES) * panel_bytes(format, num_columns, group_size), PART_ALIGNMENT)


def row_bytes(format: WeightFormat, num_columns: int, group_size: int = 0) -> int:
    """Bytes of one row as files keep it: plain values, GGUF's blocks, or int4 groups as in native/weights/repack.h."""
    if format is WeightFormat.INT4:
        return num_columns // group_size * (3 + group_size // 2)
    if format.is_float:
        return num_columns * (4 if format is WeightFormat.F32 else 2)
    columns, _, size_bytes = _BLOCKS[format]
    return num_columns // columns * size_bytes
