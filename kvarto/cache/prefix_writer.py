"""PrefixWriter: puts what sequences compute into the prefix index. Page tables are never rewritten for it.

An *attached* sequence holds the pages of its whole chain, so its units are published as they fill, and a page in the
tree is never unused while one below it is in use: all that the pool counts as evictable can be evicted, ends first.
When another sequence published the same tokens first, the second copy is not cached; going on below pages that it does
not hold would break that law, so the sequence is detached and publishes the rest of its pages when it closes, those
that nobody else uses. If only windowed layers exist there is no chain of pages, and it stays attached.
"""

from __future__ import annotations

from kvarto.cache.digests import MATCH_UNIT, UNIT_BYTES, unit_digests
from kvarto.cache.entry import Entry, EntryUnit
from kvarto.cache.geometry import Geometry
from kvarto.cache.prefix_index import PrefixIndex
from kvarto.cache.sequence import Sequence
from kvarto.cache.turn import next_parent
from kvarto.core.ids import NO_PAGE
from kvarto.memory.arbiter import Arbiter
from kvarto.memory.page_pool import PagePool


class PrefixWriter:
    """Works on one index."""

    def __init__(self, geometry: Geometry, pool: PagePool, arbiter: Arbiter, index: PrefixIndex) -> None:
        self._geometry = geometry
        self._pool = pool
        self._arbiter = arbiter
        self._index = index

    def stand_on(self, sequence: Sequence, entries: list[Entry]) -> None:
        """Add whole entries to the sequence's chain: it stands on the last, and its use is counted there."""
        before = last_entry(sequence)
        sequence.entries += entries
        after = last_entry(sequence)
        if before is not after:
            self._index.enter(after)
            self._index.leave(before)
        self._count_use(sequence, after)

    def publish(self, sequence: Sequence) -> None:
        """Cache the match units that an attached sequence has completed."""
        while sequence.is_attached and self._next_end(sequence) <= sequence.num_computed_tokens:
            self._publish_unit(sequence)

    def publish_rest(self, sequence: Sequence) -> None:
        """Cache what a detached sequence computed and holds alone. Only for one that is about to close."""
        sequence.is_attached = True
        while sequence.is_attached and self._next_end(sequence) <= sequence.num_computed_tokens:
            if not self._holds_alone(sequence):
                return
            self._publish_unit(sequence, is_closing=True)

    def _next_end(self, sequence: Sequence) -> int:
        return (sequence.num_published_units + 1) * MATCH_UNIT

    def _publish_unit(self, sequence: Sequence, is_closing: bool = False) -> None:
        start = len(sequence.entries) * self._geometry.entry_tokens
        end = self._next_end(sequence)
        tokens = sequence.token_bytes(start, end)
        digest = self._digest(sequence, tokens)
        parent = self._parent(sequence)
        known, is_sound = (None, False) if parent is None else self._index.find(digest, parent, tokens)
        if parent is None or not is_sound:  # a collision: the chain cannot go on from here
            self._index.prune(parent)
            self._detach(sequence)
            return
        if end - start < self._geometry.entry_tokens:
            self._publish_short(sequence, parent, known, tokens, digest)
        elif known is None:
            entry = self._grow_or_add(sequence, parent, tokens, digest)
            sequence.growing = None
            self.stand_on(sequence, [entry])
        elif not self._join(sequence, known, is_closing):
            self._detach(sequence)
            return
        sequence.num_published_units += 1

    def _parent(self, sequence: Sequence) -> Entry | None:
        """After what the next entry comes; a new branch, where the chain turns, has no child yet. None for a collision
        of its digest.
        """
        last, turn = last_entry(sequence), sequence.turn
        turns_here = turn is not None and len(sequence.entries) == turn.first_entry
        return self._index.branch(last, turn) if turn is not None and turns_here else last

    def _publish_short(
        self, sequence: Sequence, parent: Entry, known: Entry | None, tokens: bytes, digest: bytes
    ) -> None:
        """A match unit inside a page. Another entry may begin with the same tokens; ours waits until it differs."""
        if sequence.growing is not None or known is None:
            sequence.growing = self._grow_or_add(sequence, parent, tokens, digest)
            self._count_use(sequence, sequence.growing)

    def _grow_or_add(self, sequence: Sequence, parent: Entry, tokens: bytes, digest: bytes) -> Entry:
        if sequence.growing is not None:
            self._index.extend(sequence.growing, tokens, digest)
            return sequence.growing
        first = len(sequence.entries) * self._geometry.units_per_entry
        digests = sequence.digests[first : first + len(tokens) // UNIT_BYTES]
        return self._index.add(parent, tokens, digests, self._entry_pages(sequence))

    def _join(self, sequence: Sequence, known: Entry, is_closing: bool) -> bool:
        """Stand on an entry that another sequence published. False when that would leave the chain."""
        if self._geometry.full_part is not None and not is_closing:
            return False
        self._drop_growing(sequence)
        self._index.adopt(known, self._entry_pages(sequence))
        self.stand_on(sequence, [known])
        return True

    def _detach(self, sequence: Sequence) -> None:
        self._drop_growing(sequence)
        sequence.is_attached = False

    def _drop_growing(self, sequence: Sequence) -> None:
        if sequence.growing is not None:
            self._index.remove(sequence.growing)
            self._index.prune(sequence.growing.parent)
            if sequence.use is not None and sequence.use.is_gone:
                sequence.use = sequence.use.depends_on  # which inherited the count
            sequence.growing = None

    def _holds_alone(self, sequence: Sequence) -> bool:
        """No other sequence uses the pages of the entry to be published, which would have to offer them later."""
        pages = [page for group in self._entry_pages(sequence) for page in group if page != NO_PAGE]
        return not any(self._pool.is_shared(page) for page in pages)

    def _entry_pages(self, sequence: Sequence) -> list[list[int]]:
        """[num_groups][pages_per_entry] of the entry after the whole ones."""
        first = len(sequence.entries) * self._geometry.pages_per_entry
        pages: list[list[int]] = sequence.table[:, first : first + self._geometry.pages_per_entry].tolist()
        return pages

    def _digest(self, sequence: Sequence, tokens: bytes) -> bytes:
        """Digest of the unit that ends `tokens`."""
        unit = sequence.num_published_units
        last = tokens[-UNIT_BYTES:]
        if unit == len(sequence.digests):
            assert sequence.root is not None, "a sequence without a chain was published"
            parent = next_parent(sequence.digests, sequence.root.digests[0], sequence.turn)
            sequence.digests += unit_digests(parent, last)
        foreseen = sequence.prompt[unit * UNIT_BYTES : (unit + 1) * UNIT_BYTES]
        assert foreseen == last[: len(foreseen)], "committed tokens differ from those that the sequence was opened with"
        return sequence.digests[unit]

    def _count_use(self, sequence: Sequence, entry: Entry) -> None:
        """Count the sequence's use at the last unit of its chain: it moves down as the chain grows."""
        unit = self._chain_unit(entry)
        if unit is None or unit is sequence.use:
            return
        if sequence.use is not None:
            sequence.use.frequency -= 1
        self._arbiter.use(unit)
        sequence.use = unit

    def _chain_unit(self, entry: Entry) -> EntryUnit | None:
        return entry.units[0] if self._geometry.full_part is not None else None


def last_entry(sequence: Sequence) -> Entry:
    """The last whole entry of the sequence's chain, or its root."""
    entry = sequence.entries[-1] if sequence.entries else sequence.root
    assert entry is not None, "a sequence without a chain has no last entry"
    return entry
