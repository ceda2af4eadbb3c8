"""Pages of sequences, against a walk that computes a sequence chunk by chunk and keeps what the window sees."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarto.core.kv_format import LayerGroup
from kvarto.planning.page_count import longest_sequence, pages_for_group, pages_for_sequence

FULL = LayerGroup((0,), 1, 2, 16, None)


def windowed(window: int) -> LayerGroup:
    return LayerGroup((1,), 1, 2, 16, window)


def walked_pages(window: int | None, page_size: int, num_tokens: int, chunk_tokens: int, first_chunk: int) -> int:
    """The most pages at any step, the first chunk being `first_chunk` long."""
    most = computed = 0
    while computed < num_tokens:
        end = min(num_tokens, computed + (chunk_tokens if computed else first_chunk))
        first_seen = 0 if window is None else max(0, computed - window + 1)
        most = max(most, (end - 1) // page_size - first_seen // page_size + 1)
        computed = end
    return most


@settings(max_examples=300, deadline=None)
@given(
    window=st.one_of(st.none(), st.integers(1, 100)),
    page_size=st.sampled_from([8, 16, 32]),
    num_tokens=st.integers(0, 400),
    chunk_tokens=st.integers(1, 60),
    data=st.data(),
)
def test_no_walk_takes_more(
    window: int | None, page_size: int, num_tokens: int, chunk_tokens: int, data: st.DataObject
) -> None:
    group = FULL if window is None else windowed(window)
    first_chunk = data.draw(st.integers(1, chunk_tokens))
    walked = walked_pages(window, page_size, num_tokens, chunk_tokens, first_chunk)
    assert walked <= pages_for_group(group, page_size, num_tokens, chunk_tokens)


@pytest.mark.parametrize("window", [None, 1, 8, 20])
def test_some_walk_takes_as_many(window: int | None) -> None:
    group = FULL if window is None else windowed(window)
    for chunk_tokens in (1, 7, 16):
        walks = [walked_pages(window, 8, 400, chunk_tokens, first) for first in range(1, chunk_tokens + 1)]
        assert max(walks) == pages_for_group(group, 8, 400, chunk_tokens)


@settings(max_examples=200, deadline=None)
@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 60)), min_size=1, max_size=3),
    num_pages=st.integers(0, 80),
    chunk_tokens=st.integers(1, 40),
    most_tokens=st.integers(1, 600),
)
def test_the_longest_sequence_fits_and_one_page_more_does_not(
    windows: list[int | None], num_pages: int, chunk_tokens: int, most_tokens: int
) -> None:
    groups = [FULL if window is None else windowed(window) for window in windows]
    length = longest_sequence(groups, 16, num_pages, chunk_tokens, most_tokens)
    assert 0 <= length <= most_tokens
    assert pages_for_sequence(groups, 16, length, chunk_tokens) <= num_pages
    if length < most_tokens:
        assert pages_for_sequence(groups, 16, length + 1, chunk_tokens) > num_pages
