"""What backends refuse to bind, and pages that are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvarto.adapters.binding import bind, bound_shape
from kvarto.adapters.packing import num_pages, stream_bytes
from kvarto.adapters.targets import targets_of
from kvarto.core.bound_adapter import BoundAdapter, BoundRows, Strips
from kvarto.core.strip_type import StripType
from tests.ops.adapters import Draw, drawn
from tests.ops.opened import LIMITS, LLAMA, Opened, open_backend

WITH_LORA = replace(LIMITS, max_lora_rank=4)


@pytest.fixture(scope="module", params=["reference", "native"])
def llama(request: pytest.FixtureRequest) -> Iterator[Opened]:
    opened = open_backend(LLAMA, request.param, limits=WITH_LORA)
    yield opened
    opened.backend.close()


@pytest.fixture
def bound(llama: Opened) -> BoundAdapter:
    base = targets_of(llama.program)
    names = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj")
    adapter = drawn([base.find(name) for name in names], Draw())
    page_bytes = llama.layout.kv_format.page_bytes
    pages = np.arange(num_pages(stream_bytes(adapter), page_bytes), dtype=np.int32)
    return bind(bound_shape(adapter, base), pages, page_bytes)


def _shaped(bound: BoundAdapter, **changes: object) -> BoundAdapter:
    return replace(bound, shape=replace(bound.shape, **changes))  # type: ignore[arg-type]


def _update(**changes: object) -> Callable[[BoundAdapter], BoundAdapter]:
    def change(bound: BoundAdapter) -> BoundAdapter:
        first, *others = bound.updates
        return _shaped(bound, updates=(replace(first, **changes), *others))  # type: ignore[arg-type]

    return change


def _strips(name: str, **changes: object) -> Callable[[BoundAdapter], BoundAdapter]:
    def change(bound: BoundAdapter) -> BoundAdapter:
        first, *others = bound.updates
        strips = replace(getattr(first, name), **changes)
        return _shaped(bound, updates=(replace(first, **{name: strips}), *others))

    return change


def _rows(
    *token_ids: int, op_index: int = 0, width: int = 64, type: StripType = StripType.F32
) -> Callable[[BoundAdapter], BoundAdapter]:
    rows = BoundRows(op_index, token_ids, Strips(0, max(len(token_ids), 1), width, type))
    return lambda bound: _shaped(bound, token_rows=(rows,))


FAULTS: dict[str, tuple[Callable[[BoundAdapter], BoundAdapter], str]] = {
    "page": (lambda bound: replace(bound, pages=bound.pages + 100_000), "pages"),
    "negative page": (lambda bound: replace(bound, pages=bound.pages - 1), "pages -1"),
    "page size": (lambda bound: replace(bound, page_bytes=4096), "those of the pool"),
    "too few pages": (lambda bound: replace(bound, pages=bound.pages[:0]), "bytes"),
    "op": (_update(op_index=1), "Norm, cannot be updated"),
    "no op": (_update(op_index=-1), "op -1"),
    "band": (_update(first_row=100), "rows 100 to 196 of 160"),
    "negative band": (_update(first_row=-1), "rows -1"),
    "scaling": (_update(scaling=float("nan")), "scaling"),
    "overlap": (_update(first_row=40), "overlap"),
    "order": (lambda bound: _shaped(bound, updates=bound.updates[::-1]), "another order"),
    "columns": (_strips("lora_a", num_columns=63), "A has 63 columns"),
    "rank": (_strips("lora_a", num_strips=3), "A has 3 rows, B 4"),
    "start": (_strips("lora_a", start=-4), "bytes -4"),
    "end": (_strips("lora_b", start=1 << 40), "bytes"),
    "alignment": (_strips("lora_b", start=2), "at byte 2"),
    "codes": (_strips("lora_b", type=StripType.Q8, start=2, num_columns=95), "int8 strips of 95 columns"),
    "codes inside a scale": (_strips("lora_b", type=StripType.Q4, start=1), "int4 at byte 1"),
    "bias of codes": (_update(bias=Strips(0, 1, 96, StripType.Q8)), "a vector of"),
    "rows of codes": (_rows(3, type=StripType.Q4), "rows of tokens in int4"),
    "bias": (_update(bias=Strips(0, 1, 95, StripType.F32)), "beside 96 rows"),
    "magnitude": (_update(magnitude=Strips(0, 1, 96, StripType.F16)), "not float32"),
    "token": (_rows(3, 211), "tokens 3 to 211"),
    "tokens twice": (_rows(3, 3), "twice"),
    "no tokens": (_rows(), "0 tokens"),
    "rows of a linear": (_rows(3, op_index=2), "no rows of tokens"),
    "width of rows": (_rows(3, width=32), "32 elements"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_does_not_fit_is_refused(llama: Opened, bound: BoundAdapter, name: str) -> None:
    change, message = FAULTS[name]
    with pytest.raises(ValueError, match=message):
        llama.backend.bind_adapter(0, change(bound))
    llama.backend.bind_adapter(0, bound)
    llama.backend.unbind_adapter(0)


def test_larger_ranks_than_planned_are_refused(llama: Opened, bound: BoundAdapter) -> None:
    (first, *_) = bound.updates
    five = replace(first, lora_a=replace(first.lora_a, num_strips=5), lora_b=replace(first.lora_b, num_strips=5))
    with pytest.raises(ValueError, match="rank 5, planned for 4"):
        llama.backend.bind_adapter(0, _shaped(bound, updates=(five,)))


def test_handles_are_small_and_bound_once(llama: Opened, bound: BoundAdapter) -> None:
    for handle in (-1, 4096):
        with pytest.raises(ValueError, match=f"handle {handle}"):
            llama.backend.bind_adapter(handle, bound)
    llama.backend.bind_adapter(4095, bound)
    with pytest.raises(AssertionError, match="4095 is bound"):
        llama.backend.bind_adapter(4095, bound)
    llama.backend.unbind_adapter(4095)
    with pytest.raises(AssertionError, match="4095 is not bound"):
        llama.backend.unbind_adapter(4095)


def test_pages_are_written_from_their_start_and_keep_their_rest(llama: Opened) -> None:
    assert llama.backend.arena is not None
    region, page_bytes = llama.layout.pages, llama.layout.kv_format.page_bytes
    images = np.random.default_rng(1).integers(0, 256, (5, page_bytes), np.uint8)
    for size in (1, 100, page_bytes - 1, page_bytes):
        before = llama.backend.arena.array.copy()
        pages, which = np.array([7, 0, llama.layout.num_pages - 1, 3], np.int32), np.array([4, 1, 1, 0], np.int32)
        llama.backend.write_pages(pages, np.ascontiguousarray(images[:, :size]), which)
        for page, image in zip(pages.tolist(), which.tolist(), strict=True):
            before[region.offset + page * page_bytes :][:size] = images[image, :size]
        np.testing.assert_array_equal(llama.backend.arena.array, before)
    wrong = ((-1, 0, 1), (llama.layout.num_pages, 0, 1), (0, -1, 1), (0, 5, 1), (0, 0, page_bytes + 1))
    for page, image, size in wrong:
        pages, which = np.array([page], np.int32), np.array([image], np.int32)
        with pytest.raises((AssertionError, ValueError)):
            llama.backend.write_pages(pages, np.zeros((5, size), np.uint8), which)
