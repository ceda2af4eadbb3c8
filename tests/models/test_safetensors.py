"""Safetensors: equal to the reference library on good files, and a named error for every lie."""

from __future__ import annotations

import json
import pickle
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from kvarto.core.errors import BadFile, UnsupportedModel
from kvarto.models import base
from kvarto.models.files import open_weights

Header = dict[str, Any]


def folder_with(path: Path, files: dict[str, bytes], config: str = '{"model_type": "llama"}') -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def raw_file(header: Header | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def refused(path: Path, data: bytes, match: str | None = None) -> None:
    began = time.monotonic()
    with pytest.raises(BadFile, match=match) as caught:
        open_weights(folder_with(path, {"model.safetensors": data}))
    assert str(path) in str(caught.value)
    assert time.monotonic() - began < 10.0


def tensor(dtype: str = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> Header:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_the_librarys(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(37, 19).to(dtype),
        "b": torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-40, 65504.0]).to(dtype),
        "c": torch.randn(3, 4, 5).to(dtype),
    }
    folder = folder_with(tmp_path, {"model.safetensors": safetensors.torch.save(tensors)})
    files = open_weights(folder)
    monkeypatch.setattr(base, "BLOCK_BYTES", 200)
    for name, value in tensors.items():
        expected = value.float().numpy().reshape(-1, value.shape[-1])
        info = files.tensors[name]
        assert info.shape == tuple(value.shape)
        assert (info.num_rows, info.num_columns) == expected.shape
        found = files.read_rows(name, 0, info.num_rows)
        # A NaN's bits are the platform's affair; of all else every bit counts, the sign of zero too.
        assert np.array_equal(found, expected, equal_nan=True)
        is_number = ~np.isnan(expected)
        assert np.array_equal(np.signbit(found[is_number]), np.signbit(expected[is_number]))
        assert found.flags.writeable
        columns = files.read_columns(name, 1, info.num_columns)
        assert np.array_equal(columns, expected[:, 1:], equal_nan=True)
    assert np.array_equal(files.read_rows("a", 5, 9), tensors["a"].float().numpy()[5:9])
    files.close()


def test_shards(tmp_path: Path) -> None:
    shards = {f"model-0000{i}-of-00002.safetensors": {f"t{i}": torch.full((2, 2), float(i))} for i in (1, 2)}
    index = {"weight_map": {name: shard for shard, tensors in shards.items() for name in tensors}}
    folder = folder_with(tmp_path, {shard: safetensors.torch.save(t) for shard, t in shards.items()})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    files = open_weights(folder)
    assert [files.read_rows(f"t{i}", 0, 1)[0, 0] for i in (1, 2)] == [1.0, 2.0]
    files.close()

    for weight_map, says in (
        (index["weight_map"] | {"t3": "model-00001-of-00002.safetensors"}, "does not hold it"),
        (index["weight_map"] | {"t1": "model-00002-of-00002.safetensors"}, "does not hold it"),
        ({"t1": "../x.safetensors"}, "not a file name"),
        ({"t1": "/etc/passwd"}, "not a file name"),
        ({"t1": 7}, "not a file name"),
        ({"t1": "model-00009-of-00002.safetensors"}, "cannot be opened"),
        ({}, "weight_map"),
    ):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(BadFile, match=says):
            open_weights(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    data = safetensors.torch.save({"t": torch.zeros(2)})
    folder = folder_with(tmp_path, {"a.safetensors": data, "b.safetensors": data})
    more = safetensors.torch.save({"t": torch.zeros(2), "u": torch.zeros(2)})
    (folder / "b.safetensors").write_bytes(more)
    index = {"weight_map": {"t": "a.safetensors", "u": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadFile, match="`t` is both in"):
        open_weights(folder)


EDGES = (0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1)


def test_header_lengths(tmp_path: Path) -> None:
    good = raw_file({"t": tensor()}, bytes(24))
    for length in (*EDGES, len(good) - 8 - 24 + 1, len(good) - 8 - 24 - 1, len(good) - 8, len(good) - 7):
        refused(tmp_path, struct.pack("<Q", length) + good[8:])
    for cut in range(len(good)):
        refused(tmp_path, good[:cut])
    refused(tmp_path, good + b"x", "follow the last tensor")


@pytest.mark.parametrize("edge", [*EDGES, -1, 2.0, "2", None, True, [2]])
def test_every_number_of_an_entry(edge: Any, tmp_path: Path) -> None:
    for at in range(2):
        shape: list[Any] = [2, 3]
        shape[at] = edge
        refused(tmp_path, raw_file({"t": tensor(shape=shape)}, bytes(24)))
        offsets: list[Any] = [0, 24]
        offsets[at] = edge
        if not (at == 0 and edge == 0 and type(edge) is int):
            refused(tmp_path, raw_file({"t": tensor(offsets=offsets)}, bytes(24)))


@pytest.mark.parametrize(
    ("header", "data_bytes", "says"),
    [
        ({"a": tensor(), "b": tensor(offsets=(12, 36))}, 36, "overlaps"),
        ({"a": tensor(), "b": tensor(offsets=(0, 24))}, 24, "overlaps"),
        ({"a": tensor(), "b": tensor(offsets=(28, 52))}, 52, "gap"),
        ({"a": tensor(offsets=(4, 28))}, 28, "gap"),
        ({"a": tensor(shape=(2**32, 2**32), offsets=(0, 0))}, 0, "takes"),
        ({"a": tensor(shape=(2**62, 4, 0, 2**63))}, 24, "takes"),
        ({"a": tensor(shape=(1,) * 9 + (6,))}, 24, "at most 8 extents"),
        ({"a": tensor(dtype="F33")}, 24, "unknown dtype `F33`"),
        ({"a": {"dtype": "F32", "shape": [6]}}, 24, "must have"),
        ({"a": tensor() | {"extra": 1}}, 24, "must have"),
        ({"a": [1, 2]}, 24, "must have"),
        (b"[]", 0, "an object was expected"),
        (b'{"a": ', 0, "not valid JSON"),
        (b'{"a": NaN}', 0, "not JSON"),
        (b'{"\xff": 1}', 0, "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, 0, "not valid JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", 0, "not valid JSON"),
    ],
)
def test_headers_that_lie(header: Any, data_bytes: int, says: str, tmp_path: Path) -> None:
    refused(tmp_path, raw_file(header, bytes(data_bytes)), says)


def test_duplicate_keys_are_refused_quickly(tmp_path: Path) -> None:
    entry = json.dumps(tensor())
    refused(tmp_path, raw_file(f'{{"t": {entry}, "t": {entry}}}'.encode(), bytes(24)), "`t` stands there twice")
    refused(tmp_path, raw_file(b'{"t": {"dtype": "F32", "dtype": "F16"}}', b""), "`dtype` stands there twice")
    many = ",".join(f'"{i}":0' for i in range(100_000))
    refused(tmp_path, raw_file(f'{{{many},"99999":0}}'.encode(), b""), "`99999` stands there twice")


def test_too_many_tensors(tmp_path: Path) -> None:
    header = {f"{i}": tensor(shape=(0,), offsets=(0, 0)) for i in range(100_001)}
    refused(tmp_path, raw_file(header, b""), "100001 tensors")


def test_pickles_are_refused_whatever_their_name(tmp_path: Path) -> None:
    harmful = pickle.dumps({"w": [1.0]}, protocol=4)
    archive = tmp_path / "zip"
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("archive/data.pkl", harmful)
    for data in (harmful, pickle.dumps([0], protocol=2), archive.read_bytes()):
        refused(tmp_path / "f", data, "never read")
        single = tmp_path / "model.gguf"
        single.write_bytes(data)
        with pytest.raises(BadFile, match="never read"):
            open_weights(single)
    folder = folder_with(tmp_path / "g", {"pytorch_model.bin": harmful})
    with pytest.raises(BadFile, match=r"only `pytorch_model\.bin`.*save_pretrained"):
        open_weights(folder)


def test_headers_that_begin_like_a_pickle_are_read(tmp_path: Path) -> None:
    header = json.dumps({"t": tensor()}).encode()
    data = raw_file(header + b" " * (0x280 - len(header)), bytes(24))
    assert data[:2] == b"\x80\x02"
    open_weights(folder_with(tmp_path, {"model.safetensors": data})).close()


def test_other_dtypes_are_refused_when_read(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, {"model.safetensors": safetensors.torch.save({"t": torch.zeros(4, dtype=torch.int8)})}
    )
    files = open_weights(folder)
    with pytest.raises(UnsupportedModel, match=r"`t` in .* is I8"):
        files.read_rows("t", 0, 1)
    files.close()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["wte.weight", "h.0.ln_1.weight"], ["transformer.wte.weight", "transformer.h.0.ln_1.weight"]),
        (["embed_tokens.weight", "lm_head.weight"], ["model.embed_tokens.weight", "lm_head.weight"]),
        (["model.embed_tokens.weight", "lm_head.weight"], ["model.embed_tokens.weight", "lm_head.weight"]),
        (
            ["language_model.model.embed_tokens.weight", "language_model.lm_head.weight", "vision_tower.x"],
            ["model.embed_tokens.weight", "lm_head.weight"],
        ),
        (
            ["model.language_model.norm.weight", "lm_head.weight", "model.vision_tower.x", "model.projector.y"],
            ["model.norm.weight", "lm_head.weight"],
        ),
    ],
)
def test_names_are_the_language_models(given: list[str], expected: list[str], tmp_path: Path) -> None:
    data = safetensors.torch.save({name: torch.full((2,), float(i)) for i, name in enumerate(given)})
    files = open_weights(folder_with(tmp_path, {"model.safetensors": data}))
    assert set(files.tensors) == set(expected)
    for name in expected:
        # The value tells which of the given tensors it is.
        assert given[int(files.read_rows(name, 0, 1)[0, 0])].endswith(name.split(".", 1)[1])
    files.close()


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    for path, says in (
        (tmp_path / "missing", "does not exist"),
        (tmp_path, "no `config.json`"),
        (Path("/dev/zero"), "not a regular file"),
    ):
        with pytest.raises(BadFile, match=says):
            open_weights(path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(BadFile, match="2 GGUF files"):
        open_weights(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(raw_file({}, b""))
    with pytest.raises(BadFile, match="give the folder"):
        open_weights(tmp_path / "x.safetensors")


def test_files_are_closed_after_a_refusal(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        refused(tmp_path, raw_file({"t": tensor()}, b""))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
