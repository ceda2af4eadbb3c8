"""AdapterFiles: the one class that knows files of adapters. What it gives is checked; everything above it has names.

Calls block for as long as the disk takes, and come from worker threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.assemble import IsCopy
from kvarto.adapters.binding import unsupported
from kvarto.adapters.digest import DigestCache
from kvarto.adapters.files import AdapterLimits
from kvarto.adapters.gguf_files import open_gguf_adapter
from kvarto.adapters.opened import OpenedAdapter
from kvarto.adapters.packing import num_pages, stream_bytes
from kvarto.adapters.pages import ScaleOf, page_images
from kvarto.adapters.peft_files import CONFIG_NAME, TENSORS_NAME, open_peft_adapter
from kvarto.adapters.targets import BaseTargets
from kvarto.core.digest_fields import DIGEST_BYTES
from kvarto.core.errors import BadAdapter, UnsupportedAdapter
from kvarto.models.raw_file import FileIdentity

GGUF_SUFFIX = ".gguf"


@dataclass(frozen=True, slots=True, eq=False)
class FoundAdapter:
    """Headers of one adapter, read and checked; its values are still on disk."""

    adapter: Adapter
    identity: tuple[FileIdentity, ...]
    """Of its files: another one is another version."""
    num_pages: int
    """That its bytes take, exactly."""
    opened: OpenedAdapter | None = None
    """For `AdapterFiles` alone."""


class Source(Protocol):
    """Where adapters come from. Called from threads; raises AdapterError."""

    def find(self, path: Path) -> FoundAdapter:
        """Open and check all but the values."""
        ...

    def digest(self, found: FoundAdapter) -> bytes:
        """32 bytes that say what the adapter is; reads every value."""
        ...

    def read(self, found: FoundAdapter, images: NDArray[np.uint8]) -> None:
        """Fill `images`: `[num_pages, page_bytes]`, uint8."""
        ...


class AdapterFiles:
    """PEFT's folders and GGUF files inside `roots`, for one base and one size of pages."""

    def __init__(
        self,
        base: BaseTargets,
        roots: Sequence[Path],
        page_bytes: int,
        *,
        limits: AdapterLimits | None = None,
        is_copy: IsCopy | None = None,
        scale_of: ScaleOf | None = None,
    ) -> None:
        """`is_copy`: see `open_peft_adapter`; `scale_of`: see `page_images`."""
        self._base = base
        self._roots = tuple(roots)
        self._page_bytes = page_bytes
        self._limits = limits or AdapterLimits()
        self._is_copy = is_copy
        self._scale_of = scale_of
        self._digests = DigestCache()

    def find(self, path: Path) -> FoundAdapter:
        """Open and check all but the values. Raises AdapterError, also for what no backend can run."""
        opened = self._open(path)
        adapter = opened.adapter
        if (why := unsupported(adapter)) is not None:
            raise UnsupportedAdapter(f"`{path}` cannot be served: {why}")
        identity = tuple(file.identity for file in opened.files)
        return FoundAdapter(adapter, identity, num_pages(stream_bytes(adapter), self._page_bytes), opened)

    def digest(self, found: FoundAdapter) -> bytes:
        """Remembered by the identity of the files. Raises BadAdapter where a value is not finite or a file changed."""
        assert found.opened is not None, "an adapter without files has no digest"
        return self._digests.digest_of(found.opened)

    def read(self, found: FoundAdapter, images: NDArray[np.uint8]) -> None:
        """Fill `images`: `[num_pages, page_bytes]`. Raises BadAdapter where a value is not finite or a file changed."""
        count = 0
        for count, image in enumerate(page_images(found.adapter, self._page_bytes, self._scale_of), start=1):
            images[count - 1] = np.frombuffer(image, np.uint8)
        assert count == len(images), f"{count} pages were packed, {len(images)} planned"

    def _open(self, path: Path) -> OpenedAdapter:
        if path.suffix == GGUF_SUFFIX:
            return open_gguf_adapter(path, self._base, self._roots, limits=self._limits)
        return open_peft_adapter(path, self._base, self._roots, limits=self._limits, is_copy=self._is_copy)


def page_digests(images: NDArray[np.uint8]) -> tuple[bytes, ...]:
    """32 bytes per page."""
    return tuple(blake2b(image.data, digest_size=DIGEST_BYTES).digest() for image in images)


def adapters_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of what looks like an adapter in a folder: sub-folders with a config, and GGUF files.

    Names are those of the folders, and of the files without `.gguf`. Raises BadAdapter where it cannot be listed.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise BadAdapter(f"`{folder}` cannot be listed: {error.strerror}; name a folder of adapters") from error
    for entry in entries:
        if (entry / CONFIG_NAME).is_file():
            yield entry.name, entry
        elif entry.suffix == GGUF_SUFFIX and entry.is_file():
            yield entry.stem, entry


Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and time of writing of each file: changes whenever the adapter may have."""


def look_into(folders: Sequence[Path]) -> dict[str, tuple[Path, Stamp]]:
    """Path and stamp of all adapters in some folders, by name; the first of a name counts. Raises BadAdapter."""
    found: dict[str, tuple[Path, Stamp]] = {}
    for folder in folders:
        for name, path in adapters_in(folder):
            if name not in found and (stamp := _stamp(path)) is not None:
                found[name] = path, stamp
    return found


def _stamp(path: Path) -> Stamp | None:
    """None where the files go away while they are looked at."""
    files = [path] if path.suffix == GGUF_SUFFIX else [path / CONFIG_NAME, path / TENSORS_NAME]
    try:
        stats = [file.stat() for file in files if file.exists()]
    except OSError:
        return None
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in stats)
