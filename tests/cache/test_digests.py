"""Keys: typed, length-prefixed, chained, and secret."""

from __future__ import annotations

from array import array
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarto.cache.digests import MATCH_UNIT, UNIT_BYTES, root_digest, root_fields, unit_digests
from kvarto.core.digest_fields import DIGEST_BYTES

ROOT = b"r" * DIGEST_BYTES


def token_bytes(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


fields = st.tuples(st.binary(max_size=12), st.binary(max_size=12), st.one_of(st.none(), st.text(max_size=8)))


@given(fields, fields)
def test_different_fields_have_different_bytes(
    a: tuple[bytes, bytes, str | None], b: tuple[bytes, bytes, str | None]
) -> None:
    assert (root_fields(*a) == root_fields(*b)) == (a == b)


def test_fields_that_look_alike_when_joined_are_told_apart() -> None:
    parts = (b"", b"S", b"A", b"SA", b"AS", b"S\x01\0\0\0\0\0\0\0x")
    salts = (None, "", "S", "A", "SA", "x", "\udc80", "\udc81")
    made = {root_fields(identity, adapter, salt) for identity, adapter, salt in product(parts, parts, salts)}
    assert len(made) == len(parts) ** 2 * len(salts)


def test_without_the_key_no_root_can_be_made() -> None:
    made = root_fields(b"model", b"", None)
    assert root_digest(b"a" * 32, made) != root_digest(b"b" * 32, made)
    assert len(root_digest(b"a" * 32, made)) == DIGEST_BYTES


@given(st.lists(st.integers(0, 3), max_size=100), st.integers(0, 100))
def test_a_chain_may_be_cut_anywhere(tokens: list[int], cut: int) -> None:
    data = token_bytes(tokens)
    whole = unit_digests(ROOT, data)
    assert len(whole) == len(tokens) // MATCH_UNIT
    cut = min(cut // MATCH_UNIT, len(whole))
    first = unit_digests(ROOT, data[: cut * UNIT_BYTES])
    rest = unit_digests(first[-1] if first else ROOT, data[cut * UNIT_BYTES :])
    assert first + rest == whole


@pytest.mark.parametrize("position", range(3 * MATCH_UNIT))
def test_every_token_changes_all_that_follows(position: int) -> None:
    tokens = list(range(3 * MATCH_UNIT))
    changed = tokens[:]
    changed[position] += 1 << 16
    before, after = unit_digests(ROOT, token_bytes(tokens)), unit_digests(ROOT, token_bytes(changed))
    unit = position // MATCH_UNIT
    assert before[:unit] == after[:unit]
    assert not set(before[unit:]) & set(after[unit:])
