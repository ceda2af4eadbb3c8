"""What every format of weight files offers: tensors by Hugging Face name, read as float32 a few rows at a time.

A reader knows the file's layout, never the model: it hands out names, shapes and values exactly as a Hugging Face
checkpoint has them. Nothing is cached; pages of the file leave the page cache once read, so memory stays flat.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarto.core.weight_format import LANES, WeightFormat

Float32 = NDArray[np.float32]
RawRows = NDArray[np.uint8]
"""`[rows, bytes of a row]`, as the file keeps them."""

BLOCK_BYTES = 2 << 20
"""Bytes of float32 that readers and loader hold at a time: small enough to stay in cache, large enough for the disk."""


_ROW_FORMATS = frozenset(WeightFormat)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as a Hugging Face checkpoint would list it."""

    name: str
    shape: tuple[int, ...]
    file_dtype: str
    """How the file keeps it: `BF16`, `Q4_K`, …; `INT4` for codes of 4 bits with scales and zero points."""
    file_bytes: int
    """Bytes in the file, with scales and all."""
    group_size: int = 0
    """Columns that share a scale, of `INT4`; 0 elsewhere."""

    @property
    def num_rows(self) -> int:
        """Product of all extents but the last; 1 for a vector."""
        count = 1
        for extent in self.shape[:-1]:
            count *= extent
        return count

    @property
    def num_columns(self) -> int:
        """The last extent; 1 for a scalar."""
        return self.shape[-1] if self.shape else 1

    @property
    def row_format(self) -> WeightFormat | None:
        """The format whose rows are the file's, bit for bit; None where there is none."""
        name = self.file_dtype.lower()
        return WeightFormat(name) if name in _ROW_FORMATS else None


class WeightFiles(ABC):
    """The weights and the configuration of one model on disk."""

    path: Path
    config: dict[str, Any]
    """In the form of Hugging Face's `config.json`."""
    tensors: dict[str, TensorInfo]
    may_be_unused: frozenset[str] = frozenset()
    """Tensors that say nothing, and that a model may have no place for."""

    @abstractmethod
    def read_rows(self, name: str, start: int, stop: int) -> Float32:
        """Rows `[start, stop)` as `[stop - start, num_columns]`, float32. The caller owns the array. Raises BadFile."""

    def read_columns(self, name: str, start: int, stop: int) -> Float32:
        """Columns `[start, stop)` as `[num_rows, stop - start]`, float32, in one pass over the tensor."""
        info = self.tensors[name]
        columns = np.empty((info.num_rows, stop - start), np.float32)
        for first, last in row_blocks(0, info.num_rows, info.num_columns):
            columns[first:last] = self.read_rows(name, first, last)[:, start:stop]
        return columns

    def has_raw_rows(self, name: str, *, is_transposed: bool) -> bool:
        """Whether `read_raw_rows` gives rows of this tensor, or of its transpose."""
        return False

    def read_raw_rows(self, name: str, start: int, stop: int) -> RawRows:
        """Rows `[start, stop)` of the tensor, or of its transpose where `has_raw_rows` says so, as `row_format` has
        them. The array may not be writable. Raises BadFile.
        """
        raise NotImplementedError(name)

    @abstractmethod
    def close(self) -> None:
        """Close the files. Reading afterwards is an error."""


def row_blocks(start: int, stop: int, num_columns: int) -> list[tuple[int, int]]:
    """Cut rows `[start, stop)` into bands of at most `BLOCK_BYTES` as float32, and of at least one row."""
    step = max(1, BLOCK_BYTES // (4 * max(1, num_columns)))
    return [(first, min(first + step, stop)) for first in range(start, stop, step)]


def panel_blocks(num_rows: int, bytes_of_row: int) -> list[tuple[int, int]]:
    """Cut `num_rows` into bands of about `BLOCK_BYTES` that begin at multiples of 16, and of 128 where they can.

    128 rows are a head, or two: readers that undo a permutation inside heads then read each head once.
    """
    step = BLOCK_BYTES // max(1, bytes_of_row)
    step = step // 128 * 128 or max(LANES, step // LANES * LANES)
    return [(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]
