"""From float32 values to the bits of other types, rounded to nearest even."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvarto.core.dtype import DType
from kvarto.core.errors import UnsupportedModel
from kvarto.core.weight_format import WeightFormat
from kvarto.models.base import Float32, RawRows

F16_MAX = 65504.0
"""The largest finite float16."""


def to_bytes(values: Float32, dtype: DType, weight_name: str) -> NDArray[np.uint8]:
    """The values as raw bytes, one after the other. Raises UnsupportedModel for one beyond the type's range."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype is DType.F32:
        return values.reshape(-1).view(np.uint8)
    if dtype is DType.BF16:
        return to_bfloat16(values).reshape(-1).view(np.uint8)
    assert dtype is DType.F16, f"weights are f32, f16 or bf16, not {dtype}"
    # Written so that NaN passes: it stays NaN in f16.
    if (np.abs(values) > F16_MAX).any():
        raise UnsupportedModel(
            f"weight `{weight_name}` has values beyond the range of f16; use `--dtype bf16` or `--dtype f32`"
        )
    return values.astype(np.float16).reshape(-1).view(np.uint8)


def to_rows(values: Float32, format: WeightFormat, weight_name: str) -> RawRows:
    """`[rows, columns]` as a file would keep them: plain values, or codes of 8 bits with a scale per 32 columns."""
    if format.is_float:
        return to_bytes(values, DType(format), weight_name).reshape(len(values), -1)
    assert format is WeightFormat.Q8_0, f"values are never quantised to {format}"
    import gguf  # takes longer to import than most weights take to load, and few models need it

    rows: RawRows = gguf.quantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType.Q8_0)
    return rows


def to_bfloat16(values: Float32) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    # Half of the last kept bit, less one where that bit is even, so that a tie rounds to even.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    # Rounding up could carry a NaN's mantissa into the sign; keep its top bits and make it quiet.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
