"""How many pages sequences take. Pure arithmetic over layer groups.

A full-attention group keeps all tokens. A windowed group keeps, at its largest, the tokens of the step at hand and the
`window - 1` before them, which may begin in the middle of a page:

    page        |....ww|wwwwww|wwcccc|cccc..|        w: seen through the window, c: this step's chunk
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from kvarto.core.buffers import StepLimits
from kvarto.core.kv_format import LayerGroup
from kvarto.core.units import ceil_div


def pages_for_sequence(groups: Sequence[LayerGroup], page_size: int, num_tokens: int, chunk_tokens: int) -> int:
    """Pages of all groups for one sequence of `num_tokens`, computed in chunks of at most `chunk_tokens`."""
    return sum(pages_for_group(group, page_size, num_tokens, chunk_tokens) for group in groups)


def pages_for_group(group: LayerGroup, page_size: int, num_tokens: int, chunk_tokens: int) -> int:
    """Pages of one group, as in `pages_for_sequence`."""
    all_pages = ceil_div(num_tokens, page_size)
    if group.window is None:
        return all_pages
    kept_tokens = group.window - 1 + chunk_tokens
    return min(all_pages, ceil_div(kept_tokens - 1, page_size) + 1)


def longest_sequence(
    groups: Sequence[LayerGroup], page_size: int, num_pages: int, chunk_tokens: int, most_tokens: int
) -> int:
    """Tokens of the longest sequence, up to `most_tokens`, that `num_pages` can hold."""

    def pages(num_full: int) -> int:
        return pages_for_sequence(groups, page_size, num_full * page_size, chunk_tokens)

    # Pages grow with tokens, so the first length that does not fit is found by bisection.
    candidates = range(ceil_div(most_tokens, page_size) + 1)
    return min((bisect_right(candidates, num_pages, key=pages) - 1) * page_size, most_tokens)


def default_num_pages(groups: Sequence[LayerGroup], page_size: int, limits: StepLimits, tokens_per_seq: int) -> int:
    """Pages when nobody said how many: `max_seqs` sequences of `tokens_per_seq`, and room for one of the longest."""
    chunk_tokens = limits.max_tokens
    usual = pages_for_sequence(groups, page_size, min(tokens_per_seq, limits.max_context), chunk_tokens)
    longest = pages_for_sequence(groups, page_size, limits.max_context, chunk_tokens)
    return max(limits.max_seqs * usual, longest)
