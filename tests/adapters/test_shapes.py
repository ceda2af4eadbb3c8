"""What is remembered of a shape is what a fresh look finds; and nothing is remembered that depends on values."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvarto.adapters.arrays import Bytes, StoredArray
from kvarto.adapters.shape_cache import ShapeCache, shape_key
from kvarto.adapters.source import AdapterFiles, FoundAdapter
from kvarto.adapters.targets import targets_of
from kvarto.core.errors import AdapterError, UnsupportedAdapter
from tests.adapters.bases import program_of
from tests.adapters.malformed import BREAKS
from tests.adapters.pages import in_order
from tests.adapters.test_binding import MATRIX
from tests.adapters.writer import ALL_LINEAR, Options, as_type, write_adapter

BASE = targets_of(program_of())
PAGE_BYTES = 4096


def digest(files: AdapterFiles, found: FoundAdapter) -> bytes:
    return files.read(found, np.empty((found.num_pages, PAGE_BYTES), np.uint8), in_order(found)).content


def shape_of(found: FoundAdapter) -> object:
    assert found.on_disk is not None
    return found.on_disk.shape


@pytest.mark.parametrize("options", MATRIX, ids=lambda options: f"r{options.rank} {options.dtypes}")
def test_what_is_remembered_is_what_a_fresh_look_finds(options: Options, tmp_path: Path) -> None:
    files = AdapterFiles(BASE, [tmp_path], PAGE_BYTES, scale_of=lambda update, values: values.magnitude)
    found = [files.find(write_adapter(tmp_path / f"{s}", BASE, replace(options, seed=s)).folder) for s in range(3)]
    assert shape_of(found[0]) is shape_of(found[1]) is shape_of(found[2])
    assert len({digest(files, each) for each in found}) == 3
    for each in found:
        assert each.on_disk is not None
        fresh = AdapterFiles(BASE, [tmp_path], PAGE_BYTES).find(each.on_disk.tensors_file.path.parent)
        assert fresh.adapter is not each.adapter
        assert fresh.adapter == each.adapter
        assert (fresh.identity, fresh.num_pages) == (each.identity, each.num_pages)
        assert (fresh.bound_shape.updates, fresh.bound_shape.token_rows) == (
            each.bound_shape.updates,
            each.bound_shape.token_rows,
        )


def test_equal_headers_with_another_config_are_another_shape(tmp_path: Path) -> None:
    files = AdapterFiles(BASE, [tmp_path], PAGE_BYTES)
    one = files.find(write_adapter(tmp_path / "a", BASE, Options(alpha=8)).folder)
    two = files.find(write_adapter(tmp_path / "b", BASE, Options(alpha=9)).folder)
    assert shape_of(one) is not shape_of(two)
    assert one.adapter.updates[0].scaling != two.adapter.updates[0].scaling


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_adapter_is_refused_with_its_reason_though_a_good_one_is_remembered(name: str, tmp_path: Path) -> None:
    broken, why = BREAKS[name]
    files = AdapterFiles(BASE, [tmp_path], PAGE_BYTES)
    written = write_adapter(tmp_path / "a", BASE)
    good = shape_of(files.find(written.folder))
    broken(random.Random(1), written)
    for _ in range(2):
        with pytest.raises(AdapterError) as caught:
            files.find(written.folder)
        assert re.search(why, str(caught.value)), str(caught.value)
    assert shape_of(files.find(write_adapter(tmp_path / "b", BASE, Options(seed=1)).folder)) is good


def test_messages_name_the_file_at_hand(tmp_path: Path) -> None:
    files = AdapterFiles(BASE, [tmp_path], PAGE_BYTES)
    for name in ("first", "second"):
        written = write_adapter(tmp_path / name, BASE)
        path = written.folder / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes() + b"more")
        with pytest.raises(AdapterError, match=f"{name}/adapter_model"):
            files.find(written.folder)
        written.save()
        (written.folder / "adapter_config.json").write_text(json.dumps(written.config)[:-1])
        with pytest.raises(AdapterError, match=f"{name}/adapter_config"):
            files.find(written.folder)


def test_copies_of_the_base_are_compared_in_each_file_anew(tmp_path: Path) -> None:
    table = np.random.default_rng(1).normal(size=(97, 32)).astype(np.float32)

    def is_copy(module: str, array: StoredArray, file: Bytes) -> bool:
        return bool(np.array_equal(array.row_values(file, 0, 97), table))

    files = AdapterFiles(BASE, [tmp_path], PAGE_BYTES, is_copy=is_copy)
    written = write_adapter(tmp_path / "a", BASE)
    written.tensors["base_model.model.model.embed_tokens.weight"] = as_type(table, "F32")[0]
    good = files.find(written.save())
    assert good.adapter.copies
    assert good.adapter.size_bytes == sum(
        array.nbytes for name, (_, array) in written.tensors.items() if "lora" in name
    )
    other = table.copy()
    other[96, 31] += 1
    written.tensors["base_model.model.model.embed_tokens.weight"] = as_type(other, "F32")[0]
    with pytest.raises(UnsupportedAdapter, match="differs from the base's"):
        files.find(written.save())


def test_the_cache_is_bounded_by_tensors_and_keeps_what_was_used_last() -> None:
    cache: ShapeCache[str] = ShapeCache(max_tensors=10)
    keys = [shape_key(b"", bytes([number]), 1) for number in range(4)]
    for number in range(3):
        assert cache.add(keys[number], f"{number}", 4) == f"{number}"
        assert cache.get(keys[0]) == "0"
    assert [cache.get(key) for key in keys] == ["0", None, "2", None]
    assert cache.add(keys[0], "again", 4) == "0", "equal adapters have two shapes"
    cache.add(keys[3], "large", 1000)
    assert [cache.get(key) for key in keys] == [None, None, None, "large"]
    assert len(cache) == 1


def test_keys_tell_config_header_and_size_apart() -> None:
    keys = {shape_key(*each) for each in ((b"ab", b"c", 1), (b"a", b"bc", 1), (b"ab", b"c", 2), (b"", b"abc", 1))}
    assert len(keys) == 4


def test_thousands_of_one_recipe_share_one_shape(tmp_path: Path) -> None:
    files = AdapterFiles(BASE, [tmp_path], PAGE_BYTES)
    shapes = set()
    for seed in range(30):
        shapes.add(
            id(shape_of(files.find(write_adapter(tmp_path / f"{seed}", BASE, Options(ALL_LINEAR, seed=seed)).folder)))
        )
    assert len(shapes) == 1
