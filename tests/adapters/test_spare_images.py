"""Spare memory is used again by what has its size, and never more of it is kept than was said."""

from __future__ import annotations

import random

import numpy as np

from kvarto.adapters.spare_images import SpareImages, new_images


def test_a_block_is_taken_again_by_its_size_and_by_nobody_twice() -> None:
    spare = SpareImages(most_bytes=1000)
    block = spare.take(2, 100)
    spare.give(block)
    assert spare.take(3, 100) is not block
    assert spare.take(2, 100) is block
    assert spare.take(2, 100) is not block
    assert spare.size_bytes == 0


def test_no_more_is_kept_than_was_said() -> None:
    rng = random.Random(1)
    spare, out = SpareImages(most_bytes=1000), list[np.ndarray]()
    for _ in range(500):
        if rng.random() < 0.5:
            out.append(spare.take(rng.randrange(1, 6), 100))
        elif out:
            spare.give(out.pop(rng.randrange(len(out))))
        assert 0 <= spare.size_bytes <= 1000
        assert len({id(block) for block in out}) == len(out)
        if rng.random() < 0.1:
            spare.shrink(300)
            assert spare.size_bytes <= 300
    spare.give(np.empty((20, 100), np.uint8))
    assert spare.size_bytes == 0


def test_blocks_begin_with_a_cache_line_and_are_as_large_as_was_asked() -> None:
    for num_pages, page_bytes in ((1, 64), (3, 100), (7, 4096), (3, 1 << 20)):
        block = new_images(num_pages, page_bytes)
        assert block.shape == (num_pages, page_bytes)
        assert block.flags.c_contiguous
        assert block.ctypes.data % 64 == 0
