"""An adapter together with the files that it was read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.files import PinnedFile


@dataclass(frozen=True, slots=True)
class OpenedAdapter:
    """What the openers of each format return."""

    adapter: Adapter
    files: tuple[PinnedFile, ...]
    shape_key: bytes
    """Of all that the adapter follows from, beside the base and the limits: equal keys, equal adapters."""

    @property
    def tensors_file(self) -> PinnedFile:
        """The one that has the values."""
        return self.files[-1]


KnownAdapter = Callable[[bytes], Adapter | None]
"""From the key of a shape to the adapter that was found under it."""


def unknown(key: bytes) -> Adapter | None:
    """Nothing was found before."""
    return None
