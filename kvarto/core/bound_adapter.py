"""BoundAdapter: an adapter whose bytes are in pages, as a backend needs it. No files and no names.

All but its pages is its shape, which thousands of adapters may share: backends look at a shape once.

An adapter is one stream of bytes, cut wherever a page ends (kvarto/adapters/packing.py): byte b of it lies in page
`pages[b // page_bytes]`, at `b % page_bytes`. A strip is a row of A, a column of B, or a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvarto.core.strip_type import StripType


@dataclass(frozen=True, slots=True)
class Strips:
    """Strips of equal width and type, one right after the other in the stream."""

    start: int
    """Byte of the stream at which the first begins."""
    num_strips: int
    num_columns: int
    type: StripType

    @property
    def strip_bytes(self) -> int:
        """Bytes of one strip."""
        return self.type.size_bytes(self.num_columns)

    @property
    def end(self) -> int:
        """Byte behind the last."""
        return self.start + self.num_strips * self.strip_bytes

    def place(self, strip: int, column: int) -> int:
        """Byte of the stream at which a column of a strip begins, the first of a block."""
        return self.start + strip * self.strip_bytes + self.type.size_bytes(column)


@dataclass(frozen=True, slots=True)
class BoundUpdate:
    """`y[first_row : first_row + out] += scaling * (B (A x) + bias)`, y what the op writes for a row, x what it reads.

    With a magnitude g, that sum and what the base gave without its bias are both multiplied by g, row by row. What an
    `Embed` gives is scaled by the op, and so is the sum; what `Logits` makes of its sums comes later.
    """

    op_index: int
    """Of a `Linear`, `Logits` or `Embed` in the Program. For an `Embed`, A x is the column of A of the row's token."""
    first_row: int
    scaling: float
    lora_a: Strips
    """`rank` strips of `in` columns."""
    lora_b: Strips
    """`rank` strips of `out` columns: B column by column."""
    bias: Strips | None = None
    """One strip of `out`."""
    magnitude: Strips | None = None
    """One strip of `out`: m / |W + scaling B A|, in float32."""

    @property
    def rank(self) -> int:
        """Rows of A and columns of B."""
        return self.lora_a.num_strips

    @property
    def out_width(self) -> int:
        """Rows of the band."""
        return self.lora_b.num_columns

    def strips(self) -> tuple[Strips, ...]:
        """A, B and what else there is, in this order."""
        return tuple(s for s in (self.lora_a, self.lora_b, self.bias, self.magnitude) if s is not None)


@dataclass(frozen=True, slots=True)
class BoundRows:
    """Rows in place of the base's: embeddings of some tokens, or their rows of the output matrix."""

    op_index: int
    """Of an `Embed` or `Logits`."""
    token_ids: tuple[int, ...]
    """Distinct, in the order of the rows."""
    rows: Strips
    """One per token."""


@dataclass(frozen=True, eq=False)
class BoundShape:
    """What adapters of equal shape have in common. Known by its identity, and may be referred to weakly."""

    updates: tuple[BoundUpdate, ...]
    """In the order of ops, then of rows; bands of one op never overlap."""
    token_rows: tuple[BoundRows, ...] = ()

    @cached_property
    def end(self) -> int:
        """Byte of the stream behind the last strip."""
        strips = [strips for update in self.updates for strips in update.strips()]
        return max((each.end for each in (*strips, *(rows.rows for rows in self.token_rows))), default=0)


@dataclass(frozen=True, slots=True)
class BoundAdapter:
    """All of one adapter."""

    page_bytes: int
    pages: NDArray[np.int32]
    """Of the pool, in the order of the stream. They hold the bytes for as long as the adapter is bound."""
    shape: BoundShape

    @property
    def updates(self) -> tuple[BoundUpdate, ...]:
        """Those of its shape."""
        return self.shape.updates

    @property
    def token_rows(self) -> tuple[BoundRows, ...]:
        """Those of its shape."""
        return self.shape.token_rows
