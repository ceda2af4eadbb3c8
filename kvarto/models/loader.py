"""From weight files to the weights region: transforms, conversion, and a strict match of names and shapes first.

Works in blocks of `BLOCK_BYTES`; the largest moment is a few blocks, whatever the model. Knows neither file formats
nor where the bytes go: the caller's store writes them, and packs the rows of matrices that have parts.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvarto.core.buffers import Weight, WeightPart
from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.core.program import Program
from kvarto.core.weight_format import row_bytes
from kvarto.models.bands import Band, band_of
from kvarto.models.base import RawRows, WeightFiles, panel_blocks, row_blocks
from kvarto.models.convert import to_bytes, to_rows
from kvarto.models.tensor_names import UNUSED_BUFFERS

Progress = Callable[[int], None]


class WeightStore(Protocol):
    """Where weights go; backends are one. Called from several threads, never for the same weight at once."""

    def store_weight(self, name: str, offset_bytes: int, data: NDArray[np.uint8]) -> None:
        """Raw bytes of a row-major weight, at an offset inside it."""
        ...

    def store_rows(self, name: str, part_index: int, first_row: int, raw: RawRows) -> None:
        """Rows of a part as files keep its format; `first_row` is a multiple of 16, and so is their number, but for
        the part's last rows.
        """
        ...


def load_weights(
    program: Program,
    files: WeightFiles,
    store: WeightStore,
    progress: Progress | None = None,
    *,
    num_threads: int = 1,
) -> None:
    """Store every weight of the program, converted to its dtype or its parts' formats.

    Calls for one weight come from one thread, in ascending order within a part; `progress(bytes just stored)` after
    each. Raises BadFile or UnsupportedModel before anything is stored where names or shapes do not match, and
    UnsupportedModel while storing where a value does not fit into the type.
    """
    check_tensors(program, files)

    def load(weight: Weight) -> None:
        if weight.parts:
            _load_parts(weight, files, store, progress or _ignore)
        else:
            _load_row_major(weight, files, store, progress or _ignore)

    # Reading, repacking and numpy's loops all let other threads run.
    with ThreadPoolExecutor(num_threads, "load") as pool:
        loading = [pool.submit(load, weight) for weight in program.weights.values()]
        try:
            for done in as_completed(loading):
                done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


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
    known = used | files.may_be_unused
    unused = [name for name in files.tensors if name not in known and not _is_no_parameter(name)]
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


def _check_shapes(weight: Weight, files: WeightFiles) -> None:
    num_columns = weight.shape[-1] if len(weight.shape) > 1 else 1
    bands = [band_of(source, files) for source in weight.sources]
    num_rows = sum(band.num_rows for band in bands)
    if num_rows * num_columns == weight.num_elements and all(band.num_columns == num_columns for band in bands):
        return
    found = ", ".join(f"`{band.info.name}` {list(band.info.shape)}" for band in bands[:4])
    raise BadFile(f"`{files.path}`: weight `{weight.name}` {list(weight.shape)} cannot be made of {found}")


def _load_row_major(weight: Weight, files: WeightFiles, store: WeightStore, progress: Progress) -> None:
    offset_bytes = 0
    for source in weight.sources:
        band = band_of(source, files)
        for first, last in row_blocks(0, band.num_rows, band.num_columns):
            raw = to_bytes(band.read(files, first, last), weight.dtype, weight.name)
            store.store_weight(weight.name, offset_bytes, raw)
            offset_bytes += len(raw)
            progress(len(raw))
    assert offset_bytes == weight.size_bytes, f"`{weight.name}`: {offset_bytes} of {weight.size_bytes} bytes stored"


def _load_parts(weight: Weight, files: WeightFiles, store: WeightStore, progress: Progress) -> None:
    for index, (source, part) in enumerate(zip(weight.sources, weight.parts, strict=True)):
        band = band_of(source, files)
        is_raw = part.format is band.info.row_format and band.has_raw_rows(files)
        for first, last in panel_blocks(part.num_rows, _bytes_of_row(band, part, is_raw=is_raw)):
            if is_raw:
                raw = band.read_raw(files, first, last)
            else:
                raw = to_rows(band.read(files, first, last), part.format, weight.name)
            store.store_rows(weight.name, index, first, raw)
            progress(raw.nbytes)


def _bytes_of_row(band: Band, part: WeightPart, *, is_raw: bool) -> int:
    """Bytes that a row takes while it is on its way."""
    return row_bytes(part.format, band.num_columns, part.group_size) if is_raw else 4 * band.num_columns


def _ignore(size_bytes: int) -> None:
    """Nobody watches."""
