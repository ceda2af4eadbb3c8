"""CommonPages: which resident adapter has a page with which bytes. Bytes are compared by digests that we computed."""

from __future__ import annotations

from collections import Counter

from kvarto.adapters.resident import Resident

MAX_DEPTH = 4
"""Of adapters that have pages in common with one that has pages in common with one …: each is held with the others."""


class CommonPages:
    """Owners by digest of a page."""

    def __init__(self) -> None:
        self._owners: dict[bytes, Resident] = {}

    def add(self, resident: Resident) -> None:
        """Its own pages can be shared from now on."""
        own = set(resident.own.tolist())
        for digest, page in _pages(resident):
            if page in own:
                self._owners.setdefault(digest, resident)

    def remove(self, resident: Resident) -> None:
        """It leaves; its pages are nobody's."""
        for digest in resident.page_digests:
            if self._owners.get(digest) is resident:
                del self._owners[digest]

    def best(self, digests: tuple[bytes, ...]) -> tuple[Resident | None, dict[int, int]]:
        """The resident with the most equal pages, its base's among them; and these pages, by index in `digests`.

        The last page is left out: an adapter without a page of its own could not be told from one that nobody uses.
        """
        owners = Counter(owner for digest in digests if (owner := self._owners.get(digest)) is not None)
        best: Resident | None = None
        common: dict[int, int] = {}
        for resident in owners:
            pages = dict(_pages(resident)) if resident.depth < MAX_DEPTH else {}
            found = {index: pages[digest] for index, digest in enumerate(digests[:-1]) if digest in pages}
            if len(found) > len(common):
                best, common = resident, found
        return best, common


def _pages(resident: Resident) -> list[tuple[bytes, int]]:
    return list(zip(resident.page_digests, resident.pages.tolist(), strict=True))
