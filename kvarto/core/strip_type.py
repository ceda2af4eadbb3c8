"""StripType: how the pages of an adapter have the columns of a strip. All sizes of strips follow from it.

    f32, f16, bf16    the columns one after the other
    int8              blocks of 32 columns: a float16 scale, then a code of 8 bits for each
    int4              blocks of 32 columns: a float16 scale, then 16 bytes: columns 0..15 in their low halves, plus 8,
                      16..31 in their high ones

A code stands for `bfloat16(code * scale)`, so a strip of codes is one of bfloat16 to all who multiply with it.
"""

from __future__ import annotations

from enum import StrEnum

BLOCK_COLUMNS = 32
SCALE_BYTES = 2


class StripType(StrEnum):
    """In the order of `enum class StripType` in native/core/strip_type.h; codes have the names of `--adapter-dtype`."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8 = "int8"
    Q4 = "int4"

    @property
    def code(self) -> int:
        """What native code calls it."""
        return _INDICES[self]

    @property
    def has_codes(self) -> bool:
        """Whether columns come in blocks with a scale."""
        return self in (StripType.Q8, StripType.Q4)

    @property
    def block_columns(self) -> int:
        """Columns that lie together: strips are cut between blocks alone, and have whole ones."""
        return BLOCK_COLUMNS if self.has_codes else 1

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return _BLOCK_BYTES[self]

    @property
    def alignment(self) -> int:
        """Bytes of which the start of every strip is a multiple."""
        return SCALE_BYTES if self.has_codes else self.block_bytes

    def size_bytes(self, num_columns: int) -> int:
        """Bytes of whole blocks."""
        num_blocks, rest = divmod(num_columns, self.block_columns)
        assert rest == 0, f"{num_columns} columns of {self} are no whole blocks of {self.block_columns}"
        return num_blocks * self.block_bytes


_INDICES = {type: index for index, type in enumerate(StripType)}
_BLOCK_BYTES = {
    StripType.F32: 4,
    StripType.F16: 2,
    StripType.BF16: 2,
    StripType.Q8: SCALE_BYTES + BLOCK_COLUMNS,
    StripType.Q4: SCALE_BYTES + BLOCK_COLUMNS // 2,
}
