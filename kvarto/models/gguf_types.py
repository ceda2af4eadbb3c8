"""GGUF's tensor types: numbers, names, block sizes, and their values in float32.

The table is our own because importing the `gguf` package takes longer than all else that opens a file; the package
dequantises blocks, where anybody asks for their values. Source: ggml's `ggml_type` and docs/gguf.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvarto.models.base import Float32, RawRows


@dataclass(frozen=True, slots=True)
class GGUFType:
    """A type that can be read."""

    name: str
    code: int
    block_columns: int
    block_bytes: int

    def row_bytes(self, num_columns: int) -> int:
        """Bytes of a row of whole blocks."""
        return num_columns // self.block_columns * self.block_bytes

    def dequantise(self, raw: RawRows) -> Float32:
        """`[rows, columns]` of `[rows, bytes of a row]`. The array may share memory with `raw`."""
        if self.name == "F32":
            return raw.view("<f4")
        if self.name == "F16":
            return raw.view("<f2").astype(np.float32)
        import gguf

        values: Float32 = gguf.dequantize(raw, gguf.GGMLQuantizationType(self.code))
        return values


READABLE = {
    type.code: type
    for type in (
        GGUFType("F32", 0, 1, 4), GGUFType("F16", 1, 1, 2), GGUFType("BF16", 30, 1, 2),
        GGUFType("Q4_0", 2, 32, 18), GGUFType("Q4_1", 3, 32, 20), GGUFType("Q5_0", 6, 32, 22),
        GGUFType("Q5_1", 7, 32, 24), GGUFType("Q8_0", 8, 32, 34), GGUFType("Q2_K", 10, 256, 84),
        GGUFType("Q3_K", 11, 256, 110), GGUFType("Q4_K", 12, 256, 144), GGUFType("Q5_K", 13, 256, 176),
        GGUFType("Q6_K", 14, 256, 210), GGUFType("IQ4_NL", 20, 32, 18), GGUFType("IQ4_XS", 23, 256, 136),
    )
}  # fmt: skip
"""By number. Others are refused by name when the file is opened."""

OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Names of types that are valid but not read, for the refusal."""
