"""Laws of binding: strips lie inside the stream, cover it, overlap nowhere, and hold what the files hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvarto.adapters.adapter import Adapter, LowRankUpdate, TokenRows
from kvarto.adapters.arrays import Bits
from kvarto.adapters.binding import bind, bound_shape, unsupported
from kvarto.adapters.packing import num_pages, pack, stream_bytes, strips_of
from kvarto.adapters.peft_files import open_peft_adapter
from kvarto.adapters.targets import BaseTargets, Role, targets_of
from kvarto.core.bound_adapter import BoundAdapter, Strips
from tests.adapters.bases import program_of
from tests.adapters.held import HeldArray, array_of, held, page_images
from tests.adapters.writer import ALL_LINEAR, QV, Options, write_adapter

PAGE_BYTES = 4096
EVERYTHING = (*ALL_LINEAR, "model.embed_tokens", "lm_head")
MATRIX = [
    Options(QV, rank=1),
    Options(ALL_LINEAR, rank=5, dtypes=("BF16", "F32"), lora_bias=True),
    Options(ALL_LINEAR, rank=3, dtypes=("F16", "BF16"), use_dora=True, rank_pattern={"v_proj": 7}),
    Options(EVERYTHING, rank=4, dtypes=("F32", "F16")),
]


@pytest.fixture(scope="module", params=["even", "odd"])
def base(request: pytest.FixtureRequest) -> BaseTargets:
    sizes = {} if request.param == "even" else {"hidden_size": 72, "intermediate_size": 1101, "vocab_size": 97}
    return targets_of(program_of(**sizes))


@pytest.fixture(params=MATRIX, ids=lambda options: f"r{options.rank} {options.dtypes}")
def adapter(request: pytest.FixtureRequest, base: BaseTargets, tmp_path: Path) -> Adapter:
    written = write_adapter(tmp_path / "a", base, request.param)
    adapter = held(open_peft_adapter(written.folder, base, [tmp_path]))
    table = base.by_module[base.embed_module]
    rows = np.random.default_rng(2).normal(size=(3, table.out_width)).astype(np.float32)
    return replace(adapter, token_rows=(TokenRows(table.weight, (Role.EMBED,), (7, 90, 3), array_of(rows)),))


def scale_of(update: LowRankUpdate) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    assert update.magnitude is not None
    return update.magnitude.values() + np.float32(1)


def bound_to_all(adapter: Adapter, base: BaseTargets) -> BoundAdapter:
    count = num_pages(stream_bytes(adapter), PAGE_BYTES)
    return bind(bound_shape(adapter, base), np.arange(count, dtype=np.int32)[::-1].copy(), PAGE_BYTES)


def strips_in_order(bound: BoundAdapter) -> Iterator[Strips]:
    """As `strips_of` has them."""
    for update in bound.updates:
        found = (update.lora_a, update.lora_b, update.bias, update.magnitude)
        yield from (strips for strips in found if strips is not None)
    yield from (rows.rows for rows in bound.token_rows)


def test_strips_cover_the_stream_and_overlap_nowhere(adapter: Adapter, base: BaseTargets) -> None:
    bound = bound_to_all(adapter, base)
    spans = sorted((strips.start, strips.end) for strips in strips_in_order(bound))
    assert spans[0][0] == 0
    assert all(end == start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] == stream_bytes(adapter) <= len(bound.pages) * PAGE_BYTES
    assert all(strips.start % strips.type.alignment == 0 for strips in strips_in_order(bound))


def test_strips_begin_where_packing_places_their_first_tiles(adapter: Adapter, base: BaseTargets) -> None:
    packing = pack(strips_of(adapter), PAGE_BYTES)
    for matrix, strips in enumerate(strips_in_order(bound_to_all(adapter, base))):
        for index, strip in enumerate(range(*packing.strips_of[matrix : matrix + 2])):
            start = strips.start + index * strips.strip_bytes
            for tile in range(*packing.tiles_of[strip : strip + 2]):
                place = start + strips.type.size_bytes(int(packing.first_column[tile]))
                assert divmod(place, PAGE_BYTES) == (packing.page[tile], packing.offset[tile])


def test_strips_hold_what_the_files_hold(adapter: Adapter, base: BaseTargets) -> None:
    stream = b"".join(page_images(adapter, PAGE_BYTES, scale_of))
    bound = bound_to_all(adapter, base)

    def is_same(strips: Strips | None, array: HeldArray | None, values: Bits | None) -> None:
        assert (strips is None) == (array is None)
        if strips is not None and values is not None:
            found = np.frombuffer(stream, values.dtype, values.size, strips.start)
            np.testing.assert_array_equal(found.reshape(strips.num_strips, strips.num_columns), values)

    for update, of in zip(bound.updates, adapter.updates, strict=True):
        is_same(update.lora_a, of.lora_a, of.lora_a.read())
        is_same(update.lora_b, of.lora_b, of.lora_b.read().T)
        is_same(update.bias, of.bias, None if of.bias is None else of.bias.read()[None])
        is_same(update.magnitude, of.magnitude, None if of.magnitude is None else scale_of(of)[None])
    is_same(bound.token_rows[0].rows, adapter.token_rows[0].rows, adapter.token_rows[0].rows.read())


def test_updates_name_their_ops_in_order(adapter: Adapter, base: BaseTargets) -> None:
    bound = bound_to_all(adapter, base)
    places = [(update.op_index, update.first_row) for update in bound.updates]
    assert places == sorted(places)
    for update, of in zip(bound.updates, adapter.updates, strict=True):
        assert update.op_index == base.op_indices[of.target.weight, of.target.role]
        assert (update.rank, update.out_width) == (of.rank, of.target.out_width)
        assert update.lora_a.num_columns == of.target.in_width
        assert update.scaling == of.scaling


def test_rows_of_a_tied_pair_join_both_of_its_ops(tmp_path: Path) -> None:
    base = targets_of(program_of(tie_word_embeddings=True))
    adapter = held(open_peft_adapter(write_adapter(tmp_path / "a", base).folder, base, [tmp_path]))
    array = array_of(np.zeros((2, 32), np.float16))
    rows = TokenRows(base.by_module[base.embed_module].weight, (Role.EMBED, Role.LOGITS), (5, 4), array)
    bound = bound_to_all(replace(adapter, token_rows=(rows,)), base)
    first, second = bound.token_rows
    assert first.op_index < second.op_index
    assert first.rows == second.rows
    assert first.token_ids == second.token_ids == (5, 4)


def test_everything_that_is_read_can_be_run(adapter: Adapter) -> None:
    assert unsupported(adapter) is None
