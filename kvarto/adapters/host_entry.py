"""HostEntry: one adapter's pages in host memory, from the wish to have them to their end. State only.

hold ──> waiting ── room ──> reading ── done ──> ready, held ⇄ ready, kept ── room is needed ──> gone
            │                   ├── fails ──> failed
            └──── released ─────┴───────────> gone
"""

from __future__ import annotations

from enum import Enum

from kvarto.adapters.source import FoundAdapter
from kvarto.adapters.spare_images import Images
from kvarto.core.errors import KvartoError
from kvarto.memory.calls import Call


class HostState(Enum):
    """See the drawing above."""

    WAITING = "waiting"
    READING = "reading"
    READY = "ready"
    FAILED = "failed"
    GONE = "gone"


class HostEntry:
    """One adapter's pages in host memory. Only the tier changes it."""

    __slots__ = (
        "age",
        "call",
        "digest",
        "error",
        "found",
        "frequency",
        "images",
        "num_holders",
        "page_digests",
        "reload_cost_s",
        "size_bytes",
        "state",
    )

    def __init__(self, digest: bytes | None, found: FoundAdapter, size_bytes: int) -> None:
        self.digest = digest
        """Of its content; known when it is ready."""
        self.found = found
        self.size_bytes = size_bytes
        self.state = HostState.WAITING
        self.images: Images | None = None
        """While it is ready."""
        self.page_digests: tuple[bytes, ...] = ()
        """One per page, once it was read."""
        self.error: KvartoError | None = None
        """Why it failed."""
        self.num_holders = 0
        self.frequency = 0
        self.age = 0.0
        self.reload_cost_s = 0.0
        """Seconds that its read took."""
        self.call: Call | None = None

    @property
    def priority(self) -> float:
        """Least goes first."""
        return self.age + self.frequency * self.reload_cost_s / max(1, self.size_bytes)
