"""KVCache: pages for sequences, the prefixes that they share, and forks. One pool, one table per layer group.

    open ── match the prefix and lock it ──> grow ── pages ──> (is_ready) ── a step writes KV ──> commit ──> … ──> close

Tables only grow at the end, but for two changes that concern a sequence alone: a shared page that it is about to write
is replaced by a copy, and pages behind a window go back (NO_PAGE). What is shared and what is cached is decided in
`prefix_index` and `prefix_writer`; who has to go when pages are short, in the arbiter.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvarto.cache.digests import MATCH_UNIT, TOKEN_BYTES, root_fields
from kvarto.cache.entry import Entry
from kvarto.cache.geometry import Geometry
from kvarto.cache.page_copies import PageCopies
from kvarto.cache.prefix_index import PrefixIndex
from kvarto.cache.prefix_writer import PrefixWriter, last_entry
from kvarto.cache.sequence import Sequence
from kvarto.cache.turn import turn_at
from kvarto.core.errors import OutOfPages
from kvarto.core.ids import NO_PAGE, OwnerId
from kvarto.core.kv_format import KVFormat, LayerGroup
from kvarto.memory.arbiter import Arbiter, Unit
from kvarto.memory.page_pool import PagePool
from kvarto.memory.transfers import Transfers
from kvarto.planning.page_count import pages_for_group, pages_for_sequence

KV_OWNER = OwnerId(0)
"""Where nobody else owns pages."""
_NEVER = 1 << 62

Int32 = NDArray[np.int32]


@dataclass(slots=True)
class PrefixStats:
    """Since start."""

    query_tokens: int = 0
    """Tokens of sequences that were opened with the prefix cache."""
    hit_tokens: int = 0
    """Of these, tokens that were in it."""


class KVCache:
    """All sequences of one engine. Calls come from one thread."""

    def __init__(
        self,
        *,
        pool: PagePool,
        arbiter: Arbiter,
        transfers: Transfers,
        groups: tuple[LayerGroup, ...],
        kv_format: KVFormat,
        identity: bytes,
        key: bytes,
        enable_prefix_caching: bool,
        recompute_cost_s: Callable[[int, int], float],
        owner: OwnerId = KV_OWNER,
        floor_pages: int = 0,
    ) -> None:
        """`identity`: model, numerics fingerprint and layout version. `key`: the server's secret, at most 64 bytes.

        `recompute_cost_s(first_token, num_tokens)` says what a lost page costs. `owner` is its id in pool and arbiter.
        """
        self._pool = pool
        self._arbiter = arbiter
        self._transfers = transfers
        self._geometry = Geometry(groups, kv_format.page_size)
        self._identity = identity
        self._is_caching = enable_prefix_caching
        self._owner = owner
        self._copies = PageCopies(pool, transfers)
        self._index = PrefixIndex(self._geometry, pool, arbiter, owner, key, recompute_cost_s)
        self._writer = PrefixWriter(self._geometry, pool, arbiter, self._index)
        self._sequences: dict[Sequence, None] = {}
        self.stats = PrefixStats()
        arbiter.register(owner, self._index, floor_pages=floor_pages)

    @property
    def sequences(self) -> Collection[Sequence]:
        """Those that are open, oldest first."""
        return self._sequences.keys()

    @property
    def num_available_pages(self) -> int:
        """Pages that `grow` can have: free, or evictable."""
        return self._arbiter.num_available(self._owner)

    @property
    def num_pages(self) -> int:
        """Of the whole pool."""
        return self._pool.num_pages

    def fits(self, num_tokens: int, chunk_tokens: int = 1, num_other_pages: int = 0) -> bool:
        """Whether a sequence is none longer than `max_tokens`; for every request, so it looks for no longest one."""
        return self._geometry.fits(num_tokens, max(0, self._pool.num_pages - num_other_pages), chunk_tokens)

    def max_tokens(self, chunk_tokens: int = 1, num_other_pages: int = 0) -> int:
        """The longest sequence that the whole pool can hold when it is computed `chunk_tokens` at a time, beside
        `num_other_pages` that hold something else.
        """
        return self._geometry.max_tokens(max(0, self._pool.num_pages - num_other_pages), chunk_tokens)

    def open(
        self,
        token_ids: TokenIds[int],
        *,
        salt: str | None,
        adapter_digest: bytes = b"",
        adapter_start: int = 0,
        adapter: Unit | None = None,
        use_prefix: bool = True,
    ) -> Sequence:
        """Begin a sequence with the longest cached prefix of `token_ids`, locked; at most all tokens but one.

        Without `use_prefix` nothing is reused, but what is computed still becomes cached. Takes no page but for the
        copy of a partial match, which is skipped when pages are short. `adapter_digest` says which adapter computes it,
        empty for the base, and `adapter_start` from which token on: KV before that is the base's, and shared with it.
        `adapter` is the adapter's unit, on the device for as long as the sequence is open; its KV goes before it.
        """
        table = np.full((self._geometry.num_groups, self._geometry.num_pages(len(token_ids))), NO_PAGE, np.int32)
        sequence = Sequence(table, num_behind=[0] * len(self._geometry.parts))
        if self._is_caching and adapter_start:
            sequence.turn = turn_at(adapter_start, adapter_digest, adapter, self._geometry)
            sequence.root = self._index.root(root_fields(self._identity, b"", salt))
        elif self._is_caching:
            sequence.root = self._index.root(root_fields(self._identity, adapter_digest, salt), adapter)
        if sequence.root is not None:
            self._index.enter(sequence.root)
            sequence.is_attached = True
            if use_prefix:
                self._reuse_prefix(sequence, array("i", token_ids))
                self.stats.query_tokens += len(token_ids)
                self.stats.hit_tokens += sequence.num_cached_tokens
        self._sequences[sequence] = None
        self._set_next_event(sequence)
        return sequence

    def fork(self, parent: Sequence) -> Sequence:
        """A sequence with the same tokens in the same pages. Whoever writes a shared page first copies it."""
        num_pages = self._geometry.num_pages(parent.num_computed_tokens)
        child = Sequence(
            parent.table[:, :num_pages].copy(),
            num_pages,
            parent.num_computed_tokens,
            parent.num_cached_tokens,
            tokens=parent.tokens[:],
            next_event=parent.next_event,
            num_behind=parent.num_behind[:],
            root=parent.root,
            turn=parent.turn,
            is_attached=parent.is_attached,
            prompt=parent.prompt,
            digests=parent.digests[:],
            growing=parent.growing,
            num_published_units=parent.num_published_units,
        )
        self._pool.share(child.pages)
        child.copies = self._copies.share(parent.copies)
        child.may_share_tail = parent.may_share_tail = True
        parent.num_writable_tokens = 0
        if child.root is not None:
            self._index.enter(child.root)
            self._writer.stand_on(child, parent.entries)
        self._sequences[child] = None
        return child

    def pages_to_grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that `grow` would take."""
        num_new = max(0, self._geometry.num_pages(num_tokens) - sequence.num_pages)
        return num_new * self._geometry.num_groups + len(self._shared_tail(sequence))

    def pages_to_reach(self, sequence: Sequence, num_tokens: int, chunk_tokens: int) -> int:
        """Pages that the sequence lacks at most until `num_tokens` are computed, `chunk_tokens` at a time.

        With a window these are far fewer than `grow` would take at once, for pages go back on the way.
        """
        missing = len(self._shared_tail(sequence))
        for layers in self._geometry.groups:
            most = pages_for_group(layers, self._geometry.page_size, num_tokens, chunk_tokens)
            missing += max(0, most - self._num_held(sequence, layers.window))
        return missing

    def pages_for(self, num_tokens: int, chunk_tokens: int) -> int:
        """Pages that a new sequence takes at most until `num_tokens` are computed, `chunk_tokens` at a time."""
        return pages_for_sequence(self._geometry.groups, self._geometry.page_size, num_tokens, chunk_tokens)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens in all, the next one writable. Raises OutOfPages with nothing changed."""
        if num_tokens <= sequence.num_writable_tokens:
            return
        shared = self._shared_tail(sequence)
        num_pages = self._geometry.num_pages(num_tokens)
        num_new = max(0, num_pages - sequence.num_pages)
        pages = self._allocate(num_new * self._geometry.num_groups + len(shared))
        sequence.may_share_tail = False
        sequence.table_version += 1
        for (group, column), target in zip(shared, pages.tolist(), strict=False):
            self._copy_on_write(sequence, group, column, target)
        if num_new:
            sequence.reserve(num_pages)
            new = pages[len(shared) :].reshape(self._geometry.num_groups, num_new)
            sequence.table[:, sequence.num_pages : num_pages] = new
            sequence.num_pages = num_pages
        sequence.num_writable_tokens = sequence.num_pages * self._geometry.page_size

    def is_ready(self, sequence: Sequence) -> bool:
        """Its copies have arrived, so a step may read and write its pages. Raises TransferFailed: close it then."""
        if sequence.copies:
            self._copies.poll()
            if not all(copy.is_done for copy in sequence.copies):
                return False
            sequence.copies.clear()
        return True

    def commit(self, sequence: Sequence, token_ids: TokenIds[int]) -> None:
        """A step has written the KV of these tokens, which follow those computed, into pages that `grow` made.

        Complete match units become cached; pages behind a window go back.
        """
        sequence.tokens.extend(token_ids)
        sequence.num_computed_tokens += len(token_ids)
        if sequence.num_computed_tokens >= sequence.next_event:
            self._pass_event(sequence)

    def close(self, sequence: Sequence) -> None:
        """Give all pages back; those in the prefix cache stay until others need them. Legal in every state."""
        assert sequence.is_open, "a sequence was closed twice"
        sequence.is_open = False
        has_all = not sequence.copies
        self._copies.abandon(sequence.copies)
        if has_all and sequence.root is not None and not sequence.is_attached:
            self._writer.publish_rest(sequence)
        self._pool.free(sequence.pages)
        if sequence.root is not None:
            self._let_go(sequence)
        del self._sequences[sequence]
        self._copies.poll()

    def forget_adapter(self, adapter: Unit) -> None:
        """The adapter is about to go, and no sequence uses it: its KV goes before it."""
        self._index.drop(adapter)

    def sweep(self) -> None:
        """Fail copies that are overdue, and take back the pages of those that ended. For every step."""
        self._transfers.sweep()
        self._copies.poll()

    def check(self) -> None:
        """Raise AssertionError naming the broken law. Counts every page again: O(pages + entries)."""
        self._pool.check()
        self._arbiter.check()
        self._index.check()
        mine = self._pool.owner == self._owner
        tables = [sequence.pages for sequence in self._sequences] or [np.empty(0, np.int32)]
        pages = np.concatenate(tables)
        users = np.bincount(pages[pages != NO_PAGE], minlength=self._pool.num_pages)
        assert np.array_equal(users[mine], self._pool.ref_count[mine]), "page tables and ref_counts disagree"
        assert not users[~mine].any(), "a page table holds a page of another owner"
        ends = [page for transfer in self._copies.in_flight for page in (transfer.source, transfer.target)]
        pins = np.bincount(np.array(ends, dtype=np.int64), minlength=self._pool.num_pages)
        assert np.array_equal(pins[mine], self._pool.pin_count[mine]), "copies in flight and pin_counts disagree"
        for sequence in self._sequences:
            self._check_sequence(sequence)

    def _reuse_prefix(self, sequence: Sequence, tokens: array[int]) -> None:
        assert sequence.root is not None
        sequence.prompt = tokens.tobytes()
        match = self._index.match(sequence.root, sequence.prompt[:-TOKEN_BYTES], sequence.turn)
        sequence.digests = match.digests
        self._lock(sequence, match.entries)
        num_tokens = len(match.entries) * self._geometry.entry_tokens
        if match.partial is not None and self._copy_partial(sequence, match.partial, match.num_partial_tokens):
            num_tokens += match.num_partial_tokens
        sequence.num_computed_tokens = sequence.num_cached_tokens = num_tokens
        sequence.tokens = tokens[:num_tokens]
        sequence.num_published_units = num_tokens // MATCH_UNIT
        self._release_behind(sequence)

    def _lock(self, sequence: Sequence, entries: list[Entry]) -> None:
        """Take part in the pages of whole entries, all that the next token sees."""
        if not entries:
            return
        stride = self._geometry.pages_per_entry
        end = len(entries) * stride
        for part in self._geometry.parts:
            first = 0
            if part.window is not None:
                first = self._geometry.num_entries_behind(part, len(entries) * self._geometry.entry_tokens)
                sequence.num_behind[part.index] = first
            units = [unit for entry in entries[first:] if (unit := entry.units[part.index]) is not None]
            cells = [(group, page) for group in part.groups for page in range(part.num_pages)]
            pages = np.array([unit.pages for unit in units], dtype=np.int32).reshape(len(units), len(cells))
            for column, (group, page) in enumerate(cells):
                sequence.table[group, first * stride + part.first_page + page : end : stride] = pages[:, column]
            if part.window is not None:
                for unit in units:
                    self._arbiter.use(unit)
        sequence.num_pages = end
        self._pool.share(sequence.pages)
        self._writer.stand_on(sequence, entries)

    def _copy_partial(self, sequence: Sequence, entry: Entry, num_tokens: int) -> bool:
        """Copy the first pages of an entry. False when no pages are left for that."""
        sources = self._first_pages(entry, self._geometry.num_pages(num_tokens))
        pinned = np.array([page for _, _, page in sources], dtype=np.int32)
        self._pool.pin(pinned)
        try:
            targets = self._allocate(len(sources))
        except OutOfPages:
            return False
        else:
            for (group, column, source), target in zip(sources, targets.tolist(), strict=True):
                sequence.table[group, sequence.num_pages + column] = target
                sequence.copies.append(self._copies.start(source, target))
            sequence.num_pages += self._geometry.num_pages(num_tokens)
            for unit in entry.units:
                if unit is not None:
                    self._arbiter.use(unit)
            return True
        finally:
            self._pool.unpin(pinned)

    def _first_pages(self, entry: Entry, num_pages: int) -> list[tuple[int, int, int]]:
        """(group, page of the entry, page id) for the first `num_pages` of each group."""
        cells = []
        for part in self._geometry.parts:
            unit = entry.units[part.index]
            assert unit is not None, "a partial match lacks pages"
            columns = range(part.first_page, part.first_page + part.num_pages)
            places = [(group, column) for group in part.groups for column in columns]
            cells += [(g, c, page) for (g, c), page in zip(places, unit.pages, strict=True) if c < num_pages]
        return cells

    def _shared_tail(self, sequence: Sequence) -> list[tuple[int, int]]:
        """(group, column) of pages that the next token makes its own: those of the unfinished entry, which leave the
        prefix cache together, as far as others use them.
        """
        if not sequence.may_share_tail:
            return []
        first = sequence.num_computed_tokens // self._geometry.entry_tokens * self._geometry.pages_per_entry
        last = self._geometry.num_pages(sequence.num_computed_tokens)
        tail = sequence.table[:, first:last].tolist()
        return [
            (group, first + i)
            for group, pages in enumerate(tail)
            for i, page in enumerate(pages)
            if page != NO_PAGE and self._pool.is_shared(page)
        ]

    def _num_held(self, sequence: Sequence, window: int | None) -> int:
        """Pages of one group, those behind its window not counted."""
        parts = [part for part in self._geometry.windowed_parts if part.window == window]
        return sequence.num_pages - sum(sequence.num_behind[part.index] for part in parts)

    def _copy_on_write(self, sequence: Sequence, group: int, column: int, target: int) -> None:
        source = int(sequence.table[group, column])
        sequence.copies.append(self._copies.start(source, target))
        sequence.table[group, column] = target
        self._pool.free(np.array([source], dtype=np.int32))
        sequence.growing = None  # it stays with those who keep the page

    def _allocate(self, num_pages: int) -> Int32:
        """Pages for this cache, others evicted for them. Raises OutOfPages."""
        if num_pages > self._pool.num_free:
            self._copies.poll()
            if num_pages > self.num_available_pages:
                raise OutOfPages(
                    f"asked for {num_pages} pages, {self._pool.num_free} free and "
                    f"{self.num_available_pages - self._pool.num_free} evictable of {self._pool.num_pages}; "
                    "raise `--device-memory` or lower `--max-num-seqs`"
                )
            self._arbiter.reclaim(num_pages - self._pool.num_free, self._owner)
        return self._pool.allocate(num_pages, self._owner)

    def _pass_event(self, sequence: Sequence) -> None:
        assert not sequence.copies, "a step ran before the copies of a sequence had arrived"
        capacity = sequence.num_pages * self._geometry.page_size
        assert sequence.num_computed_tokens <= capacity, "tokens were committed that `grow` made no room for"
        self._writer.publish(sequence)
        self._release_behind(sequence)
        self._set_next_event(sequence)

    def _release_behind(self, sequence: Sequence) -> None:
        """Give back the pages that no later token sees."""
        for part in self._geometry.windowed_parts:
            before = sequence.num_behind[part.index]
            behind = self._geometry.num_entries_behind(part, sequence.num_computed_tokens)
            if behind <= before:
                continue
            columns = np.arange(before, behind) * self._geometry.pages_per_entry + part.first_page
            cells = np.ix_(np.array(part.groups), columns)
            self._pool.free(sequence.table[cells].ravel())
            sequence.table[cells] = NO_PAGE
            sequence.table_version += 1
            sequence.num_behind[part.index] = behind
            self._offer(part.index, sequence.entries[before:behind])

    def _set_next_event(self, sequence: Sequence) -> None:
        geometry = self._geometry
        events = [geometry.next_release(part, sequence.num_behind[part.index]) for part in geometry.windowed_parts]
        if sequence.is_attached:
            events.append((sequence.num_published_units + 1) * MATCH_UNIT)
        sequence.next_event = min(events, default=_NEVER)

    def _let_go(self, sequence: Sequence) -> None:
        """Offer what only this sequence may have used. Above the end of its chain the arbiter finds its way itself."""
        last = last_entry(sequence)
        for part in self._geometry.parts:
            first = sequence.num_behind[part.index] if part.window is not None else len(sequence.entries)
            self._offer(part.index, sequence.entries[first:])
            self._offer(part.index, [last] if sequence.growing is None else [last, sequence.growing])
        self._index.leave(last)

    def _offer(self, part: int, entries: list[Entry]) -> None:
        for entry in entries:
            if (unit := entry.units[part]) is not None:
                self._arbiter.offer(unit)

    def _check_sequence(self, sequence: Sequence) -> None:
        geometry = self._geometry
        assert len(sequence.tokens) == sequence.num_computed_tokens, "a sequence does not know its tokens"
        num_pages = geometry.num_pages(sequence.num_computed_tokens)
        assert num_pages <= sequence.num_pages, "a sequence has computed tokens without pages"
        for part in geometry.windowed_parts:
            behind = geometry.num_entries_behind(part, sequence.num_computed_tokens)
            assert sequence.num_behind[part.index] == behind, "pages behind a window were kept, or given back early"
        if sequence.is_attached and geometry.full_part is not None:
            self._check_chain(sequence)

    def _check_chain(self, sequence: Sequence) -> None:
        full, stride = self._geometry.full_part, self._geometry.pages_per_entry
        assert full is not None
        last = [] if sequence.growing is None else [sequence.growing]
        for index, entry in enumerate(sequence.entries + last):
            unit = entry.units[0]
            pages = sequence.table[list(full.groups), index * stride : (index + 1) * stride].ravel()
            assert unit is not None, "an attached sequence stands on an entry without pages"
            assert unit.pages == tuple(pages.tolist()), "an attached sequence stands on pages that are not its own"
