"""Laws of packing, for real and for odd sizes: every element once, no overlap, none straddles, slack below one page."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvarto.adapters.adapter import LowRankUpdate
from kvarto.adapters.packing import LINE_BYTES, TILE_COLUMNS, Packing, Strips, num_pages, pack, stream_bytes, strips_of
from kvarto.adapters.peft_files import open_peft_adapter
from kvarto.adapters.targets import BaseTargets, Role, targets_of
from kvarto.core.dtype import DType
from kvarto.core.strip_type import StripType
from tests.adapters.bases import PUBLISHED, program_of
from tests.adapters.held import held, page_images
from tests.adapters.writer import ALL_LINEAR, Options, write_adapter

SUBSETS = {
    "qv": ("q_proj", "v_proj"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "all and lm_head": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
    "down": ("down_proj",),
}
FLOATS = (StripType.F32, StripType.F16, StripType.BF16)
BASES = {name: program_of(config) for name, config in PUBLISHED.items()}
PAGE_SIZES = {
    name: sorted({
        program.kv_format(dtype, tokens).page_bytes
        for dtype in (DType.BF16, DType.F32, DType.I8) for tokens in (1, 8, 16, 32)
    })
    for name, program in BASES.items()
}  # fmt: skip


def matrices_of(base: BaseTargets, names: tuple[str, ...], rank: int, type: StripType = StripType.BF16) -> list[Strips]:
    found = []
    for module, target in sorted(base.by_module.items()):
        if module.rpartition(".")[2] in names and target.role is not Role.EMBED:
            found += [Strips(rank, target.in_width, type), Strips(rank, target.out_width, type)]
    return found


def check(packing: Packing, matrices: list[Strips]) -> None:
    strips = np.concatenate([[m.num_columns, m.type.block_bytes] * m.num_strips for m in matrices]).reshape(-1, 2)
    assert packing.strips_of.tolist() == np.cumsum([0, *(m.num_strips for m in matrices)]).tolist()
    assert packing.tiles_of[-1] == packing.num_tiles
    assert len(packing.tiles_of) == len(strips) + 1
    strip_of = np.repeat(np.arange(len(strips)), np.diff(packing.tiles_of))
    widths, items = strips[strip_of].T
    # Columns of each strip follow each other without a gap, in tiles that end at multiples of 512 or sooner.
    assert (np.diff(packing.tiles_of) > 0).all()
    firsts, lasts = packing.tiles_of[:-1], packing.tiles_of[1:] - 1
    ends = packing.first_column.astype(np.int64) + packing.num_columns
    assert (packing.first_column[firsts] == 0).all()
    assert (ends[lasts] == strips[:, 0]).all()
    inner = np.setdiff1d(np.arange(packing.num_tiles), firsts)
    assert (packing.first_column[inner] == ends[inner - 1]).all()
    assert packing.num_columns.min() >= 1
    assert ((ends - 1) // TILE_COLUMNS == packing.first_column // TILE_COLUMNS).all()
    # No tile leaves its page, none overlap, and types lie at multiples of their size.
    size = packing.num_columns.astype(np.int64) * items
    assert (packing.offset >= 0).all()
    assert (packing.offset + size <= packing.page_bytes).all()
    assert (packing.offset % items == 0).all()
    start = packing.page.astype(np.int64) * packing.page_bytes + packing.offset
    order = np.argsort(start)
    assert (start[order][1:] >= (start + size)[order][:-1]).all()
    assert size.sum() == packing.payload_bytes == sum(m.size_bytes for m in matrices)
    # Slack.
    assert packing.page.max() == packing.num_pages - 1
    assert packing.num_pages == num_pages(packing.payload_bytes, packing.page_bytes)
    assert 0 <= packing.slack_bytes < packing.page_bytes
    # Whole cache lines begin at one, and are cut at multiples of sixteen columns.
    is_line = widths * items % LINE_BYTES == 0
    assert (packing.offset[is_line] % LINE_BYTES == 0).all()
    assert (packing.first_column[is_line] % 16 == 0).all()


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("model", PUBLISHED)
def test_laws_hold_for_published_sizes(model: str, subset: str) -> None:
    base = targets_of(BASES[model])
    ranks = (1, 2, 256, 3, 64, 100, 5, 8, 13, 255) if subset == "qv" else (1, 2, 3, 8, 16, 1, 5, 8, 13, 1)
    for rank, page_bytes in zip(ranks, PAGE_SIZES[model], strict=False):
        matrices = matrices_of(base, SUBSETS[subset], rank)
        check(pack(matrices, page_bytes), matrices)


@pytest.mark.parametrize("model", PUBLISHED)
def test_slack_is_below_two_percent_for_all_linears(model: str) -> None:
    base = targets_of(BASES[model])
    for rank in (8, 16, 64, 256):
        size_bytes = sum(m.size_bytes for m in matrices_of(base, SUBSETS["all"], rank))
        for page_bytes in PAGE_SIZES[model]:
            slack = num_pages(size_bytes, page_bytes) * page_bytes - size_bytes
            assert slack < page_bytes
            if page_bytes <= size_bytes // 50:
                assert slack <= 0.02 * size_bytes


def test_the_numbers_of_a_known_model() -> None:
    matrices = matrices_of(targets_of(BASES["SmolLM2-135M"]), SUBSETS["all"], 64)
    page_bytes = BASES["SmolLM2-135M"].kv_format(DType.BF16, 16).page_bytes
    assert page_bytes == 368_640
    packing = pack(matrices, page_bytes)
    check(packing, matrices)
    assert packing.payload_bytes == 30 * 64 * 2 * (4 * 576 + 2 * (576 + 192) + 3 * (576 + 1536))
    assert packing.num_tiles > 50_000
    assert packing.slack_bytes / packing.payload_bytes < 0.02


@pytest.mark.parametrize("page_bytes", [4096, 12_288, 69_632, 2 << 20])
def test_laws_hold_for_odd_sizes_and_mixed_types(page_bytes: int) -> None:
    rng = random.Random(page_bytes)
    for _ in range(40):
        matrices = [
            Strips(rng.choice((1, 2, 7, 64)), rng.choice((1, 3, 33, 511, 512, 513, 896, 2049)), rng.choice(FLOATS))
            for _ in range(rng.randint(1, 12))
        ]
        check(pack(matrices, page_bytes), matrices)


def test_the_same_sizes_give_the_same_places() -> None:
    matrices = [Strips(3, 896, FLOATS[1]), Strips(3, 33, FLOATS[0]), Strips(1, 128, FLOATS[2])]
    one, two = pack(matrices, 4096), pack([*matrices], 4096)
    assert all(np.array_equal(getattr(one, name), getattr(two, name)) for name in Packing.__slots__)


def scale_of(update: LowRankUpdate) -> NDArray[np.float32]:
    """Any function of an update stands for what a base makes of its magnitude."""
    assert update.magnitude is not None
    return update.magnitude.values() * np.float32(0.5)


def test_tiles_of_the_images_are_the_tensors(tmp_path: Path) -> None:
    base = targets_of(program_of(hidden_size=640, intermediate_size=1100, vocab_size=97))
    options = Options(ALL_LINEAR, rank=5, dtypes=("F32", "BF16"), lora_bias=True, use_dora=True)
    written = write_adapter(tmp_path / "a", base, options)
    adapter = held(open_peft_adapter(written.folder, base, [tmp_path]))
    matrices = strips_of(adapter)
    packing = pack(matrices, 4096)
    check(packing, matrices)
    images = page_images(adapter, 4096, scale_of)
    assert len(images) == packing.num_pages == num_pages(stream_bytes(adapter), 4096)
    expected = []
    for update in adapter.updates:
        assert update.bias is not None
        expected += [update.lora_a.read(), update.lora_b.read().T, update.bias.read()[None], scale_of(update)[None]]
    for matrix, array in enumerate(expected):
        for row, strip in enumerate(range(*packing.strips_of[matrix : matrix + 2])):
            for tile in range(*packing.tiles_of[strip : strip + 2]):
                first, count = packing.first_column[tile], packing.num_columns[tile]
                found = np.frombuffer(images[packing.page[tile]], array.dtype, count, packing.offset[tile])
                np.testing.assert_array_equal(found, array[row, first : first + count])
