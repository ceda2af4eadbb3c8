"""How tokens, match units, pages and layer groups fit together. Pure arithmetic.

An *entry* is the smallest stretch that is whole pages and whole match units: max(page_size, 16) tokens. Its pages
fall into *parts*, which are cached and evicted one by one: all pages of the full-attention groups together, since a
prefix needs every one of them, and for each window the pages that leave the window at the same token.

    page_size 8     |  page  |  page  |      entry = 2 pages, one match unit; a window has two parts
    page_size 64    |u   u   u   u    |      entry = 1 page, four match units; one part per window
"""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.cache.digests import MATCH_UNIT
from kvarto.core.kv_format import LayerGroup
from kvarto.planning.page_count import longest_sequence, pages_for_sequence

_MAX_POSITIONS = (1 << 31) - 1
"""Positions are int32; only models without full attention could go on for longer."""


@dataclass(frozen=True, slots=True)
class Part:
    """Pages of an entry that are cached and evicted together."""

    index: int
    window: int | None
    groups: tuple[int, ...]
    first_page: int
    """Within the entry."""
    num_pages: int
    """Of each group."""
    end_token: int
    """Within the entry: one past its last token."""


class Geometry:
    """Shapes of one cache."""

    def __init__(self, groups: tuple[LayerGroup, ...], page_size: int) -> None:
        self.groups = groups
        self.page_size = page_size
        self.num_groups = len(groups)
        self.entry_tokens = max(page_size, MATCH_UNIT)
        self.pages_per_entry = self.entry_tokens // page_size
        self.units_per_entry = self.entry_tokens // MATCH_UNIT
        self.parts = self._make_parts()
        self.full_part = next((part for part in self.parts if part.window is None), None)
        """The first one; None for models whose every layer has a window."""
        self.windowed_parts = tuple(part for part in self.parts if part.window is not None)

    def _make_parts(self) -> tuple[Part, ...]:
        by_window: dict[int | None, list[int]] = {}
        for group, layers in enumerate(self.groups):
            by_window.setdefault(layers.window, []).append(group)
        parts: list[Part] = []
        for window, groups in sorted(by_window.items(), key=lambda item: item[0] or 0):
            num_pages = self.pages_per_entry if window is None else 1
            for first in range(0, self.pages_per_entry, num_pages):
                end_token = (first + num_pages) * self.page_size
                parts.append(Part(len(parts), window, tuple(groups), first, num_pages, end_token))
        return tuple(parts)

    def num_pages(self, num_tokens: int) -> int:
        """Pages of one group's table that hold `num_tokens`."""
        return -(-num_tokens // self.page_size)

    def num_entries_behind(self, part: Part, num_computed_tokens: int) -> int:
        """Entries whose pages of `part` no later token sees, for a windowed part."""
        assert part.window is not None
        first_seen = num_computed_tokens - part.window + 1
        return max(0, (first_seen - part.end_token) // self.entry_tokens + 1)

    def next_release(self, part: Part, num_entries_behind: int) -> int:
        """Computed tokens at which the next entry's pages of `part` fall behind the window."""
        assert part.window is not None
        return num_entries_behind * self.entry_tokens + part.end_token + part.window - 1

    def fits(self, num_tokens: int, num_pages: int, chunk_tokens: int) -> bool:
        """Whether `num_pages` pages can hold a sequence of `num_tokens`: it is none longer than `max_tokens`."""
        needed = pages_for_sequence(self.groups, self.page_size, num_tokens, chunk_tokens)
        return needed <= num_pages and num_tokens <= _MAX_POSITIONS

    def max_tokens(self, num_pages: int, chunk_tokens: int) -> int:
        """Longest sequence, computed in chunks of `chunk_tokens`, that `num_pages` pages can hold."""
        return longest_sequence(self.groups, self.page_size, num_pages, chunk_tokens, _MAX_POSITIONS)
