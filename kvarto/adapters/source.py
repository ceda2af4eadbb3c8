"""AdapterFiles: the one class that knows files of adapters. What it gives is checked; everything above it has names.

Calls block for as long as the disk takes, and come from worker threads.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.base_copies import IsCopy
from kvarto.adapters.binding import bound_shape, unsupported
from kvarto.adapters.digest import Digests
from kvarto.adapters.files import AdapterLimits, PinnedFile
from kvarto.adapters.gguf_files import open_gguf_adapter
from kvarto.adapters.known_digests import KnownDigests
from kvarto.adapters.magnitudes import ScaleOf
from kvarto.adapters.opened import OpenedAdapter
from kvarto.adapters.packer import Packer
from kvarto.adapters.packing import num_pages
from kvarto.adapters.page_hasher import PageHasher
from kvarto.adapters.peft_files import CONFIG_NAME, TENSORS_NAME, open_peft_adapter
from kvarto.adapters.quantised import quantised
from kvarto.adapters.shape_cache import ShapeCache
from kvarto.adapters.targets import BaseTargets
from kvarto.core.bound_adapter import BoundShape
from kvarto.core.clock import Clock
from kvarto.core.errors import BadAdapter, UnsupportedAdapter
from kvarto.core.strip_type import StripType
from kvarto.models.raw_file import FileIdentity

Bytes = NDArray[np.uint8]
Int32 = NDArray[np.int32]

GGUF_SUFFIX = ".gguf"
LEAST_DIRECT_BYTES = 256 << 10
"""Of a file that is read past the page cache: a smaller one is a single read in any case."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterShape:
    """All that follows from config and header of an adapter: shared by all that differ from it in values alone."""

    adapter: Adapter
    packer: Packer
    bound: BoundShape


@dataclass(frozen=True, slots=True, eq=False)
class AdapterOnDisk:
    """For `AdapterFiles` alone: what to read, and how."""

    shape: AdapterShape
    tensors_file: PinnedFile


@dataclass(frozen=True, slots=True, eq=False)
class FoundAdapter:
    """Headers of one adapter, read and checked; its values are still on disk."""

    adapter: Adapter
    identity: tuple[FileIdentity, ...]
    """Of its files: another one is another version."""
    num_pages: int
    """That its bytes take, exactly."""
    digest: bytes | None = None
    """Of its content, where these very files were read before."""
    on_disk: AdapterOnDisk | None = None

    @property
    def bound_shape(self) -> BoundShape:
        """For backends."""
        assert self.on_disk is not None, "an adapter without files is bound"
        return self.on_disk.shape.bound


class Source(Protocol):
    """Where adapters come from. Called from threads; raises AdapterError."""

    def find(self, path: Path) -> FoundAdapter:
        """Open and check all but the values."""
        ...

    def read(self, found: FoundAdapter, images: Bytes, which: Int32) -> Digests:
        """Fill `images[which]`, of `[num_images, page_bytes]`, in that order. Reads every value."""
        ...


def read_checked(
    source: Source, found: FoundAdapter, digest: bytes | None, images: Bytes, which: Int32, clock: Clock
) -> tuple[Digests, float]:
    """Read in a worker thread; what that gives, and the seconds that it took. Raises BadAdapter where it is not what
    `digest` says.
    """
    start_s = clock.now()
    digests = source.read(found, images, which)
    if digest not in (None, digests.content):
        raise BadAdapter("the adapter's files hold other values than they did, at the same times; load it again")
    return digests, clock.now() - start_s


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
        codes: StripType | None = None,
        hasher: PageHasher | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`is_copy`: see `open_peft_adapter`; `scale_of`: see `Packer.pack`; `codes`: see `quantised`; `hasher`:
        of pages, one with a secret of its own where none is given; `now_ns`: the clock of files' times."""
        self._base = base
        self._roots = tuple(roots)
        self._page_bytes = page_bytes
        self._limits = limits or AdapterLimits()
        self._is_copy = is_copy
        self._scale_of = scale_of
        self._codes = codes
        self._hasher = hasher or PageHasher()
        self._now_ns = now_ns
        self._digests = KnownDigests()
        self._shapes: ShapeCache[AdapterShape] = ShapeCache()

    def find(self, path: Path) -> FoundAdapter:
        """Open and check all but the values. Raises AdapterError, also for what no backend can run."""
        opened = self._open(path)
        shape = self._shapes.get(opened.shape_key) or self._new_shape(opened)
        if (why := unsupported(shape.adapter)) is not None:
            raise UnsupportedAdapter(f"`{path}` cannot be served: {why}")
        identity = tuple(file.identity for file in opened.files)
        count = num_pages(shape.packer.stream_bytes, self._page_bytes)
        on_disk = AdapterOnDisk(shape, opened.tensors_file)
        return FoundAdapter(shape.adapter, identity, count, self._digests.content(identity), on_disk)

    def read(self, found: FoundAdapter, images: Bytes, which: Int32) -> Digests:
        """Fill `images[which]`, of `[num_images, page_bytes]`, in that order. Raises BadAdapter where a value is not
        finite or a file changed, UnsupportedAdapter where a value has no code.

        Files that were read before, and not written since, are not hashed again. A first read goes past the page cache
        where it can: most adapters are read once in a long while, and would push out what is needed. What is read again
        was pushed out of the device, and has its place there.
        """
        assert found.on_disk is not None, "an adapter without files is read"
        assert len(which) == found.num_pages, f"{len(which)} pages for an adapter of {found.num_pages}"
        packer, began_ns = found.on_disk.shape.packer, self._now_ns()
        known = self._digests.digests(found.identity)
        is_first = self._digests.content(found.identity) is None
        with found.on_disk.tensors_file.opened() as file:
            may_be_direct = is_first and file.size_bytes >= LEAST_DIRECT_BYTES
            packer.pack(file, images, which, self._scale_of, may_be_direct=may_be_direct)
        if known is not None:
            return known
        digests = packer.digests(images, which)
        self._digests.put(found.identity, digests, began_ns)
        return digests

    def _new_shape(self, opened: OpenedAdapter) -> AdapterShape:
        adapter = opened.adapter if self._codes is None else quantised(opened.adapter, self._codes)
        packer = Packer(adapter, opened.tensors_file.identity.size_bytes, self._hasher)
        shape = AdapterShape(adapter, packer, bound_shape(adapter, self._base))
        return self._shapes.add(opened.shape_key, shape, sum(1 for _ in adapter.arrays()))

    def _known(self, key: bytes) -> Adapter | None:
        shape = self._shapes.get(key)
        return None if shape is None else shape.adapter

    def _open(self, path: Path) -> OpenedAdapter:
        if path.suffix == GGUF_SUFFIX:
            return open_gguf_adapter(path, self._base, self._roots, limits=self._limits)
        return open_peft_adapter(
            path, self._base, self._roots, limits=self._limits, is_copy=self._is_copy, known=self._known
        )


Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and time of writing of each file: changes whenever the adapter may have."""


def adapters_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of what looks like an adapter in a folder: sub-folders with a config, and GGUF files.

    Names are those of the folders, and of the files without `.gguf`. Raises BadAdapter where it cannot be listed.
    """
    for name, path, _ in _listed(folder):
        yield name, Path(path)


def look_into(folders: Sequence[Path]) -> dict[str, tuple[str, Stamp]]:
    """Path and stamp of all adapters in some folders, by name; the first of a name counts. Raises BadAdapter.

    Two `stat`s per adapter, and little Python: there may be thousands, and each is looked at every few seconds.
    """
    found: dict[str, tuple[str, Stamp]] = {}
    for folder in folders:
        for name, path, stamp in _listed(folder):
            if name not in found:
                found[name] = path, stamp
    return found


def _listed(folder: Path) -> Iterator[tuple[str, str, Stamp]]:
    """Name, path and stamp."""
    try:
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except OSError as error:
        raise BadAdapter(f"`{folder}` cannot be listed: {error.strerror}; name a folder of adapters") from error
    for entry in entries:
        path = entry.path
        if (config := _mark(f"{path}/{CONFIG_NAME}")) is not None:
            tensors = _mark(f"{path}/{TENSORS_NAME}")
            yield entry.name, path, (config,) if tensors is None else (config, tensors)
        elif path.endswith(GGUF_SUFFIX) and (whole := _mark(path)) is not None:
            yield entry.name.removesuffix(GGUF_SUFFIX), path, (whole,)


def _mark(path: str) -> tuple[int, int, int] | None:
    """None for what is no file, or not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None
