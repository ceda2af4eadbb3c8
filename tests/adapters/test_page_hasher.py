"""Digests follow from POLYVAL as RFC 8452 has it, on every instruction set; and equal pages alone have equal ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from blake3 import blake3
from numpy.typing import NDArray

from kvarto.adapters.page_hasher import PageHasher
from kvarto.core import _native
from kvarto.core.digest_fields import PAGE_KEY_BYTES

Bytes = NDArray[np.uint8]
P = 1 << 128 | 1 << 127 | 1 << 126 | 1 << 121 | 1
ISAS = _native.ops.isas()
FAST = [isa for isa in ISAS if _native.adapters.can_hash_pages(isa)]
KEY = random.Random(0).randbytes(PAGE_KEY_BYTES)


def dot(a: int, b: int) -> int:
    """a b / x^128, in exact integers."""
    product = 0
    for place in range(128):
        product ^= (a << place) * (b >> place & 1)
    for _ in range(128):
        product = (product ^ P * (product & 1)) >> 1
    return product


def polyval(point: bytes, message: bytes) -> bytes:
    h, total = int.from_bytes(point, "little"), 0
    for start in range(0, len(message), 16):
        total = dot(total ^ int.from_bytes(message[start : start + 16], "little"), h)
    return total.to_bytes(16, "little")


def values_of(isa: str, point: bytes, pages: Bytes) -> list[bytes]:
    values = np.full((len(pages), 16), 0xA5, np.uint8)
    _native.adapters.hash_pages(isa, point, pages, pages.shape[1], np.arange(len(pages), dtype=np.int32), values)
    return [value.tobytes() for value in values]


def random_pages(rng: random.Random, num_pages: int, page_bytes: int) -> Bytes:
    return np.frombuffer(rng.randbytes(num_pages * page_bytes), np.uint8).reshape(num_pages, page_bytes).copy()


@pytest.mark.parametrize("isa", FAST)
def test_the_value_is_that_of_the_standard(isa: str) -> None:
    """The example of RFC 8452, appendix A; blocks of zeros before the first add nothing."""
    point = bytes.fromhex("25629347589242761d31f826ba4b757b")
    blocks = bytes.fromhex("4f4f95668c83dfb6401762bb2d01a262d1a24ddd2721d006bbe45f20d3c9f362")
    for size in (64, 1024, 4096):
        page = np.frombuffer(blocks.rjust(size, b"\0"), np.uint8).reshape(1, size)
        assert values_of(isa, point, page)[0].hex() == "f7a3b47b846119fae5b7866cf5e5b77e"


@pytest.mark.parametrize("isa", FAST)
def test_values_are_those_of_exact_integers(isa: str) -> None:
    rng = random.Random(1)
    extremes = [bytes(16), b"\x01".ljust(16, b"\0"), b"\xff" * 16]
    for lines in [*range(1, 18), 31, 32, 33]:
        point = rng.choice([rng.randbytes(16), *extremes])
        pages = random_pages(rng, 2, 64 * lines)
        pages[1] |= np.uint8(rng.choice((0, 0xFF)))  # bytes that are NaN in each type
        assert values_of(isa, point, pages) == [polyval(point, page.tobytes()) for page in pages], (lines, point)


def test_all_sets_agree_on_large_pages_wherever_they_lie() -> None:
    rng = random.Random(2)
    for lines in (64, 1000, 5760):
        point, raw = rng.randbytes(16), rng.randbytes(3 * 64 * lines + 63)
        start = rng.randrange(64)
        pages = np.frombuffer(raw, np.uint8)[start : start + 3 * 64 * lines].reshape(3, -1)
        assert all(values_of(isa, point, pages) == values_of(FAST[0], point, pages) for isa in FAST)


@pytest.mark.parametrize("isa", ISAS)
def test_a_digest_is_keyed_and_covers_value_and_length(isa: str) -> None:
    rng = random.Random(3)
    for size in (64, 4096, 4160):
        pages, hasher = random_pages(rng, 3, size), PageHasher(KEY, isa=isa)
        for page, digest in zip(pages, hasher.digests(pages), strict=True):
            covered = polyval(KEY[:16], page.tobytes()) + size.to_bytes(8, "little")
            expected = blake3(covered if isa in FAST else page.tobytes(), key=KEY[16:]).digest()
            assert digest == expected


def changed(rng: random.Random, page: Bytes) -> Iterator[Bytes]:
    """The same, but for a bit, two blocks that changed places, or a turn."""
    for _ in range(40):
        other = page.copy()
        other[rng.randrange(len(page))] ^= 1 << rng.randrange(8)
        yield other
    blocks = page.reshape(-1, 16)
    for _ in range(40):
        one, two = rng.sample(range(len(blocks)), 2)
        other = blocks.copy()
        other[[one, two]] = other[[two, one]]
        yield other.reshape(-1)
    yield np.roll(page, 16)
    yield np.roll(page, 64)


@pytest.mark.parametrize("isa", ISAS)
def test_pages_are_equal_where_their_digests_are(isa: str) -> None:
    rng = random.Random(4)
    for size in (64, 1024, 8256):
        page = random_pages(rng, 1, size)[0]
        pages = np.stack([page, *changed(rng, page), np.zeros_like(page), np.full_like(page, 0xFF)])
        digests = PageHasher(isa=isa).digests(pages)
        kinds = [each.tobytes() for each in pages]
        assert len(set(digests)) == len(set(kinds)) == len(set(zip(digests, kinds, strict=True))) > 40


@pytest.mark.parametrize("isa", ISAS)
def test_pages_are_hashed_in_the_order_asked_for(isa: str) -> None:
    pages, hasher = random_pages(random.Random(6), 5, 448), PageHasher(KEY, isa=isa)
    of_all = hasher.digests(pages)
    for which in ([], [3], [4, 0, 0, 2], [2, 1, 0, 4, 3]):
        assert hasher.digests(pages, np.array(which, np.int32)) == tuple(of_all[page] for page in which)


@pytest.mark.parametrize("isa", ISAS)
def test_zeros_of_another_length_have_another_digest(isa: str) -> None:
    """Their values are all zero."""
    hasher = PageHasher(KEY, isa=isa)
    assert len({hasher.digests(np.zeros((1, size), np.uint8)) for size in (64, 128, 4096)}) == 3


@pytest.mark.parametrize("isa", ISAS)
def test_equal_pages_have_one_digest_under_one_key_and_others_under_others(isa: str) -> None:
    pages = np.repeat(random_pages(random.Random(5), 1, 512), 2, axis=0)
    keys = [KEY, KEY[:16] + bytes(32), bytes(16) + KEY[16:], None, None]
    found = [set(PageHasher(key, isa=isa).digests(pages)) for key in keys]
    assert [len(each) for each in found] == [1] * len(keys)
    assert len(set.union(*found)) == len(keys) - (isa not in FAST)  # without a polynomial, the point is not used
    assert set(PageHasher(KEY, isa=isa).digests(pages)) == found[0]


def test_the_portable_set_goes_without() -> None:
    for isa in ISAS:
        assert PageHasher(isa=isa).algorithm == ("BLAKE3" if isa == "portable" else "POLYVAL")
    with pytest.raises(ValueError, match="`portable` multiplies nothing without carries"):
        values_of("portable", bytes(16), np.zeros((1, 64), np.uint8))


@pytest.mark.skipif(not FAST, reason="no instruction set here multiplies without carries")
def test_what_does_not_fit_is_refused() -> None:
    isa, page = FAST[-1], np.zeros((2, 128), np.uint8)
    values, both = np.zeros((2, 16), np.uint8), np.arange(2, dtype=np.int32)
    for page_bytes in (0, -64, 63, 65, 1, 96, 1 << 62, -(1 << 63)):
        with pytest.raises(ValueError, match="multiples of 64|outside of its region"):
            _native.adapters.hash_pages(isa, bytes(16), page, page_bytes, both, values)
    for outside in (-1, 2, 1 << 30, -(1 << 31)):
        with pytest.raises(ValueError, match="outside of its region"):
            _native.adapters.hash_pages(isa, bytes(16), page, 128, np.array([0, outside], np.int32), values)
    with pytest.raises(ValueError, match="a point has 16 bytes"):
        _native.adapters.hash_pages(isa, bytes(15), page, 64, both, values)
    for places in (np.zeros((1, 16), np.uint8), np.zeros((3, 16), np.uint8), np.zeros(33, np.uint8)):
        with pytest.raises(ValueError, match="one place"):
            _native.adapters.hash_pages(isa, bytes(16), page, 128, both, places)
    with pytest.raises(ValueError, match="`vax` cannot run here"):
        _native.adapters.hash_pages("vax", bytes(16), page, 128, both, values)
    with pytest.raises(ValueError, match="pages of 96 bytes"):
        PageHasher(KEY, isa=isa).digests(np.zeros((2, 96), np.uint8))
    assert PageHasher(KEY, isa=isa).digests(np.zeros((0, 64), np.uint8)) == ()
