"""Integers and strings with a meaning."""

from __future__ import annotations

from typing import Final, NewType

PageId = NewType("PageId", int)
"""Index of a page in the pool."""
OwnerId = NewType("OwnerId", int)
"""Index of an owner in the ledger."""
RequestId = NewType("RequestId", str)
"""Made by the server; a client's own id never becomes a key."""

NO_PAGE: Final = -1
"""In a page table: nothing is kept here (behind a sliding window, or past the end)."""
NO_ADAPTER: Final = -1
"""In a step: the sequence uses the bare base."""
MAX_ADAPTERS: Final = 4096
"""Handles of adapters are below it."""
