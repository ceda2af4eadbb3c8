"""Spare memory is used again by what has its size, and never more of it is kept than was said."""

from __future__ import annotations

import random

import numpy as np

from kvarto.adapters.spare_images import SpareImages


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
