"""A copy past the caches is a copy: of these bytes, and of no other."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvarto.core import _native


def test_bytes_arrive_wherever_they_begin_and_end_and_their_neighbours_stay() -> None:
    rng = random.Random(1)
    source = np.frombuffer(rng.randbytes(10_000), np.uint8)
    for size in [*range(200), 4095, 4096, 4097, *(rng.randrange(9000) for _ in range(100))]:
        start, begin = rng.randrange(130), rng.randrange(130)
        out = np.full(10_000, 0xA5, np.uint8)
        _native.memory.stream_copy(out[begin : begin + size], source[start : start + size])
        assert np.array_equal(out[begin : begin + size], source[start : start + size])
        assert (out[:begin] == 0xA5).all()
        assert (out[begin + size :] == 0xA5).all()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="another number"):
        _native.memory.stream_copy(np.empty(64, np.uint8), np.empty(65, np.uint8))
    with pytest.raises((BufferError, ValueError)):
        _native.memory.stream_copy(np.empty((8, 8), np.uint8)[:, :4], np.empty(32, np.uint8))
    read_only = np.empty(8, np.uint8)
    read_only.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        _native.memory.stream_copy(read_only, np.empty(8, np.uint8))
