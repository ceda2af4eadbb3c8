"""Codes of 4 bits, eight to an i32, as AWQ, GPTQ and compressed-tensors lay them out. Pure functions of arrays.

```text
value = scale * (code - zero)          k: column (input), n: row (output), g: group of columns

              codes                    scales    zero points            order of eight in a word
AWQ           qweight [k, n / 8]       [g, n]    qzeros [g, n / 8]      n + 0, 2, 4, 6, 1, 3, 5, 7
GPTQ          qweight [k / 8, n]       [g, n]    qzeros [g, n / 8]      ascending; zeros less one in its first version
pack-quant.   weight_packed [n, k / 8] [n, g]    [n / 8, g], or none: 8 ascending; or zeros as signed bytes [n, g]
```
Sources: AutoAWQ's `WQLinear_GEMM`, AutoGPTQ's `QuantLinear`, compressed-tensors' `PackedQuantizationCompressor`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvarto.models.base import Float32, RawRows

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of eight neighbouring rows is."""


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """Some rows of a weight."""

    nibbles: Bytes
    """`[rows, columns / 32, 16]`: code i in the low bits of byte i, code i + 16 in the high ones."""
    scales: Float32
    """`[rows, groups]`"""
    zeros: Bytes
    """`[rows, groups]`"""

    def values(self, group_of_column: NDArray[np.int64]) -> Float32:
        """`[rows, columns]` in float32, rounded once; `group_of_column` is `[columns]`."""
        halves = np.concatenate([self.nibbles & np.uint8(15), self.nibbles >> np.uint8(4)], axis=-1)
        codes = halves.reshape(len(halves), -1).astype(np.float32)
        values: Float32 = (codes - self.zeros[:, group_of_column]) * self.scales[:, group_of_column]
        return values

    def raw(self, scales: NDArray[np.float16]) -> RawRows:
        """As native/weights/repack.h has rows of int4; `scales` are these, in float16."""
        num_rows, num_groups = scales.shape
        groups = [
            np.ascontiguousarray(scales).view(np.uint8).reshape(num_rows, num_groups, 2),
            self.zeros[:, :, None],
            self.nibbles.reshape(num_rows, num_groups, -1),
        ]
        return np.concatenate(groups, axis=-1).reshape(num_rows, -1)


def row_nibbles(words: Words) -> Bytes:
    """From `[rows, columns / 8]`, ascending along columns, to nibbles as in `Int4Rows`."""
    by_32 = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1, 16)
    # Byte j holds codes 2j and 2j + 1; codes i and i + 16 belong together.
    first, second = by_32[:, :, :8], by_32[:, :, 8:]
    nibbles = np.empty_like(by_32)
    nibbles[:, :, 0::2] = (first & np.uint8(15)) | (second << np.uint8(4))
    nibbles[:, :, 1::2] = (first >> np.uint8(4)) | (second & np.uint8(0xF0))
    return nibbles


def awq_nibbles(words: Words, start: int, stop: int) -> Bytes:
    """Rows `[start, stop)` of AWQ's `[columns, rows / 8]`, as nibbles."""
    first = start // 8
    eights = words[:, first : -(-stop // 8)]
    by_32 = np.ascontiguousarray(eights).view(np.uint8).reshape(-1, 2, 16, 4 * eights.shape[1])
    low_columns, high_columns = by_32[:, 0], by_32[:, 1]
    # Byte b of a word holds places 2b and 2b + 1; each comes out as a byte of two codes, 16 columns apart.
    even = (low_columns & np.uint8(15)) | (high_columns << np.uint8(4))
    odd = (low_columns >> np.uint8(4)) | (high_columns & np.uint8(0xF0))
    places = np.stack([even, odd], axis=-1).reshape(len(even), 16, -1, 8)
    rows = places[:, :, :, _AWQ_PLACES].reshape(len(even), 16, -1)[:, :, start - 8 * first : stop - 8 * first]
    return np.ascontiguousarray(rows.transpose(2, 0, 1))


def column_zeros(words: Words, *, is_awq: bool) -> Bytes:
    """From `[groups, rows / 8]` to `[rows, groups]`."""
    eights = _eights(words)
    if is_awq:
        eights = eights[:, :, _AWQ_PLACES]
    return np.ascontiguousarray(eights.reshape(len(words), -1).T)


def row_zeros(words: Words) -> Bytes:
    """From `[rows / 8, groups]` to `[rows, groups]`."""
    return np.ascontiguousarray(_eights(words).swapaxes(1, 2)).reshape(-1, words.shape[1])


def _eights(words: Words) -> Bytes:
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return ((words[:, :, None] >> shifts) & np.uint32(15)).astype(np.uint8)
