"""Adapters without files: a world of named contents, read slowly, and wrongly on demand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvarto.adapters.adapter import Adapter
from kvarto.adapters.digest import Digests
from kvarto.adapters.source import FoundAdapter
from kvarto.core.errors import BadAdapter
from kvarto.models.raw_file import FileIdentity
from tests.adapters.held import HASHER


@dataclass
class FakeFiles:
    """Paths to (seed of the content, pages). Changing one is a new file."""

    contents: dict[Path, tuple[int, int]] = field(default_factory=dict)
    invocation: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Seeds of adapters that are called by tokens."""
    fails: Callable[[], bool] = lambda: False
    remembers: bool = True
    """Files that were read are known when they are found again."""
    known: dict[tuple[FileIdentity, ...], bytes] = field(default_factory=dict)

    def put(self, path: str | Path, seed: int, num_pages: int) -> Path:
        self.contents[Path(path)] = (seed, num_pages)
        return Path(path)

    def find(self, path: Path) -> FoundAdapter:
        if self.fails():
            raise BadAdapter("injected")
        if path not in self.contents:
            raise BadAdapter(f"`{path}` is not there")
        seed, num_pages = self.contents[path]
        adapter = Adapter(updates=(), invocation_tokens=self.invocation.get(seed, ()))
        identity = (FileIdentity(1, seed, num_pages, hash(str(path)) & 0xFFFF, 0),)
        return FoundAdapter(adapter, identity, num_pages, self.known.get(identity))

    def read(self, found: FoundAdapter, images: NDArray[np.uint8], which: NDArray[np.int32]) -> Digests:
        self._check(found)
        assert len(which) == found.num_pages
        for index, page in enumerate(which):
            images[page] = page_of(_seed(found), index, images.shape[1])
        if self.remembers:
            self.known[found.identity] = digest_of(_seed(found))
        return Digests(digest_of(_seed(found)), HASHER.digests(images, which))

    def _check(self, found: FoundAdapter) -> None:
        if self.fails():
            raise BadAdapter("injected")
        if not any(seed == _seed(found) for seed, _ in self.contents.values()):
            raise BadAdapter("the file has changed since it was checked")


def digest_of(seed: int) -> bytes:
    return blake2b(b"content %d" % seed, digest_size=32).digest()


def page_of(seed: int, index: int, page_bytes: int) -> NDArray[np.uint8]:
    """Every other page is that of a family of adapters."""
    source = (seed % 3) * 1009 + index + (1 << 40) if index % 2 else seed * 1009 + index
    return np.frombuffer(random.Random(source).randbytes(page_bytes), np.uint8)


def _seed(found: FoundAdapter) -> int:
    return found.identity[0].inode
