"""WriteKV of every instruction set: its slots alone, in PyTorch's rounding, and int8 within half a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvarto.core.dtype import DType
from kvarto.core.kv_format import KVFormat
from kvarto.core.ops import Attention, HeadShape
from kvarto.core.step import Step
from tests.ops.native.paged_ops import ISAS, Array, Limits, PagedOps
from tests.ops.steps import paged_step

LAYER_SLOTS, LAYER_SLOT, NUM_PAGES = 3, 1, 5
ROUNDED = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}
each_isa = pytest.mark.parametrize("isa", ISAS)


def _ops(isa: str, heads: HeadShape, dtype: DType, page_size: int, num_tokens: int) -> tuple[PagedOps, Step]:
    kv = KVFormat(dtype, page_size, LAYER_SLOTS, heads.num_kv_heads, heads.head_dim)
    op = Attention("qkv", "out", heads, 0, LAYER_SLOT, 1.0)
    ops = PagedOps(isa, op, kv, NUM_PAGES, Limits(num_tokens, 1, num_tokens))
    return ops, paged_step([num_tokens], [num_tokens], [[4, 1, 3]], page_size)


def _rows(heads: HeadShape, num_tokens: int) -> Array:
    """Numbers of every size, subnormal and huge for 16 bits too."""
    rng = np.random.default_rng(4)
    sizes = np.exp2(rng.integers(-26, 18, (num_tokens, 1)))
    return (rng.standard_normal((num_tokens, heads.width)) * sizes).astype(np.float32)


@each_isa
@pytest.mark.parametrize("dtype", list(ROUNDED))
@pytest.mark.parametrize(("page_size", "head_dim"), [(8, 24), (256, 80)])
def test_touches_its_slots_alone(isa: str, dtype: DType, page_size: int, head_dim: int) -> None:
    heads = HeadShape(2, 3, head_dim)
    num_tokens = 2 * page_size + 3
    ops, step = _ops(isa, heads, dtype, page_size, num_tokens)
    rows = _rows(heads, num_tokens)
    rows[1, 2 * head_dim], rows[2, 5 * head_dim + 1] = np.nan, -np.inf
    before = ops.pages.copy()
    ops.write(rows, step)
    written = torch.from_numpy(rows).view(num_tokens, 8, head_dim)[:, 2:].to(ROUNDED[dtype]).view(torch.uint8)
    want = before.copy()
    kv_bytes = head_dim * dtype.itemsize
    for token, slot in enumerate(step.slot_mapping[0]):
        page, offset = divmod(int(slot), page_size)
        for plane_head in range(6):
            start = 6 * page_size * kv_bytes * LAYER_SLOT + (plane_head * page_size + offset) * kv_bytes
            want[page, start : start + kv_bytes] = written[token, plane_head].numpy()
    is_nan = np.isnan(_floats(want, dtype))
    np.testing.assert_array_equal(np.isnan(_floats(ops.pages, dtype)), is_nan)
    np.testing.assert_array_equal(_floats(ops.pages, dtype)[~is_nan], _floats(want, dtype)[~is_nan])


def _floats(pages: Array, dtype: DType) -> Array:
    floats: Array = torch.from_numpy(pages.reshape(-1)).view(ROUNDED[dtype]).to(torch.float32).numpy()
    return floats


@each_isa
@pytest.mark.parametrize(("page_size", "head_dim"), [(8, 24), (16, 64), (64, 256)])
def test_int8_is_within_half_a_step(isa: str, page_size: int, head_dim: int) -> None:
    heads = HeadShape(2, 3, head_dim)
    num_tokens = 2 * page_size + 3
    ops, step = _ops(isa, heads, DType.I8, page_size, num_tokens)
    rows = _rows(heads, num_tokens)
    rows[0, 2 * head_dim : 3 * head_dim] = 0
    ops.write(rows, step)
    heads_of_row = rows.reshape(num_tokens, 8, head_dim)
    for token, slot in enumerate(step.slot_mapping[0]):
        page, offset = divmod(int(slot), page_size)
        codes, scales = ops.planes(page, LAYER_SLOT)
        want = heads_of_row[token, 2:].reshape(2, 3, head_dim)
        scale = scales[:, :, offset]
        np.testing.assert_allclose(scale, np.abs(want).max(-1) / 127, rtol=1e-6)
        error = np.abs(codes[:, :, offset].astype(np.float64) * scale[..., None] - want)
        assert (error <= 0.5001 * scale[..., None]).all()
        assert np.abs(codes[:, :, offset].astype(np.int32)).max() <= 127


@each_isa
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_int8_says_what_is_not_finite(isa: str, value: float) -> None:
    """A scale of NaN makes the whole head NaN, and leaves the other heads alone."""
    heads = HeadShape(1, 2, 32)
    ops, step = _ops(isa, heads, DType.I8, 16, 3)
    rows = _rows(heads, 3)
    rows[1, 2 * 32 + 5] = value  # second k head of token 1
    ops.write(rows, step)
    _, scales = ops.planes(4, LAYER_SLOT)
    is_nan = np.isnan(scales[:, :, :3])
    assert is_nan[0, 1, 1]
    assert is_nan.sum() == 1


@pytest.mark.parametrize("dtype", [*ROUNDED, DType.I8])
def test_every_set_writes_the_same_bits(dtype: DType) -> None:
    heads = HeadShape(1, 2, 40)
    written = []
    for isa in ISAS:
        ops, step = _ops(isa, heads, dtype, 16, 40)
        ops.write(_rows(heads, 40), step)
        written.append(ops.pages.copy())
    for pages in written[1:]:
        np.testing.assert_array_equal(pages, written[0])
