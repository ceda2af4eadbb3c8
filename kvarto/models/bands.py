"""Bands: the rows of a source tensor as they lie in its weight, transforms undone, whatever the file's format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvarto.core.buffers import Source, Transform
from kvarto.core.errors import BadFile
from kvarto.models.base import Float32, RawRows, TensorInfo, WeightFiles


@dataclass(frozen=True, slots=True)
class Band:
    """Rows `[start, stop)` of a tensor after its transform."""

    info: TensorInfo
    transform: Transform
    start: int
    stop: int
    num_columns: int

    @property
    def num_rows(self) -> int:
        """Rows of the weight that it makes."""
        return self.stop - self.start

    @property
    def file_bytes(self) -> int:
        """Its share of the tensor's bytes on file."""
        num_elements = self.info.num_rows * self.info.num_columns
        return self.info.file_bytes * self.num_rows * self.num_columns // max(1, num_elements)

    def read(self, files: WeightFiles, first: int, last: int) -> Float32:
        """Rows `[first, last)` of the band as float32."""
        name, first, last = self.info.name, self.start + first, self.start + last
        if len(self.info.shape) == 1:
            rows = files.read_rows(name, 0, 1).reshape(-1, 1)[first:last]
        elif self.transform is Transform.TRANSPOSE:
            rows = files.read_columns(name, first, last).T
        else:
            rows = files.read_rows(name, first, last)
        return rows + np.float32(1.0) if self.transform is Transform.ADD_ONE else rows

    def has_raw_rows(self, files: WeightFiles) -> bool:
        """Whether the file has these rows as they are."""
        is_transposed = self.transform is Transform.TRANSPOSE
        return self.transform is not Transform.ADD_ONE and files.has_raw_rows(
            self.info.name, is_transposed=is_transposed
        )

    def read_raw(self, files: WeightFiles, first: int, last: int) -> RawRows:
        """Rows `[first, last)` of the band in the file's own type; only where `has_raw_rows`."""
        return files.read_raw_rows(self.info.name, self.start + first, self.start + last)


def band_of(source: Source, files: WeightFiles) -> Band:
    """Raises BadFile where the tensor has fewer rows than are asked for."""
    info = files.tensors[source.name]
    num_rows, num_columns = info.num_rows, info.num_columns
    if len(info.shape) == 1:
        num_rows, num_columns = num_columns, 1
    elif source.transform is Transform.TRANSPOSE:
        num_rows, num_columns = num_columns, num_rows
    start, stop = source.rows if source.rows is not None else (0, num_rows)
    if not 0 <= start <= stop <= num_rows:
        raise BadFile(f"tensor `{source.name}` has {num_rows} rows, rows {start} to {stop} of it are needed")
    return Band(info, source.transform, start, stop, num_columns)
