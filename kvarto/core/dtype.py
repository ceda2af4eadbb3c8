"""Element types that buffers, weights and pages are made of."""

from __future__ import annotations

from enum import StrEnum


class DType(StrEnum):
    """An element type; the value is its name in flags and fingerprints."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"
    I8 = "int8"
    """Codes; of KV only, where each token and head has one float32 scale. Named as `--kv-cache-dtype` names it."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "i64": 8, "u8": 1, "int8": 1}[self.value]
