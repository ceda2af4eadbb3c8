"""Load: one version of an adapter on its way to the device. State only.

identifying ──> reading ──> ready ── take: pages ──> copying ── bind ──> resident
     ├────────────┴──────────── fails ─────────────────┴──────────────> failed
     └── into its pages ──> ready ── take: pages ──> filling ── bind ──> resident

What the files hold is known from an earlier read, or from this one: where that content is resident, or on its way with
another load, this one goes on with that.
"""

from __future__ import annotations

from enum import Enum

from kvarto.adapters.host_entry import HostEntry
from kvarto.adapters.registry import AdapterVersion
from kvarto.adapters.resident import PageShare
from kvarto.core.errors import KvartoError
from kvarto.memory.calls import Call


class Stage(Enum):
    """See the drawing above."""

    IDENTIFYING = "identifying"
    READING = "reading"
    READY = "ready"
    COPYING = "copying"
    FILLING = "filling"
    RESIDENT = "resident"
    FAILED = "failed"


class Load:
    """One version on its way. Only the residency changes it."""

    __slots__ = (
        "calls",
        "entry",
        "error",
        "is_rechecked",
        "num_wanted",
        "page_digests",
        "share",
        "stage",
        "started_s",
        "version",
    )

    def __init__(self, version: AdapterVersion, now_s: float) -> None:
        self.version = version
        self.stage = Stage.IDENTIFYING
        self.num_wanted = 0
        self.entry: HostEntry | None = None
        """None where it is read into its pages."""
        self.page_digests: tuple[bytes, ...] = ()
        """Once it was read."""
        self.share: PageShare | None = None
        """From `take` on: its pages."""
        self.calls: list[Call] = []
        """That write its pages."""
        self.error: KvartoError | None = None
        self.is_rechecked = False
        """It failed, and its files were looked at again since."""
        self.started_s = now_s
