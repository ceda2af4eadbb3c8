"""Laws of codes: sizes, round trips within their bounds, the same blocks whatever is beside them, nothing overflows."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvarto.adapters.strip_codes import dequantise, quantise
from kvarto.core.dtype import DType
from kvarto.core.strip_type import StripType
from kvarto.models.convert import to_bfloat16

Float32 = NDArray[np.float32]
CODES = (StripType.Q8, StripType.Q4)
MOST = {StripType.Q8: 127, StripType.Q4: 8}
SMALLEST_HALF = 2.0**-24
LARGEST = {StripType.Q8: 127 * 65519.0, StripType.Q4: 8 * 65519.0}
"""Scales of larger values round to infinity in float16."""


def drawn(seed: int, num_blocks: int = 300) -> Float32:
    """Blocks of values of all magnitudes, some zero, some with one that towers."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(num_blocks, 32)) * 10.0 ** rng.integers(-12, 5, (num_blocks, 1))
    values[rng.random(values.shape) < 0.1] = 0
    values[::7] = 0
    values[1::7, 5] *= 1e4
    values[2::7] = values[2::7].round(1)  # ties
    return np.clip(values, -5e5, 5e5).astype(np.float32)


def packed(values: Float32, type: StripType) -> NDArray[np.uint8]:
    blocks = quantise(values, type)
    assert blocks is not None
    return blocks


def test_types_of_files_have_their_names_and_sizes() -> None:
    for dtype in (DType.F32, DType.F16, DType.BF16):
        assert StripType(dtype.value).size_bytes(33) == 33 * dtype.itemsize
    assert [type.size_bytes(64) for type in CODES] == [68, 36]
    for type in CODES:
        with pytest.raises(AssertionError, match="33 columns"):
            type.size_bytes(33)


@pytest.mark.parametrize("type", CODES)
def test_what_codes_stand_for_is_a_bfloat16_near_the_value(type: StripType) -> None:
    for seed in range(20):
        values = drawn(seed)
        blocks = packed(values, type)
        assert len(blocks) == type.size_bytes(values.size)
        back = dequantise(blocks, type).reshape(values.shape)
        np.testing.assert_array_equal((to_bfloat16(back).astype(np.uint32) << 16).view(np.float32), back)
        largest = np.abs(values).max(axis=1, keepdims=True)
        # Half a step; of int4 one whole, where the largest value lies on the side with one code less or another
        # divisor is better for all. Then half of bfloat16's step, and of the smallest float16.
        step = largest / 127 / 2 if type is StripType.Q8 else largest / 7
        assert (np.abs(back - values) <= step * 1.001 + np.abs(back) * 2.0**-8 + SMALLEST_HALF / 2).all()
        assert (back[(values == 0).all(axis=1)] == 0).all()


def test_int4_is_never_worse_than_the_plain_way() -> None:
    values = np.random.default_rng(3).normal(size=(4000, 32)).astype(np.float32)
    places = np.abs(values).argmax(axis=1)[:, None]
    plain = (np.take_along_axis(values, places, 1) / -8).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(values / plain), -8, 7)
    back = dequantise(packed(values, StripType.Q4), StripType.Q4).reshape(values.shape)
    ours, theirs = (np.square((x - values).astype(np.float64)).sum(axis=1) for x in (back, codes * plain))
    assert (ours <= theirs * 1.1).all()  # bfloat16 rounds ours once more
    assert ours.sum() < 0.94 * theirs.sum()


@pytest.mark.parametrize("type", CODES)
def test_blocks_of_zeros_have_a_scale_of_zero_and_stay_zero(type: StripType) -> None:
    blocks = packed(np.array([0.0, -0.0] * 32, np.float32), type)
    assert blocks.reshape(2, -1)[:, :2].tolist() == [[0, 0]] * 2
    assert dequantise(blocks, type).view(np.uint32).tolist() == [0] * 64


@pytest.mark.parametrize("type", CODES)
def test_what_is_too_small_for_a_scale_becomes_zero_below_half_of_the_smallest_float16(type: StripType) -> None:
    for largest in (1e-40, 1e-9, 2.9e-8, 3.1e-8, 6e-8, 1e-7, 3e-7, 1e-6, 4e-6, 7e-6):
        values = (np.linspace(-1, 1, 32) * largest).astype(np.float32)
        back = dequantise(packed(values, type), type)
        step = max(SMALLEST_HALF, largest / MOST[type] * 1.2)
        assert np.abs(values[back == 0]).max(initial=0) <= step / 2
        assert np.abs(back - values).max() <= step * (0.5 if type is StripType.Q8 else 1.5)  # one code less on a side


@pytest.mark.parametrize("type", CODES)
def test_what_is_too_large_for_a_scale_is_refused(type: StripType) -> None:
    for sign in (1, -1):
        values = np.zeros(64, np.float32)
        values[40] = sign * LARGEST[type]
        assert np.abs(dequantise(packed(values, type), type)).max() > 0.9 * LARGEST[type]
        values[40] *= np.float32(1.0001)
        assert quantise(values, type) is None


@pytest.mark.parametrize("type", CODES)
def test_a_block_is_a_function_of_its_values(type: StripType) -> None:
    values = drawn(5)
    whole = packed(values, type).reshape(len(values), -1)
    for index in (0, 1, 50, 299):
        assert packed(values[index], type).tolist() == whole[index].tolist()


def test_every_code_and_scale_is_read_as_its_product() -> None:
    scales = np.arange(0x7C00, dtype=np.uint16)[::97].view(np.float16)
    scales = np.concatenate((scales, -scales))
    for type in CODES:
        for scale in scales[:: 1 if type is StripType.Q4 else 9]:
            codes = np.arange(-8, 8) if type is StripType.Q4 else np.arange(-128, 128)
            codes = np.tile(codes, 32 // len(codes) or 1)
            raw = codes.astype(np.int8).view(np.uint8).reshape(-1, 32)
            if type is StripType.Q4:
                raw = (raw[:, :16] + 8 & 15) | (raw[:, 16:] + 8 & 15) << 4
            head = np.tile(np.array([scale]).view(np.uint8), (len(raw), 1))
            want = codes.astype(np.float32) * np.float32(scale)
            want = (to_bfloat16(want).astype(np.uint32) << 16).view(np.float32)
            got = dequantise(np.concatenate((head, raw.astype(np.uint8)), axis=1), type)
            np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
