"""The native pass over a file makes the codes that the format's NumPy makes, byte for byte, whatever the file has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from kvarto.adapters.adapter import Adapter, LowRankUpdate
from kvarto.adapters.arrays import Encoding, StoredArray
from kvarto.adapters.peft_files import open_peft_adapter
from kvarto.adapters.quantised import quantised
from kvarto.adapters.source import AdapterFiles
from kvarto.adapters.strip_codes import quantise
from kvarto.adapters.targets import targets_of
from kvarto.core import _native
from kvarto.core.errors import BadAdapter, UnsupportedAdapter
from kvarto.core.strip_type import StripType
from kvarto.models.convert import to_bfloat16
from tests.adapters.bases import program_of
from tests.adapters.held import HASHER, MemoryFile
from tests.adapters.pages import Scattered, pack_whole
from tests.adapters.test_gguf_files import converted
from tests.adapters.test_packer import BASES, EVERYTHING, ISAS, MATRIX, PAGE_BYTES, check, packed, scale_of
from tests.adapters.writer import ALL_LINEAR, Options, as_type, write_adapter

CODES = (StripType.Q8, StripType.Q4)
Array = np.ndarray[Any, Any]


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("options", MATRIX, ids=lambda options: f"r{options.rank} {options.dtypes}")
@pytest.mark.parametrize("base", BASES)
def test_pages_and_digest_are_those_of_the_oracle(
    base: str, options: Options, codes: StripType, tmp_path: Path
) -> None:
    written = write_adapter(tmp_path / "a", BASES[base], options)
    hidden = BASES[base].by_module[BASES[base].embed_module].out_width
    delta = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    written.tensors[delta] = as_type(np.random.default_rng(5).normal(size=(3, hidden)), options.dtypes[0])[0]
    written.config["trainable_token_indices"] = [3, 90, 7]
    check(written.save(), BASES[base], random.Random(base).choice((2048, 4096, 12_288)), codes)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0])
@pytest.mark.parametrize("is_permuted", [True, False])
def test_gguf_files_too(kind: Q, is_permuted: bool, codes: StripType, tmp_path: Path) -> None:
    model_type = "llama" if is_permuted else "qwen2"
    base = targets_of(program_of(model_type=model_type, hidden_size=64, intermediate_size=96))
    written = write_adapter(tmp_path / "a", base, Options(EVERYTHING, rank=32))
    metadata = {"general.architecture": model_type}
    check(converted(tmp_path, base, written.updates, kind, is_permuted=is_permuted, **metadata), base, codes=codes)


@pytest.mark.parametrize("seed", range(40))
def test_random_tensors_become_the_codes_of_their_strips(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    data, tensors, want = bytearray(), [], bytearray()
    for array, values in arrays(rng):
        is_transposed, codes = rng.random() < 0.6 or array.num_permuted_heads > 0, rng.choice(CODES)
        rows, columns = array.file_shape
        if (rows if is_transposed else columns) % 32:
            continue
        want += bytes(-len(want) % 4 + rng.choice((0, 4)))
        tensors.append(_native.adapters.FileTensor(
            len(data), rows, columns, len(want), array.encoding, codes.code, is_transposed, False,
            array.num_permuted_heads,
        ))  # fmt: skip
        read = array.values(MemoryFile(values))
        blocks = quantise(np.ascontiguousarray(read.T if is_transposed else read), codes)
        assert blocks is not None
        want += blocks.tobytes()
        data += values
    made = _native.adapters.PackPlan(rng.sample(tensors, len(tensors)), len(data), len(want), 0)
    path = tmp_path / "file"
    path.write_bytes(data)
    for isa in ISAS:
        stream = np.full(len(want), 7, np.uint8)
        with path.open("rb") as file:
            assert pack_whole(made, isa, file.fileno(), stream, np.empty(0, np.uint8), seed % 2 == 0) == (None, 0)
        assert stream.tobytes() == bytes(want)
        for page_bytes in (64, 64 * rng.randrange(2, 100)):
            pages = Scattered(rng, -(-len(want) // page_bytes), page_bytes)
            with path.open("rb") as file:
                into = pages.region, page_bytes, pages.which
                assert made.pack(isa, file.fileno(), *into, np.empty(0, np.uint8), seed % 2 == 0) == (None, 0)
            assert pages.stream() == bytes(want).ljust(len(pages.which) * page_bytes, b"\0")


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("isa", ISAS)
def test_blocks_of_extreme_values_become_their_codes_too(isa: str, codes: StripType, tmp_path: Path) -> None:
    """What is too small for a scale, ties between signs, and what is next to too large; any number of blocks."""
    smallest, scale = np.float32(2.0**-149), np.float32(2.0**-24)
    extremes = [sign * each * unit for unit in (smallest, scale / 4) for each in range(1, 20) for sign in (1, -1)]
    blocks = np.zeros((len(extremes) + 3, 32), np.float32)
    for row, extreme in enumerate(extremes):
        blocks[row, [row % 7, 20]] = extreme, -extreme if row % 3 else extreme / 2
    blocks[-2:, 5] = 5.2e5, -5.2e5
    for num_blocks in (1, 15, 16, 17, len(blocks)):
        values = np.ascontiguousarray(blocks[-num_blocks:])
        (tmp_path / "file").write_bytes(values.tobytes())
        expected = quantise(values, codes)
        assert expected is not None
        matrix = _native.adapters.FileTensor(0, num_blocks, 32, 0, Encoding.F32, codes.code, False, False, 0)
        stream = np.full(len(expected), 7, np.uint8)
        with (tmp_path / "file").open("rb") as file:
            made = _native.adapters.PackPlan([matrix], values.nbytes, len(expected), 0)
            assert pack_whole(made, isa, file.fileno(), stream, np.empty(0, np.uint8), False) == (None, 0)
        assert stream.tobytes() == expected.tobytes()


def arrays(rng: random.Random) -> Iterator[tuple[StoredArray, bytes]]:
    """Tensors of all encodings and their bytes in the file: ranks 1 to 64 beside widths that are blocks, and others."""
    for number in range(6):
        encoding, rank = rng.choice(list(Encoding)), rng.randint(1, 64)
        width = rng.choice((32, 64, 96, 576, 640, 2048, 5120))
        heads = rng.choice((0, 0, 1, 2)) if width <= 640 else 0
        heads *= width % (2 * max(heads, 1)) == 0
        if heads == 0 and rng.random() < 0.5:
            shape = (rank, width)
        else:
            shape = (width, 32 * (rank // 16 + 1) if encoding is Encoding.Q8_0 else rank)
        most = 500_000 if encoding in (Encoding.F32, Encoding.BF16) else 60_000
        values = drawn(rng, shape).clip(-most, most)
        array = StoredArray(f"t{number}", shape, encoding, 0, num_permuted_heads=heads)
        yield array, in_file(values, encoding)


def drawn(rng: random.Random, shape: tuple[int, int]) -> Array:
    """Values of all magnitudes: denormals, zeros, huge ones, whole blocks of either."""
    numbers = np.random.default_rng(rng.randrange(1 << 32))
    values = numbers.normal(size=shape) * 10.0 ** numbers.integers(*rng.choice(((-3, 0), (-46, 7), (-9, -4))), shape)
    kind = rng.randrange(4)
    if kind == 0:
        values[: shape[0] // 2] = 0
    elif kind == 1:
        values *= numbers.random(shape) < 0.02
    elif kind == 2:
        values = values.round(2)
    return values.astype(np.float32)


def in_file(values: Array, encoding: Encoding) -> bytes:
    if encoding is Encoding.F32:
        return values.tobytes()
    if encoding is Encoding.F16:
        return values.astype(np.float16).tobytes()
    if encoding is Encoding.BF16:
        return to_bfloat16(values).tobytes()
    blocks = values.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
    codes = np.clip(np.rint(np.divide(blocks, scales, where=scales > 0, out=np.zeros_like(blocks))), -127, 127)
    return np.concatenate((scales.view(np.uint8), codes.astype(np.int8).view(np.uint8)), axis=1).tobytes()


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(("bad", "error", "says"), [
    (np.nan, BadAdapter, "holds NaN"), (-np.inf, BadAdapter, "holds NaN"),
    (1e9, UnsupportedAdapter, "adapter-dtype auto"),
])  # fmt: skip
def test_a_value_without_a_code_is_found_wherever_it_is(
    bad: float, error: type[Exception], says: str, codes: StripType, tmp_path: Path
) -> None:
    base, rng = BASES["even"], random.Random(says)
    written = write_adapter(tmp_path / "a", base, Options(ALL_LINEAR[:7], rank=3, dtypes=("F32", "BF16")))
    for name, (dtype, array) in list(written.tensors.items()):
        values = array.copy()
        if array.shape["lora_A" in name] % 32:
            continue  # no whole blocks: it keeps its type, whose range is float32's
        value = np.float32(bad) if dtype == "F32" else to_bfloat16(np.array([bad], np.float32))[0]
        values.reshape(-1)[rng.randrange(values.size)] = value
        spoiled = replace(written, folder=tmp_path / "b", tensors=written.tensors | {name: (dtype, values)})
        files = AdapterFiles(base, [tmp_path], PAGE_BYTES, scale_of=scale_of, codes=codes)
        with pytest.raises(error, match=f"`{name}` holds.*") as caught:
            packed(files, files.find(spoiled.save()))
        assert says in str(caught.value)


def test_what_has_codes_and_what_keeps_its_type(tmp_path: Path) -> None:
    base = targets_of(program_of(hidden_size=64, intermediate_size=104))
    options = Options(ALL_LINEAR[:7], rank=4, dtypes=("F16", "F32"), lora_bias=True, use_dora=True)
    opened = open_peft_adapter(write_adapter(tmp_path / "a", base, options).folder, base, [tmp_path])
    for update in quantised(opened.adapter, StripType.Q4).updates:
        a, b = update.lora_a, update.lora_b
        assert a.strip_type is (StripType.Q4 if a.shape[1] == 64 else StripType.F16)
        assert b.strip_type is (StripType.Q4 if b.shape[0] % 32 == 0 else StripType.F32)
        assert update.bias is not None
        assert update.magnitude is not None
        assert update.bias.codes is update.magnitude.codes is None


def test_heads_that_do_not_fit_into_what_is_read_at_once_keep_their_type() -> None:
    array = StoredArray("b", (1600, 8), Encoding.F32, 0, num_permuted_heads=16)
    assert array.file_shape[0] // array.num_permuted_heads == 100
    target = BASES["even"].by_module["model.layers.0.self_attn.q_proj"]
    lora_a = StoredArray("a", (8, 32), Encoding.F32, 0)
    for lora_b, is_coded in ((array, False), (replace(array, shape=(1280, 8)), True)):
        (update,) = quantised(Adapter((LowRankUpdate(target, 8, 1.0, lora_a, lora_b),)), StripType.Q8).updates
        assert update.lora_b.strip_type is (StripType.Q8 if is_coded else StripType.F32)


@pytest.mark.parametrize("page_bytes", [2048, 4096, 1 << 20])
def test_adapters_of_other_types_have_other_digests_whatever_the_pages(page_bytes: int, tmp_path: Path) -> None:
    base = BASES["even"]
    written = write_adapter(tmp_path / "a", base, Options(ALL_LINEAR, rank=4))
    digests, sizes = [], []
    for codes in (None, *CODES):
        files = AdapterFiles(base, [tmp_path], page_bytes, codes=codes, hasher=HASHER)
        found = files.find(written.folder)
        sizes.append(found.adapter.size_bytes)
        digests.append(packed(files, found, page_bytes)[1])
        assert found.num_pages == -(-found.adapter.size_bytes // page_bytes)
    assert len(set(digests)) == 3
    assert sizes[0] > sizes[1] > sizes[2]
