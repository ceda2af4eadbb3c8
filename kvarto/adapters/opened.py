"""An adapter together with the files that it was read from."""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.files import PinnedFile


@dataclass(frozen=True, slots=True)
class OpenedAdapter:
    """What the openers of each format return."""

    adapter: Adapter
    files: tuple[PinnedFile, ...]
