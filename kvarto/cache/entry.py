"""Entry: a stretch of tokens after a prefix, and the units of pages that hold its KV. State only.

Entries form a tree below one root for each (identity, adapter, salt). An entry stands for the tokens of whole pages
(see `geometry`); the last of a chain may be shorter and grow while its sequence fills the page:

    root ── [0..63] ── [64..127] ── [128..175]        found by the digest of each of its match units, and below that
                  └─── [64..127]                      by comparing tokens; tokens are compared on every hit anyway

A chain whose adapter begins in the midst of it leaves the base's at a *branch*, a root below an entry (see `turn`).

The pages of an entry are cached as *units*, one for each part of the geometry, and the arbiter may take them:
- the unit of the full-attention groups depends on the one of its parent entry, so chains go from their ends, where
  nothing behind a hole could match; that of a first entry, also below a branch, depends on the adapter's unit too;
- the unit of a window depends on the full-attention one of its own entry, which is worth more. Without it fewer lengths
  match. Where all layers have windows, an entry stays without pages while it has children, because the tokens of its
  place must still be compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvarto.cache.geometry import Part
from kvarto.core.ids import OwnerId
from kvarto.memory.arbiter import Unit


class EntryUnit(Unit):
    """The pages of one part of an entry, in the order [group][page of the entry]."""

    __slots__ = ("entry", "part")

    def __init__(self, owner: OwnerId, pages: tuple[int, ...], cost_s: float, entry: Entry, part: Part) -> None:
        super().__init__(owner, pages, cost_s, *bases_of(entry, part))
        self.entry = entry
        self.part = part


class Entry:
    """A stretch of tokens after a prefix."""

    __slots__ = (
        "depth",
        "digests",
        "first_child",
        "next_sibling",
        "num_sequences",
        "parent",
        "previous_sibling",
        "tokens",
        "units",
    )

    def __init__(self, parent: Entry | None, tokens: bytes, digests: list[bytes], num_parts: int) -> None:
        self.parent = parent
        """None for a root that is no branch."""
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.tokens = tokens
        """Little-endian int32 ids. For a root: its fields."""
        self.digests = digests
        """One for each whole match unit."""
        self.units: list[EntryUnit | None] = [None] * num_parts
        self.num_sequences = 0
        """Live sequences whose last whole entry this is."""
        # Children are linked, newest first: a dictionary in each entry would be a quarter of all its bytes.
        self.first_child: Entry | None = None
        self.next_sibling: Entry | None = None
        self.previous_sibling: Entry | None = None
        if parent is not None:
            self._link(parent)

    @property
    def children(self) -> Iterator[Entry]:
        """Newest first."""
        child = self.first_child
        while child is not None:
            yield child
            child = child.next_sibling

    def _link(self, parent: Entry) -> None:
        self.next_sibling = parent.first_child
        if self.next_sibling is not None:
            self.next_sibling.previous_sibling = self
        parent.first_child = self

    def unlink(self) -> None:
        """Leave the parent."""
        if self.previous_sibling is not None:
            self.previous_sibling.next_sibling = self.next_sibling
        else:
            assert self.parent is not None, "a root has no parent to leave"
            self.parent.first_child = self.next_sibling
        if self.next_sibling is not None:
            self.next_sibling.previous_sibling = self.previous_sibling


class Root(Entry):
    """Where the chains of one identity, adapter and salt begin: at the first token, or at a branch, below `parent`."""

    __slots__ = ("adapter",)

    def __init__(self, fields: bytes, digest: bytes, num_parts: int, parent: Entry | None = None) -> None:
        super().__init__(parent, fields, [digest], num_parts)
        self.depth = 0 if parent is None else parent.depth  # it stands for no token
        self.adapter: Unit | None = None
        """Of the adapter that is on the device now, without which nobody can use the KV below; None for the base."""


def bases_of(entry: Entry, part: Part) -> tuple[Unit | None, Unit | None]:
    """Units without which that of `part` is worth nothing: index 0 is the full-attention part, if there is one."""
    if part.window is not None:
        full = entry.units[0]
        return full if full is not None and full.part.window is None else _root_of(entry).adapter, None
    parent = entry.parent
    assert parent is not None, "a root has no units"
    if not isinstance(parent, Root):
        return parent.units[0], None
    before = None if parent.parent is None else parent.parent.units[0]
    return (parent.adapter, None) if before is None else (before, parent.adapter)


def _root_of(entry: Entry) -> Root:
    """The nearest."""
    while not isinstance(entry, Root):
        assert entry.parent is not None, "an entry without a root"
        entry = entry.parent
    return entry


def entries_after(entry: Entry) -> Iterator[Entry]:
    """The next ones of all chains, whether or not they branch here."""
    for child in entry.children:
        if isinstance(child, Root):
            yield from child.children
        else:
            yield child
