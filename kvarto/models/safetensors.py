"""Safetensors folders, sharded or not: a strict check of each header, then rows as float32.

```text
file = [u64 header bytes][header: JSON {name: {dtype, shape, data_offsets}}][data, no gaps]
```
Source: the format's own README (huggingface/safetensors). Where that is lenient (size of a header, trailing space),
we take what real writers make. Every number is checked in exact integers against the file's length first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.models.base import Float32, RawRows, TensorInfo, WeightFiles
from kvarto.models.json_file import parse_json, read_json
from kvarto.models.raw_file import RawFile

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 100_000
MAX_DIMS = 8
_READ_AT_ONCE = 64 << 10
"""Bytes: most headers of adapters are shorter, and are read in one go."""
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
_READABLE = ("F32", "F16", "BF16")

_BARE_ROOTS = {"wte.weight": "transformer.", "embed_tokens.weight": "model."}
"""A tensor that gives away a file saved from a model without its output matrix, and the root that its names lack."""
_LANGUAGE_MODEL = {"model.language_model.": "model.", "language_model.": ""}
"""Where multimodal files keep their language model."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file, checked."""

    info: TensorInfo
    file: RawFile
    offset: int
    """Of the first byte, in the file."""


class SafetensorsFiles(WeightFiles):
    """All shards of a model folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = read_json(folder / "config.json")
        self._files: list[RawFile] = []
        self._entries: dict[str, TensorEntry] = {}
        try:
            for name in _shard_names(folder):
                self._open_shard(folder / name)
            _check_index(folder, self._entries)
        except BaseException:
            self.close()
            raise
        self._entries = _settle_names(self._entries)
        self.tensors = {name: entry.info for name, entry in self._entries.items()}

    def _open_shard(self, path: Path) -> None:
        file = RawFile(path)
        self._files.append(file)
        for entry in read_header(file):
            known = self._entries.setdefault(entry.info.name, entry)
            if known is not entry:
                raise BadFile(f"tensor `{entry.info.name}` is both in `{known.file.path}` and in `{path}`")
            if len(self._entries) > MAX_TENSORS:
                raise BadFile(f"`{self.path}` has more than {MAX_TENSORS} tensors")

    def read_rows(self, name: str, start: int, stop: int) -> Float32:
        """See WeightFiles."""
        entry = self._entries[name]
        if entry.info.file_dtype not in _READABLE:
            raise UnsupportedModel(
                f"tensor `{name}` in `{entry.file.path}` is {entry.info.file_dtype}; read are {', '.join(_READABLE)}"
            )
        raw = self.read_raw_rows(name, start, stop)
        return _to_float32(raw.reshape(-1), self.tensors[name].file_dtype).reshape(len(raw), -1)

    def has_raw_rows(self, name: str, *, is_transposed: bool) -> bool:
        """See WeightFiles."""
        return not is_transposed

    def read_raw_rows(self, name: str, start: int, stop: int) -> RawRows:
        """See WeightFiles. Of any type."""
        entry = self._entries[name]
        row_bytes = entry.info.num_columns * _ITEM_BYTES[entry.info.file_dtype]
        offset, size_bytes = entry.offset + start * row_bytes, (stop - start) * row_bytes
        raw = entry.file.read(offset, size_bytes)
        entry.file.forget(offset, size_bytes)
        return np.frombuffer(raw, np.uint8).reshape(stop - start, row_bytes)

    def close(self) -> None:
        """See WeightFiles."""
        for file in self._files:
            file.close()


def _to_float32(raw: RawRows, dtype: str) -> Float32:
    if dtype == "F32":
        return raw.view("<f4").astype(np.float32)
    if dtype == "F16":
        return raw.view("<f2").astype(np.float32)
    bits = raw.view("<u2").astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _shard_names(folder: Path) -> list[str]:
    if (folder / INDEX_NAME).is_file():
        weight_map = _weight_map(folder)
        return sorted(set(weight_map.values()))
    if (folder / SINGLE_NAME).is_file():
        return [SINGLE_NAME]
    found = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".safetensors"))
    raise BadFile(
        f"`{folder}` has neither `{SINGLE_NAME}` nor `{INDEX_NAME}`"
        + (f", only {', '.join(f'`{name}`' for name in found[:4])}" if found else "")
        + "; pickled weights are never read, save them with `save_pretrained(folder)`, which writes safetensors"
    )


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or len(weight_map) > MAX_TENSORS:
        raise BadFile(f"`{folder / INDEX_NAME}`: `weight_map` must be an object with 1 to {MAX_TENSORS} entries")
    for name, shard in weight_map.items():
        # A shard is a file beside the index: no separators, so nothing outside the folder is ever opened.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise BadFile(f"`{folder / INDEX_NAME}`: `{name}` names the shard `{shard}`, which is not a file name")
    return weight_map


def _check_index(folder: Path, entries: dict[str, TensorEntry]) -> None:
    if not (folder / INDEX_NAME).is_file():
        return
    for name, shard in _weight_map(folder).items():
        entry = entries.get(name)
        if entry is None or entry.file.path.name != shard:
            raise BadFile(f"`{folder / INDEX_NAME}` puts tensor `{name}` into `{shard}`, which does not hold it")


def _settle_names(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Names as in the state dict of the language model, whichever class the file was saved from."""
    settled: dict[str, TensorEntry] = {}
    is_multimodal = any(name.startswith(tuple(_LANGUAGE_MODEL)) for name in entries)
    bare_root = next((root for table, root in _BARE_ROOTS.items() if table in entries), "")
    for name, entry in entries.items():
        new: str | None = name
        if name == "lm_head.weight":
            pass
        elif is_multimodal:
            new = _below_language_model(name)
        else:
            new = bare_root + name
        if new is not None:
            info = replace(entry.info, name=new)
            settled[new] = TensorEntry(info, entry.file, entry.offset)
    return settled


def _below_language_model(name: str) -> str | None:
    """The name inside the language model; None for tensors of other towers, which are not served."""
    prefix = next((prefix for prefix in _LANGUAGE_MODEL if name.startswith(prefix)), None)
    return None if prefix is None else _LANGUAGE_MODEL[prefix] + name.removeprefix(prefix)


def read_header(
    file: RawFile, max_header_bytes: int = MAX_HEADER_BYTES, max_tensors: int = MAX_TENSORS
) -> list[TensorEntry]:
    """Parse and check the header: every tensor lies whole in the file, none overlap, nothing is left over.

    Raises BadFile.
    """
    return parse_header(file, header_bytes(file, max_header_bytes), max_tensors)


def header_bytes(file: RawFile, max_header_bytes: int = MAX_HEADER_BYTES) -> bytes:
    """All that comes before the data, its length first; unchecked but for that. Raises BadFile."""
    if file.size_bytes < 8:
        raise BadFile(f"`{file.path}` has {file.size_bytes} bytes, too few for safetensors; download it again")
    start = file.read(0, min(_READ_AT_ONCE, file.size_bytes))
    refuse_pickle(file.path, start[:9])
    size_bytes = int.from_bytes(start[:8], "little")
    if size_bytes > max_header_bytes or 8 + size_bytes > file.size_bytes:
        raise BadFile(
            f"`{file.path}`: the header claims {size_bytes} bytes; the file has {file.size_bytes}, "
            f"and at most {max_header_bytes} are read"
        )
    missing = 8 + size_bytes - len(start)
    return start + file.read(len(start), missing) if missing > 0 else start[: 8 + size_bytes]


def parse_header(file: RawFile, raw: bytes, max_tensors: int = MAX_TENSORS) -> list[TensorEntry]:
    """Parse and check what `header_bytes` gave. Raises BadFile."""
    header = parse_json(raw[8:], f"{file.path} (header)")
    header.pop("__metadata__", None)
    if len(header) > max_tensors:
        raise BadFile(f"`{file.path}` lists {len(header)} tensors; at most {max_tensors} are read")
    spans = [_parse_entry(file, len(raw), name, fields) for name, fields in header.items()]
    _check_spans(file, len(raw), spans)
    return [entry for entry, _ in spans]


def refuse_pickle(path: Path, start: bytes) -> None:
    """Raise BadFile if a file that begins so is a pickle, or a zip archive as `torch.save` makes them."""
    # A safetensors header of 640 bytes begins like a pickle too, but its JSON follows at byte 8.
    is_pickle = start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and start[8:9] != b"{"
    if start[:4] == b"PK\x03\x04" or is_pickle:
        raise BadFile(
            f"`{path}` holds pickled Python objects, whatever its name says; they are never read because they "
            "can run code. Save the model with `save_pretrained(folder)`, which writes safetensors"
        )


def _parse_entry(file: RawFile, data_start: int, name: str, fields: Any) -> tuple[TensorEntry, int]:
    where = f"`{file.path}`: tensor `{name}`"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise BadFile(f"{where} must have `dtype`, `shape` and `data_offsets`, found {json.dumps(fields)[:80]}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise BadFile(f"{where} has the unknown dtype `{dtype}`; read are {', '.join(_READABLE)}")
    if not _are_counts(shape) or len(shape) > MAX_DIMS:
        raise BadFile(f"{where} has the shape {str(shape)[:80]}; at most {MAX_DIMS} extents of 0 or more are read")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadFile(f"{where} has the offsets {str(offsets)[:80]}; a start and an end are needed")
    size_bytes = _ITEM_BYTES[dtype]
    for extent in shape:
        size_bytes *= extent
    if offsets[1] - offsets[0] != size_bytes or data_start + offsets[1] > file.size_bytes:
        raise BadFile(
            f"{where}: {dtype} of shape {shape} takes {size_bytes} bytes, its offsets span {offsets[0]} to "
            f"{offsets[1]}, and the file holds {file.size_bytes - data_start}"
        )
    return TensorEntry(TensorInfo(name, tuple(shape), dtype, size_bytes), file, data_start + offsets[0]), size_bytes


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_spans(file: RawFile, data_start: int, spans: list[tuple[TensorEntry, int]]) -> None:
    position = data_start
    for entry, size_bytes in sorted(spans, key=lambda span: (span[0].offset, span[1])):
        if entry.offset != position:
            what = "overlaps the tensor before it" if entry.offset < position else "leaves a gap before it"
            raise BadFile(f"`{file.path}`: tensor `{entry.info.name}` {what}")
        position += size_bytes
    if position != file.size_bytes:
        raise BadFile(f"`{file.path}`: {file.size_bytes - position} bytes follow the last tensor; download it again")
