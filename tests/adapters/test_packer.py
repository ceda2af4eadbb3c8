"""The one native pass over a file gives, byte for byte, what the obvious way gives; and it finds what is wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from kvarto.adapters.adapter import LowRankUpdate
from kvarto.adapters.arrays import Encoding, StoredArray
from kvarto.adapters.magnitudes import UpdateValues
from kvarto.adapters.opened import OpenedAdapter
from kvarto.adapters.source import AdapterFiles, FoundAdapter
from kvarto.adapters.spare_images import new_images
from kvarto.adapters.targets import BaseTargets, targets_of
from kvarto.core import _native
from kvarto.core.errors import BadAdapter
from kvarto.core.strip_type import StripType
from tests.adapters.bases import program_of
from tests.adapters.held import HASHER, MemoryFile, adapter_digest, held, page_images, update_values
from tests.adapters.pages import Scattered, in_order, pack_whole
from tests.adapters.test_gguf_files import converted
from tests.adapters.writer import ALL_LINEAR, QV, Options, Written, as_type, write_adapter

EVERYTHING = (*ALL_LINEAR, "model.embed_tokens", "lm_head")
MATRIX = [
    Options(QV, rank=1),
    Options(ALL_LINEAR, rank=5, dtypes=("BF16", "F32"), lora_bias=True),
    Options(ALL_LINEAR, rank=3, dtypes=("F16", "BF16"), use_dora=True, rank_pattern={"v_proj": 7}),
    Options(ALL_LINEAR, rank=33, dtypes=("BF16", "BF16"), use_dora=True, lora_bias=True),
    Options(EVERYTHING, rank=4, dtypes=("F32", "F16")),
]
BASES = {
    "even": targets_of(program_of()),
    "odd": targets_of(program_of(hidden_size=72, intermediate_size=1101, vocab_size=97)),
    "wide": targets_of(program_of(hidden_size=64, intermediate_size=40_001, vocab_size=97)),
}
PAGE_BYTES = 4096
ISAS = _native.ops.isas()


def scale_of(update: LowRankUpdate, values: UpdateValues) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Any function of all values stands for what a base makes of a magnitude."""
    return values.magnitude + values.lora_b.max(axis=1) + values.lora_a.max()


def packed(files: AdapterFiles, found: FoundAdapter, page_bytes: int = PAGE_BYTES) -> tuple[list[bytes], bytes]:
    """Into memory that held something else before."""
    images = np.full((found.num_pages, page_bytes), 0xA5, np.uint8)
    content = files.read(found, images, in_order(found)).content
    return [image.tobytes() for image in images], content


def check(path: Path, base: BaseTargets, page_bytes: int = PAGE_BYTES, codes: StripType | None = None) -> None:
    files = AdapterFiles(base, [path.parent], page_bytes, scale_of=scale_of, codes=codes, hasher=HASHER)
    found = files.find(path)
    assert found.on_disk is not None
    adapter = held(OpenedAdapter(found.adapter, (found.on_disk.tensors_file,), b""))
    images, content = packed(files, found, page_bytes)
    scale = lambda update: scale_of(update, update_values(update))  # noqa: E731
    assert images == page_images(adapter, page_bytes, scale)
    assert content == adapter_digest(adapter, page_bytes, scale)
    pages = Scattered(random.Random(page_bytes), found.num_pages, page_bytes)
    fresh = AdapterFiles(base, [path.parent], page_bytes, scale_of=scale_of, codes=codes, hasher=HASHER)
    assert fresh.read(found, pages.region, pages.which).content == content
    assert pages.stream() == b"".join(images)


@pytest.mark.parametrize("options", MATRIX, ids=lambda options: f"r{options.rank} {options.dtypes}")
@pytest.mark.parametrize("base", BASES)
def test_pages_and_digest_are_those_of_the_oracle(base: str, options: Options, tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASES[base], options)
    hidden = BASES[base].by_module[BASES[base].embed_module].out_width
    delta = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    values = np.random.default_rng(5).normal(size=(3, hidden))
    written.tensors[delta] = as_type(values, options.dtypes[0])[0]
    written.config["trainable_token_indices"] = [3, 90, 7]
    check(written.save(), BASES[base])


def test_the_order_of_a_file_and_the_size_of_pages_change_nothing(tmp_path: Path) -> None:
    base = BASES["odd"]
    written = write_adapter(tmp_path / "a", base, Options(ALL_LINEAR, rank=6, dtypes=("F16", "F32"), lora_bias=True))
    for seed in range(5):
        tensors = list(written.tensors.items())
        random.Random(seed).shuffle(tensors)
        written.tensors = dict(tensors)
        check(written.save(), base, random.Random(seed).choice((2048, 4096, 12_288, 1 << 20)))


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0])
@pytest.mark.parametrize("is_permuted", [True, False])
def test_gguf_files_too(kind: Q, is_permuted: bool, tmp_path: Path) -> None:
    model_type, architecture = ("llama", "llama") if is_permuted else ("qwen2", "qwen2")
    sizes = {"hidden_size": 64, "intermediate_size": 96}  # rows of Q8_0 are multiples of 32
    base = targets_of(program_of(model_type=model_type, **sizes))
    written = write_adapter(tmp_path / "a", base, Options(EVERYTHING, rank=32))
    metadata = {"general.architecture": architecture}
    check(converted(tmp_path, base, written.updates, kind, is_permuted=is_permuted, **metadata), base)


def test_magnitudes_may_be_of_several_types_and_of_odd_widths(tmp_path: Path) -> None:
    base = BASES["odd"]
    written = write_adapter(tmp_path / "a", base, Options(ALL_LINEAR, rank=2, use_dora=True))
    for number, (name, (_, values)) in enumerate(list(written.tensors.items())):
        if "magnitude" in name:
            written.tensors[name] = as_type(values, ("BF16", "F32", "F16")[number // 3 % 3])[0]
    check(written.save(), base)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_bad_value_is_found_wherever_it_is_and_its_tensor_is_named(dtype: str, tmp_path: Path) -> None:
    rng = random.Random(dtype)
    base = BASES["odd"]
    options = Options(ALL_LINEAR[:7], rank=3, dtypes=(dtype, dtype), use_dora=True, lora_bias=True)
    written = write_adapter(tmp_path / "a", base, options)
    for name, (_, array) in list(written.tensors.items()):
        values = array.copy()
        bad = {
            "F32": (0x7F800000, 0xFF800000, 0x7FC00001),
            "F16": (0x7C00, 0xFC00, 0x7E01),
            "BF16": (0x7F80, 0xFF80, 0x7FC1),
        }
        bits = values.reshape(-1).view(np.uint32 if dtype == "F32" else np.uint16)
        bits[rng.choice((0, bits.size - 1, rng.randrange(bits.size)))] = rng.choice(bad[dtype])
        spoiled = Written(tmp_path / "b", written.config, written.tensors | {name: (dtype, values)})
        files = AdapterFiles(base, [tmp_path], PAGE_BYTES, scale_of=scale_of)
        with pytest.raises(BadAdapter, match=f"`{name}` holds NaN"):
            packed(files, files.find(spoiled.save()))


def test_a_file_that_is_replaced_or_cut_after_it_was_found_is_refused(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASES["even"])
    files = AdapterFiles(BASES["even"], [tmp_path], PAGE_BYTES)
    path = written.folder / "adapter_model.safetensors"
    found = files.find(written.folder)
    data = path.read_bytes()
    (tmp_path / "new").write_bytes(data)
    os.replace(tmp_path / "new", path)
    with pytest.raises(BadAdapter, match="has changed since"):
        packed(files, found)
    found = files.find(written.folder)
    os.truncate(path, len(data) - 4)
    with pytest.raises(BadAdapter, match="has changed since"):
        packed(files, found)
    path.unlink()
    with pytest.raises(BadAdapter, match="cannot be opened"):
        packed(files, found)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    written = write_adapter(tmp_path / "a", BASES["even"], Options(use_dora=True))
    path = written.folder / "adapter_model.safetensors"

    def write_meanwhile(
        update: LowRankUpdate, values: UpdateValues
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        os.utime(path, ns=(7, 7))
        return values.magnitude

    files = AdapterFiles(BASES["even"], [tmp_path], PAGE_BYTES, scale_of=write_meanwhile)
    found = files.find(written.folder)
    with pytest.raises(BadAdapter, match="has changed since"):
        packed(files, found)
    assert files.find(written.folder).digest is None, "what was read in the midst of a change is remembered"


# The plan alone.


def plan(
    tensors: list[_native.adapters.FileTensor], file: int, stream: int, beside: int = 0
) -> _native.adapters.PackPlan:
    return _native.adapters.PackPlan(tensors, file, stream, beside)


def tensor(**changes: int) -> _native.adapters.FileTensor:
    values = {"offset": 0, "num_rows": 4, "num_columns": 8, "start": 0, "type": 0, "is_transposed": False,
              "is_beside": False, "num_heads": 0} | changes  # fmt: skip
    values.setdefault("strips", StripType(Encoding(values["type"]).dtype.value).code if 0 <= values["type"] < 4 else 0)
    return _native.adapters.FileTensor(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(16))
def test_random_plans_put_everything_where_it_belongs(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    data, tensors, want = bytearray(rng.randbytes(rng.randrange(9))), [], {False: bytearray(), True: bytearray()}
    for each in arrays(rng, seed):
        rows, columns = each.file_shape
        is_transposed, is_beside = columns < 70_000 and rng.random() < 0.5, rng.random() < 0.2
        target = want[is_beside]
        target += bytes(rng.choice((0, 0, 4, 12)) + -len(target) % 4)
        place = {"offset": len(data), "num_rows": rows, "num_columns": columns, "start": len(target)}
        how = {"is_transposed": is_transposed, "is_beside": is_beside, "num_heads": each.num_permuted_heads}
        tensors.append(tensor(type=each.encoding, **place, **how))
        raw = raw_values(rng, each)
        target += each.read(MemoryFile(raw)).tobytes(order="F" if is_transposed else "C")
        data += raw + rng.randbytes(rng.randrange(9))
    made = plan(rng.sample(tensors, len(tensors)), len(data), len(want[False]), len(want[True]))
    path = tmp_path / "file"
    path.write_bytes(data)
    for isa in ISAS:
        for start in (0, 4, 16):
            stream, beside = filled(len(want[False]) + 100, start), filled(len(want[True]), start)
            with path.open("rb") as file:  # it was just written
                assert pack_whole(made, isa, file.fileno(), stream, beside, seed % 2 == 0) == (None, 0)
                assert file.tell() == 0
            assert stream.tobytes() == bytes(want[False]) + bytes(100)
            assert beside.tobytes() == bytes(want[True])
        for page_bytes in (64, 1024, 64 * rng.randrange(2, 500)):
            pages = Scattered(rng, len(want[False]) // page_bytes + 2, page_bytes)
            with path.open("rb") as file:
                into = pages.region, page_bytes, pages.which
                assert made.pack(isa, file.fileno(), *into, beside, seed % 2 == 0) == (None, 0)
            assert pages.stream() == bytes(want[False]).ljust(len(pages.which) * page_bytes, b"\0")


def filled(size: int, start: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Memory that held something else before, and begins so many bytes behind the start of a cache line."""
    block = new_images(1, size + start)[0]
    block[:] = 7
    return block[start:]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [Encoding.F32, Encoding.BF16])
def test_columns_are_put_together_from_wherever_a_read_ends(isa: str, dtype: Encoding, tmp_path: Path) -> None:
    """Reads end inside of rows and of lines of columns, and after each the next one begins in the midst of a column."""
    for rows, columns in ((6_000, 37), (5_003, 24), (640, 257), (40, 9_000)):
        values = np.frombuffer(raw_values(random.Random(rows), StoredArray("b", (rows, columns), dtype, 0)), np.uint8)
        values = values.reshape(rows, columns, -1)
        size, path = values.nbytes, tmp_path / "file"
        path.write_bytes(b"!" + values.tobytes())
        matrix = tensor(offset=1, num_rows=rows, num_columns=columns, type=dtype, is_transposed=True)
        made = plan([matrix], size + 1, size)
        for start in (0, 12):
            stream = filled(size, start)
            with path.open("rb") as file:
                assert pack_whole(made, isa, file.fileno(), stream, np.empty(0, np.uint8), False) == (None, 0)
            assert stream.tobytes() == values.transpose(1, 0, 2).tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [Encoding.F32, Encoding.F16, Encoding.BF16])
@pytest.mark.parametrize("is_transposed", [True, False])
def test_no_place_hides_a_bad_value(isa: str, dtype: Encoding, is_transposed: bool, tmp_path: Path) -> None:
    array = StoredArray("a", (48, 24), dtype, 0)
    good = raw_values(random.Random(1), array)
    made = plan([tensor(num_rows=48, num_columns=24, type=dtype, is_transposed=is_transposed)], len(good), len(good))
    item, path = array.dtype.itemsize, tmp_path / "file"
    for place in random.Random(2).sample(range(48 * 24), 100):
        data = bytearray(good)
        data[(place + 1) * item - 2 : (place + 1) * item] = b"\x80\xff"
        path.write_bytes(data)
        with path.open("rb") as file:
            found = pack_whole(made, isa, file.fileno(), filled(len(good), 4), np.empty(0, np.uint8), False)
        assert found == ((0, False), 0), f"value {place} is no number"


def test_all_sets_give_one_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = BASES["even"]
    options = Options(ALL_LINEAR, rank=32, dtypes=("BF16", "F32"), use_dora=True, lora_bias=True)
    written = write_adapter(tmp_path / "a", base, options)
    for codes in (None, StripType.Q8, StripType.Q4):
        found = set()
        for isa in ISAS:
            monkeypatch.setenv("KVARTO_ISA", isa)
            files = AdapterFiles(base, [tmp_path], PAGE_BYTES, scale_of=scale_of, codes=codes, hasher=HASHER)
            images, content = packed(files, files.find(written.folder))
            found.add((b"".join(images), content))
        assert len(found) == 1


def arrays(rng: random.Random, seed: int) -> Iterator[StoredArray]:
    for number in range(rng.randint(1, 6)):
        encoding, heads = rng.choice(list(Encoding)), rng.choice((0, 0, 1, 3))
        columns = rng.choice((1, 3, 8, 33, 300)) * (32 if encoding is Encoding.Q8_0 else 1)
        if seed % 8 == 0:  # longer rows than are rearranged
            encoding, columns, heads = Encoding.Q8_0, 70_016, 0
        rows = rng.choice((1, 5, 64, 65, 400) if columns < 70_000 else (1, 3)) * (2 * heads or 1)
        yield StoredArray(f"t{number}", (rows, columns), encoding, 0, num_permuted_heads=heads)


def raw_values(rng: random.Random, array: StoredArray) -> bytes:
    """Finite ones: no exponent is all ones."""
    values = np.random.default_rng(rng.randrange(1 << 32))
    if array.encoding is Encoding.Q8_0:
        blocks = values.integers(0, 256, (array.file_bytes // 34, 34), np.uint8)
        blocks[:, 1] &= 0xBB  # also zero and what is too small for an exponent
        blocks[:: rng.randint(2, 9), 1] &= 0x83
        return blocks.tobytes()
    bits = values.integers(0, 256, array.file_bytes, np.uint8)
    bits[array.dtype.itemsize - 1 :: array.dtype.itemsize] &= 0xBB
    return bits.tobytes()


FAULTS = {
    "rows": {"num_rows": 0},
    "columns": {"num_columns": -1},
    "many": {"num_rows": 1 << 40, "num_columns": 1 << 40},
    "most": {"num_rows": (1 << 63) - 1, "num_columns": (1 << 63) - 1},
    "type": {"type": 4},
    "negative type": {"type": -1},
    "blocks": {"type": 3},
    "strips": {"strips": 5},
    "negative strips": {"strips": -1},
    "other values": {"strips": 1},
    "codes of eight columns": {"strips": 3},
    "codes of four rows": {"strips": 4, "is_transposed": True},
    "codes inside a value": {"strips": 3, "num_rows": 1, "num_columns": 32, "start": 3},
    "codes behind the stream": {"strips": 3, "num_rows": 1, "num_columns": 32, "start": 96},
    "long rows of codes": {"strips": 3, "num_rows": 32, "num_columns": 8_224, "is_transposed": True},
    "heads of many rows": {"strips": 3, "num_rows": 8_200, "num_columns": 33, "is_transposed": True, "num_heads": 1},
    "before the file": {"offset": -1},
    "behind the file": {"offset": 1},
    "far behind the file": {"offset": (1 << 63) - 1},
    "before the stream": {"start": -4},
    "behind the stream": {"start": 4},
    "far behind the stream": {"start": (1 << 63) - 4},
    "inside a value": {"start": 2, "num_rows": 1},
    "beside": {"is_beside": True},
    "heads": {"num_heads": 3},
    "negative heads": {"num_heads": -1},
    "many heads": {"num_heads": 1 << 62},
    "long rows": {"num_rows": 1, "num_columns": 70_000, "is_transposed": True},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_plan_that_leaves_its_places_is_refused(name: str) -> None:
    size = 4 * 320_000 if " rows" in name else 128
    with pytest.raises(ValueError, match="packing"):
        plan([tensor(**FAULTS[name])], size, size)


def test_two_tensors_have_two_places() -> None:
    first, second = tensor(num_rows=2), tensor(num_rows=2, start=60)
    with pytest.raises(ValueError, match="one place"):
        plan([first, second], 128, 128)
    with pytest.raises(ValueError, match="negative"):
        plan([], -1, 0)


def test_targets_without_room_and_files_without_bytes_are_refused(tmp_path: Path) -> None:
    made, beside = plan([tensor()], 128, 128), np.empty(0, np.uint8)
    path = tmp_path / "file"
    path.write_bytes(bytes(127))
    with path.open("rb") as file:
        for stream in (np.empty(127, np.uint8), np.empty(130, np.uint8)[1:130]):
            with pytest.raises(ValueError, match="no room"):
                pack_whole(made, ISAS[-1], file.fileno(), stream, beside, False)
        with pytest.raises(EOFError):
            pack_whole(made, ISAS[-1], file.fileno(), np.empty(128, np.uint8), beside, False)
        with pytest.raises((BufferError, ValueError)):
            pack_whole(made, ISAS[-1], file.fileno(), np.empty((128, 2), np.uint8)[:, 0], beside, True)
        with pytest.raises(ValueError, match="`vax` cannot run here"):
            pack_whole(made, "vax", file.fileno(), np.empty(128, np.uint8), beside, False)
    with pytest.raises(OSError, match="descriptor"):
        pack_whole(made, ISAS[-1], 1 << 20, np.empty(128, np.uint8), beside, False)


def test_pages_that_are_not_there_are_refused() -> None:
    made, beside, region = plan([tensor()], 128, 128), np.empty(0, np.uint8), np.empty(256, np.uint8)
    for page_bytes, which in ((128, [2]), (128, [-1]), (64, [0, 4]), (257, [0]), (1 << 62, [0]), (64, [0, -(1 << 31)])):
        with pytest.raises(ValueError, match="outside of its region"):
            made.pack(ISAS[-1], 1 << 20, region, page_bytes, np.array(which, np.int32), beside, False)
    for page_bytes, which in ((64, [0]), (128, []), (0, [0]), (-128, [0]), (130, [0, 0])):
        with pytest.raises(ValueError, match="no room|without bytes"):
            made.pack(ISAS[-1], 1 << 20, region, page_bytes, np.array(which, np.int32), beside, False)
    with pytest.raises(ValueError, match="begins inside"):  # one page is enough, where it is not the first
        made.pack(ISAS[-1], 1 << 20, np.empty(260, np.uint8), 130, np.ones(1, np.int32), beside, False)
    with pytest.raises(ValueError, match="int32"):
        made.pack(ISAS[-1], 1 << 20, region, 128, np.zeros(1, np.int64), beside, False)  # type: ignore[arg-type]


def test_random_plans_never_leave_their_places() -> None:
    """Judged by the sanitizers' build; here by what is refused and what is not."""
    rng = random.Random(3)
    odd = (0, 1, -1, 2, 3, 4, 7, 32, 64, 1 << 20, 1 << 31, 1 << 48, (1 << 63) - 1, -(1 << 63))
    num_taken = 0
    for _ in range(3000):
        changes = {name: rng.choice(odd) for name in rng.sample(list(_FIELDS), rng.randint(0, 3))}
        try:
            made = plan([tensor(**changes)], 512, 512)
        except (ValueError, TypeError):  # the latter for numbers that are none of an int32
            continue
        num_taken += 1
        read, write = os.pipe()
        with pytest.raises((OSError, EOFError)):
            pack_whole(made, ISAS[-1], read, np.empty(512, np.uint8), np.empty(0, np.uint8), rng.random() < 0.5)
        os.close(read)
        os.close(write)
    assert num_taken > 50


_FIELDS = ("offset", "num_rows", "num_columns", "start", "num_heads", "strips", "is_transposed")


def test_one_row_is_one_row_whatever_else(tmp_path: Path) -> None:
    array = StoredArray("a", (4, 8), Encoding.F32, 0)
    assert replace(array, is_transposed=True).file_shape == (8, 4)
    assert array.reshaped((32,)).file_shape == (1, 32)
