"""From weight files to the weights region: transforms, conversion, and a strict match of names and shapes first.

Works in blocks of `BLOCK_BYTES`; the largest moment is a few blocks, whatever the model. Knows neither file formats
nor where the bytes go: the caller's `store` writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvarto.core.buffers import Source, Transform, Weight
from kvarto.core.dtype import DType
from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.core.program import Program
from kvarto.models.base import Float32, TensorInfo, WeightFiles, row_blocks
from kvarto.models.tensor_names import UNUSED_BUFFERS

Store = Callable[[str, int, NDArray[np.uint8]], None]
Progress = Callable[[int], None]

F16_MAX = 65504.0
"""The largest finite float16."""


def load_weights(program: Program, files: WeightFiles, store: Store, progress: Progress | None = None) -> None:
    """Store every weight of the program, converted to its dtype.

    `store(weight name, offset in it in bytes, raw bytes)` is called in ascending order within a weight;
    `progress(bytes just stored)` after each. Raises BadFile or UnsupportedModel before anything is stored where names
    or shapes do not match, and UnsupportedModel while storing where a value does not fit into the dtype.
    """
    check_tensors(program, files)
    for weight in program.weights.values():
        _load_weight(weight, files, store, progress)


def check_tensors(program: Program, files: WeightFiles) -> None:
    """Every source exists and fits; every tensor of the files is used, or is known to be no parameter."""
    sources = [source for weight in program.weights.values() for source in weight.sources]
    missing = sorted({source.name for source in sources} - set(files.tensors))
    if missing:
        raise BadFile(
            f"`{files.path}` lacks {len(missing)} tensors that `{program.architecture}` needs: {_some(missing)}"
        )
    for weight in program.weights.values():
        _check_shapes(weight, files)
    used = {source.name for source in sources}
    unused = [name for name in files.tensors if name not in used and not _is_no_parameter(name)]
    if unused:
        raise UnsupportedModel(
            f"`{files.path}` has {len(unused)} tensors that `{program.architecture}` has no use for: {_some(unused)}; "
            "the model is another than its config says"
        )


def _some(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:3]) + (", …" if len(names) > 3 else "")


def _is_no_parameter(name: str) -> bool:
    # Files of models that tie their output matrix may carry a copy of it.
    return name.endswith(UNUSED_BUFFERS) or name == "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Band:
    """The rows of one source as they lie in its weight: `[start, stop)` of the transformed tensor."""

    info: TensorInfo
    transform: Transform
    start: int
    stop: int
    num_columns: int

    def read(self, files: WeightFiles, first: int, last: int) -> Float32:
        """Rows `[first, last)` of the transformed tensor."""
        name = self.info.name
        if len(self.info.shape) == 1:
            rows = files.read_rows(name, 0, 1).reshape(-1, 1)[first:last]
        elif self.transform is Transform.TRANSPOSE:
            rows = files.read_columns(name, first, last).T
        else:
            rows = files.read_rows(name, first, last)
        return rows + np.float32(1.0) if self.transform is Transform.ADD_ONE else rows


def _band(source: Source, files: WeightFiles) -> _Band:
    info = files.tensors[source.name]
    num_rows, num_columns = info.num_rows, info.num_columns
    if len(info.shape) == 1:
        num_rows, num_columns = num_columns, 1
    elif source.transform is Transform.TRANSPOSE:
        num_rows, num_columns = num_columns, num_rows
    start, stop = source.rows if source.rows is not None else (0, num_rows)
    if not 0 <= start <= stop <= num_rows:
        raise BadFile(f"tensor `{source.name}` has {num_rows} rows, rows {start} to {stop} of it are needed")
    return _Band(info, source.transform, start, stop, num_columns)


def _check_shapes(weight: Weight, files: WeightFiles) -> None:
    num_columns = weight.shape[-1] if len(weight.shape) > 1 else 1
    bands = [_band(source, files) for source in weight.sources]
    num_rows = sum(band.stop - band.start for band in bands)
    if num_rows * num_columns == weight.num_elements and all(band.num_columns == num_columns for band in bands):
        return
    found = ", ".join(f"`{band.info.name}` {list(band.info.shape)}" for band in bands[:4])
    raise BadFile(f"`{files.path}`: weight `{weight.name}` {list(weight.shape)} cannot be made of {found}")


def _load_weight(weight: Weight, files: WeightFiles, store: Store, progress: Progress | None) -> None:
    offset_bytes = 0
    for source in weight.sources:
        band = _band(source, files)
        for first, last in row_blocks(band.start, band.stop, band.num_columns):
            raw = to_bytes(band.read(files, first, last), weight)
            store(weight.name, offset_bytes, raw)
            offset_bytes += len(raw)
            if progress is not None:
                progress(len(raw))
    assert offset_bytes == weight.size_bytes, f"`{weight.name}`: {offset_bytes} of {weight.size_bytes} bytes stored"


def to_bytes(values: Float32, weight: Weight) -> NDArray[np.uint8]:
    """The values in the weight's dtype as raw bytes, rounded to nearest even."""
    values = np.ascontiguousarray(values, np.float32)
    if weight.dtype is DType.F32:
        return values.reshape(-1).view(np.uint8)
    if weight.dtype is DType.BF16:
        return to_bfloat16(values).reshape(-1).view(np.uint8)
    assert weight.dtype is DType.F16, f"weights are f32, f16 or bf16, not {weight.dtype}"
    # Written so that NaN passes: it stays NaN in f16.
    if (np.abs(values) > F16_MAX).any():
        raise UnsupportedModel(
            f"weight `{weight.name}` has values beyond the range of f16; use `--dtype bf16` or `--dtype f32`"
        )
    return values.astype(np.float16).reshape(-1).view(np.uint8)


def to_bfloat16(values: Float32) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    # Half of the last kept bit, less one where that bit is even, so that a tie rounds to even.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    # Rounding up could carry a NaN's mantissa into the sign; keep its top bits and make it quiet.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
