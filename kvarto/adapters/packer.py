"""Packer: from an adapter's file to the bytes of its pages, in one pass; and their digests. One per shape.

    file ── native: read, look for NaN, rearrange, quantise ──> stream, magnitudes
         ── g in its place ──> page images ──> digests

Values are read once, and never by Python. Of a magnitude m (DoRA), pages do not hold m itself but what rows are
multiplied with, g = m / |W + scaling B A|: it needs the base's weights, so whoever has them gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.adapter import SCALE_TYPE, Adapter, LowRankUpdate
from kvarto.adapters.arrays import StoredArray, bits_of, not_finite, to_float32
from kvarto.adapters.digest import Digests, content_digest, shape_digest
from kvarto.adapters.magnitudes import ScaleOf, UpdateValues
from kvarto.adapters.packing import stream_bytes, stream_starts, strips_of
from kvarto.adapters.page_hasher import PageHasher
from kvarto.adapters.paged_bytes import PagedBytes
from kvarto.adapters.strip_codes import dequantise
from kvarto.core import _native
from kvarto.core.errors import BadFile, UnsupportedAdapter
from kvarto.core.units import align_up
from kvarto.models.raw_file import RawFile
from kvarto.ops.native.isa import choose_isa

Bytes = NDArray[np.uint8]
Int32 = NDArray[np.int32]
_MAGNITUDE_ALIGNMENT = 4
"""Bytes: they may be of several types, and follow each other so far apart."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor and where it goes."""

    array: StoredArray
    start: int
    has_columns: bool = False
    """Its columns follow each other there."""
    is_magnitude: bool = False

    def native(self) -> _native.adapters.FileTensor:
        rows, columns = self.array.file_shape
        return _native.adapters.FileTensor(
            offset=self.array.offset,
            num_rows=rows,
            num_columns=columns,
            start=self.start,
            type=self.array.encoding,
            strips=self.array.strip_type.code,
            is_transposed=self.array.is_transposed is not self.has_columns,
            is_beside=self.is_magnitude,
            num_heads=self.array.num_permuted_heads,
        )


@dataclass(frozen=True, slots=True)
class _PlacedUpdate:
    """Where the parts of an update begin, in bytes of the stream."""

    update: LowRankUpdate
    lora_a: int
    lora_b: int
    bias: int | None
    scale: int | None
    """Of what the magnitude becomes."""
    magnitude: int
    """Among the magnitudes."""

    def tensors(self) -> Iterator[_Placed]:
        """What is read."""
        update = self.update
        yield _Placed(update.lora_a, self.lora_a)
        yield _Placed(update.lora_b, self.lora_b, has_columns=True)
        if update.bias is not None and self.bias is not None:
            yield _Placed(update.bias, self.bias)
        if update.magnitude is not None:
            yield _Placed(update.magnitude, self.magnitude, is_magnitude=True)


class Packer:
    """Packs the files of adapters that are equal but for their values. Safe to use from threads."""

    def __init__(self, adapter: Adapter, file_bytes: int, hasher: PageHasher) -> None:
        """`file_bytes`: of the file with the tensors. Raises ValueError where a tensor leaves it."""
        self._hasher = hasher
        self._isa = choose_isa()
        self.stream_bytes = stream_bytes(adapter)
        self._shape_digest = shape_digest(adapter)
        starts = iter(stream_starts(strips_of(adapter)).tolist())
        updates = list(_placed_updates(adapter, starts))
        self._scaled = tuple(each for each in updates if each.scale is not None)
        self._magnitude_bytes = max((_magnitude_end(each) for each in self._scaled), default=0)
        placed = [tensor for update in updates for tensor in update.tensors()]
        placed += [_Placed(rows.rows, next(starts)) for rows in adapter.token_rows]
        self._placed = tuple(placed)
        tensors = [each.native() for each in placed]
        self._plan = _native.adapters.PackPlan(tensors, file_bytes, self.stream_bytes, self._magnitude_bytes)

    def pack(
        self, file: RawFile, images: Bytes, which: Int32, scale_of: ScaleOf | None = None, *, may_be_direct: bool
    ) -> None:
        """Fill `images[which]`, of `[num_images, page_bytes]`, in that order; what the last page does not hold is zero.

        `scale_of` is needed where there are magnitudes. `may_be_direct`: past the page cache, where the file is not in
        it. Raises BadAdapter where a value is not finite, UnsupportedAdapter where one is too large for the codes that
        are asked for, BadFile where the file has become shorter.
        """
        magnitudes, page_bytes = np.empty(self._magnitude_bytes, np.uint8), images.shape[1]
        try:
            bad, _ = self._plan.pack(self._isa, file.fileno(), images, page_bytes, which, magnitudes, may_be_direct)
        except EOFError as error:
            raise BadFile(f"`{file.path}` shrank while it was read; stop what writes to it and start again") from error
        if bad is not None:
            tensor, is_finite = bad
            raise _too_large(self._placed[tensor].array) if is_finite else not_finite(self._placed[tensor].array.name)
        for update in self._scaled:
            assert scale_of is not None, "an adapter with magnitudes needs the base to be packed"
            _fill_scale(update, PagedBytes(images, which), magnitudes, scale_of)

    def digests(self, images: Bytes, which: Int32) -> Digests:
        """Of what was packed."""
        pages = self._hasher.digests(images, which)
        return Digests(content_digest(self._shape_digest, images.shape[1], pages), pages)


def _placed_updates(adapter: Adapter, starts: Iterator[int]) -> Iterator[_PlacedUpdate]:
    """Takes its starts in the order of `strips_of`."""
    magnitude_start = 0
    for update in adapter.updates:
        lora_a, lora_b = next(starts), next(starts)
        bias = None if update.bias is None else next(starts)
        scale = None if update.magnitude is None else next(starts)
        yield _PlacedUpdate(update, lora_a, lora_b, bias, scale, magnitude_start)
        if update.magnitude is not None:
            magnitude_start = align_up(magnitude_start + update.magnitude.size_bytes, _MAGNITUDE_ALIGNMENT)


def _magnitude_end(placed: _PlacedUpdate) -> int:
    assert placed.update.magnitude is not None, "an update without a magnitude is scaled"
    return align_up(placed.magnitude + placed.update.magnitude.size_bytes, _MAGNITUDE_ALIGNMENT)


def _fill_scale(placed: _PlacedUpdate, stream: PagedBytes, magnitudes: Bytes, scale_of: ScaleOf) -> None:
    """Put g where the update's magnitude has its place."""
    update, out_width, start = placed.update, placed.update.target.out_width, placed.scale
    assert update.magnitude is not None, "an update without a magnitude is scaled"
    assert start is not None, "what a magnitude becomes has no place"
    a, b = update.lora_a, update.lora_b
    values = UpdateValues(
        lora_a=_values(stream.read(placed.lora_a, a.strip_bytes), a).reshape(a.shape),
        lora_b=_values(stream.read(placed.lora_b, b.strip_bytes), b).reshape(b.shape[::-1]).T,
        magnitude=_values(magnitudes[placed.magnitude :][: update.magnitude.strip_bytes], update.magnitude),
    )
    scale = scale_of(update, values)
    assert scale.dtype == np.float32, "what rows are multiplied with is float32"
    assert scale.shape == (out_width,), f"{scale.shape} for {update.target}"
    assert scale.nbytes == SCALE_TYPE.size_bytes(out_width), "a scale has another size than its place"
    stream.write(start, np.ascontiguousarray(scale).view(np.uint8))


def _values(raw: Bytes, array: StoredArray) -> NDArray[np.float32]:
    if array.codes is not None:
        return dequantise(raw, array.codes)
    return to_float32(bits_of(raw, array.dtype), array.dtype)


def _too_large(array: StoredArray) -> UnsupportedAdapter:
    return UnsupportedAdapter(
        f"tensor `{array.name}` holds values whose scale is beyond float16, so they have no {array.codes} codes; serve "
        "it with `--adapter-dtype auto`, or use an earlier checkpoint"
    )
