"""PrefixIndex: which pages hold the KV of which tokens after which prefix. Knows no sequences, only that they exist.

A tree of entries (`entry`), found by digests and by comparing tokens. Their pages are units that the arbiter may take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kvarto.cache.digests import MATCH_UNIT, TOKEN_BYTES, UNIT_BYTES, branch_digest, root_digest, unit_digests
from kvarto.cache.entry import Entry, EntryUnit, Root, bases_of, entries_after
from kvarto.cache.geometry import Geometry, Part
from kvarto.cache.turn import Turn, next_parent
from kvarto.core.ids import NO_PAGE, OwnerId
from kvarto.memory.arbiter import Arbiter, Unit
from kvarto.memory.page_pool import PagePool

_AHEAD_UNITS = 64
"""Units hashed at once: a miss wastes nothing, the digests are needed when the tokens are computed."""
_MAX_SIBLINGS = 64
"""Entries compared token by token for a partial match, newest first. Whole match units are found among any number."""


@dataclass(slots=True)
class Match:
    """What is cached of a prompt: whole entries, and a part of one more that is to be copied."""

    entries: list[Entry]
    partial: Entry | None
    num_partial_tokens: int
    digests: list[bytes]
    """Of the prompt's match units, from the first one to at least the end of the match."""


class PrefixIndex:
    """The tree of entries; an evictor of the arbiter."""

    def __init__(
        self,
        geometry: Geometry,
        pool: PagePool,
        arbiter: Arbiter,
        owner: OwnerId,
        key: bytes,
        recompute_cost_s: Callable[[int, int], float],
    ) -> None:
        self._geometry = geometry
        self._pool = pool
        self._arbiter = arbiter
        self._owner = owner
        self._key = key
        self._recompute_cost_s = recompute_cost_s
        self._costs: dict[tuple[int, int], float] = {}
        self._roots: dict[bytes, Root] = {}
        self._by_digest: dict[bytes, Entry] = {}

    def root(self, fields: bytes, adapter: Unit | None = None) -> Entry | None:
        """The root for these fields, made when new. None if its digest is another's: then nothing can be cached.

        `adapter`: the unit that all below depends on. It changes only when nothing is below.
        """
        digest = root_digest(self._key, fields)
        root = self._roots.get(digest)
        if root is None:
            root = self._roots[digest] = Root(fields, digest, len(self._geometry.parts))
        if root.tokens != fields:
            return None
        root.adapter = adapter
        return root

    def branch(self, parent: Entry, turn: Turn) -> Root | None:
        """Where chains leave the base's after `parent`, made when new: add something below, or `prune` it. None if its
        digest is another's.
        """
        digest = branch_digest(parent.digests[-1], turn.fields)
        if digest not in self._roots:
            self._roots[digest] = Root(turn.fields, digest, len(self._geometry.parts), parent)
        return self._find_branch(parent, turn)

    def _find_branch(self, parent: Entry, turn: Turn) -> Root | None:
        branch = self._roots.get(branch_digest(parent.digests[-1], turn.fields))
        if branch is None or branch.parent is not parent or branch.tokens != turn.fields:
            return None
        branch.adapter = turn.adapter
        return branch

    def enter(self, entry: Entry) -> None:
        """A sequence stands on this entry, which stays even without pages until `leave`."""
        entry.num_sequences += 1

    def leave(self, entry: Entry) -> None:
        """Undo `enter`."""
        entry.num_sequences -= 1
        self.prune(entry)

    def match(self, root: Entry, tokens: bytes, turn: Turn | None = None) -> Match:
        """The longest cached prefix of `tokens`. Locks nothing; the caller does before anything else happens."""
        path, digests = self._walk(root, tokens, turn)
        entries = path[: self._num_visible(path)]
        first = len(entries) * self._geometry.units_per_entry
        units = digests[first : first + self._geometry.units_per_entry]
        partial, num_partial_tokens = self._partial([root, *entries], tokens, units, turn)
        return Match(entries, partial, num_partial_tokens, digests)

    def find(self, digest: bytes, parent: Entry, tokens: bytes) -> tuple[Entry | None, bool]:
        """The entry that begins with `tokens` after `parent`; and whether the digest is free, or rightly taken."""
        entry = self._by_digest.get(digest)
        if entry is None:
            return None, True
        if entry.parent is parent and entry.tokens.startswith(tokens):
            return entry, True
        return None, False

    def add(self, parent: Entry, tokens: bytes, digests: list[bytes], pages: list[list[int]]) -> Entry:
        """Cache a new entry. `pages`: [num_groups, pages_per_entry], held by the caller."""
        entry = Entry(parent, tokens, digests, len(self._geometry.parts))
        for digest in digests:
            self._by_digest.setdefault(digest, entry)
        self.adopt(entry, pages)
        return entry

    def adopt(self, entry: Entry, pages: list[list[int]]) -> None:
        """Cache pages for those parts of an entry that have none. NO_PAGE in `pages` leaves a part out."""
        for part in self._geometry.parts:
            if entry.units[part.index] is None:
                stop = part.first_page + part.num_pages
                chosen = [page for group in part.groups for page in pages[group][part.first_page : stop]]
                if NO_PAGE not in chosen:
                    self._add_unit(entry, part, tuple(chosen))

    def extend(self, entry: Entry, tokens: bytes, digest: bytes) -> None:
        """One more match unit of the page is computed: `tokens` are all of the entry's, `digest` the last unit's."""
        entry.tokens = tokens
        entry.digests.append(digest)
        self._by_digest.setdefault(digest, entry)

    def remove(self, entry: Entry) -> None:
        """Drop an entry that its only sequence has no use for; its pages stay with the sequence."""
        for unit in reversed(entry.units):
            if unit is not None:
                self._pool.uncache(np.array(unit.pages, dtype=np.int32))
                self._lose(unit)
                self._arbiter.forget(unit)
        self._unlink(entry)

    def drop(self, adapter: Unit) -> None:
        """Forget all that depends on the unit of an adapter, which no sequence uses."""
        for root in [root for root in self._roots.values() if root.adapter is adapter]:
            for entry in reversed(list(self._below(root))):
                self.remove(entry)
            self.prune(root)

    def evict(self, unit: Unit) -> None:
        """Forget a unit that the arbiter takes."""
        assert isinstance(unit, EntryUnit), "the arbiter took another owner's unit"
        self._lose(unit)
        self.prune(unit.entry)

    def entries(self) -> Iterator[Entry]:
        """All entries but the roots, parents first."""
        return self._below(*(root for root in self._roots.values() if root.parent is None))

    @staticmethod
    def _below(*roots: Entry) -> Iterator[Entry]:
        stack = list(roots)
        while stack:
            entry = stack.pop()
            stack.extend(entry.children)
            if not isinstance(entry, Root):
                yield entry

    def check(self) -> None:
        """Raise AssertionError naming the broken law. O(entries)."""
        found = set(self.entries())
        assert set(self._by_digest.values()) <= found, "a digest leads to an entry that is not in the tree"
        for entry in found:
            self._check_entry(entry)
        for root in self._roots.values():
            assert root.first_child or (root.parent is None and root.num_sequences), "a root without any use is kept"
            assert root.parent is None or root in set(root.parent.children), "a branch is not where it should be"
        pages = [page for entry in found for unit in entry.units if unit is not None for page in unit.pages]
        assert len(set(pages)) == len(pages), "a page is cached for two entries"
        cached = np.flatnonzero(self._pool.is_cached & (self._pool.owner == self._owner))
        assert sorted(pages) == cached.tolist(), "the pool and the index disagree on which pages are cached"

    def _check_entry(self, entry: Entry) -> None:
        parent = entry.parent
        assert parent is not None
        before, after = entry.previous_sibling, entry.next_sibling
        assert (before.next_sibling if before else parent.first_child) is entry, "siblings are linked wrong"
        assert after is None or after.previous_sibling is entry, "siblings are linked wrong"
        assert len(entry.tokens) // TOKEN_BYTES // MATCH_UNIT == len(entry.digests), "digests do not cover the tokens"
        assert entry.first_child or entry.num_sequences or any(entry.units), "an entry without any use is kept"
        if self._geometry.full_part is not None:
            assert entry.units[0] is not None, "an entry has no full-attention pages"
        assert entry.digests == unit_digests(parent.digests[-1], entry.tokens), "digests do not chain"
        for unit in entry.units:
            if unit is not None:
                self._check_unit(unit)

    def _check_unit(self, unit: EntryUnit) -> None:
        bases = bases_of(unit.entry, unit.part)
        assert (unit.depends_on, unit.depends_also) == bases, f"unit {unit.pages} depends on another than it should"
        assert not any(base.is_gone for base in unit.bases), f"unit {unit.pages} outlives what it depends on"
        held = {self._pool.is_held(page) for page in unit.pages}
        assert len(held) == 1, f"unit {unit.pages} is held in part"
        assert not unit.is_gone, f"unit {unit.pages} is gone and still in its entry"
        if True in held:
            return
        assert unit.is_offered or unit.num_dependents, f"unit {unit.pages} can never be evicted"
        if unit.part.window is None:
            below = [each.units[0] for each in entries_after(unit.entry)] + unit.entry.units[1:]
            units_below = [each for each in below if each is not None]
            assert len(units_below) == unit.num_dependents, f"unit {unit.pages} counts its dependents wrong"
            held_below = [each.pages for each in units_below if self._pool.is_held(each.pages[0])]
            assert not held_below, f"unit {unit.pages} is evictable, and {held_below} below it are held"

    def _walk(self, root: Entry, tokens: bytes, turn: Turn | None) -> tuple[list[Entry], list[bytes]]:
        """Entries that hold `tokens` from the start, whether or not their pages suffice, and digests so far."""
        entry_bytes = self._geometry.entry_tokens * TOKEN_BYTES
        units_per_entry = self._geometry.units_per_entry
        digests: list[bytes] = []
        path: list[Entry] = []
        parent: Entry | None = root
        for index in range(-(-len(tokens) // entry_bytes)):
            start = index * entry_bytes
            last = (index + 1) * units_per_entry
            if last > len(digests):
                digests += _digests_ahead(digests, root.digests[0], tokens, turn)
            if turn is not None and parent is not None and index == turn.first_entry:
                parent = self._find_branch(parent, turn)
            entry = self._by_digest.get(digests[last - 1]) if last <= len(digests) else None
            if entry is None or entry.parent is not parent or entry.tokens != tokens[start : start + entry_bytes]:
                break
            path.append(entry)
            parent = entry
        return path, digests

    def _num_visible(self, path: list[Entry]) -> int:
        """Length of the longest prefix of `path` for which every window's pages are there."""
        windowed = self._geometry.windowed_parts
        if not windowed:
            return len(path)
        longest = 0
        run_starts = [0] * len(windowed)  # since which entry each part has its pages without a hole
        for index, entry in enumerate(path):
            for i, part in enumerate(windowed):
                if entry.units[part.index] is None:
                    run_starts[i] = index + 1
            num_tokens = (index + 1) * self._geometry.entry_tokens
            first_seen = (self._geometry.num_entries_behind(part, num_tokens) for part in windowed)
            if all(run <= first for run, first in zip(run_starts, first_seen, strict=True)):
                longest = index + 1
        return longest

    def _partial(
        self, chain: list[Entry], tokens: bytes, units: list[bytes], turn: Turn | None
    ) -> tuple[Entry | None, int]:
        """The entry after a chain that shares the most tokens with those that follow it, and how many."""
        best: Entry | None = None
        most = 0
        for parent, rest in self._parents(chain, tokens, turn):
            for candidate in self._partial_candidates(parent, rest, units):
                if all(candidate.units) and (num_tokens := _num_common_tokens(candidate.tokens, rest)) > most:
                    best, most = candidate, num_tokens
        return best, most

    def _parents(self, chain: list[Entry], tokens: bytes, turn: Turn | None) -> Iterator[tuple[Entry, bytes]]:
        """Below what the next entry may be, and the tokens that it may share: where the chain turns, the base's up to
        the turn.
        """
        num_tokens = (len(chain) - 1) * self._geometry.entry_tokens
        rest = tokens[num_tokens * TOKEN_BYTES :]
        if turn is not None and len(chain) - 1 == turn.first_entry:
            if (branch := self._find_branch(chain[-1], turn)) is not None:
                yield branch, rest
            rest = rest[: (turn.start - num_tokens) * TOKEN_BYTES]
        yield chain[-1], rest

    def _partial_candidates(self, parent: Entry, rest: bytes, units: list[bytes]) -> Iterator[Entry]:
        for digest in reversed(units):
            entry = self._by_digest.get(digest)
            if entry is not None and entry.parent is parent:
                yield entry
                break
        yield from islice(parent.children, _MAX_SIBLINGS) if rest else ()

    def _lose(self, unit: EntryUnit) -> None:
        unit.entry.units[unit.part.index] = None
        if unit.depends_on is not None and unit.part.window is not None:
            unit.frequency = 0  # the uses of a window are counted in the full-attention unit as well

    def _add_unit(self, entry: Entry, part: Part, pages: tuple[int, ...]) -> None:
        first_token = (entry.depth - 1) * self._geometry.entry_tokens
        num_tokens = part.num_pages * self._geometry.page_size
        unit = EntryUnit(self._owner, pages, self._cost_s(first_token, num_tokens), entry, part)
        entry.units[part.index] = unit
        self._pool.cache(pages)
        if part.window is not None:
            self._arbiter.use(unit)

    def _cost_s(self, first_token: int, num_tokens: int) -> float:
        """Seconds to recompute, taken at the power of two below `first_token`: the cost model walks a whole program."""
        key = (1 << first_token.bit_length() >> 1, num_tokens)
        if key not in self._costs:
            self._costs[key] = self._recompute_cost_s(*key)
        return self._costs[key]

    def prune(self, entry: Entry | None) -> None:
        """Drop the entry, and those above it, that have no pages, no children and no sequence."""
        while entry is not None and not (entry.first_child or entry.num_sequences or any(entry.units)):
            if isinstance(entry, Root):
                del self._roots[entry.digests[0]]
            if entry.parent is not None:
                self._unlink(entry)
            entry = entry.parent

    def _unlink(self, entry: Entry) -> None:
        entry.unlink()
        for digest in entry.digests:
            if self._by_digest.get(digest) is entry:
                del self._by_digest[digest]


def _digests_ahead(digests: list[bytes], root_digest: bytes, tokens: bytes, turn: Turn | None) -> list[bytes]:
    """The next ones after `digests`, up to the turn if that comes."""
    first = len(digests)
    stop = first + _AHEAD_UNITS
    if turn is not None and first < turn.first_unit:
        stop = min(stop, turn.first_unit)
    return unit_digests(next_parent(digests, root_digest, turn), tokens[first * UNIT_BYTES : stop * UNIT_BYTES])


def _num_common_tokens(a: bytes, b: bytes) -> int:
    """Length of the common prefix, by bisection on equality of slices."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
