"""Resident: an adapter that steps can name, and the unit that the arbiter knows it by. State only.

Pages that are equal to those of a resident adapter are not there twice: whoever came later depends on it.

    pages of b  | own | a's | own | a's | own |        b.base = a, b.unit depends on a.unit, holding b holds a
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvarto.core.ids import OwnerId
from kvarto.memory.arbiter import Unit

Int32 = NDArray[np.int32]


class AdapterUnit(Unit):
    """The pages that a resident adapter owns, for the arbiter."""

    __slots__ = ("resident",)

    def __init__(self, owner: OwnerId, resident: Resident, reload_cost_s: float) -> None:
        base = resident.base.unit if resident.base is not None else None
        super().__init__(owner, tuple(resident.own.tolist()), reload_cost_s, base)
        self.resident = resident


class Resident:
    """An adapter that steps can name. Only the residency changes it."""

    __slots__ = ("base", "depth", "digest", "handle", "num_users", "own", "page_digests", "pages", "size_bytes", "unit")

    def __init__(
        self, digest: bytes, layout: PageShare, page_digests: tuple[bytes, ...], handle: int, size_bytes: int
    ) -> None:
        self.digest = digest
        self.pages = layout.pages
        """In the order of its stream."""
        self.own = layout.own
        """Those that no other adapter had, at least one."""
        self.base = layout.base
        """Whose pages the others are, or its base's: it stays as long as this one."""
        self.depth: int = 0 if layout.base is None else layout.base.depth + 1
        self.page_digests = page_digests
        self.handle = handle
        self.size_bytes = size_bytes
        """Of its tensors: what a step with it reads."""
        self.num_users = 0
        self.unit: AdapterUnit

    @property
    def num_held_pages(self) -> int:
        """Pages that are held with it: its own, and all of its base."""
        return len(self.own) + (0 if self.base is None else self.base.num_held_pages)


@dataclass(frozen=True, slots=True)
class PageShare:
    """Pages of one adapter: its own, and those that it has in common with an adapter that is resident."""

    pages: Int32
    own: Int32
    base: Resident | None
