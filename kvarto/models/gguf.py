"""Weights of a GGUF file with the names, layout and values of a Hugging Face checkpoint, dequantised by rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvarto.core.errors import BadFile
from kvarto.models.base import Float32, RawRows, TensorInfo, WeightFiles, row_blocks
from kvarto.models.gguf_config import config_of
from kvarto.models.gguf_container import GGUFContainer, GGUFTensor, read_container
from kvarto.models.gguf_names import NOT_WEIGHTS, Placement, place_tensors
from kvarto.models.gguf_rope import RopeFactors
from kvarto.models.raw_file import RawFile

MAX_ROPE_PAIRS = 1 << 16

_Item = TypeVar("_Item", bound=np.generic)
_Read = Callable[[GGUFTensor, int, int], NDArray[_Item]]


class GGUFFiles(WeightFiles):
    """One GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = RawFile(path)
        try:
            container = read_container(self._file)
            self.config = config_of(container.metadata, container.tensors, self._rope_factors(container))
            self._placements = place_tensors(container.tensors, self.config)
        except BaseException:
            self.close()
            raise
        self.metadata: dict[str, Any] = container.metadata
        self.tensors = {
            name: TensorInfo(name, placement.shape, placement.tensor.type.name, placement.file_bytes)
            for name, placement in self._placements.items()
        }

    def read_rows(self, name: str, start: int, stop: int) -> Float32:
        """See WeightFiles."""
        placement, info = self._placements[name], self.tensors[name]
        if placement.is_transposed:
            return self._read_transposed_rows(placement, start, stop)
        if placement.num_permuted_heads == 0:
            rows = self._dequantise(placement.tensor, placement.first_row + start, placement.first_row + stop)
        elif len(info.shape) == 1:
            rows = unpermute_heads(self._dequantise(placement.tensor, 0, 1).T, placement.num_permuted_heads).T
        else:
            rows = self._read_unpermuted(placement, start, stop, self._dequantise)
        return rows - np.float32(1.0) if placement.is_plus_one else rows

    def read_columns(self, name: str, start: int, stop: int) -> Float32:
        """See WeightFiles. Columns of a tensor that lies transposed on file are its rows there."""
        placement = self._placements[name]
        if placement.is_transposed:
            return self._dequantise(placement.tensor, start, stop).T
        return super().read_columns(name, start, stop)

    def has_raw_rows(self, name: str, *, is_transposed: bool) -> bool:
        """See WeightFiles. Each tensor lies in one way."""
        placement = self._placements[name]
        return placement.is_transposed == is_transposed and not placement.is_plus_one and len(placement.shape) > 1

    def read_raw_rows(self, name: str, start: int, stop: int) -> RawRows:
        """See WeightFiles. Heads come apart by whole rows, whose blocks stay as they are."""
        placement = self._placements[name]
        if placement.num_permuted_heads == 0:
            first_row = placement.first_row
            return self._read_raw(placement.tensor, first_row + start, first_row + stop)
        return self._read_unpermuted(placement, start, stop, self._read_raw)

    def _read_unpermuted(self, placement: Placement, start: int, stop: int, read: _Read[_Item]) -> NDArray[_Item]:
        # Whole heads are read, as every row of a head may be needed for one half of it.
        head_dim = placement.shape[0] // placement.num_permuted_heads
        first, last = start // head_dim, -(-stop // head_dim)
        raw = read(placement.tensor, first * head_dim, last * head_dim)
        return unpermute_heads(raw, last - first)[start - first * head_dim : stop - first * head_dim]

    def _read_transposed_rows(self, placement: Placement, start: int, stop: int) -> Float32:
        rows = np.empty((stop - start, placement.shape[1]), np.float32)
        for first, last in row_blocks(0, placement.shape[1], placement.shape[0]):
            rows[:, first:last] = self._dequantise(placement.tensor, first, last)[:, start:stop].T
        return rows

    def _dequantise(self, tensor: GGUFTensor, start: int, stop: int) -> Float32:
        """Rows of the tensor as it lies on file, in blocks: dequantising takes several times its result."""
        columns = tensor.shape[-1]
        rows = np.empty((stop - start, columns), np.float32)
        for first, last in row_blocks(start, stop, columns):
            raw = self._read_raw(tensor, first, last)
            rows[first - start : last - start] = tensor.type.dequantise(raw)
        return rows

    def _read_raw(self, tensor: GGUFTensor, start: int, stop: int) -> RawRows:
        offset, size_bytes = tensor.offset + start * tensor.row_bytes, (stop - start) * tensor.row_bytes
        raw = np.frombuffer(self._file.read(offset, size_bytes), np.uint8).reshape(stop - start, tensor.row_bytes)
        self._file.forget(offset, size_bytes)
        return raw

    def _rope_factors(self, container: GGUFContainer) -> RopeFactors:
        freqs, long, short = (self._read_vector(container.tensors.get(name)) for name in NOT_WEIGHTS)
        return RopeFactors(freqs, long, short)

    def _read_vector(self, tensor: GGUFTensor | None) -> Float32 | None:
        if tensor is None:
            return None
        if len(tensor.shape) != 1 or tensor.shape[0] > MAX_ROPE_PAIRS:
            raise BadFile(f"tensor `{tensor.name}` has shape {list(tensor.shape)}; a short vector is needed")
        return self._dequantise(tensor, 0, 1).reshape(-1)

    def close(self) -> None:
        """See WeightFiles."""
        self._file.close()


def unpermute_heads(rows: NDArray[_Item], num_heads: int) -> NDArray[_Item]:
    """Rows of rotated heads as Hugging Face has them, from those of llama.cpp: halves apart, from pairs interleaved.

    `[heads * pairs * 2, columns]` to `[heads * 2 * pairs, columns]`.
    """
    columns = rows.shape[1]
    return rows.reshape(num_heads, -1, 2, columns).swapaxes(1, 2).reshape(-1, columns)
