"""The strict reader of GGUF's container: metadata and the table of tensors, nothing of the data.

```text
file = "GGUF" | u32 version | u64 tensors | u64 keys | keys: string, u32 type, value | tensor infos: string, u32 dims,
       u64 extents (innermost first), u32 type, u64 offset | zeros up to `general.alignment` | data
string = u64 bytes, UTF-8          array = u32 type, u64 count, values
```
Source: ggml's docs/gguf.md. There is one parser on purpose: the `gguf` package trusts counts and sizes, and takes 5 s
where this takes 0.1 s. Each count is checked in exact integers against the bytes that the file still has before
anything is allocated for it.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.core.units import align_up
from kvarto.models.gguf_types import OTHERS, READABLE, GGUFType
from kvarto.models.raw_file import RawFile

MAX_KEYS = 1 << 16
MAX_TENSORS = 100_000
MAX_METADATA_BYTES = 256 << 20
"""The largest real one (262k tokens and their merges) is below 32 MiB."""
MAX_ARRAY_STRINGS = 1 << 21
MAX_NAME_BYTES = 1 << 10
MAX_STRING_BYTES = 16 << 20
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING = 8
_ARRAY = 9
_WINDOW_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One line of the table of tensors, checked."""

    name: str
    shape: tuple[int, ...]
    """Outermost first, as numpy has it."""
    type: GGUFType
    offset: int
    """Of the first byte, in the file."""
    size_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one innermost row."""
        return self.type.row_bytes(self.shape[-1])


@dataclass(frozen=True, slots=True)
class GGUFContainer:
    """What the head of the file says."""

    metadata: dict[str, Any]
    """Numbers, booleans and strings; arrays of numbers as numpy arrays, of strings as lists."""
    tensors: dict[str, GGUFTensor]


def read_container(file: RawFile) -> GGUFContainer:
    """Parse and check the head of the file. Raises BadFile, or UnsupportedModel for what is valid but not built in."""
    cursor = _Cursor(file)
    num_tensors, num_keys = _read_counts(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string("a key", MAX_NAME_BYTES)
        if key in metadata:
            cursor.refuse(f"key `{key}` stands there twice")
        metadata[key] = _read_value(cursor, cursor.number("<I", f"the type of `{key}`"), key)
    if str(metadata.get("split.count", 1)) not in ("0", "1"):
        raise UnsupportedModel(
            f"`{file.path}` is one of {metadata['split.count']!r:.20} parts; "
            "join them with `llama-gguf-split --merge` first"
        )
    rows = [_read_tensor_row(cursor) for _ in range(num_tensors)]
    return GGUFContainer(metadata, _place_tensors(cursor, rows, _alignment(cursor, metadata)))


class _Cursor:
    """Reads forward through the head of the file, one window at a time."""

    def __init__(self, file: RawFile) -> None:
        self.file = file
        self.position = 0
        self._window = b""
        self._window_start = 0

    def refuse(self, what: str) -> NoReturn:
        raise BadFile(f"`{self.file.path}`: {what} (near byte {self.position}); download the file again")

    @property
    def remaining(self) -> int:
        return min(self.file.size_bytes, MAX_METADATA_BYTES) - self.position

    def take(self, size_bytes: int, what: str) -> bytes:
        if size_bytes > self.remaining:
            self.refuse(f"{what} needs {size_bytes} bytes, {self.remaining} are left")
        start = self.position - self._window_start
        if start + size_bytes > len(self._window):
            length = min(max(size_bytes, _WINDOW_BYTES), self.file.size_bytes - self.position)
            self._window, self._window_start, start = self.file.read(self.position, length), self.position, 0
        self.position += size_bytes
        return self._window[start : start + size_bytes]

    def number(self, layout: str, what: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]

    def string(self, what: str, max_bytes: int = MAX_STRING_BYTES) -> str:
        size_bytes = self.number("<Q", f"the length of {what}")
        if size_bytes > max_bytes:
            self.refuse(f"{what} claims {size_bytes} bytes, at most {max_bytes} are read")
        try:
            return self.take(size_bytes, what).decode("utf-8")
        except UnicodeDecodeError:
            self.refuse(f"{what} is not valid UTF-8")

    def strings(self, count: int, what: str) -> list[str]:
        """Many short ones: a vocabulary has 100,000, so what lies whole in the window is not taken piece by piece."""
        found: list[str] = []
        try:
            while len(found) < count:
                self._take_strings(count, found)
                if len(found) < count:  # the next one ends beyond the window
                    size_bytes = int.from_bytes(self.take(8, what), "little")
                    found.append(self.take(size_bytes, what).decode("utf-8"))
        except UnicodeDecodeError:
            self.refuse(f"{what} is not valid UTF-8")
        return found

    def _take_strings(self, count: int, found: list[str]) -> None:
        """Append to `found`, up to `count` in all, the strings that end inside the window."""
        window, last = self._window, len(self._window)
        start = self.position - self._window_start
        length_of = struct.Struct("<Q").unpack_from
        while len(found) < count and start + 8 <= last:
            end = start + 8 + length_of(window, start)[0]
            if end > last:
                break
            found.append(window[start + 8 : end].decode("utf-8"))
            start = end
        self.position = self._window_start + start


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    if cursor.take(4, "the magic") != b"GGUF":
        cursor.refuse("this is not a GGUF file")
    version = cursor.number("<I", "the version")
    if version not in (2, 3):
        byte_order = " in big-endian order" if version in (2 << 24, 3 << 24) else ""
        raise UnsupportedModel(
            f"`{cursor.file.path}` is GGUF version {version}{byte_order}; versions 2 and 3 in little-endian order "
            "are read: convert the model again"
        )
    num_tensors = cursor.number("<Q", "the number of tensors")
    num_keys = cursor.number("<Q", "the number of keys")
    # The shortest key (empty name, one byte) and the shortest tensor row, so that a count cannot outgrow the file.
    for count, limit, at_least, what in ((num_keys, MAX_KEYS, 13, "keys"), (num_tensors, MAX_TENSORS, 32, "tensors")):
        if count > limit or count * at_least > cursor.remaining:
            cursor.refuse(f"{count} {what} are claimed, {cursor.remaining} bytes are left and {limit} {what} are read")
    if num_tensors == 0:
        cursor.refuse("there are no tensors; a vocabulary alone cannot be served")
    return num_tensors, num_keys


def _read_value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind], f"`{key}`")
    if kind == _STRING:
        return cursor.string(f"`{key}`")
    if kind == _ARRAY:
        return _read_array(cursor, key)
    cursor.refuse(f"`{key}` has the unknown type {kind}")


def _read_array(cursor: _Cursor, key: str) -> Any:
    kind = cursor.number("<I", f"the element type of `{key}`")
    count = cursor.number("<Q", f"the length of `{key}`")
    if kind == _STRING:
        if count > MAX_ARRAY_STRINGS or count * 8 > cursor.remaining:
            cursor.refuse(f"`{key}` claims {count} strings, {cursor.remaining} bytes are left")
        return cursor.strings(count, f"an element of `{key}`")
    if kind not in _SCALARS:
        cursor.refuse(f"`{key}` is an array of type {kind}; numbers, booleans and strings are read")
    dtype = np.dtype(_SCALARS[kind])
    return np.frombuffer(cursor.take(count * dtype.itemsize, f"`{key}`"), dtype)


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.refuse(f"`general.alignment` is {alignment}; a power of two from 8 to {MAX_ALIGNMENT} is needed")
    return alignment


def _read_tensor_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("a tensor's name", MAX_NAME_BYTES)
    num_dims = cursor.number("<I", f"the rank of `{name}`")
    if not 1 <= num_dims <= MAX_DIMS:
        cursor.refuse(f"tensor `{name}` has {num_dims} dims, 1 to {MAX_DIMS} are read")
    extents = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims, f"the shape of `{name}`"))
    if 0 in extents:
        cursor.refuse(f"tensor `{name}` has an extent of 0 in {list(extents)}")
    kind, offset = struct.unpack("<IQ", cursor.take(12, f"type and offset of `{name}`"))
    return name, extents[::-1], kind, offset


def _place_tensors(
    cursor: _Cursor, rows: list[tuple[str, tuple[int, ...], int, int]], alignment: int
) -> dict[str, GGUFTensor]:
    data_start = align_up(cursor.position, alignment)
    tensors: dict[str, GGUFTensor] = {}
    expected = 0
    for name, shape, kind, offset in rows:
        if name in tensors:
            cursor.refuse(f"tensor `{name}` stands there twice")
        type = _type_of(cursor, name, kind)
        size_bytes = _size_bytes(cursor, name, shape, type)
        # Writers put tensors back to back in table order, as ggml demands; so nothing overlaps and nothing is hidden.
        if offset != expected:
            cursor.refuse(f"tensor `{name}` lies at {offset} of the data, {expected} was expected")
        if data_start + offset + size_bytes > cursor.file.size_bytes:
            cursor.refuse(
                f"tensor `{name}` ends at byte {data_start + offset + size_bytes}, the file at {cursor.file.size_bytes}"
            )
        expected = align_up(offset + size_bytes, alignment)
        tensors[name] = GGUFTensor(name, shape, type, data_start + offset, size_bytes)
    if cursor.file.size_bytes > data_start + expected:
        cursor.refuse(f"{cursor.file.size_bytes - data_start - expected} bytes follow the last tensor")
    return tensors


def _type_of(cursor: _Cursor, name: str, kind: int) -> GGUFType:
    if kind in READABLE:
        return READABLE[kind]
    if kind not in OTHERS:
        cursor.refuse(f"tensor `{name}` has the unknown type {kind}")
    raise UnsupportedModel(
        f"`{cursor.file.path}`: tensor `{name}` is {OTHERS[kind]}; read are "
        + ", ".join(type.name for type in READABLE.values())
    )


def _size_bytes(cursor: _Cursor, name: str, shape: tuple[int, ...], type: GGUFType) -> int:
    if shape[-1] % type.block_columns:
        cursor.refuse(
            f"tensor `{name}` has rows of {shape[-1]}, {type.name} comes in blocks of {type.block_columns}"
        )
    return math.prod(shape[:-1]) * type.row_bytes(shape[-1])
