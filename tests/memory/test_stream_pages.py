"""Copies past the caches are copies: of these bytes, to these pages, and to no other."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from kvarto.core._native.memory import stream_pages

Bytes = NDArray[np.uint8]


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def test_bytes_arrive_wherever_they_begin_and_end_and_their_neighbours_stay() -> None:
    rng = random.Random(1)
    source = np.frombuffer(rng.randbytes(10_000), np.uint8)
    for size in [*range(1, 200), 4095, 4096, 4097, *(rng.randrange(1, 9000) for _ in range(100))]:
        start, begin = rng.randrange(130), rng.randrange(130)
        out = np.full(10_000, 0xA5, np.uint8)
        stream_pages(out[begin : begin + size], size, ids(0), source[start : start + size], size, ids(0))
        assert np.array_equal(out[begin : begin + size], source[start : start + size])
        assert (out[:begin] == 0xA5).all()
        assert (out[begin + size :] == 0xA5).all()


def test_each_page_gets_its_image_and_keeps_its_rest() -> None:
    rng = np.random.default_rng(2)
    for _ in range(100):
        num_pages, num_images, page_bytes = rng.integers(1, 20), rng.integers(1, 9), int(rng.integers(1, 700))
        image_bytes, count = int(rng.integers(1, page_bytes + 1)), rng.integers(0, num_pages + 1)
        out = rng.integers(0, 256, (num_pages, page_bytes), np.uint8)
        images = rng.integers(0, 256, (num_images, image_bytes), np.uint8)
        pages = rng.permutation(num_pages)[:count].astype(np.int32)
        which = rng.integers(0, num_images, count).astype(np.int32)
        expected = out.copy()
        expected[pages, :image_bytes] = images[which]
        stream_pages(out, page_bytes, pages, images, image_bytes, which)
        np.testing.assert_array_equal(out, expected)


def test_what_is_not_there_is_refused_before_anything_is_written() -> None:
    out, images = np.zeros((4, 64), np.uint8), np.ones((2, 64), np.uint8)
    largest = np.iinfo(np.int32).max
    for page, image in ((-1, 0), (4, 0), (largest, 0), (0, -1), (0, 2), (0, largest)):
        with pytest.raises(ValueError, match="outside of its region|not there"):
            stream_pages(out, 64, ids(1, page), images, 64, ids(0, image))
    for page_bytes, image_bytes in ((64, 65), (64, 0), (64, -1), (0, 0), (0, 64), (-64, -64), (1, 1 << 62)):
        with pytest.raises(ValueError, match="larger than a page, or empty"):
            stream_pages(out, page_bytes, ids(0), images, image_bytes, ids(0))
    with pytest.raises(ValueError, match="one image for each page"):
        stream_pages(out, 64, ids(0, 1), images, 64, ids(0))
    with pytest.raises(ValueError, match="outside of its region"):
        stream_pages(out, 1 << 62, ids(0), images, 64, ids(0))
    assert not out.any()


def test_arrays_of_another_kind_are_refused() -> None:
    out, image = np.zeros((4, 64), np.uint8), np.ones((1, 64), np.uint8)
    with pytest.raises(ValueError, match="int32"):
        stream_pages(out, 64, np.zeros(1, np.int64), image, 64, ids(0))  # type: ignore[arg-type]
    with pytest.raises((BufferError, ValueError)):
        stream_pages(out[:, :32], 32, ids(0), image, 32, ids(0))
    out.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        stream_pages(out, 64, ids(0), image, 64, ids(0))
