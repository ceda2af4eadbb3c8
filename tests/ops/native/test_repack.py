"""Repacking moves bits and loses none: rows of every format come back from panels with the bits of `gguf`'s values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvarto.core._native import weights as native
from kvarto.core.weight_format import LANES, WeightFormat, block_columns, packed_bytes, panel_bytes, row_bytes
from tests.ops.native.file_rows import QUANTS, meaning, random_rows

CASES = [
    *((format, 0, columns) for format in WeightFormat if format.is_float for columns in (1, 6, 33)),
    *((format, 0, blocks * block_columns(format)) for format in QUANTS for blocks in (1, 3)),
    *((WeightFormat.INT4, group_size, groups * group_size) for group_size in (32, 64, 128, 96) for groups in (1, 3)),
]
SENTINEL = 0xA5


def pack(format: WeightFormat, group_size: int, columns: int, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    panels = np.full(packed_bytes(format, len(raw), columns, group_size) + 64, SENTINEL, np.uint8)
    native.repack_rows(format.code, group_size, columns, raw, panels)
    assert (panels[-64:] == SENTINEL).all(), "written beyond the panels"
    return panels[:-64]


def unpack(
    format: WeightFormat, group_size: int, panels: np.ndarray[Any, Any], first: int, last: int, columns: int
) -> np.ndarray[Any, Any]:
    out = np.empty((last - first, columns), np.float32)
    native.unpack_rows(format.code, group_size, panels, first, out)
    return out


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), np.ascontiguousarray(b, np.float32).view(np.uint32))


@pytest.mark.parametrize(("format", "group_size", "columns"), CASES)
def test_every_bit_comes_back(format: WeightFormat, group_size: int, columns: int) -> None:
    rng = np.random.default_rng(columns + group_size)
    for num_rows in (1, 15, 16, 17, 48):
        raw = random_rows(format, num_rows, columns, rng, group_size)
        expected = meaning(format, raw, group_size)
        panels = pack(format, group_size, columns, raw)
        assert same_bits(unpack(format, group_size, panels, 0, num_rows, columns), expected)
        first = num_rows // 3
        assert same_bits(unpack(format, group_size, panels, first, num_rows, columns), expected[first:])
        padding = unpack(format, group_size, panels, num_rows, -(-num_rows // LANES) * LANES, columns)
        assert not padding.any(), "padding rows are zero"


@pytest.mark.parametrize(("format", "group_size", "columns"), CASES)
def test_content_is_kept_bit_for_bit(format: WeightFormat, group_size: int, columns: int) -> None:
    """No two different files make the same panels: every bit of the rows is in exactly one bit of the panels."""
    rng = np.random.default_rng(1)
    raw = random_rows(format, LANES, columns, rng, group_size)
    panels = pack(format, group_size, columns, raw)
    # A pair's second half is padding where F16's columns are odd; all else has as many bits as on file.
    if columns % block_columns(format, group_size) == 0:
        assert panel_bytes(format, columns, group_size) == raw.size
    for _ in range(40):
        row, at, bit = rng.integers(LANES), rng.integers(raw.shape[1]), rng.integers(8)
        flipped = raw.copy()
        flipped[row, at] ^= np.uint8(1 << bit)
        if format is WeightFormat.INT4 and flipped.reshape(LANES, -1, 3 + group_size // 2)[:, :, 2].max() > 15:
            continue
        difference = pack(format, group_size, columns, flipped) ^ panels
        assert np.bitwise_count(difference).sum() == 1


@pytest.mark.parametrize(("format", "group_size", "columns"), CASES)
def test_blocks_of_rows_land_side_by_side(format: WeightFormat, group_size: int, columns: int) -> None:
    """Storing by blocks of whole panels equals storing at once: how files are read does not matter."""
    raw = random_rows(format, 75, columns, np.random.default_rng(2), group_size)
    whole = pack(format, group_size, columns, raw)
    pieces = np.zeros_like(whole)
    bytes_of_panel = panel_bytes(format, columns, group_size)
    for first, last in ((48, 75), (0, 16), (16, 48)):
        native.repack_rows(format.code, group_size, columns, raw[first:last], pieces[first // LANES * bytes_of_panel :])
    end = -(-75 // LANES) * bytes_of_panel
    assert np.array_equal(pieces[:end], whole[:end])


@pytest.mark.parametrize(("format", "group_size", "columns"), CASES)
def test_sizes_agree_with_the_plans(format: WeightFormat, group_size: int, columns: int) -> None:
    for num_rows in (0, 1, 16, 17, 4096):
        expected = packed_bytes(format, num_rows, columns, group_size)
        assert native.part_bytes(format.code, group_size, num_rows, columns) == expected
        assert expected % 64 == 0
    assert native.file_row_bytes(format.code, group_size, columns) == row_bytes(format, columns, group_size)


def test_no_rows_write_nothing() -> None:
    panels = np.full(544, SENTINEL, np.uint8)
    native.repack_rows(WeightFormat.Q8_0.code, 0, 32, np.empty((0, 34), np.uint8), panels)
    assert (panels == SENTINEL).all()


@pytest.mark.parametrize(
    ("format", "group_size", "columns", "raw_bytes", "panel_size"),
    [
        (99, 0, 32, 34, 544),
        (-1, 0, 32, 34, 544),
        (WeightFormat.Q8_0.code, 0, 33, 34, 544),  # not whole blocks
        (WeightFormat.Q8_0.code, 0, 32, 33, 544),  # rows too short
        (WeightFormat.Q8_0.code, 0, 32, 34, 543),  # panels too small
        (WeightFormat.Q8_0.code, 32, 32, 34, 544),  # a group size where there is none
        (WeightFormat.INT4.code, 0, 32, 19, 304),
        (WeightFormat.INT4.code, 48, 48, 27, 432),
    ],
)
def test_what_does_not_fit_is_refused(
    format: int, group_size: int, columns: int, raw_bytes: int, panel_size: int
) -> None:
    panels = np.full(panel_size, SENTINEL, np.uint8)
    with pytest.raises(ValueError):
        native.repack_rows(format, group_size, columns, np.zeros((16, raw_bytes), np.uint8), panels)
    assert (panels == SENTINEL).all()
