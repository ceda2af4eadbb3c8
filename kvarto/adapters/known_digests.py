"""KnownDigests: what was in files that were read before, by their identity, so that loading them again hashes nothing.

A file that is written gets another time of change, as fine as the clock of its file system: two writes within one tick
look like one. So only of files that had been left alone for a while is it certain that equal times mean equal bytes;
others are hashed each time, and compared.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

from kvarto.adapters.digest import Digests
from kvarto.models.raw_file import FileIdentity

Files = tuple[FileIdentity, ...]

SETTLED_NS = 2_000_000_000
"""Since the last write: the coarsest clock of a file system that we know ticks every two seconds."""
MAX_BYTES = 64 << 20
"""Of all that is kept: 32,000 adapters of 50 pages."""
_ENTRY_BYTES = 512
"""Of an entry beside the digests of its pages, about."""


@dataclass(frozen=True, slots=True)
class _Known:
    content: bytes
    pages: bytes
    is_settled: bool

    @property
    def size_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.pages)


class KnownDigests:
    """Those used last. For one base and one size of pages; safe to use from threads."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = Lock()
        self._known: OrderedDict[Files, _Known] = OrderedDict()

    def content(self, files: Files) -> bytes | None:
        """What they held when they were read."""
        known = self._find(files)
        return None if known is None else known.content

    def digests(self, files: Files) -> Digests | None:
        """The same with the digests of pages, where it is certain that the files hold it still."""
        known = self._find(files)
        if known is None or not known.is_settled:
            return None
        pages, size = known.pages, len(known.content)
        return Digests(known.content, tuple(pages[start : start + size] for start in range(0, len(pages), size)))

    def put(self, files: Files, digests: Digests, began_ns: int) -> None:
        """Remember what these files held when they were read; `began_ns`: when that began, since the epoch."""
        is_settled = all(max(file.mtime_ns, file.ctime_ns) + SETTLED_NS <= began_ns for file in files)
        known = _Known(digests.content, b"".join(digests.pages), is_settled)
        with self._lock:
            before = self._known.pop(files, None)
            self._known[files] = known
            self._num_bytes += known.size_bytes - (0 if before is None else before.size_bytes)
            while self._num_bytes > self._max_bytes:
                _, oldest = self._known.popitem(last=False)
                self._num_bytes -= oldest.size_bytes

    def _find(self, files: Files) -> _Known | None:
        with self._lock:
            if files in self._known:
                self._known.move_to_end(files)
            return self._known.get(files)
